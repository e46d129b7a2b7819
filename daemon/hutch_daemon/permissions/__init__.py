"""Decides each tool call from the owner's rules (`policy`) and asks a person for the rest (`desk`)."""
