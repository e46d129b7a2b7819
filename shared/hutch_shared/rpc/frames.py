"""From a stream of bytes to frames: one per line, split on the byte `\\n` alone.

What is always true: the memory held is at most the limit plus one chunk; each byte is looked at once, however the
chunks fall; a frame over the limit costs that frame only.
"""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["OVERSIZED", "FrameSplitter"]

OVERSIZED: Final = "oversized"
"""Stands in the place of a frame that was longer than the limit; its bytes are gone."""

_BLANK: Final = b" \t\r"


class FrameSplitter:
    """Cuts what comes in into frames without their `\\n`. Blank lines are none, and leading blanks are cut off."""

    __slots__ = ("_begun", "_limit", "_skipping")

    def __init__(self, limit: int) -> None:
        """Take frames of at most `limit` bytes."""
        self._limit = limit
        self._begun = bytearray()
        self._skipping = False

    @property
    def in_frame(self) -> bool:
        """Whether a frame has begun and its end has not come (also while an oversized one is skipped)."""
        return self._skipping or bool(self._begun)

    def feed(self, chunk: bytes) -> list[bytes | Literal["oversized"]]:
        """Return the frames that `chunk` completes, in order; an oversized one is reported as soon as it is known."""
        frames: list[bytes | Literal["oversized"]] = []
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            if self._skipping:
                self._skipping = False
            elif self._begun:
                self._grow(end, frames)
                if not self._skipping:
                    frames.append(bytes(self._begun))
                self._begun = bytearray()
                self._skipping = False
            elif end := end.lstrip(_BLANK):
                frames.append(end if len(end) <= self._limit else OVERSIZED)
        if rest and not self._skipping:
            self._grow(rest, frames)
        return frames

    def _grow(self, piece: bytes, frames: list[bytes | Literal["oversized"]]) -> None:
        if not self._begun:
            piece = piece.lstrip(_BLANK)
        if len(self._begun) + len(piece) > self._limit:
            self._begun = bytearray()
            self._skipping = True
            frames.append(OVERSIZED)
        else:
            self._begun += piece

    def __repr__(self) -> str:
        return f"<FrameSplitter {'skipping' if self._skipping else f'holds {len(self._begun)}'} of {self._limit}>"
