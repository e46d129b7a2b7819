"""The tasks of all sessions with work: starts them, finds them, and restarts a task after a bug."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import structlog
from anyio.abc import TaskGroup

from hutch_daemon.services.notices import Notices
from hutch_daemon.services.presence import Presence
from hutch_daemon.services.session_loop import SessionLoop
from hutch_shared.backoff import Backoff
from hutch_shared.errors import HutchError, Reason
from hutch_shared.latch import Latch

__all__ = ["MakeLoop", "SessionTasks"]

_log = structlog.get_logger(__name__)

MakeLoop = Callable[[str, int], SessionLoop]
"""Takes a session and its owner; returns the session's loop."""


class SessionTasks:
    """One task for each session that has work. Use it inside its `running` block."""

    def __init__(self, presence: Presence, notices: Notices) -> None:
        """`presence` watches the sessions that have a task. A bug in a task adds a notice to `notices`."""
        self._presence = presence
        self._notices = notices
        self._loops: dict[str, SessionLoop] = {}
        self._make: MakeLoop | None = None
        self._made: list[SessionLoop] = []
        """The loops whose task must still be started: `start` is also called after a commit, outside of any task."""
        self._changed = Latch()

    @asynccontextmanager
    async def running(self, make: MakeLoop) -> AsyncIterator[None]:
        """Run the tasks while the block runs; `make` makes their loops. Leaving the block ends no executor."""
        async with anyio.create_task_group() as tasks:
            self._make = make
            tasks.start_soon(self._start_tasks, tasks)
            try:
                yield
            finally:
                self._make = None
                tasks.cancel_scope.cancel()

    def start(self, session: str, owner: int) -> SessionLoop:
        """Wake the task of a session; start it if it has none. `shutting_down` outside of `running`."""
        loop = self._loops.get(session)
        if loop is None:
            if self._make is None:
                raise HutchError(Reason.SHUTTING_DOWN)
            loop = self._loops[session] = self._make(session, owner)
            self._presence.watch(session, owner)
            self._made.append(loop)
            self._changed.notify()
        loop.wake()
        return loop

    def warm_up(self, session: str, owner: int) -> None:
        """Make the session's task get an executor before the first prompt arrives."""
        self.start(session, owner).warm_up()

    def wake(self, session: str) -> None:
        """Wake the session's task, if there is one."""
        if (loop := self._loops.get(session)) is not None:
            loop.wake()

    async def before_end(self, session: str, turn: str) -> None:
        """Let the session's processes use no model any more, if this is its current turn."""
        if (loop := self._loops.get(session)) is not None:
            await loop.before_end(turn)

    def request_stop(self, session: str, turn: str, why: str) -> None:
        """Request that a turn is interrupted, if it is its session's current turn; `why` is for the log."""
        _log.info("a turn is stopped", session=session, turn=turn, why=why)
        if (loop := self._loops.get(session)) is not None:
            loop.request_stop(turn, "interrupted")

    async def _start_tasks(self, tasks: TaskGroup) -> None:
        while True:
            while self._made:
                tasks.start_soon(self._run, self._made.pop())
            await self._changed.wait()

    async def _run(self, loop: SessionLoop) -> None:
        """Run a session's loop. A bug in it affects only that session: it is logged, and the loop is restarted."""
        backoff = Backoff(1.0, 60.0)
        while True:
            try:
                await loop.run()
            except Exception:  # noqa: BLE001 a bug must not affect other sessions
                _log.exception("a session's task broke", loop=repr(loop))
                self._notices.add(f"broken:{loop.session}", f"The session {loop.session} met a bug; the log has it.")
                await anyio.sleep(backoff.next())
            else:
                self._loops.pop(loop.session, None)
                self._presence.forget(loop.session)
                return
