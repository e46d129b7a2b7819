"""Decides each tool call by the owner's rules (`policy`); the user decides the rest (`approvals`)."""
