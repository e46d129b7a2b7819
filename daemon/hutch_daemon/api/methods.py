"""Tables of the wire's methods and the functions that carry them out. The type checker checks each line.

A line gives the type of the parameters and the function that carries the method out: a service's, or the connection's
own. A listener looks the functions up once, when it is made. Renaming a function without its line, or giving it other
parameters, does not pass `mypy --strict`. `ping` is not here: the peer answers it by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from hutch_daemon.pool.executors import Executor
from hutch_daemon.services.access import Caller
from hutch_daemon.services.services import Services
from hutch_shared import messages as m

__all__ = ["CLIENT_METHODS", "EXECUTOR_METHODS", "HELLO", "ExecutorMethod", "OwnMethod", "ServiceMethod"]


class AboutSession(Protocol):
    """Parameters of a call about a session."""

    @property
    def session(self) -> str: ...


P = TypeVar("P", bound=msgspec.Struct)
PS = TypeVar("PS", bound=AboutSession)
R = TypeVar("R")

ClientCall = Callable[[Caller, P], Awaitable[R]]
OwnCall = Callable[[Any, Caller, P], Awaitable[R]]
ExecutorCall = Callable[[Executor, P], R]


class ClientContext(Protocol):
    """A client's connection, with the methods that it carries out itself."""

    async def get_version(self, caller: Caller, params: m.VersionParams) -> m.Version: ...
    async def follow_events(self, caller: Caller, params: m.FollowEvents) -> m.Following: ...
    async def unfollow(self, caller: Caller, params: m.Unfollow) -> m.Nothing: ...


@dataclass(frozen=True, slots=True)
class OwnMethod(Generic[P, R]):
    """One line of the clients' table: the connection carries the method out itself."""

    params: type[P]
    call_of: Callable[[type[ClientContext]], OwnCall[P, R]]
    """Takes the class of connections; returns its function for the method."""


@dataclass(frozen=True, slots=True)
class ServiceMethod(Generic[P, R]):
    """One line of the clients' table: a service carries the method out."""

    params: type[P]
    call_of: Callable[[Services], ClientCall[P, R]]


@dataclass(frozen=True, slots=True)
class ExecutorMethod(Generic[P, R]):
    """One line of the executors' table."""

    params: type[P]
    call_of: Callable[[Services], ExecutorCall[P, R]]
    about_session: bool
    """True if the parameters name the session that the call is about."""


def _about_session(
    params: type[PS], call_of: Callable[[Services], Callable[[Executor, PS], R]]
) -> ExecutorMethod[Any, R]:
    return ExecutorMethod(params, call_of, about_session=True)


CLIENT_METHODS: Final[dict[str, OwnMethod[Any, Any] | ServiceMethod[Any, Any]]] = {
    "get_version": OwnMethod(m.VersionParams, lambda c: c.get_version),
    "get_status": ServiceMethod(m.Nothing, lambda s: s.host.get_status),
    "open_session": ServiceMethod(m.OpenSession, lambda s: s.sessions.open_session),
    "submit_prompt": ServiceMethod(m.SubmitPrompt, lambda s: s.turns.submit_prompt),
    "compact_session": ServiceMethod(m.CompactSession, lambda s: s.turns.compact_session),
    "clear_session": ServiceMethod(m.ClearSession, lambda s: s.turns.clear_session),
    "list_sessions": ServiceMethod(m.ListSessions, lambda s: s.sessions.list_sessions),
    "get_session": ServiceMethod(m.SessionRef, lambda s: s.sessions.get_session),
    "list_turns": ServiceMethod(m.ListTurns, lambda s: s.turns.list_turns),
    "get_turn": ServiceMethod(m.TurnRef, lambda s: s.turns.get_turn),
    "follow_events": OwnMethod(m.FollowEvents, lambda c: c.follow_events),
    "unfollow": OwnMethod(m.Unfollow, lambda c: c.unfollow),
    "read_events": ServiceMethod(m.ReadEvents, lambda s: s.history.read_events),
    "list_permissions": ServiceMethod(m.ListPermissions, lambda s: s.approvals.list_permissions),
    "answer_permission": ServiceMethod(m.AnswerPermission, lambda s: s.approvals.answer_permission),
    "interrupt_turn": ServiceMethod(m.InterruptTurn, lambda s: s.turns.interrupt_turn),
    "cancel_turn": ServiceMethod(m.TurnRef, lambda s: s.turns.cancel_turn),
    "close_session": ServiceMethod(m.CloseSession, lambda s: s.sessions.close_session),
    "delete_session": ServiceMethod(m.SessionRef, lambda s: s.sessions.delete_session),
    "fork_session": ServiceMethod(m.ForkSession, lambda s: s.forks.fork_session),
    "put_api_key": ServiceMethod(m.PutApiKey, lambda s: s.keys.put_api_key),
    "list_api_keys": ServiceMethod(m.Nothing, lambda s: s.keys.list_api_keys),
    "delete_api_key": ServiceMethod(m.DeleteApiKey, lambda s: s.keys.delete_api_key),
    "use_api_key": ServiceMethod(m.UseApiKey, lambda s: s.keys.use_api_key),
    "explain_key": ServiceMethod(m.ExplainKey, lambda s: s.keys.explain_key),
    "rotate_master_key": ServiceMethod(m.Nothing, lambda s: s.keys.rotate_master_key),
    "get_usage": ServiceMethod(m.GetUsage, lambda s: s.history.get_usage),
    "show_policy": ServiceMethod(m.ShowPolicy, lambda s: s.policy.show_policy),
    "explain_policy": ServiceMethod(m.ExplainPolicy, lambda s: s.policy.explain_policy),
    "test_policy": ServiceMethod(m.TestPolicy, lambda s: s.policy.test_policy),
    "change_rules": ServiceMethod(m.ChangeRules, lambda s: s.policy.change_rules),
    "trust_policy": ServiceMethod(m.TrustPolicy, lambda s: s.policy.trust_policy),
    "set_permission_mode": ServiceMethod(m.SetPermissionMode, lambda s: s.modes.set_permission_mode),
    "read_audit": ServiceMethod(m.ReadAudit, lambda s: s.history.read_audit),
    "stop_daemon": ServiceMethod(m.StopDaemon, lambda s: s.host.stop_daemon),
    "backup_store": ServiceMethod(m.BackupStore, lambda s: s.host.backup_store),
}

HELLO: Final = "hello"
"""The method that authenticates an executor. The connection itself carries it out."""

EXECUTOR_METHODS: Final[dict[str, ExecutorMethod[Any, Any]]] = {
    "get_api_key": _about_session(m.GetApiKey, lambda s: s.executors.get_api_key),
    "request_permission": _about_session(m.RequestPermission, lambda s: s.approvals.request_permission),
    "judge_reads": _about_session(m.JudgeReads, lambda s: s.policy.judge_reads),
    "report_message": _about_session(m.ReportMessage, lambda s: s.reports.report_message),
    "heartbeat": ExecutorMethod(m.Heartbeat, lambda s: s.executors.heartbeat, about_session=False),
}
