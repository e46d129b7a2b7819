"""Work that repeats: removes old events, probes the environments, and gives the broker new prices."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import anyio
import structlog

from hutch_daemon.environments.registry import Environments
from hutch_daemon.store import events
from hutch_daemon.store.store import Store
from hutch_daemon.wiring.settings_file import SettingsFile
from hutch_shared.errors import HutchError
from hutch_shared.times import now_ms

__all__ = ["keep_probing", "prune", "refresh_prices", "retain"]

_log: Final = structlog.get_logger("hutchd")
_DAY: Final = 24 * 3600
_PRUNE_EVERY: Final = 3600.0
_PROBE_EVERY: Final = 20.0


async def keep_probing(environments: Environments) -> None:
    """Probe until cancelled. A launcher that hears nothing from hutchd for some time ends all executors."""
    before = ""
    while True:
        await anyio.sleep(_PROBE_EVERY)
        why = await environments.probe()
        if why != before:
            _log.warning("what this host gives sessions", why=why or "it is back")
            before = why


async def refresh_prices(file: SettingsFile, refresh: Callable[[], Awaitable[None]]) -> None:
    """Call `refresh` after each change of the settings, until cancelled; again if they change during the call."""
    changed = file.changed
    while True:
        await changed.wait()
        changed = file.changed
        await refresh()


async def retain(store: Store, file: SettingsFile) -> None:
    """Remove the events that exceed the settings' age or size: at start, after new settings, and every hour."""
    while True:
        changed, kept = file.changed, file.in_force.current.store
        if kept.keep_days is not None or kept.keep_bytes is not None:
            before = None if kept.keep_days is None else now_ms() - int(kept.keep_days * _DAY * 1000)
            try:
                removed = await prune(store, before=before, max_bytes=kept.keep_bytes)
            except HutchError as error:
                _log.warning("old events are not removed", error=error.message)
            else:
                if removed:
                    _log.info("old events removed", events=removed)
        with anyio.move_on_after(_PRUNE_EVERY):
            await changed.wait()


async def prune(store: Store, *, before: int | None = None, max_bytes: int | None = None) -> int:
    """Remove events older than `before` (ms since 1970) and, while the database exceeds `max_bytes`, the oldest.

    Return the number of removed events. Works in short transactions, so that other writes run between them.
    """
    total = 0
    while count := await store.write(partial(events.prune, before=before, max_bytes=max_bytes)):
        total += count
    return total
