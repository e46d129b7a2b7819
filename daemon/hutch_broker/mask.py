"""The key does not come back: where a provider's answer repeats it, stars stand in its place. Pure.

A gateway that answers with the headers it got would tell the agent the key. The length stays, so that nothing else of
the answer changes.
"""

from __future__ import annotations

__all__ = ["Mask"]


class Mask:
    """Hides one secret in a stream of bytes; what may be its beginning is held back until more has come."""

    __slots__ = ("_first", "_held", "_secret", "_stars")

    def __init__(self, secret: str) -> None:
        """Hide `secret`."""
        self._secret = secret.encode()
        self._first = self._secret[:1]
        self._stars = b"*" * len(self._secret)
        self._held = b""

    def text(self, text: str) -> str:
        """Return a header's value without it."""
        return text.replace(self._secret.decode(), self._stars.decode())

    def feed(self, chunk: bytes) -> bytes:
        """Return what may go out now."""
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if self._secret in chunk:
            chunk = chunk.replace(self._secret, self._stars)
        start = max(0, len(chunk) - len(self._secret) + 1)
        while (start := chunk.find(self._first, start)) >= 0:
            if self._secret.startswith(chunk[start:]):
                self._held = chunk[start:]
                return chunk[:start]
            start += 1
        return chunk

    def rest(self) -> bytes:
        """Return what was held back, at the end."""
        held, self._held = self._held, b""
        return held
