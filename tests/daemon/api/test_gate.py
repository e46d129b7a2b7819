"""The gate: its tables are complete, and it refuses every method that they do not list."""

from __future__ import annotations

import pytest

from hutch_daemon.api.gate import (
    CLIENT_GATE,
    EXECUTOR_GATE,
    CallerClass,
    LeaseStanding,
    Ownership,
    Phase,
    Role,
    Subject,
    admit_client,
    admit_executor,
    callers_of,
    expected,
    expected_of_executor,
    role_of,
    standing_of,
)
from hutch_daemon.services.access import Caller
from hutch_shared.errors import HutchError, Reason
from hutch_shared.methods import CLIENT, EXECUTOR

DAEMON = 500
CALLERS = {
    "person": (Caller(uid=1000, gid=1000, pid=1), Role.PERSON),
    "insider": (Caller(uid=1000, gid=1000, pid=1, insider="x-1"), Role.INSIDER),
    "admin": (Caller(uid=1001, gid=1001, pid=1, admin=True), Role.ADMIN),
    "root": (Caller(uid=0, gid=0, pid=1, admin=True), Role.ROOT),
    "insider as root": (Caller(uid=0, gid=0, pid=1, admin=True, insider="x-1"), Role.INSIDER),
    "hutchd's own account": (Caller(uid=DAEMON, gid=DAEMON, pid=1), Role.HUTCHD),
    "insider as hutchd": (Caller(uid=DAEMON, gid=DAEMON, pid=1, insider="x-1"), Role.INSIDER),
}


def said(method: str, caller: Caller, phase: Phase) -> Reason | None:
    """Return the reason with which the gate refuses, or None."""
    try:
        admit_client(method, caller, daemon_uid=DAEMON, phase=phase)
    except HutchError as error:
        return error.reason
    return None


def test_every_method_has_a_row() -> None:
    """The tables name exactly the methods of the protocol, and each executor row decides every lease standing."""
    assert set(CLIENT_GATE) == set(CLIENT)
    assert set(EXECUTOR_GATE) == set(EXECUTOR)
    assert {len(row) for row in EXECUTOR_GATE.values()} == {len(LeaseStanding)}


@pytest.mark.parametrize("who", CALLERS)
def test_each_caller_has_one_role(who: str) -> None:
    """A process of a session is an insider, whatever its account; then root, administrators and hutchd's account."""
    caller, role = CALLERS[who]

    assert role_of(caller, daemon_uid=DAEMON) is role


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("who", CALLERS)
def test_the_gate_refuses_as_the_table_says(who: str, phase: Phase) -> None:
    """The gate refuses, before any look-up, each caller that the table refuses for every subject."""
    caller, role = CALLERS[who]
    for method, row in CLIENT_GATE.items():
        found = said(method, caller, phase)
        answers = {
            expected(method, role, phase, about, whose, session)
            for about in row.about
            for whose in Ownership
            for session in ("open", "closed")
        }

        assert found is None or answers == {found}, method
        assert (found is None) == (answers.isdisjoint({Reason.INSIDER, Reason.NOT_ALLOWED, Reason.SHUTTING_DOWN}))


def test_insiders_change_nothing() -> None:
    """Processes of a session may call every method that changes no state, and no other."""
    closed = {method for method in CLIENT if expected(method, Role.INSIDER, about=first(method)) is Reason.INSIDER}

    assert closed == {method for method, row in CLIENT.items() if row.changes}


def test_only_operators_operate_hutchd() -> None:
    """A user may call every method except those that operate hutchd itself."""
    closed = {method for method in CLIENT if expected(method, Role.PERSON, about=first(method)) is Reason.NOT_ALLOWED}

    assert closed == {"rotate_master_key", "stop_daemon", "backup_store"}
    assert all(callers_of(method) is CallerClass.OPERATORS for method in closed)


def test_a_draining_hutchd_starts_no_new_work() -> None:
    """A draining hutchd refuses only the methods that start new work."""
    closed = {
        method
        for method in CLIENT
        if expected(method, Role.ROOT, Phase.DRAINING, first(method)) is Reason.SHUTTING_DOWN
    }

    assert closed == {"open_session", "submit_prompt", "compact_session", "clear_session", "fork_session"}


def test_a_foreign_record_looks_missing() -> None:
    """Except to administrators, another user's record looks missing; a key does so to administrators too."""
    for method, row in CLIENT_GATE.items():
        for about in set(row.about) & {Subject.SESSION, Subject.TURN, Subject.QUESTION, Subject.KEY}:
            for role in callers_of(method).value:
                foreign, none = (
                    expected(method, role, about=about, whose=one) for one in (Ownership.FOREIGN, Ownership.MISSING)
                )
                own = expected(method, role, about=about, whose=Ownership.OWN)
                sees = role in (Role.ROOT, Role.ADMIN) and about is not Subject.KEY

                assert foreign == (own if sees else none), (method, about, role)


def test_an_unknown_method_is_refused() -> None:
    """A method without a row is refused to every client, root included, and to every executor."""
    assert said("make_coffee", Caller(uid=0, gid=0, pid=1, admin=True), Phase.SERVING) is Reason.NOT_ALLOWED
    for standing in LeaseStanding:
        with pytest.raises(HutchError) as refused:
            admit_executor("make_coffee", standing)
        assert refused.value.reason is Reason.NOT_ALLOWED


def test_a_subject_outside_the_row_is_a_bug() -> None:
    """The gate raises an error for a subject that the method's row does not list."""
    with pytest.raises(ValueError, match="not about"):
        expected("get_turn", Role.PERSON, about=Subject.KEY)


def first(method: str) -> Subject:
    """Return the first subject of a method."""
    return CLIENT_GATE[method].about[0]


@pytest.mark.parametrize(
    ("executor", "over", "leased", "session", "standing"),
    [
        (None, False, None, "s-1", LeaseStanding.STRANGER),
        ("x-1", False, None, None, LeaseStanding.SPARE),
        ("x-1", False, None, "s-1", LeaseStanding.SPARE),
        ("x-1", False, "s-1", "s-1", LeaseStanding.LEASED),
        ("x-1", False, "s-1", None, LeaseStanding.LEASED),
        ("x-1", False, "s-1", "s-2", LeaseStanding.ELSEWHERE),
        ("x-1", False, "s-1", "", LeaseStanding.ELSEWHERE),
        ("x-1", True, "s-1", "s-1", LeaseStanding.OVER),
        ("x-1", True, None, None, LeaseStanding.OVER),
    ],
)
def test_an_executor_speaks_for_its_leased_session(
    executor: str | None, over: bool, leased: str | None, session: str | None, standing: LeaseStanding
) -> None:
    """An executor speaks for the session of its lease row until it is given up."""
    assert standing_of(executor, over=over, leased=leased, session=session) is standing


def test_only_hello_and_ping_precede_hello() -> None:
    """After hello, an executor speaks for a session only while it is leased to it."""
    open_to = {
        standing: {method for method in EXECUTOR if expected_of_executor(method, standing) is None}
        for standing in LeaseStanding
    }

    assert open_to[LeaseStanding.STRANGER] == {"ping", "hello"}
    assert open_to[LeaseStanding.LEASED] == set(EXECUTOR) - {"hello"}
    assert (
        open_to[LeaseStanding.SPARE]
        == open_to[LeaseStanding.ELSEWHERE]
        == open_to[LeaseStanding.OVER]
        == {"ping", "heartbeat"}
    )
