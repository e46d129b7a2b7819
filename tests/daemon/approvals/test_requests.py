"""The steps that follow from the state of a permission request, without a store or a clock."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hutch_daemon.permissions import requests
from hutch_daemon.permissions.pending import PendingAsks, UnstoredDenial
from hutch_daemon.permissions.requests import DueAt, PendingRequest, Settlement, next_step
from hutch_daemon.store.rows import PermissionRow, SessionRow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.times import to_wire
from tests.daemon.store.examples import AT, session_row


def request_row(**fields: Any) -> PermissionRow:
    plain: dict[str, Any] = {
        "id": "p-1",
        "session": "s-aaaa",
        "turn": "t-1",
        "executor": "x-1",
        "ask": "ask-1",
        "kind": "tool",
        "asked_at": AT,
        "call": m.ToolCall("c-1", "run_command", "Bash", {"command": "make"}, command="make"),
        "cwd": "/proj",
        "digest": "d",
        "expires_at": AT + 1000,
    }
    return PermissionRow(**(plain | fields))


def waiting(deadline: float = 100, presence_due: float = math.inf, *, notified: bool = False) -> PendingRequest:
    return PendingRequest(request_row(), deadline, presence_due, notified)


def step(request: PendingRequest, now: float = 10, when_nobody: m.WhenNobody = "wait") -> str:
    """Return the next step as one line."""
    found = next_step(request, now, when_nobody)
    if isinstance(found, DueAt):
        return f"wait until {found.at}"
    return f"{found.state} by {found.settled_by}{', stop' if found.stop_reason else ''}"


def test_a_request_waits_for_its_deadline() -> None:
    """Without any other event, nothing happens before the request expires."""
    assert step(waiting(100)) == "wait until 100"


@pytest.mark.parametrize("now", [100, 101])
def test_a_request_expires_at_its_deadline(now: float) -> None:
    """Expiry takes precedence over `when_nobody`."""
    assert step(waiting(100, presence_due=0), now, "stop") == "expired by expiry"


@pytest.mark.parametrize(("presence_due", "at"), [(50, 50), (150, 100)])
def test_the_presence_check_waits_until_it_is_due(presence_due: float, at: float) -> None:
    """Before that, the session's `when_nobody` does not apply."""
    assert step(waiting(100, presence_due), 10, "deny") == f"wait until {at}"


@pytest.mark.parametrize(
    ("when_nobody", "found"),
    [("wait", "wait until 100"), ("deny", "denied by nobody"), ("stop", "denied by nobody, stop")],
)
def test_when_nobody_applies_once_the_presence_check_is_due(when_nobody: m.WhenNobody, found: str) -> None:
    """`wait` continues to wait, `deny` denies, `stop` denies and stops the turn."""
    assert step(waiting(100, presence_due=10), 10, when_nobody) == found


def test_a_notified_user_counts_as_present_until_the_deadline() -> None:
    """After a successful notify command, the request waits for its deadline."""
    assert step(waiting(100, presence_due=10, notified=True), 10, "stop") == "wait until 100"


def test_a_request_is_shown_in_the_form_of_the_protocol() -> None:
    """The record's fields have the message's names and times; internal fields are left out."""
    shown = requests.permission_view(request_row())

    assert (shown.id, shown.asked_at, shown.expires_at) == ("p-1", to_wire(AT), to_wire(AT + 1000))
    assert shown.settled_at is None
    assert not hasattr(shown, "executor")


@pytest.mark.parametrize(
    ("kind", "answer", "reason"),
    [
        ("tool", {"decision": "answer"}, Reason.INVALID_PARAMS),
        ("plan", {"decision": "answer"}, Reason.INVALID_PARAMS),
        ("question", {"decision": "allow"}, Reason.INVALID_PARAMS),
        ("tool", {"decision": "allow", "interrupt": True}, Reason.INVALID_PARAMS),
        ("question", {"decision": "answer", "interrupt": True}, Reason.INVALID_PARAMS),
        ("tool", {"decision": "allow", "updated_input": {"command": "ls"}, "scope": "always"}, Reason.INVALID_PARAMS),
    ],
)
def test_a_decision_must_fit_its_request(kind: m.PermissionKind, answer: dict[str, Any], reason: Reason) -> None:
    """Questions are answered, other requests allowed or denied; only a denial can stop the turn."""
    with pytest.raises(HutchError) as refused:
        requests.check_answer(request_row(kind=kind), m.AnswerPermission("p-1", **answer))

    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("tool", {"decision": "allow"}),
        ("tool", {"decision": "deny", "interrupt": True}),
        ("plan", {"decision": "allow"}),
        ("question", {"decision": "answer"}),
        ("question", {"decision": "deny"}),
    ],
)
def test_a_decision_that_fits_is_accepted(kind: m.PermissionKind, answer: dict[str, Any]) -> None:
    """The check raises nothing."""
    requests.check_answer(request_row(kind=kind), m.AnswerPermission("p-1", **answer))


def test_a_second_decision_is_refused_with_the_first() -> None:
    """The refusal carries the settled request."""
    row = requests.expired().applied_to(request_row(), AT)

    with pytest.raises(HutchError) as refused:
        requests.check_answer(row, m.AnswerPermission("p-1", "allow"))

    assert refused.value.reason is Reason.ALREADY_SETTLED
    assert refused.value.details["permission"]["state"] == "expired"


@pytest.mark.parametrize(
    ("scope", "project", "session"), [("once", None, None), ("always", "/proj", None), ("session", None, "s-aaaa")]
)
def test_a_scope_beyond_once_adds_a_rule(scope: m.Scope, project: str | None, session: str | None) -> None:
    """`always` adds it for the session's directory, `session` for that session alone."""
    asked: SessionRow = session_row("s-aaaa", cwd="/proj")
    params = m.AnswerPermission("p-1", "allow", scope=scope, rule="Bash(make:*)")
    rule = requests.rule_of_answer(asked, request_row(), params, AT)

    assert (None if rule is None else (rule.rule, rule.effect, rule.project, rule.session)) == (
        None if scope == "once" else ("Bash(make:*)", "allow", project, session)
    )


def test_an_unstored_denial_shows_the_same_record_as_a_stored_one() -> None:
    """A denial looks the same before and after it is stored."""
    params = m.AnswerPermission("p-1", "deny", message="No.", interrupt=True)
    settlement = requests.settlement_of_answer(request_row(), params, "uid 1", None, None)
    row = settlement.applied_to(request_row(), AT + 5)

    assert (row.state, row.settled_by, row.settled_at, row.message, row.interrupt) == (
        "denied",
        "uid 1",
        AT + 5,
        "No.",
        True,
    )
    assert settlement.stop_reason == "uid 1 denied and stopped"


def test_a_withdrawn_request_interrupts_its_executor() -> None:
    """The turn is over, so the agent must not continue after the denial."""
    decision = requests.standing(requests.withdrawn("the turn ended").applied_to(request_row(), AT))

    assert (decision.decision, decision.state, decision.interrupt) == ("deny", "withdrawn", True)


def test_a_decision_names_the_edited_input_and_its_digest() -> None:
    """Both replace those of the requested input."""
    settlement = Settlement(
        state="allowed", settled_by="uid 1", updated_input={"command": "make -n"}, decided_digest="e"
    )
    decision = requests.standing(settlement.applied_to(request_row(), AT))

    assert (decision.input, decision.digest) == ({"command": "make -n"}, "e")


async def test_an_unstored_denial_wakes_its_caller_and_stands() -> None:
    """Every later read returns the denial until the store has it."""
    asks = PendingAsks()
    asks.add(waiting())
    denied = requests.undecided(stop=False)
    asks.deny(UnstoredDenial(denied.applied_to(request_row(), AT), denied))

    found = await asks.settled("p-1")
    before = repr(asks)
    asks.settle(denied.applied_to(request_row(), AT))

    assert found is not None
    assert found.state == "denied"
    assert before == "<PendingAsks 0 pending, 1 denials to store>"
    assert repr(asks) == "<PendingAsks 0 pending, 0 denials to store>"
    assert await asks.settled("p-1") is None
