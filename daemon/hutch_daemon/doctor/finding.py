"""The result of one examination."""

from __future__ import annotations

import msgspec

__all__ = ["Finding"]


class Finding(msgspec.Struct, frozen=True):
    """`subject` names the thing examined; `advice` tells the user what to do, or is None if nothing is wrong."""

    subject: str
    advice: str | None = None
