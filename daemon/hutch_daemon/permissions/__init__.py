"""Judges each tool call by the owner's rules (`policy`), and asks a user if no rule decides (`approvals`)."""
