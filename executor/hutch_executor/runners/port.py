"""The port between the worker and what drives an agent: what a runner does, and what it may ask of hutchd.

The worker calls a runner from one task at a time, but for `interrupt`, `set_mode` and `close`, which come while `run`
is under way. A runner calls its `DaemonPort` from any of its tasks.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import msgspec

from hutch_executor.account.setup import Setup
from hutch_shared import messages as m
from hutch_shared.events import EventKind, TurnEnded

__all__ = ["AgentRunner", "DaemonPort"]


class DaemonPort(Protocol):
    """hutchd as a runner sees it. Lost connections, numbers, receipts and the spool are behind it."""

    async def get_api_key(self, provider: str) -> m.KeyGrant:
        """Return the key or lease for `provider`. Waits through a reconnect.

        HutchError (`no_key`, `key_unreadable`, `not_allowed`, …) when there is none to be had.
        """
        ...

    async def request_permission(
        self,
        kind: m.PermissionKind,
        call: m.ToolCall,
        *,
        cwd: str | None = None,
        questions: tuple[m.Question, ...] = (),
        plan: str | None = None,
    ) -> m.PermissionDecision:
        """Ask about one call and wait for the decision, as long as it takes, through reconnects.

        `cwd` is where it would run: relative paths are judged from there. None: the session's own directory.
        Only `decision.input` may run. What cannot be decided comes back as a denial, never as an exception. From the
        moment the turn is interrupted every ask, waiting or new, comes back at once as a denial with `interrupt` set.
        A cancelled caller stops waiting; hutchd withdraws the question when the turn ends.
        """
        ...

    async def report(self, kind: EventKind, data: msgspec.Struct, native: bytes | None = None) -> None:
        """Report one event of the running turn; `data` is the struct of `events.DATA_OF_KIND[kind]`.

        `native` is the agent's own message as one JSON value in UTF-8, spliced as it is. Events keep the order of
        the calls. Returns when the event has its number and is kept; waits when as much as may be kept is kept
        (back-pressure: stop reading from the agent). On cancel before that the event was not reported. An event too
        large for the wire loses its `native`, then becomes a `notice`.
        """
        ...


class AgentRunner(Protocol):
    """Drives one kind of agent for one session: open once, then turns one at a time, then close."""

    agent: ClassVar[str]
    setup: Setup
    """What the agent, and all that it runs, has of its account's set-up. The worker puts it here before `open`."""

    def __init__(self) -> None:
        """Make a runner that has done nothing yet."""
        ...

    @classmethod
    def preload(cls) -> None:
        """Import all that a session will need; a spare executor does it before it is ready."""
        ...

    async def open(self, session: m.PrepareSession, daemon: DaemonPort) -> m.Prepared:
        """Connect the agent, so that the first prompt finds it ready. HutchError when it cannot be started."""
        ...

    async def run(self, prompt: m.ExecutePrompt) -> TurnEnded:
        """Play one turn and return how it ended. The worker reports `turn_started` before it and `turn_ended` after.

        Everything in between goes through `DaemonPort.report`. An exception fails the turn and ends the executor.
        """
        ...

    async def interrupt(self) -> None:
        """Stop the turn. When it has returned, nothing of the turn starts any more; `run` returns soon after."""
        ...

    async def set_mode(self, mode: m.PermissionMode) -> None:
        """Tell the agent that the session's permission mode changed, where it needs to know."""
        ...

    async def close(self) -> None:
        """End the agent and what it started, within its own deadline. Safe to call twice and in any state."""
        ...
