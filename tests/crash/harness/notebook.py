"""Where a party writes down what it was promised, one JSON line each; it outlives a `kill -9` of its writer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Notebook:
    """One party's file. A party that was killed goes on in it."""

    def __init__(self, path: Path) -> None:
        """Read what stands in it and go on after that; a line that was not finished is taken away."""
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
    """Return the whole lines of a notebook; none when it was never begun."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text.split(b"\n")[:-1]]
