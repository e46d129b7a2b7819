"""The gate: two tables that decide which callers may call which methods, about which records, and when. Pure.

A method that is not in a table is refused, so that a new method is closed until it is added. The tables contain the
complete answer; `expected` and `expected_of_executor` look it up. `admit_client` checks the part that is known before a
call is carried out: the caller, and whether hutchd accepts new work. The rest depends on the owner and the state of the
record that a call names; the services look these up and answer as the table says. A test calls every cell of the table
on real services.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from hutch_daemon.services.access import Caller
from hutch_shared.errors import HutchError, Reason
from hutch_shared.messages import SessionState
from hutch_shared.methods import CLIENT

__all__ = [
    "CLIENT_GATE",
    "EXECUTOR_GATE",
    "CallerClass",
    "GateRow",
    "LeaseStanding",
    "Ownership",
    "Phase",
    "Role",
    "Subject",
    "admit_client",
    "admit_executor",
    "callers_of",
    "expected",
    "expected_of_executor",
    "role_of",
    "standing_of",
]


class Role(Enum):
    """The role of a caller: the first of these that applies."""

    INSIDER = "insider"
    """A process of a session, under any account. It never has the rights of an administrator."""
    ROOT = "root"
    """uid 0."""
    ADMIN = "admin"
    """A user whom the settings name as administrator."""
    HUTCHD = "hutchd"
    """hutchd's own account. In user mode this is the only user; in system mode it is an operator without sessions."""
    PERSON = "person"
    """Any other account that may dial the socket."""


class CallerClass(Enum):
    """The roles that may call a method."""

    EVERYBODY = frozenset(Role)
    PEOPLE = frozenset(Role) - {Role.INSIDER}
    OPERATORS = frozenset({Role.ROOT, Role.ADMIN, Role.HUTCHD})


class Subject(Enum):
    """The subject of a call. SESSION, TURN, QUESTION and KEY may be the caller's, another user's, or missing."""

    NOTHING = "nothing that belongs to a user"
    OWN = "the caller's own things, for administrators too"
    SEEN = "all things that the caller may see: the caller's own; for administrators all users'"
    SESSION = "a session"
    TURN = "a turn"
    QUESTION = "a question"
    KEY = "a key: only the caller's own, for administrators too"


class Ownership(Enum):
    """The owner of the record that a call names, from the caller's point of view."""

    OWN = "own"
    FOREIGN = "another's"
    MISSING = "missing"


class Phase(Enum):
    """The phase of hutchd's life."""

    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class GateRow:
    """The rules for one client method."""

    about: tuple[Subject, ...]
    """The subjects that its parameters may name."""
    operators: bool = False
    """True if only operators may call it. Otherwise everybody may, except insiders if the method changes state."""
    draining: bool = True
    """True if it is allowed while hutchd drains."""
    open: Reason | None = None
    """The refusal if the session is open and working: a turn runs, another is queued, a request is pending."""
    closed: Reason | None = None
    """The refusal if the session is closed: its turns have ended, its requests are settled."""
    absent: Reason | None = Reason.NOT_FOUND
    """The refusal if the record does not exist, or the caller may not see it. None: the result is empty instead."""


_NOTHING, _OWN, _SEEN = (Subject.NOTHING,), (Subject.OWN,), (Subject.SEEN,)
_SESSION, _TURN, _QUESTION, _KEY = (Subject.SESSION,), (Subject.TURN,), (Subject.QUESTION,), (Subject.KEY,)

CLIENT_GATE: Final[dict[str, GateRow]] = {
    "ping": GateRow(_NOTHING),
    "get_version": GateRow(_NOTHING),
    "get_status": GateRow(_SEEN),
    "open_session": GateRow(_OWN, draining=False),
    "submit_prompt": GateRow(_SESSION, draining=False, closed=Reason.SESSION_CLOSED),
    "compact_session": GateRow(_SESSION, draining=False, closed=Reason.SESSION_CLOSED),
    "clear_session": GateRow(_SESSION, draining=False, closed=Reason.SESSION_CLOSED),
    "list_sessions": GateRow(_SEEN),
    "get_session": GateRow(_SESSION),
    "list_turns": GateRow(_SESSION),
    "get_turn": GateRow(_TURN),
    "follow_events": GateRow(_SEEN + _SESSION),
    "unfollow": GateRow(_NOTHING),
    "read_events": GateRow(_SEEN + _SESSION),
    "list_permissions": GateRow(_SEEN + _SESSION + _QUESTION),
    "answer_permission": GateRow(_QUESTION, closed=Reason.ALREADY_SETTLED),
    "interrupt_turn": GateRow(_SESSION, closed=Reason.WRONG_STATE),
    "cancel_turn": GateRow(_TURN, closed=Reason.WRONG_STATE),
    "close_session": GateRow(_SESSION),
    "delete_session": GateRow(_SESSION, open=Reason.WRONG_STATE),
    "fork_session": GateRow(_SESSION, draining=False),
    "put_api_key": GateRow(_OWN),
    "list_api_keys": GateRow(_OWN),
    "delete_api_key": GateRow(_KEY, absent=Reason.NO_KEY),
    "use_api_key": GateRow(_KEY, absent=Reason.NO_KEY),
    "explain_key": GateRow(_OWN + _SESSION),
    "rotate_master_key": GateRow(_NOTHING, operators=True),
    "get_usage": GateRow(_SEEN + _SESSION),
    "show_policy": GateRow(_OWN + _SESSION),
    "explain_policy": GateRow(_OWN + _SESSION),
    "test_policy": GateRow(_NOTHING),
    "change_rules": GateRow(_OWN),
    "trust_policy": GateRow(_OWN),
    "set_permission_mode": GateRow(_SESSION, closed=Reason.SESSION_CLOSED),
    "read_audit": GateRow(_SEEN + _SESSION, absent=None),
    "stop_daemon": GateRow(_NOTHING, operators=True),
    "backup_store": GateRow(_NOTHING, operators=True),
}


class LeaseStanding(Enum):
    """The relation of an executor's connection to the session that a call is about."""

    STRANGER = "before hello"
    SPARE = "spare"
    LEASED = "leased to it"
    ELSEWHERE = "leased to another"
    OVER = "given up"
    """Another executor serves its session, or it is being ended."""


_YES, _FIRST, _TWICE, _LOST = None, Reason.HELLO_FIRST, Reason.WRONG_STATE, Reason.LEASE_LOST

EXECUTOR_GATE: Final[dict[str, tuple[Reason | None, ...]]] = {
    # columns as in LeaseStanding: before hello, spare, leased to it, leased to another, given up
    "ping": (_YES, _YES, _YES, _YES, _YES),
    "hello": (_YES, _TWICE, _TWICE, _TWICE, _TWICE),
    "heartbeat": (_FIRST, _YES, _YES, _YES, _YES),
    "get_api_key": (_FIRST, _LOST, _YES, _LOST, _LOST),
    "request_permission": (_FIRST, _LOST, _YES, _LOST, _LOST),
    "judge_reads": (_FIRST, _LOST, _YES, _LOST, _LOST),
    "report_message": (_FIRST, _LOST, _YES, _LOST, _LOST),
}


# ---------------------------------------------------------------- clients


def role_of(caller: Caller, *, daemon_uid: int) -> Role:
    """Return the role of a caller."""
    if caller.insider is not None:
        return Role.INSIDER
    if caller.uid == 0:
        return Role.ROOT
    if caller.admin:
        return Role.ADMIN
    return Role.HUTCHD if caller.uid == daemon_uid else Role.PERSON


def expected(
    method: str,
    role: Role,
    phase: Phase = Phase.SERVING,
    about: Subject = Subject.NOTHING,
    whose: Ownership = Ownership.OWN,
    session: SessionState = "open",
) -> Reason | None:
    """Return the reason for refusing a call, or None if it is allowed.

    `whose` and `session` matter only if the call names a record: its owner, and the state of its session.
    """
    if (refusal := _refusal(method, role, phase)) is not None:
        return refusal
    row = CLIENT_GATE[method]
    if about not in row.about:
        raise ValueError(f"{method} is not about {about.value}")
    if about in (Subject.NOTHING, Subject.OWN, Subject.SEEN):
        return None
    sees_others = role in (Role.ROOT, Role.ADMIN) and about is not Subject.KEY
    if whose is Ownership.MISSING or (whose is Ownership.FOREIGN and not sees_others):
        return row.absent
    return row.open if session == "open" else row.closed


def admit_client(method: str, caller: Caller, *, daemon_uid: int, phase: Phase) -> None:
    """Raise `not_allowed`, `insider` or `shutting_down` if this caller may not call this method now."""
    refusal = _refusal(method, role_of(caller, daemon_uid=daemon_uid), phase)
    if refusal is Reason.INSIDER:
        sentence = f"This process belongs to a session (executor {caller.insider}); call {method} from your own shell."
        raise HutchError(refusal, sentence)
    if refusal is Reason.NOT_ALLOWED and method in CLIENT_GATE:
        raise HutchError(refusal, f"Only an administrator of this hutchd may call {method}.")
    if refusal is not None:
        raise HutchError(refusal)


def callers_of(method: str) -> CallerClass:
    """Return the roles that may call a client method. Insiders may not call methods that change state."""
    if CLIENT_GATE[method].operators:
        return CallerClass.OPERATORS
    return CallerClass.PEOPLE if CLIENT[method].changes else CallerClass.EVERYBODY


def _refusal(method: str, role: Role, phase: Phase) -> Reason | None:
    """Return the reason for refusing a call regardless of its subject, or None."""
    row = CLIENT_GATE.get(method)
    if row is None:
        return Reason.NOT_ALLOWED
    if role not in callers_of(method).value:
        return Reason.INSIDER if role is Role.INSIDER else Reason.NOT_ALLOWED
    if phase is Phase.DRAINING and not row.draining:
        return Reason.SHUTTING_DOWN
    return None


# ---------------------------------------------------------------- executors


def standing_of(executor: str | None, *, over: bool, leased: str | None, session: str | None) -> LeaseStanding:
    """Return the standing of an executor for a call about `session`; None if the call is about no session.

    `executor` is the id accepted by `hello` on this connection; `leased` is the session of its current lease.
    """
    if executor is None:
        return LeaseStanding.STRANGER
    if over:
        return LeaseStanding.OVER
    if leased is None:
        return LeaseStanding.SPARE
    return LeaseStanding.LEASED if session in (None, leased) else LeaseStanding.ELSEWHERE


def expected_of_executor(method: str, standing: LeaseStanding) -> Reason | None:
    """Return the reason for refusing an executor's call, or None if it is allowed."""
    row = EXECUTOR_GATE.get(method)
    return Reason.NOT_ALLOWED if row is None else row[list(LeaseStanding).index(standing)]


def admit_executor(method: str, standing: LeaseStanding) -> None:
    """Raise the table's refusal if an executor may not make this call."""
    refusal = expected_of_executor(method, standing)
    if refusal is not None:
        raise HutchError(refusal, "This connection has said hello already." if refusal is _TWICE else None)
