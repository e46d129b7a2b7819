"""Permission requests: their records, their settlements, and the next step for a pending one. Pure.

A permission request is a tool call that the policy does not decide, a plan, or a question that an agent asks its user.
It is pending until it is settled: a user allows, denies or answers it; it expires; no user is present; or it is
withdrawn because its turn or executor ended. Each of these is a `Settlement`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from hutch_daemon.permissions.answers import answers_by_text
from hutch_daemon.permissions.policy import Verdict
from hutch_daemon.permissions.rules import BadRuleError, parse_rule
from hutch_daemon.store.records import to_message
from hutch_daemon.store.rows import PermissionRow, RuleRow, SessionRow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import PermissionSettled
from hutch_shared.rpc.envelope import is_sound

__all__ = [
    "DueAt",
    "EditedCall",
    "PendingRequest",
    "Settlement",
    "already_settled",
    "audit_details",
    "check_answer",
    "decided_by_policy",
    "expired",
    "new_request",
    "next_step",
    "permission_view",
    "rule_of_answer",
    "settled_by_policy",
    "settled_event",
    "settlement_of_answer",
    "standing",
    "too_late",
    "undecided",
    "withdrawn",
]

_IN_PAGE: Final = b'[[[{"data":{"permission":%b}}]]]'
"""The deepest nesting of a request in a frame. Clients refuse frames that are nested deeper than the wire allows."""
_DECISION: Final[dict[m.PermissionState, m.Decision]] = {
    "allowed": "allow",
    "answered": "answer",
    "denied": "deny",
    "expired": "deny",
    "withdrawn": "deny",
}
_STATE: Final[dict[m.Decision, m.PermissionState]] = {"allow": "allowed", "deny": "denied", "answer": "answered"}


_EDIT_IN_EVENT: Final = 64 * 1024
"""Bytes of an edited input up to which the event of the settlement contains it."""
_IN_AUDIT: Final = 2000
"""Characters of an input, or of the answers, in a line of the audit."""


@dataclass(frozen=True, slots=True)
class EditedCall:
    """A call whose input a user edited, its digest, and the number of changes of the policy that its verdict saw."""

    call: m.ToolCall
    digest: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The settlement of a request: the columns that it sets, the rule that it adds, and whether it stops the turn."""

    state: m.PermissionState
    settled_by: str
    message: str | None = None
    interrupt: bool = False
    scope: m.Scope | None = None
    updated_input: dict[str, Any] | None = None
    decided_digest: str | None = None
    answers: dict[str, Any] | None = None
    rule: RuleRow | None = None
    """The rule that the decision adds, or None."""
    settled_by_rule: str | None = None
    """The text of the rule that makes the decision, or None."""
    edited_call: m.ToolCall | None = None
    """The call with the edited input, if the user edited it."""
    stop_reason: str | None = None
    """The reason why the turn is stopped too; None if the turn continues."""

    def columns(self) -> dict[str, Any]:
        """Return the columns that the settlement sets in the record, without `state` and `settled_at`."""
        return {
            "settled_by": self.settled_by,
            "message": self.message,
            "interrupt": self.interrupt,
            "scope": self.scope,
            "updated_input": self.updated_input,
            "decided_digest": self.decided_digest,
            "answers": self.answers,
            "settled_rule": self.settled_by_rule if self.rule is None else self.rule.rule,
        }

    def applied_to(self, row: PermissionRow, at: int) -> PermissionRow:
        """Return the record after this settlement. `at` is in ms since 1970."""
        return replace(row, state=self.state, settled_at=at, **self.columns())


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A pending request, with its deadlines in seconds on the monotonic clock."""

    row: PermissionRow
    deadline: float
    """The time when the request expires."""
    presence_due: float = math.inf
    """The time to check whether a user is present to decide; infinite if no check is due."""
    notified: bool = False
    """True if the notify command worked, so that a user counts as present."""
    owner: int = 0
    """The uid of the session's owner."""
    is_stale: bool = False
    """True if the policy has changed since the request was judged, so that it must be judged again."""
    may_be_allowed: bool = True
    """False until the executor of a request of an earlier hutchd has asked again.

    Until then its project's policy file, which may deny the call, is not known.
    """


@dataclass(frozen=True, slots=True)
class DueAt:
    """Nothing is due before the time `at`."""

    at: float


def next_step(request: PendingRequest, now: float, when_nobody: m.WhenNobody) -> Settlement | DueAt:
    """Return the settlement of a pending request that is due at `now`, or the time when something will be due.

    `when_nobody` is the session's policy for an absent user, or `wait` while a user is present.
    """
    if request.deadline <= now:
        return expired()
    if request.presence_due > now:
        return DueAt(min(request.deadline, request.presence_due))
    if when_nobody == "wait" or request.notified:
        return DueAt(request.deadline)
    return undecided(stop=when_nobody == "stop")


def expired() -> Settlement:
    """Return the settlement of an expired request."""
    return Settlement(state="expired", settled_by="expiry", message="Nobody answered in time.")


def undecided(*, stop: bool) -> Settlement:
    """Return the settlement of a request that no user is present to decide; `stop` stops the turn too."""
    return Settlement(
        state="denied",
        settled_by="nobody",
        message=f"Nobody is there to decide, and the session says to {'stop the turn' if stop else 'refuse'} then.",
        interrupt=stop,
        stop_reason="nobody was there to decide" if stop else None,
    )


def settled_by_policy(verdict: Verdict, mode: m.PermissionMode, digest: str) -> Settlement:
    """Return the settlement by the policy, after it changed. `verdict` allows or denies."""
    allowed = verdict.decision == "allow"
    return Settlement(
        state="allowed" if allowed else "denied",
        settled_by="rule" if verdict.rule is not None else f"mode {mode}",
        message=verdict.why if allowed else f"Denied: {verdict.why}",
        decided_digest=digest,
        settled_by_rule=verdict.rule,
    )


def withdrawn(why: str) -> Settlement:
    """Return the settlement of a request whose turn or executor has ended."""
    return Settlement(state="withdrawn", settled_by=why, message=f"Withdrawn: {why}.")


def new_request(
    params: m.RequestPermission, verdict: Verdict, *, id_: str, executor: str, digest: str, now: int, expiry: float
) -> PermissionRow:
    """Return the record of a call that the policy does not decide. INVALID_PARAMS if no client could show it.

    `now` is in ms since 1970, `expiry` in seconds.
    """
    row = PermissionRow(
        id=id_,
        session=params.session,
        turn=params.turn,
        executor=executor,
        ask=params.ask,
        kind=params.kind,
        asked_at=now,
        call=params.call,
        cwd=params.cwd,
        digest=digest,
        expires_at=now + int(expiry * 1000),
        why=verdict.why,
        rule=verdict.rule,
        layer=verdict.layer,
        questions=params.questions,
        plan=params.plan,
        suggestions=tuple(verdict.suggestions),
    )
    if not _can_be_shown(row):
        raise HutchError(Reason.INVALID_PARAMS, "The call is nested too deeply to be shown to a user.")
    return row


def _can_be_shown(row: PermissionRow) -> bool:
    return is_sound(_IN_PAGE % msgspec.json.encode(permission_view(row)))


def settled_event(row: PermissionRow) -> PermissionSettled:
    """Return the event of a settled request."""
    small = row.updated_input is not None and len(msgspec.json.encode(row.updated_input)) <= _EDIT_IN_EVENT
    return PermissionSettled(
        row.id,
        row.state,
        row.settled_by or "",
        row.message,
        scope=row.scope,
        rule=row.settled_rule,
        call_id=row.call.call_id,
        digest=row.decided_digest if row.state in ("allowed", "answered") else None,
        updated_input=row.updated_input if small else None,
        answers=row.answers,
    )


def audit_details(row: PermissionRow) -> dict[str, str]:
    """Return what the audit keeps of a settled request: the input that was decided about, cut, and the answers."""
    given = row.updated_input if row.updated_input is not None else row.call.input
    details = {"tool": row.call.agent_tool, "kind": row.kind, "scope": row.scope or "once"}
    if row.updated_input is not None:
        details["edited"] = "yes"
    details["input"] = _cut_json(given)
    if row.answers is not None:
        details["answers"] = _cut_json(row.answers)
    return details


def _cut_json(value: dict[str, Any]) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _IN_AUDIT else f"{text[:_IN_AUDIT]}…"


def permission_view(row: PermissionRow) -> m.Permission:
    """Return a request as clients see it."""
    return to_message(m.Permission, row)


def check_answer(row: PermissionRow, params: m.AnswerPermission) -> None:
    """Refuse a decision that does not fit the request: `already_settled`, `invalid_params`.

    A field that the decision does not use is refused too: its sender would take it as decided.
    """
    if row.state != "pending":
        raise already_settled(row)
    if (wrong := _misfit(row, params)) is not None:
        raise HutchError(Reason.INVALID_PARAMS, wrong)


def _misfit(row: PermissionRow, params: m.AnswerPermission) -> str | None:
    decision = params.decision
    if decision == "answer" and row.kind != "question":
        return f"A {row.kind} is allowed or denied; there is nothing to answer."
    if decision == "allow" and row.kind == "question":
        return "A question needs the decision `answer`, with `answers`."
    if params.answers is not None and decision != "answer":
        return "`answers` needs the decision `answer`."
    if params.updated_input is not None and decision != "allow":
        return "`updated_input` is the input that may run, so it is allowed only with `allow`."
    if params.scope != "once" and decision == "answer":
        return "An answer is for one question: it has no scope."
    if params.rule is not None and params.scope == "once":
        return "`rule` needs the scope `session` or `always`."
    if params.updated_input is not None and params.scope != "once" and params.rule is None:
        return "The suggested rule is for the call before the edit: give the rule for this scope with `rule`."
    if params.interrupt and decision != "deny":
        return "`interrupt` stops the turn, so it is allowed only with `deny`."
    return None


def rule_of_answer(session: SessionRow, row: PermissionRow, params: m.AnswerPermission, now: int) -> RuleRow | None:
    """Return the rule that a decision adds; None if it is for this call only. `invalid_params`, `invalid_rule`."""
    if params.scope == "once" or params.decision == "answer":
        return None
    text = params.rule or (row.suggestions[0].rule if row.suggestions else None)
    if text is None:
        raise HutchError(Reason.INVALID_PARAMS, "There is no safe rule to suggest here: give one with `rule`.")
    effect = params.decision
    try:
        parse_rule(text, effect, "answered", "answer", base=session.cwd, home="/")
    except BadRuleError as error:
        raise HutchError(Reason.INVALID_RULE, f"The rule {text!r} cannot be used: {error}") from error
    return RuleRow(
        owner=session.owner,
        effect=effect,
        rule=text,
        created_at=now,
        project=session.cwd if params.scope == "always" else None,
        session=session.id if params.scope == "session" else None,
        origin=f"answered to {row.id}",
    )


def settlement_of_answer(
    row: PermissionRow, params: m.AnswerPermission, by: str, edited: EditedCall | None, rule: RuleRow | None
) -> Settlement:
    """Return the settlement by the user named `by`. `edited` has the input that may run, if the user edited it.

    `invalid_params` if the answers do not answer the request's questions, or no client could show the edited input.
    """
    settlement = Settlement(
        state=_STATE[params.decision],
        settled_by=by,
        message=params.message,
        interrupt=params.interrupt,
        scope=params.scope,
        updated_input=None if edited is None else edited.call.input,
        decided_digest=row.digest if edited is None else edited.digest,
        answers=answers_by_text(row.questions, params.answers) if params.decision == "answer" else None,
        rule=rule,
        edited_call=None if edited is None else edited.call,
        stop_reason=f"{by} denied and stopped" if params.interrupt else None,
    )
    if edited is not None and not _can_be_shown(settlement.applied_to(row, 0)):
        raise HutchError(Reason.INVALID_PARAMS, "The edited input is nested too deeply to be shown to a user.")
    return settlement


def standing(row: PermissionRow) -> m.PermissionDecision:
    """Return the decision of a settled request, for the executor that asked."""
    return m.PermissionDecision(
        decision=_DECISION[row.state],
        state=row.state,
        input=row.updated_input if row.updated_input is not None else row.call.input,
        digest=row.decided_digest or row.digest,
        message=row.message,
        interrupt=row.interrupt or row.state == "withdrawn",  # the turn has ended, so the agent must not continue
        answers=row.answers,
    )


def decided_by_policy(params: m.RequestPermission, verdict: Verdict, digest: str) -> m.PermissionDecision:
    """Return the decision of a call that a rule or the mode allows or denies."""
    allowed = verdict.decision == "allow"
    return m.PermissionDecision(
        decision="allow" if allowed else "deny",
        state="allowed" if allowed else "denied",
        input=params.call.input,
        digest=digest,
        message=None if allowed else f"Denied: {verdict.why}",
    )


def too_late(params: m.RequestPermission, digest: str) -> m.PermissionDecision:
    """Return the denial of a call whose turn has ended or is being stopped."""
    return m.PermissionDecision(
        decision="deny",
        state="withdrawn",
        input=params.call.input,
        digest=digest,
        message="The turn does not run, or is being stopped; it starts nothing more.",
        interrupt=True,
    )


def already_settled(row: PermissionRow) -> HutchError:
    """Return the error for a decision about a settled request. It contains the current record."""
    return HutchError(
        Reason.ALREADY_SETTLED,
        f"It was settled before: {row.state} by {row.settled_by}.",
        permission=msgspec.to_builtins(permission_view(row)),
    )
