"""Unusual lines that a provider's stream may contain between its events. Add a new one here."""

from __future__ import annotations

from typing import Final

ODD_LINES: Final[dict[str, bytes]] = {
    "comment": b": keep-alive\n\n",
    "unknown event": b'event: weather\ndata: {"type":"weather","sky":"clear"}\n\n',
    "event without data": b"event: ping\n\n",
}
"""Name of the line, and its bytes."""
