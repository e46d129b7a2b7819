"""What was found."""

from __future__ import annotations

import msgspec

__all__ = ["Finding"]


class Finding(msgspec.Struct, frozen=True):
    """What was looked at; `advice` is a sentence, or None when all is well."""

    subject: str
    advice: str | None = None
