"""Stops hutchd: waits for a signal or a client's request, and carries it out."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from typing import Final

import anyio
import structlog

from hutch_daemon.service import Service
from hutch_daemon.services.host import HostService, StopRequest
from hutch_daemon.wiring.settings_file import SettingsFile
from hutch_shared import messages as m
from hutch_shared.errors import HutchError

__all__ = ["until_stopped"]

_log: Final = structlog.get_logger("hutchd")
_DAY: Final = 24 * 3600
_ENDING: Final = 60.0
"""Seconds for ending executors and closing the store, as requested from the service manager."""
_STATUS: Final = {"drain": "running turns end first", "leave": "turns are left running", "stop": "turns are stopped"}


async def until_stopped(
    host: HostService,
    request: StopRequest,
    file: SettingsFile,
    service: Service,
    signals: AsyncIterator[signal.Signals],
) -> None:
    """Wait for a stop request and carry it out. SIGHUP reloads settings. A second signal leaves live turns running.

    A request that comes while hutchd stops replaces the first one, so that a stop can be made faster.
    """
    wanted: m.StopDaemon | None = None
    async with anyio.create_task_group() as waiting:

        async def take_signals() -> None:
            async for number in signals:
                if number == signal.SIGHUP:
                    file.reload()
                else:
                    _log.info("a signal ends hutchd", signal=signal.Signals(number).name)
                    waiting.cancel_scope.cancel()
                    return

        async def take_request() -> None:
            nonlocal wanted
            wanted = await request.wait()
            waiting.cancel_scope.cancel()

        waiting.start_soon(take_signals)
        waiting.start_soon(take_request)
    if wanted is None:
        wanted = m.StopDaemon("drain", file.in_force.current.executors.drain_timeout)

    async with anyio.create_task_group() as stopping:

        async def take_second_signal() -> None:
            async for number in signals:
                if number != signal.SIGHUP:
                    _log.info("a second signal: live turns are left running")
                    stopping.cancel_scope.cancel()
                    return

        stopping.start_soon(take_second_signal)
        while wanted is not None:
            longest = f"EXTEND_TIMEOUT_USEC={round((min(wanted.timeout, _DAY) + _ENDING) * 1_000_000)}"
            service.say("STOPPING=1", longest, service.status("Stops:", _STATUS[wanted.how]))
            wanted = await _stop(host, request, wanted)
        stopping.cancel_scope.cancel()


async def _stop(host: HostService, request: StopRequest, wanted: m.StopDaemon) -> m.StopDaemon | None:
    """Stop as `HostService.stop` does; give up and return the next request if one comes first."""
    replaced: m.StopDaemon | None = None
    async with anyio.create_task_group() as group:

        async def take_request() -> None:
            nonlocal replaced
            replaced = await request.wait()
            group.cancel_scope.cancel()

        group.start_soon(take_request)
        try:
            await host.stop(wanted.how, wanted.timeout)
        except HutchError as error:
            _log.error("the record cannot be read: executors are left running", error=error.message)
        group.cancel_scope.cancel()
    return replaced
