"""The ports of a runner: `AgentRunner`, which the worker calls, and `DaemonPort`, through which a runner calls hutchd.

The worker calls a runner from one task at a time, except `interrupt`, `set_mode` and `close`, which it may call while
`run` is under way. A runner calls its `DaemonPort` from any of its tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import msgspec

from hutch_executor.account.setup import Setup
from hutch_shared import messages as m
from hutch_shared.events import EventKind, TurnEnded

__all__ = ["AgentRunner", "DaemonPort"]


class DaemonPort(Protocol):
    """hutchd as a runner sees it. It hides lost connections, event numbers, acknowledgements and the spool."""

    async def get_api_key(self, provider: str) -> m.KeyGrant:
        """Return the key or lease for `provider`. Waits through a reconnect.

        HutchError (`no_key`, `key_unreadable`, `not_allowed`, …) if there is none.
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
        """Request permission for one call and wait for the decision, without limit and through reconnects.

        `cwd` is where the call would run; relative paths start there. None means the session's directory. Only
        `decision.input` may run. A request that cannot be decided ends in a denial, never in an exception. When the
        turn is interrupted, every request, waiting or new, ends at once in a denial with `interrupt` set. A cancelled
        caller stops waiting; hutchd withdraws the request when the turn ends.
        """
        ...

    async def judge_reads(self, named: Mapping[str, str], imported: Mapping[str, str]) -> Mapping[str, str]:
        """Return which of these instruction files the agent must not be given, by path, each with the reason.

        Both map paths to real paths; `imported` are files that another file names. HutchError if nobody can say.
        """
        ...

    async def report(self, kind: EventKind, data: msgspec.Struct, native: bytes | None = None) -> None:
        """Report one event of the running turn; `data` is the struct of `events.DATA_OF_KIND[kind]`.

        `native` is the agent's own message as one JSON value in UTF-8; its bytes are not changed. Events keep the order
        of the calls. Returns when the event has its number and is kept. Waits while memory and spool are full: stop
        reading from the agent meanwhile. A cancelled call reported nothing. An event too large for the wire loses its
        `native`, then becomes a `notice`.
        """
        ...


class AgentRunner(Protocol):
    """Drives one kind of agent for one session: open once, then turns one at a time, then close."""

    agent: ClassVar[str]
    abilities: ClassVar[tuple[str, ...]]
    """The kinds of turns, besides prompts, that it can run; `offered` if it can tell whether the agent got a prompt;
    `agent_dir` if the agent keeps its conversations in `PrepareSession.agent_dir`."""
    setup: Setup
    """The PATH and umask for the agent and its commands. The worker sets it before `open`."""

    def __init__(self) -> None:
        """Make a runner; do nothing yet."""
        ...

    @classmethod
    def preload(cls) -> None:
        """Import everything that a session will need. A spare executor does it before it is ready."""
        ...

    async def open(self, session: m.PrepareSession, daemon: DaemonPort) -> m.Prepared:
        """Connect the agent, so that it is ready for the first prompt. HutchError if it cannot be started."""
        ...

    async def run(self, prompt: m.ExecutePrompt) -> TurnEnded:
        """Play one turn and return how it ended. The worker reports `turn_started` before it and `turn_ended` after.

        The events in between go through `DaemonPort.report`. An exception fails the turn and ends the executor.
        """
        ...

    async def interrupt(self) -> None:
        """Stop the turn. After the return the turn starts nothing more; `run` returns soon after."""
        ...

    async def set_mode(self, mode: m.PermissionMode) -> None:
        """Pass a changed permission mode on to the agent, if it needs to know."""
        ...

    async def close(self) -> None:
        """End the agent and all that it started, within a deadline of its own. Safe to call twice and in any state."""
        ...
