"""Sends each request of a file to a socket, and writes the answers to another file. Standard library only.

    caller.py SOCKET REQUESTS ANSWERS

REQUESTS has a JSON-RPC request on each line; ANSWERS gets {id: answer}, with null if the connection was closed. A
REQUESTS that ends in `.http` is sent unchanged, and ANSWERS gets {"status": …}, 0 if the connection was closed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any


def dial(path: str) -> socket.socket:
    """Connect within a minute."""
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(60)
    line.connect(path)
    return line


def call(path: str, request: dict[str, Any]) -> Any:
    """Make one request on a connection of its own."""
    try:
        with dial(path) as line, line.makefile("rwb") as lines:
            lines.write(json.dumps(request).encode() + b"\n")
            lines.flush()
            while answer := lines.readline():
                found = json.loads(answer)
                if "method" not in found and found.get("id") in (request["id"], None):
                    return found
    except OSError as error:
        return {"error": {"data": {"reason": type(error).__name__}}}
    return None


def status(path: str, raw: bytes) -> int:
    """Return the status of the broker's answer."""
    try:
        with dial(path) as line:
            line.sendall(raw)
            return int([*line.recv(64).split(), b"0", b"0"][1])
    except OSError:
        return 0


def main() -> None:
    """Send the requests once the file REQUESTS exists."""
    path, requests, answers = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    deadline = time.monotonic() + 60
    while not requests.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if requests.suffix == ".http":
        found: dict[str, Any] = {"status": status(path, requests.read_bytes())}
    else:
        found = {one["id"]: call(path, one) for one in map(json.loads, requests.read_text().splitlines())}
    Path(f"{answers}.part").write_text(json.dumps(found))
    os.rename(f"{answers}.part", answers)


if __name__ == "__main__":
    main()
