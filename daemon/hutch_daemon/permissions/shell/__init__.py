"""Two readings of a bash line: `grammar` finds every command, `reader` understands a subset."""
