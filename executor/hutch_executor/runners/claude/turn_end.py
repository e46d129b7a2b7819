"""How a turn ended, from the CLI's `result` line. Pure."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from hutch_executor.runners.claude.lines import ResultLine
from hutch_shared.events import TurnEnded, UsageSeen

__all__ = ["compacted", "ended", "failure"]

_DETAIL_LIMIT: Final = 2000
"""Characters of the CLI's own words in a message."""
_BY_STATUS: Final = {
    401: ("auth_failed", "The provider refused the key. Look at it with `hutch key ls`, or add another one."),
    403: ("auth_failed", "The provider does not let this key do that."),
    429: ("rate_limited", "The provider's rate limit was reached. Wait a while, then submit the prompt again."),
    529: ("overloaded", "The provider is overloaded. Submit the prompt again in a moment."),
}
_BY_SUBTYPE: Final = {
    "error_max_turns": ("max_turns", "The agent used up the number of model requests allowed for a turn."),
    "error_max_budget_usd": ("max_usd", "The agent used up its budget."),
}


def ended(result: ResultLine, usage: UsageSeen | None, *, asked: bool = True) -> TurnEnded:
    """Return how a turn ended, by the CLI's own report. Without `asked` no model got the prompt, so it failed."""
    state, (reason, message) = _verdict(result)
    detail = "; ".join(result.errors or ()) or result.result or ""
    if state == "completed" and not asked:
        state, reason = "failed", "not_asked"
        message = "Claude Code ended the turn without asking the model, so the prompt had no effect."
    if state == "failed" and detail:
        message = f"{message} ({detail[:_DETAIL_LIMIT]})"
    text = result.result if state == "completed" else None
    return TurnEnded(state, reason, message, text, usage, result.session_id)


def compacted(end: TurnEnded, error: str | None) -> TurnEnded:
    """Return how a turn ended that compacts the conversation. `error` is the CLI's; None if it wrote a summary.

    The CLI reports a failure as a success without an answer.
    """
    if end.state != "completed":
        return end
    if error is None:
        return replace(end, message="The agent goes on from a summary of the conversation.", result=None)
    message = f"The conversation could not be compacted: {error[:_DETAIL_LIMIT]}"
    return replace(end, state="failed", reason="compact_failed", message=message, result=None)


def _verdict(result: ResultLine) -> tuple[Any, tuple[str, str]]:
    if (result.terminal_reason or "").startswith("aborted"):
        return "stopped", ("interrupted", "The turn was stopped.")
    if result.is_error is False and result.subtype == "success":
        return "completed", ("completed", "The agent has finished.")
    return "failed", failure(result)


def failure(result: ResultLine) -> tuple[str, str]:
    """Return the reason and the message of a failed turn."""
    status = result.api_error_status
    if result.subtype in _BY_SUBTYPE:
        return _BY_SUBTYPE[result.subtype]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status is not None and status >= 500:
        return "provider_error", f"The provider failed (status {status}). Submit the prompt again in a moment."
    if status is not None and status >= 400:
        return "bad_request", f"The provider refused the request (status {status})."
    if "timeout" in (result.api_error or "") or "timed out" in (result.result or ""):
        return "stream_stalled", "The model's answer stopped coming."
    if result.api_error or result.terminal_reason == "api_error":
        return "stream_broken", "The connection to the model broke off."
    if any("No conversation found" in error for error in result.errors or ()):
        return "resume_unknown", "Claude Code does not know the conversation to resume, in this directory."
    if result.is_error is None and result.subtype in ("", "success"):
        return "no_result", "Claude Code ended the turn without saying how it ended."
    return "agent_error", "The agent gave up."
