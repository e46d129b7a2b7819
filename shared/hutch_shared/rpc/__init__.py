"""JSON-RPC 2.0 between two processes of one host: one JSON object per line, both sides ask and answer."""
