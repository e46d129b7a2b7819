"""Two parsers of bash lines: `grammar` finds every command that might run; `reader` understands a subset exactly."""
