"""A blocking client that costs little, so that the other side is measured."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Line", "frame"]


def frame(method: str, number: int, params: dict[str, Any] | None = None) -> bytes:
    """Return a request as one line."""
    asked: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        asked["params"] = params
    return json.dumps({**asked, "id": number}, separators=(",", ":")).encode() + b"\n"


class Line:
    """One connection. Not for threads."""

    def __init__(self, path: Path, timeout: float = 60.0) -> None:
        """Connect to the socket at `path`. TimeoutError after a wait of `timeout` seconds."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout)
        self._socket.connect(str(path))
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def ask(self, method: str, params: dict[str, Any] | None = None) -> float:
        """Call a method; return the seconds until the result. The answer must be a result."""
        self._number += 1
        asked = frame(method, self._number, params)
        began = time.perf_counter()
        self._socket.sendall(asked)
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self._receive()
        taken = time.perf_counter() - began
        assert b'"result":' in answer, answer
        return taken

    def ask_many(self, method: str, params: dict[str, Any] | None, count: int, in_flight: int) -> list[float]:
        """Make `count` calls with up to `in_flight` unanswered; return the seconds of each. Answers come in order."""
        asked = deque(frame(method, self._number + step, params) for step in range(1, count + 1))
        self._number += count
        sent: deque[float] = deque()
        taken: list[float] = []
        free = in_flight
        while len(taken) < count:
            batch = [asked.popleft() for _ in range(min(free, len(asked)))]
            if batch:
                sent.extend([time.perf_counter()] * len(batch))
                self._socket.sendall(b"".join(batch))
            answers = self._receive().count(b"\n")
            now = time.perf_counter()
            taken += [now - sent.popleft() for _ in range(answers)]
            free = answers
        return taken

    def _receive(self) -> bytes:
        chunk = self._socket.recv(1 << 16)
        if not chunk:
            raise ConnectionError("the other side closed the connection")
        return chunk
