"""An MCP server on standard input and output with one tool, `do`, which names its server. Standard library only."""

from __future__ import annotations

import json
import sys


def main(name: str) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        match message["method"]:
            case "initialize":
                version = message["params"]["protocolVersion"]
                info = {"name": name, "version": "1"}
                result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            case "tools/list":
                result = {"tools": [{"name": "do", "description": "Do it.", "inputSchema": {"type": "object"}}]}
            case "tools/call":
                result = {"content": [{"type": "text", "text": f"done by {name}"}]}
            case _:
                result = {}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


main(sys.argv[1])
