"""Ends executors: watches their processes, shuts them down or kills them, and verifies that they are gone.

An executor whose end cannot be verified is quarantined.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import anyio
import structlog

from hutch_daemon.environments.port import Exited, Killed, Launched
from hutch_daemon.pool.executors import Executor, Roster
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError
from hutch_shared.times import now_ms

__all__ = ["Ender", "Spawn"]

_READ_TO_END: Final = 5.0
"""Seconds for reading the data that an ended executor left in its socket."""
_WATCH_PAUSES: Final = (0.25, 2.0)
"""The shortest and the longest pause before hutchd tries again to watch an executor, in seconds."""
_SPARE_DELAY: Final = 0.5
"""Seconds before a spare that ended is replaced."""
_log = structlog.get_logger(__name__)

Spawn = Callable[..., None]
"""Starts a task of the pool. Takes a function and its arguments."""


class Ender:
    """Ends the executors of a roster, each in its own task."""

    def __init__(self, roster: Roster, spawn: Spawn) -> None:
        self._roster = roster
        self._spawn = spawn
        self._conditions = Conditions(logging.getLogger(__name__))

    def __repr__(self) -> str:
        return f"<Ender of {self._roster!r}>"

    def retire(self, executor: Executor, detail: str, grace: float = 0.0) -> None:
        """End an executor in the background. Does nothing if it is already ending.

        It is asked to shut down and is killed after `grace` seconds, or at once if `grace` is 0.
        """
        if executor.over:
            return
        self._roster.move(executor, "draining")
        executor.detail = detail
        self._spawn(self.end, executor, grace)
        self._roster.report(executor)

    async def watch(self, executor: Executor) -> None:
        """Wait until the executor's process ends, then end the processes that it left."""
        assert executor.launched is not None
        exited: Exited | None = None
        backoff = Backoff(*_WATCH_PAUSES)
        while exited is None:
            try:
                exited = await executor.environment.wait(executor.launched)
            except OSError as error:  # hutchd has no free file descriptor: try again
                self._conditions.begin("watch", f"executors cannot be watched: {error}")
                await anyio.sleep(backoff.next())
            else:
                self._conditions.end("watch", "executors are watched again")
        self.retire(executor, "its process ended" + (f" with {exited.code}" if exited.code is not None else ""))

    async def end(self, executor: Executor, grace: float) -> None:
        """End a draining executor."""
        await executor.started.wait()  # a running start must finish first: until then the process is not known
        launched = executor.launched
        assert launched is not None
        await self._roster.save(executor, state="draining", detail=executor.detail)
        if grace > 0 and executor.peer is not None:
            await self._ask(executor, launched, grace)
        killed = await self._kill(executor, launched)
        if executor.peer is not None:
            with anyio.move_on_after(_READ_TO_END):
                await executor.disconnected.wait()
        if executor.peer is not None:
            executor.peer.close()
        executor.killed = killed
        self._roster.move(executor, "gone" if killed.verified else "quarantined")
        if not killed.verified:
            executor.checked = self._roster.clock()
            self.report_quarantine(executor)
        await self._settle(executor)
        executor.ended.set()
        executor.connected.set()
        self._roster.report(executor)

    def report_quarantine(self, executor: Executor) -> None:
        """Report a notice about a quarantined executor, which stays until the executor is gone."""
        self._roster.notice(_quarantine(executor), f"{executor.id} is quarantined: {executor.explanation}.")

    def check(self, executor: Executor) -> anyio.Event:
        """Try again, in the background, to end the processes of a quarantined executor; the event is set at the end.

        If a check is already running, return its event.
        """
        if executor.check is None:
            executor.check = anyio.Event()
            self._spawn(self._check, executor, executor.check)
        return executor.check

    async def _check(self, executor: Executor, ended: anyio.Event) -> None:
        assert executor.launched is not None
        try:
            executor.killed = await self._kill(executor, executor.launched)
            if executor.killed.verified:
                executor.verified_late = True
                self._roster.move(executor, "gone")
                self._roster.end_notice(_quarantine(executor))
                await self._settle(executor)
                self._roster.report(executor)
            else:
                self.report_quarantine(executor)
        finally:
            executor.check, executor.checked = None, self._roster.clock()
            ended.set()

    async def _ask(self, executor: Executor, launched: Launched, grace: float) -> None:
        with anyio.move_on_after(grace):
            try:
                await executor.call("shutdown", m.Shutdown(executor.detail), grace)
                await executor.environment.wait(launched)
            except HutchError as error:
                _log.info("executor did not take its shutdown", executor=executor.id, error=error.message)

    async def _kill(self, executor: Executor, launched: Launched) -> Killed:
        try:
            killed = await executor.environment.kill(launched)
        except OSError as error:
            _log.error("an executor cannot be ended", executor=executor.id, error=str(error))
            return Killed("unknown", why=f"the search failed ({error.strerror})")
        if killed.verified and executor.has_namespace:  # its agent's pid namespace ended with it
            return replace(killed, scope="namespace")
        return killed

    async def _settle(self, executor: Executor) -> None:
        """Store the executor's state, gone or quarantined. If it is gone, free its slot."""
        fields: dict[str, Any] = {"state": executor.state, "session": None, "detail": executor.detail}
        if executor.state != "gone":
            await self._roster.save(executor, **fields)
            return
        await self._roster.save(executor, **fields, gone_at=now_ms())
        self._roster.delay_spare(executor.key, _SPARE_DELAY)
        self._roster.remove(executor)
        self._roster.end_notice(f"account_gone:{executor.id}")
        await self._sweep(executor)
        self._roster.changed.notify()

    async def _sweep(self, executor: Executor) -> None:
        """Sweep a dedicated account once its last executor is gone."""
        account = executor.key.account
        if self._roster.of_account(account.uid):
            return
        if why := await executor.environment.sweep(account):
            self._roster.notice(f"sweep:{account.name}", f"What {account.name} left could not be swept away: {why}")
        else:
            self._roster.end_notice(f"sweep:{account.name}")


def _quarantine(executor: Executor) -> str:
    """Return the name of the notice about a quarantined executor."""
    return f"quarantined:{executor.id}"
