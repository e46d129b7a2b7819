"""A party's notebook: one JSON line for each promise that it received. It outlives a `kill -9` of the party."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Notebook:
    """The notebook of one party. A party that was killed continues it."""

    def __init__(self, path: Path) -> None:
        """Open the notebook for appending. `lines` are the complete lines; an incomplete last line is removed."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(self._fd, "rb", closefd=False) as file:
            text = file.read()
        os.ftruncate(self._fd, text.rfind(b"\n") + 1)
        self.lines = read(path)

    def write(self, **said: Any) -> None:
        """Write a line."""
        os.write(self._fd, json.dumps(said).encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a notebook; none if the file does not exist."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text.split(b"\n")[:-1]]
