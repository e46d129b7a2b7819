"""The client of Hutch: `async with HutchClient.connect() as hutch: …`, and the command `hutch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hutch_client.client import Follow, HutchClient

__all__ = ["Follow", "HutchClient"]


def __getattr__(name: str) -> object:
    """Import the API on first use: most commands start faster without it."""
    if name in __all__:
        from hutch_client import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
