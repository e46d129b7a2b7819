"""The permission requests that wait for hutchd's decision: sent again after a reconnect, ended by an interrupt.

Every request ends in a decision. A request that hutchd cannot decide is denied with the reason, since nothing may run
unasked. A decision carries the digest of the judged input; if its input has another digest, the request is denied.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason

__all__ = ["OpenRequests"]

Send = Callable[[m.RequestPermission], Awaitable[m.PermissionDecision]]

_log: Final = logging.getLogger(__name__)
_TRANSIENT: Final = frozenset({Reason.OVERLOADED, Reason.STORE_UNAVAILABLE, Reason.SHUTTING_DOWN, Reason.TIMED_OUT})
"""Errors after which the same request is sent again."""
_NOT_JSON: Final = (TypeError, ValueError, RecursionError, OverflowError)
"""The errors of encoding an input without a JSON form: nested too deeply, or with a lone surrogate."""
_FIRST_PAUSE: Final = 0.1
_MAX_PAUSE: Final = 2.0


class OpenRequests:
    """The permission requests of a session's turns. `send` sends one to hutchd and returns its decision."""

    def __init__(self, send: Send) -> None:
        """Start without a turn: every request is denied until `begin_turn`."""
        self._send = send
        self._waiting: set[anyio.CancelScope] = set()
        self._is_open = False
        self._conditions = Conditions(_log)

    def __repr__(self) -> str:
        return f"<OpenRequests {'open' if self._is_open else 'stopped'}, {len(self._waiting)} waiting>"

    def begin_turn(self) -> None:
        """Accept requests from now on."""
        self._is_open = True

    def stop(self) -> None:
        """Deny with `interrupt` every request that waits, and every new one until the next turn begins."""
        self._is_open = False
        for scope in self._waiting:
            scope.cancel()

    async def decide(self, request: m.RequestPermission) -> m.PermissionDecision:
        """Return the decision on `request`. It may take days; a cancelled caller stops waiting."""
        if not self._is_open:
            return _denial(request.call, "The turn was interrupted.", interrupt=True)
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                return _checked(request.call, await self._send_until_decided(request))
            finally:
                self._waiting.discard(scope)
        return _denial(request.call, "The turn was interrupted.", interrupt=True)

    async def _send_until_decided(self, request: m.RequestPermission) -> m.PermissionDecision:
        backoff = Backoff(_FIRST_PAUSE, _MAX_PAUSE)
        while True:
            try:
                decision = await self._send(request)
                self._conditions.end("a permission request is sent again", "permission requests are decided again")
                return decision
            except HutchError as error:
                if error.reason not in _TRANSIENT:
                    return _denial(request.call, error.message, interrupt=error.reason is Reason.LEASE_LOST)
                self._conditions.failed("a permission request is sent again", error)
            except _NOT_JSON:
                return _denial(request.call, "The call's input has no JSON form, so no rule can judge it.")
            await anyio.sleep(backoff.next())


def _checked(call: m.ToolCall, decision: m.PermissionDecision) -> m.PermissionDecision:
    if decision.decision != "deny" and decision.digest != input_digest(call.agent_tool, decision.input):
        return _denial(call, "The decision is bound to another input, so nothing ran.")
    return decision


def _denial(call: m.ToolCall, message: str, *, interrupt: bool = False) -> m.PermissionDecision:
    try:
        digest = input_digest(call.agent_tool, call.input)
    except _NOT_JSON:
        digest = ""
    return m.PermissionDecision(
        decision="deny", state="withdrawn", input=call.input, digest=digest, message=message, interrupt=interrupt
    )
