"""Judges each tool call by the owner's rules (`policy`) and asks a user about the rest (`approvals`)."""
