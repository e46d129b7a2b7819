"""A double of the Claude CLI."""
