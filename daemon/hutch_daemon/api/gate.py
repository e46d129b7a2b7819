"""Who may call what, and when: one table, pure, default deny.

A method that the table does not name is refused, so that a new one is closed until somebody decides. Whose record it is
about is not decided here: what is not the caller's looks like what does not exist, and the conductor says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from hutch_daemon.conductor.callers import Caller
from hutch_shared.errors import HutchError, Reason

__all__ = ["CLIENT_GATE", "EXECUTOR_GATE", "ExecutorRow", "Phase", "Row", "Who", "admit_client", "admit_executor"]


class Who(Enum):
    """Whom a client method is for."""

    ANYONE = "anyone"
    """Every account that may dial the socket, about its own things."""
    OPERATOR = "operator"
    """uid 0, the account of hutchd itself, and admins."""


class Phase(Enum):
    """Where hutchd stands."""

    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Row:
    """One client method: for whom, whether insiders may, and whether a hutchd that drains still does it."""

    who: Who
    insiders: bool
    draining: bool


@dataclass(frozen=True, slots=True)
class ExecutorRow:
    """One executor method: only after `hello`, only while it is leased to the session that it names."""

    hello: bool
    leased: bool


_LOOK: Final = Row(Who.ANYONE, insiders=True, draining=True)
_STEER: Final = Row(Who.ANYONE, insiders=False, draining=True)
_BEGIN: Final = Row(Who.ANYONE, insiders=False, draining=False)
_OPERATE: Final = Row(Who.OPERATOR, insiders=False, draining=True)

CLIENT_GATE: Final[dict[str, Row]] = {
    "ping": _LOOK,
    "get_version": _LOOK,
    "get_status": _LOOK,
    "open_session": _BEGIN,
    "submit_prompt": _BEGIN,
    "list_sessions": _LOOK,
    "get_session": _LOOK,
    "list_turns": _LOOK,
    "get_turn": _LOOK,
    "follow_events": _LOOK,
    "unfollow": _LOOK,
    "read_events": _LOOK,
    "list_permissions": _LOOK,
    "answer_permission": _STEER,
    "interrupt_turn": _STEER,
    "cancel_turn": _STEER,
    "close_session": _STEER,
    "delete_session": _STEER,
    "fork_session": _BEGIN,
    "put_api_key": _STEER,
    "list_api_keys": _LOOK,
    "delete_api_key": _STEER,
    "use_api_key": _STEER,
    "explain_key": _LOOK,
    "rotate_master_key": _OPERATE,
    "get_usage": _LOOK,
    "show_policy": _LOOK,
    "explain_policy": _LOOK,
    "test_policy": _LOOK,
    "change_rules": _STEER,
    "trust_policy": _STEER,
    "set_permission_mode": _STEER,
    "read_audit": _LOOK,
    "stop_daemon": _OPERATE,
    "backup_store": _OPERATE,
}

EXECUTOR_GATE: Final[dict[str, ExecutorRow]] = {
    "ping": ExecutorRow(hello=False, leased=False),
    "hello": ExecutorRow(hello=False, leased=False),
    "heartbeat": ExecutorRow(hello=True, leased=False),
    "get_api_key": ExecutorRow(hello=True, leased=True),
    "request_permission": ExecutorRow(hello=True, leased=True),
    "report_message": ExecutorRow(hello=True, leased=True),
}


def admit_client(method: str, caller: Caller, *, daemon_uid: int, phase: Phase) -> None:
    """Let `caller` in, or raise `not_allowed`, `insider` or `shutting_down`."""
    row = CLIENT_GATE.get(method)
    if row is None:
        raise HutchError(Reason.NOT_ALLOWED)
    if caller.insider is not None and not row.insiders:
        raise HutchError(
            Reason.INSIDER,
            f"This process belongs to a session (executor {caller.insider}); call {method} from a shell of your own.",
        )
    if row.who is Who.OPERATOR and not (caller.admin or caller.uid == daemon_uid):
        raise HutchError(Reason.NOT_ALLOWED, f"Only an administrator of this hutchd may call {method}.")
    if phase is Phase.DRAINING and not row.draining:
        raise HutchError(Reason.SHUTTING_DOWN)


def admit_executor(method: str, *, executor: str | None, leased: str | None, session: str | None) -> None:
    """Let an executor's call in, or raise `hello_first` or `lease_lost`.

    `executor` is who said hello on this connection, `leased` the session that its lease row names now, `session` the
    one that the call is about.
    """
    row = EXECUTOR_GATE.get(method)
    if row is None:
        raise HutchError(Reason.NOT_ALLOWED)
    if row.hello and executor is None:
        raise HutchError(Reason.HELLO_FIRST)
    if row.leased and (leased is None or leased != session):
        raise HutchError(Reason.LEASE_LOST)
