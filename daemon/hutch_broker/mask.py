"""Replaces the key with stars where a provider's response repeats it. Pure.

A gateway that echoes request headers would reveal the key to the agent. The stars have the length of the key, so
`Content-Length` and the rest of the response stay valid.
"""

from __future__ import annotations

__all__ = ["Mask"]


class Mask:
    """Hides one secret in a byte stream. Trailing bytes that may start the secret are held back until more arrive."""

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
        """Return the bytes that can be sent now, with the secret replaced."""
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
        """Return the bytes that were held back. Call it at the end of the stream."""
        held, self._held = self._held, b""
        return held
