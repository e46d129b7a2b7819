"""What programs can do besides what their name says: a table of rows, checks, and the veto on open rules."""
