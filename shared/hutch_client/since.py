"""Times as users type them: `2h`, `yesterday`, a date, or an RFC 3339 time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from hutch_shared.errors import HutchError, Reason

__all__ = ["FORMS", "read_since"]

FORMS: Final = (
    "today, yesterday, 30min, 2h, 7d, 2w, a date (2026-01-31) or a time (2026-01-31T12:00, 2026-01-31T12:00:00Z)"
)
"""The accepted forms, for help texts and errors."""

_AGO: Final = re.compile(r"(\d{1,6})\s*(s|m|min|h|d|w)(?:\s+ago)?")
_UNITS: Final = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DAYS: Final = {"today": 0, "yesterday": 1}


def read_since(text: str, now: datetime | None = None) -> str:
    """Return the time as RFC 3339 in UTC. A day begins at local midnight; a time without an offset is local.

    `now` (default: the clock's time) has an offset. Raises HutchError INVALID_PARAMS, which lists the forms.
    """
    now = now or datetime.now().astimezone()
    word = text.strip().lower()
    try:
        if word in _DAYS:
            when = datetime.fromisoformat((now.date() - timedelta(days=_DAYS[word])).isoformat())
        elif ago := _AGO.fullmatch(word):
            when = now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        else:
            when = datetime.fromisoformat(text.strip())
        return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError):
        raise HutchError(
            Reason.INVALID_PARAMS, f"`{text}` is not a time that `hutch` understands. Give {FORMS}."
        ) from None
