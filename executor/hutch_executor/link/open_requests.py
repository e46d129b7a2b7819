"""Questions to hutchd that wait for a person: sent again after a reconnect, ended by an interrupt.

What comes out is a decision, always: whatever stands in the way of one is a denial that says so, since nothing runs
unasked. An allowed input is checked against the digest that the decision is bound to.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason

__all__ = ["Asks"]

Send = Callable[[m.RequestPermission], Awaitable[m.PermissionDecision]]

_log: Final = logging.getLogger(__name__)
_PASSES: Final = frozenset({Reason.OVERLOADED, Reason.STORE_UNAVAILABLE, Reason.SHUTTING_DOWN, Reason.TIMED_OUT})
"""Refusals after which the same question is put again."""
_NO_JSON: Final = (TypeError, ValueError, RecursionError, OverflowError)
"""What encoding raises for an input that has no JSON form, is nested too deeply, or holds a lone surrogate."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0


class Asks:
    """The questions of a session's turns. `send` puts one to hutchd and lasts until it is decided."""

    def __init__(self, send: Send) -> None:
        """Start between turns: nothing may be asked."""
        self._send = send
        self._waiting: set[anyio.CancelScope] = set()
        self._is_open = False

    def __repr__(self) -> str:
        return f"<Asks {'open' if self._is_open else 'stopped'}, {len(self._waiting)} waiting>"

    def begin_turn(self) -> None:
        """From now on questions may be asked."""
        self._is_open = True

    def stop(self) -> None:
        """End all that wait, and every later one, as denied with `interrupt`, until a turn begins."""
        self._is_open = False
        for scope in self._waiting:
            scope.cancel()

    async def ask(self, request: m.RequestPermission) -> m.PermissionDecision:
        """Return the decision that stands about `request`."""
        if not self._is_open:
            return _denial(request.call, "The turn was interrupted.", interrupt=True)
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                return _checked(request.call, await self._decide(request))
            finally:
                self._waiting.discard(scope)
        return _denial(request.call, "The turn was interrupted.", interrupt=True)

    async def _decide(self, request: m.RequestPermission) -> m.PermissionDecision:
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._send(request)
            except HutchError as error:
                if error.reason not in _PASSES:
                    return _denial(request.call, error.message, interrupt=error.reason is Reason.LEASE_LOST)
                _log.info("a question waits: %s", error.message)
            except _NO_JSON:
                return _denial(request.call, "The call holds what cannot be put into words, so it cannot be judged.")
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _checked(call: m.ToolCall, decision: m.PermissionDecision) -> m.PermissionDecision:
    if decision.decision != "deny" and decision.digest != input_digest(call.agent_tool, decision.input):
        return _denial(call, "The decision is not about this input, so nothing ran.")
    return decision


def _denial(call: m.ToolCall, message: str, *, interrupt: bool = False) -> m.PermissionDecision:
    try:
        digest = input_digest(call.agent_tool, call.input)
    except _NO_JSON:
        digest = ""
    return m.PermissionDecision(
        decision="deny", state="withdrawn", input=call.input, digest=digest, message=message, interrupt=interrupt
    )
