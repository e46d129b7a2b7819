"""A table of programs whose options can run other programs or write files, and the veto on open rules based on it."""
