"""Who may call what, about whose things, and when: two tables, pure, default deny.

A method that a table does not name is refused, so that a new one is closed until somebody decides. The tables say the
whole answer, `expected` and `expected_of_executor` read it from them. `admit_client` asks before a call goes anywhere:
who calls, and whether hutchd takes new work. Whose record a call names, and its state, only the record tells:
the services look it up and answer as the table says. A test calls every cell of the table on real services.
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
    """What a caller is to hutchd: the first of these that fits."""

    INSIDER = "insider"
    """A process of a session, whatever its account is: it has no rights of an administrator."""
    ROOT = "root"
    """uid 0."""
    ADMIN = "admin"
    """Named in the settings."""
    HUTCHD = "hutchd"
    """hutchd's own account: in user mode the one person that there is; in system mode it operates and owns nothing."""
    PERSON = "person"
    """Any other account that may dial the socket."""


class CallerClass(Enum):
    """The callers that a method is for."""

    EVERYBODY = frozenset(Role)
    PEOPLE = frozenset(Role) - {Role.INSIDER}
    OPERATORS = frozenset({Role.ROOT, Role.ADMIN, Role.HUTCHD})


class Subject(Enum):
    """What a call is about. Of the lower four there are own ones, others' and such as do not exist."""

    NOTHING = "nothing of anybody"
    OWN = "the caller's own, for administrators too"
    SEEN = "all that the caller sees: the own; for administrators everybody's"
    SESSION = "a session"
    TURN = "a turn"
    QUESTION = "a question"
    KEY = "a key: the own alone, for administrators too"


class Ownership(Enum):
    """The owner of the thing that a call names, as the caller sees it."""

    OWN = "own"
    FOREIGN = "another's"
    MISSING = "missing"


class Phase(Enum):
    """Where hutchd stands."""

    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class GateRow:
    """One client method."""

    about: tuple[Subject, ...]
    """What its parameters may name; the ways to call it."""
    operators: bool = False
    """It is for operators alone. Otherwise a method that changes state is for all but insiders, and any other for all.
    """
    draining: bool = True
    """A hutchd that drains does it still."""
    open: Reason | None = None
    """The answer where the session is open and at work: a turn runs, another waits, a question is asked."""
    closed: Reason | None = None
    """The answer where the session is closed: turns have ended, questions are settled."""
    absent: Reason | None = Reason.NOT_FOUND
    """The answer for what does not exist, and for what the caller does not see. None: it is told that there is nothing.
    """


_NOTHING, _OWN, _SEEN = (Subject.NOTHING,), (Subject.OWN,), (Subject.SEEN,)
_SESSION, _TURN, _QUESTION, _KEY = (Subject.SESSION,), (Subject.TURN,), (Subject.QUESTION,), (Subject.KEY,)

CLIENT_GATE: Final[dict[str, GateRow]] = {
    "ping": GateRow(_NOTHING),
    "get_version": GateRow(_NOTHING),
    "get_status": GateRow(_SEEN),
    "open_session": GateRow(_OWN, draining=False),
    "submit_prompt": GateRow(_SESSION, draining=False, closed=Reason.SESSION_CLOSED),
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
    """What an executor's connection is to the session that a call on it is about."""

    STRANGER = "before hello"
    SPARE = "spare"
    LEASED = "leased to it"
    ELSEWHERE = "leased to another"
    OVER = "given up"
    """Another serves its session, or it is to end."""


_YES, _FIRST, _TWICE, _LOST = None, Reason.HELLO_FIRST, Reason.WRONG_STATE, Reason.LEASE_LOST

EXECUTOR_GATE: Final[dict[str, tuple[Reason | None, ...]]] = {
    # the order of LeaseStanding: before hello, spare, leased to it, leased to another, given up
    "ping": (_YES, _YES, _YES, _YES, _YES),
    "hello": (_YES, _TWICE, _TWICE, _TWICE, _TWICE),
    "heartbeat": (_FIRST, _YES, _YES, _YES, _YES),
    "get_api_key": (_FIRST, _LOST, _YES, _LOST, _LOST),
    "request_permission": (_FIRST, _LOST, _YES, _LOST, _LOST),
    "report_message": (_FIRST, _LOST, _YES, _LOST, _LOST),
}


# ---------------------------------------------------------------- clients


def role_of(caller: Caller, *, daemon_uid: int) -> Role:
    """Return what the caller is."""
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
    """Return the reason of the refusal, or None where the call is allowed.

    `whose` counts where `about` is something that is named, `session` as well: how the session stands that it is, or
    is of.
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
    """Let `caller` in, or raise `not_allowed`, `insider` or `shutting_down`."""
    refusal = _refusal(method, role_of(caller, daemon_uid=daemon_uid), phase)
    if refusal is Reason.INSIDER:
        said = f"This process belongs to a session (executor {caller.insider}); call {method} from a shell of your own."
        raise HutchError(refusal, said)
    if refusal is Reason.NOT_ALLOWED and method in CLIENT_GATE:
        raise HutchError(refusal, f"Only an administrator of this hutchd may call {method}.")
    if refusal is not None:
        raise HutchError(refusal)


def callers_of(method: str) -> CallerClass:
    """Return the callers that a client method is for: what changes state is closed to insiders."""
    if CLIENT_GATE[method].operators:
        return CallerClass.OPERATORS
    return CallerClass.PEOPLE if CLIENT[method].changes else CallerClass.EVERYBODY


def _refusal(method: str, role: Role, phase: Phase) -> Reason | None:
    """Return why a call is refused, whatever it is about."""
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
    """Return what an executor is to the session that its call is about; None: it is about none.

    `executor` is who said hello on this connection, `leased` the session that its lease row names now.
    """
    if executor is None:
        return LeaseStanding.STRANGER
    if over:
        return LeaseStanding.OVER
    if leased is None:
        return LeaseStanding.SPARE
    return LeaseStanding.LEASED if session in (None, leased) else LeaseStanding.ELSEWHERE


def expected_of_executor(method: str, standing: LeaseStanding) -> Reason | None:
    """Return the reason of the refusal, or None where the call is allowed."""
    row = EXECUTOR_GATE.get(method)
    return Reason.NOT_ALLOWED if row is None else row[list(LeaseStanding).index(standing)]


def admit_executor(method: str, standing: LeaseStanding) -> None:
    """Let an executor's call in, or raise what the table says."""
    refusal = expected_of_executor(method, standing)
    if refusal is not None:
        raise HutchError(refusal, "This connection has said hello already." if refusal is _TWICE else None)
