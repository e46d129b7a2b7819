"""What happened, kept and handed on: the journal and its followers."""
