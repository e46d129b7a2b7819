"""The result of one examination."""

from __future__ import annotations

import msgspec

__all__ = ["Finding"]


class Finding(msgspec.Struct, frozen=True):
    """`subject` names what was examined; `advice` says what to do, or is None if nothing is wrong."""

    subject: str
    advice: str | None = None
