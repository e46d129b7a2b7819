"""Sends texts to Unix sockets as its account, and prints the replies byte for byte.

stranger.py < [[PATH, TEXT, ON], …]: each text is sent on a connection of its own; the reply is read up to a newline (if
ON is true) or to the end of the connection. Prints a JSON list of replies (ISO 8859-1); null if it could not connect.
"""

from __future__ import annotations

import json
import socket
import sys


def say(path: str, text: str, one_line: bool) -> str | None:
    """Send `text` to the socket `path`; return the reply, or None if it cannot connect."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    try:
        sock.connect(path)
    except OSError:
        return None
    heard = b""
    try:
        sock.sendall(text.encode("latin-1"))
        while not (one_line and b"\n" in heard) and (chunk := sock.recv(1 << 16)):
            heard += chunk
    except ConnectionError:
        pass
    sock.close()
    return heard.decode("latin-1")


print(json.dumps([say(*one) for one in json.load(sys.stdin)]))
