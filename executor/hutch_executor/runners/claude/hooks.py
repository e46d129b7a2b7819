"""The SDK's hooks and permission callback: every tool call goes to hutchd, and only the decided input runs.

The PreToolUse hook answers `ask` for every call, in every mode, so that each one reaches `may_use`. `may_use` requests
hutchd's decision and returns the judged input, the only input that runs. The PostToolUse hook compares the digest of
what ran with the decided one; another input, or a call that was never decided, ends the turn. (The hook does not answer
`allow`, because the CLI does not treat that answer as final.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

from claude_agent_sdk import (
    ClaudeAgentOptions,
    HookMatcher,
    PermissionResultAllow,
    PermissionResultDeny,
    ToolPermissionContext,
)

from hutch_executor.runners.claude.calls import PLAN_TOOL, judged_input, kind_of, plan_of
from hutch_executor.runners.claude.connection import ClaudeConnection
from hutch_executor.runners.claude.turn import ClaudeTurn
from hutch_executor.runners.port import DaemonPort
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.events import Notice
from hutch_shared.vocabulary import enters_plan, to_call, to_questions

__all__ = ["PermissionHooks", "RunningTurn"]

_HOOK_TIMEOUT: Final = 7 * 24 * 3600.0
"""Seconds. It exceeds every permission request's expiry, since the call fails if its hook times out."""
_NOTHING_STARTS: Final = "The turn has ended; nothing more starts."


class RunningTurn(Protocol):
    """Gives the hooks the current turn and the connected CLI."""

    turn: ClaudeTurn | None
    connection: ClaudeConnection | None

    async def end_for_message_socket(self, turn: ClaudeTurn, connection: ClaudeConnection, place: str) -> None:
        """End the turn, since the CLI takes messages from other processes at `place`."""
        ...

    def expect_mode(self, mode: m.PermissionMode) -> None:
        """Expect that the agent changes its mode by itself: an allowed call makes it do so."""
        ...


class PermissionHooks:
    """The hooks of one session's CLI."""

    def __init__(self, running: RunningTurn, daemon: DaemonPort, cwd: str, servers: Iterable[str]) -> None:
        """Serve the calls of `running`; relative paths start from `cwd` unless the call names another directory.

        `servers` are the session's MCP servers.
        """
        self._running = running
        self._daemon = daemon
        self._cwd = cwd
        self._servers = tuple(servers)

    def options(self, *, commands: bool = False) -> ClaudeAgentOptions:
        """Return the SDK's options that register the hooks. A CLI with `commands` gets no list of skills."""
        return ClaudeAgentOptions(
            skills=[] if commands else None,
            can_use_tool=self.may_use,
            hooks={
                "PreToolUse": [HookMatcher(hooks=[self.before_tool], timeout=_HOOK_TIMEOUT, on_failure="block")],
                "PostToolUse": [HookMatcher(hooks=[self.after_tool], timeout=_HOOK_TIMEOUT, on_failure="block")],
                "PostToolUseFailure": [HookMatcher(hooks=[self.after_tool], timeout=_HOOK_TIMEOUT)],
            },
        )

    async def before_tool(self, call: Any, call_id: str | None, _context: Any) -> Any:
        """PreToolUse: send every call to `may_use`, whatever the CLI itself would decide."""
        turn, connection = self._running.turn, self._running.connection
        if turn is not None and connection is not None and (place := await connection.message_socket()) is not None:
            await self._running.end_for_message_socket(turn, connection, place)
        starts = turn is not None and not turn.stopping
        if turn is not None and isinstance(cwd := call.get("cwd"), str):
            turn.call_cwds[call_id or ""] = cwd
        return {
            "hookSpecificOutput": {
                "hookEventName": "PreToolUse",
                "permissionDecision": "ask" if starts else "deny",
                "permissionDecisionReason": "Hutch decides." if starts else _NOTHING_STARTS,
            }
        }

    async def may_use(
        self, tool: str, tool_input: dict[str, Any], context: ToolPermissionContext
    ) -> PermissionResultAllow | PermissionResultDeny:
        """Request hutchd's decision on one call and return the judged input, which alone may run."""
        turn, connection = self._running.turn, self._running.connection
        if turn is None or connection is None or turn.stopping:
            return PermissionResultDeny(message=_NOTHING_STARTS, interrupt=True)
        call_id = context.tool_use_id or ""
        cwd = turn.call_cwds.pop(call_id, self._cwd)
        call = to_call(tool, tool_input, call_id, cwd, servers=self._servers, with_diff=True)
        kind = kind_of(tool)
        turn.undecided += 1
        try:
            await connection.caught_up()
            decision = await self._daemon.request_permission(
                kind,
                call,
                cwd=cwd,
                questions=to_questions(tool_input) if kind == "question" else (),
                plan=plan_of(tool_input) if kind == "plan" else None,
            )
        finally:
            turn.undecided -= 1
        judged = judged_input(tool, decision)
        if turn.stopping or judged is None:
            message = decision.message or ("Nobody answered." if kind == "question" else "This was not allowed.")
            return PermissionResultDeny(message=message, interrupt=decision.interrupt or turn.stopping)
        turn.decided[call_id] = input_digest(tool, judged)
        if enters_plan(call):
            self._running.expect_mode("plan")
        elif kind == "plan":
            self._running.expect_mode("ask")  # hutchd reports the session's mode next
        return PermissionResultAllow(updated_input=judged)

    async def after_tool(self, call: Any, call_id: str | None, _context: Any) -> Any:
        """PostToolUse: check that the decided input ran. A plan is exempt: the CLI removes its text again."""
        turn, connection, tool = self._running.turn, self._running.connection, str(call.get("tool_name"))
        ran = input_digest(tool, call.get("tool_input") or {})
        decided = turn.decided.pop(call_id or "", None) if turn else None
        if turn is None or connection is None:
            return {"continue_": False, "stopReason": _NOTHING_STARTS}
        connection.ran[call_id or ""] = ran
        if decided == ran or (decided is not None and tool == PLAN_TOOL):
            return {}
        word, message = (
            ("unasked_tool", f"Claude Code ran {tool} without asking.")
            if decided is None
            else ("input_mismatch", f"Claude Code ran {tool} with another input than the decided one.")
        )
        turn.give_up(word, f"{message} The turn was stopped.")
        details = {"call_id": call_id, "tool": tool, "ran": ran, "decided": decided}
        await self._daemon.report("notice", Notice(word, message, details))
        return {"continue_": False, "stopReason": message}
