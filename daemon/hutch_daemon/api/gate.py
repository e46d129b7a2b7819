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

__all__ = [
    "CLIENT_GATE",
    "EXECUTOR_GATE",
    "About",
    "Phase",
    "Role",
    "Row",
    "Standing",
    "Who",
    "Whose",
    "admit_client",
    "admit_executor",
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


class Who(Enum):
    """Whom a method is for."""

    EVERYBODY = frozenset(Role)
    PEOPLE = frozenset(Role) - {Role.INSIDER}
    OPERATORS = frozenset({Role.ROOT, Role.ADMIN, Role.HUTCHD})


class About(Enum):
    """What a call is about. Of the lower four there are own ones, others' and such as do not exist."""

    NOTHING = "nothing of anybody"
    OWN = "the caller's own, for administrators too"
    SEEN = "all that the caller sees: the own; for administrators everybody's"
    SESSION = "a session"
    TURN = "a turn"
    QUESTION = "a question"
    KEY = "a key: the own alone, for administrators too"


class Whose(Enum):
    """Whose the thing is that a call names."""

    OWN = "own"
    FOREIGN = "another's"
    ABSENT = "of nobody: there is none"


class Phase(Enum):
    """Where hutchd stands."""

    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Row:
    """One client method."""

    who: Who
    about: tuple[About, ...]
    """What its parameters may name; the ways to call it."""
    draining: bool = True
    """A hutchd that drains does it still."""
    open: Reason | None = None
    """The answer where the session is open and at work: a turn runs, another waits, a question is asked."""
    closed: Reason | None = None
    """The answer where the session is closed: turns have ended, questions are settled."""
    absent: Reason | None = Reason.NOT_FOUND
    """The answer for what does not exist, and for what the caller does not see. None: it is told that there is nothing.
    """


_ALL, _PEOPLE, _OPERATORS = Who.EVERYBODY, Who.PEOPLE, Who.OPERATORS
_NOTHING, _OWN, _SEEN = (About.NOTHING,), (About.OWN,), (About.SEEN,)
_SESSION, _TURN, _QUESTION, _KEY = (About.SESSION,), (About.TURN,), (About.QUESTION,), (About.KEY,)

CLIENT_GATE: Final[dict[str, Row]] = {
    "ping": Row(_ALL, _NOTHING),
    "get_version": Row(_ALL, _NOTHING),
    "get_status": Row(_ALL, _SEEN),
    "open_session": Row(_PEOPLE, _OWN, draining=False),
    "submit_prompt": Row(_PEOPLE, _SESSION, draining=False, closed=Reason.SESSION_CLOSED),
    "list_sessions": Row(_ALL, _SEEN),
    "get_session": Row(_ALL, _SESSION),
    "list_turns": Row(_ALL, _SESSION),
    "get_turn": Row(_ALL, _TURN),
    "follow_events": Row(_ALL, _SEEN + _SESSION),
    "unfollow": Row(_ALL, _NOTHING),
    "read_events": Row(_ALL, _SEEN + _SESSION),
    "list_permissions": Row(_ALL, _SEEN + _SESSION + _QUESTION),
    "answer_permission": Row(_PEOPLE, _QUESTION, closed=Reason.ALREADY_SETTLED),
    "interrupt_turn": Row(_PEOPLE, _SESSION, closed=Reason.WRONG_STATE),
    "cancel_turn": Row(_PEOPLE, _TURN, closed=Reason.WRONG_STATE),
    "close_session": Row(_PEOPLE, _SESSION),
    "delete_session": Row(_PEOPLE, _SESSION, open=Reason.WRONG_STATE),
    "fork_session": Row(_PEOPLE, _SESSION, draining=False),
    "put_api_key": Row(_PEOPLE, _OWN),
    "list_api_keys": Row(_ALL, _OWN),
    "delete_api_key": Row(_PEOPLE, _KEY, absent=Reason.NO_KEY),
    "use_api_key": Row(_PEOPLE, _KEY, absent=Reason.NO_KEY),
    "explain_key": Row(_ALL, _OWN + _SESSION),
    "rotate_master_key": Row(_OPERATORS, _NOTHING),
    "get_usage": Row(_ALL, _SEEN + _SESSION),
    "show_policy": Row(_ALL, _OWN + _SESSION),
    "explain_policy": Row(_ALL, _OWN + _SESSION),
    "test_policy": Row(_ALL, _NOTHING),
    "change_rules": Row(_PEOPLE, _OWN),
    "trust_policy": Row(_PEOPLE, _OWN),
    "set_permission_mode": Row(_PEOPLE, _SESSION, closed=Reason.SESSION_CLOSED),
    "read_audit": Row(_ALL, _SEEN + _SESSION, absent=None),
    "stop_daemon": Row(_OPERATORS, _NOTHING),
    "backup_store": Row(_OPERATORS, _NOTHING),
}


class Standing(Enum):
    """What an executor's connection is to the session that a call on it is about."""

    STRANGER = "before hello"
    SPARE = "spare"
    LEASED = "leased to it"
    ELSEWHERE = "leased to another"
    OVER = "given up"
    """Another serves its session, or it is to end."""


_YES, _FIRST, _TWICE, _LOST = None, Reason.HELLO_FIRST, Reason.WRONG_STATE, Reason.LEASE_LOST

EXECUTOR_GATE: Final[dict[str, tuple[Reason | None, ...]]] = {
    # the order of Standing: before hello, spare, leased to it, leased to another, given up
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
    about: About = About.NOTHING,
    whose: Whose = Whose.OWN,
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
    if about in (About.NOTHING, About.OWN, About.SEEN):
        return None
    sees_others = role in (Role.ROOT, Role.ADMIN) and about is not About.KEY
    if whose is Whose.ABSENT or (whose is Whose.FOREIGN and not sees_others):
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


def _refusal(method: str, role: Role, phase: Phase) -> Reason | None:
    """Return why a call is refused, whatever it is about."""
    row = CLIENT_GATE.get(method)
    if row is None:
        return Reason.NOT_ALLOWED
    if role not in row.who.value:
        return Reason.INSIDER if role is Role.INSIDER else Reason.NOT_ALLOWED
    if phase is Phase.DRAINING and not row.draining:
        return Reason.SHUTTING_DOWN
    return None


# ---------------------------------------------------------------- executors


def standing_of(executor: str | None, *, over: bool, leased: str | None, session: str | None) -> Standing:
    """Return what an executor is to the session that its call is about; None: it is about none.

    `executor` is who said hello on this connection, `leased` the session that its lease row names now.
    """
    if executor is None:
        return Standing.STRANGER
    if over:
        return Standing.OVER
    if leased is None:
        return Standing.SPARE
    return Standing.LEASED if session in (None, leased) else Standing.ELSEWHERE


def expected_of_executor(method: str, standing: Standing) -> Reason | None:
    """Return the reason of the refusal, or None where the call is allowed."""
    row = EXECUTOR_GATE.get(method)
    return Reason.NOT_ALLOWED if row is None else row[list(Standing).index(standing)]


def admit_executor(method: str, standing: Standing) -> None:
    """Let an executor's call in, or raise what the table says."""
    refusal = expected_of_executor(method, standing)
    if refusal is not None:
        raise HutchError(refusal, "This connection has said hello already." if refusal is _TWICE else None)
