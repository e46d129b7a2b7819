"""Odd lines that a provider's stream may hold between its events. A new one is one entry here."""

from __future__ import annotations

from typing import Final

ODD_LINES: Final[dict[str, bytes]] = {
    "comment": b": keep-alive\n\n",
    "unknown event": b'event: weather\ndata: {"type":"weather","sky":"clear"}\n\n',
    "event without data": b"event: ping\n\n",
}
"""Name of the line, and its bytes."""
