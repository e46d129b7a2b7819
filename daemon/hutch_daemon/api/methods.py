"""Every method of the wire and what carries it out, a line each: the type checker sees both sides of each line.

A line gives the type of the parameters and, from a connection, the function that carries the method out. Renaming that
function without its line, or giving it other parameters, does not pass `mypy --strict`. `ping` is not here: the peer
answers it by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from hutch_daemon.pool.executor import Executor
from hutch_daemon.services.access import Caller
from hutch_daemon.services.services import Services
from hutch_shared import messages as m

__all__ = ["CLIENT_METHODS", "EXECUTOR_METHODS", "HELLO", "ClientMethod", "ExecutorMethod"]

P = TypeVar("P", bound=msgspec.Struct)
R = TypeVar("R")

ClientCall = Callable[[Caller, P], Awaitable[R]]
ExecutorCall = Callable[[Executor, P], R]


class ClientContext(Protocol):
    """A client's connection, with the methods that it carries out itself."""

    @property
    def services(self) -> Services: ...

    async def get_version(self, caller: Caller, params: m.VersionParams) -> m.Version: ...
    async def follow_events(self, caller: Caller, params: m.FollowEvents) -> m.Following: ...
    async def unfollow(self, caller: Caller, params: m.Unfollow) -> m.Nothing: ...


@dataclass(frozen=True, slots=True)
class ClientMethod(Generic[P, R]):
    """One line of the clients' table."""

    params: type[P]
    call_of: Callable[[ClientContext], ClientCall[P, R]]
    """Returns what carries the method out."""


@dataclass(frozen=True, slots=True)
class ExecutorMethod(Generic[P, R]):
    """One line of the executors' table."""

    params: type[P]
    call_of: Callable[[Services], ExecutorCall[P, R]]
    session_of: Callable[[P], str | None]
    """Returns the session that a call is about; None: it is about none."""


def _own(params: type[P], call_of: Callable[[ClientContext], ClientCall[P, R]]) -> ClientMethod[P, R]:
    """Return the line of a method that the connection carries out itself."""
    return ClientMethod(params, call_of)


def _method(params: type[P], call_of: Callable[[Services], ClientCall[P, R]]) -> ClientMethod[P, R]:
    """Return the line of a method that a service carries out."""
    return ClientMethod(params, lambda connection: call_of(connection.services))


def _executor(
    params: type[P],
    call_of: Callable[[Services], ExecutorCall[P, R]],
    session_of: Callable[[P], str | None] = lambda _: None,
) -> ExecutorMethod[P, R]:
    return ExecutorMethod(params, call_of, session_of)


CLIENT_METHODS: Final[dict[str, ClientMethod[Any, Any]]] = {
    "get_version": _own(m.VersionParams, lambda c: c.get_version),
    "get_status": _method(m.Nothing, lambda s: s.host.get_status),
    "open_session": _method(m.OpenSession, lambda s: s.sessions.open_session),
    "submit_prompt": _method(m.SubmitPrompt, lambda s: s.turns.submit_prompt),
    "list_sessions": _method(m.ListSessions, lambda s: s.sessions.list_sessions),
    "get_session": _method(m.SessionRef, lambda s: s.sessions.get_session),
    "list_turns": _method(m.ListTurns, lambda s: s.turns.list_turns),
    "get_turn": _method(m.TurnRef, lambda s: s.turns.get_turn),
    "follow_events": _own(m.FollowEvents, lambda c: c.follow_events),
    "unfollow": _own(m.Unfollow, lambda c: c.unfollow),
    "read_events": _method(m.ReadEvents, lambda s: s.history.read_events),
    "list_permissions": _method(m.ListPermissions, lambda s: s.approvals.list_permissions),
    "answer_permission": _method(m.AnswerPermission, lambda s: s.approvals.answer_permission),
    "interrupt_turn": _method(m.InterruptTurn, lambda s: s.turns.interrupt_turn),
    "cancel_turn": _method(m.TurnRef, lambda s: s.turns.cancel_turn),
    "close_session": _method(m.CloseSession, lambda s: s.sessions.close_session),
    "delete_session": _method(m.SessionRef, lambda s: s.sessions.delete_session),
    "fork_session": _method(m.ForkSession, lambda s: s.sessions.fork_session),
    "put_api_key": _method(m.PutApiKey, lambda s: s.keys.put_api_key),
    "list_api_keys": _method(m.Nothing, lambda s: s.keys.list_api_keys),
    "delete_api_key": _method(m.DeleteApiKey, lambda s: s.keys.delete_api_key),
    "use_api_key": _method(m.UseApiKey, lambda s: s.keys.use_api_key),
    "explain_key": _method(m.ExplainKey, lambda s: s.keys.explain_key),
    "rotate_master_key": _method(m.Nothing, lambda s: s.keys.rotate_master_key),
    "get_usage": _method(m.GetUsage, lambda s: s.history.get_usage),
    "show_policy": _method(m.ShowPolicy, lambda s: s.policy.show_policy),
    "explain_policy": _method(m.ExplainPolicy, lambda s: s.policy.explain_policy),
    "test_policy": _method(m.TestPolicy, lambda s: s.policy.test_policy),
    "change_rules": _method(m.ChangeRules, lambda s: s.policy.change_rules),
    "trust_policy": _method(m.TrustPolicy, lambda s: s.policy.trust_policy),
    "set_permission_mode": _method(m.SetPermissionMode, lambda s: s.sessions.set_permission_mode),
    "read_audit": _method(m.ReadAudit, lambda s: s.history.read_audit),
    "stop_daemon": _method(m.StopDaemon, lambda s: s.host.stop_daemon),
    "backup_store": _method(m.BackupStore, lambda s: s.host.backup_store),
}

HELLO: Final = "hello"
"""Carried out by the connection itself: before it there is no executor to call for."""

EXECUTOR_METHODS: Final[dict[str, ExecutorMethod[Any, Any]]] = {
    "get_api_key": _executor(m.GetApiKey, lambda s: s.executors.get_api_key, lambda p: p.session),
    "request_permission": _executor(m.RequestPermission, lambda s: s.approvals.request_permission, lambda p: p.session),
    "report_message": _executor(m.ReportMessage, lambda s: s.executors.report_message, lambda p: p.session),
    "heartbeat": _executor(m.Heartbeat, lambda s: s.executors.heartbeat),
}
