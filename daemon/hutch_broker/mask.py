"""Replaces the key by stars where a provider's answer repeats it. Pure.

A gateway that echoes request headers would reveal the key to the agent. The length stays the same, so that nothing
else in the answer changes.
"""

from __future__ import annotations

__all__ = ["Mask"]


class Mask:
    """Hides one secret in a byte stream. Bytes that may be its start are held back until more arrive."""

    __slots__ = ("_first", "_held", "_secret", "_stars")

    def __init__(self, secret: str) -> None:
        """Hide `secret`."""
        self._secret = secret.encode()
        self._first = self._secret[:1]
        self._stars = b"*" * len(self._secret)
        self._held = b""

    def text(self, text: str) -> str:
        """Return a header's value without the secret."""
        return text.replace(self._secret.decode(), self._stars.decode())

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that may go out now."""
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
        """At the end of the stream: return the bytes that were held back."""
        held, self._held = self._held, b""
        return held
