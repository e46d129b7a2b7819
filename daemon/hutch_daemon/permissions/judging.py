"""Judges a tool call by the current policy of its session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hutch_daemon.permissions.layers import Policy
from hutch_daemon.permissions.policy import Verdict, judge, paths_to_resolve
from hutch_daemon.permissions.requests import EditedCall
from hutch_daemon.store import policy_versions, sessions
from hutch_daemon.store.records import Executes
from hutch_daemon.store.rows import PermissionRow, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.vocabulary import to_call

__all__ = ["CallJudge", "Judged", "PolicyOf", "Requester"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, the session as it was then, and the number of its owner's changes of the policy that it saw."""

    session: SessionRow
    verdict: Verdict
    version: int


class Requester(Protocol):
    """The executor that asks. It does what only the session's account can do."""

    @property
    def id(self) -> str: ...

    async def real_paths(self, session: str, paths: tuple[str, ...]) -> Mapping[str, str]:
        """Resolve paths as the session's account; the result lacks paths that cannot be resolved."""

    async def notify_somebody(self, question: m.Permission) -> m.Notified:
        """Run the notify command as the session's account."""


class PolicyOf(Protocol):
    """Returns the current policy of a session, including its project's policy file."""

    def home_of(self, session: SessionRow) -> str: ...

    def note_project(self, session: str, project: m.ProjectFile | None, *, asked_again: bool = False) -> None:
        """Take the project's policy file that a session's executor has read; None means that there is none.

        An executor that asks again sends what it read at first: that counts only if nothing else is known.
        """

    async def check_host_file(self) -> bool:
        """Look at the host's policy file; return whether it changed since the last look."""

    async def __call__(self, session: SessionRow) -> Policy: ...


class CallJudge:
    """Gathers the input of a verdict: the resolved paths, then the session's current mode, then its current policy."""

    def __init__(self, store: Store, policy_of: PolicyOf) -> None:
        """Read sessions from `store` and policies from `policy_of`."""
        self._store = store
        self._policy_of = policy_of

    async def judge(
        self,
        session: SessionRow,
        requester: Requester | None,
        kind: m.PermissionKind,
        call: m.ToolCall,
        cwd: str,
    ) -> Judged:
        """Resolve the paths, then judge by the rules and the mode of that moment.

        Without a requester no path is resolved. A question or a plan is never allowed: only a user can decide it.
        """
        paths = paths_to_resolve(call, cwd, self._policy_of.home_of(session))
        real = await requester.real_paths(session.id, paths) if paths and requester is not None else {}

        def now(conn: Executes) -> tuple[SessionRow, int]:
            return sessions.get(conn, session.id) or session, policy_versions.current(conn, session.owner)

        session, version = await self._store.read(now)
        policy = await self._policy_of(session)
        verdict = judge(
            policy,
            call,
            mode=session.permission_mode,
            cwd=cwd,
            real=real,
            home=policy.home,
            workspace=session.cwd,
            agent_dir=session.agent_dir,
            mcp_servers=session.options.mcp_servers,
        )
        if kind != "tool" and verdict.decision == "allow":
            verdict = replace(verdict, decision="ask")
        return Judged(session, verdict, version)

    async def judge_edited(
        self, session: SessionRow, requester: Requester | None, row: PermissionRow, updated: dict[str, Any]
    ) -> EditedCall:
        """Return the call with an edited input; `policy_forbids` if the policy denies it."""
        servers = session.options.mcp_servers
        call = to_call(row.call.agent_tool, updated, row.call.call_id, row.cwd, servers=servers, with_diff=True)
        if call.action != row.call.action:
            raise HutchError(Reason.INVALID_PARAMS, f"An edited input of {row.call.agent_tool} cannot be judged here.")
        if requester is None:  # only the session's account can resolve the paths
            raise HutchError(
                Reason.CONNECTION_LOST, "The executor is not connected, so an edited input cannot be judged."
            )
        judged = await self.judge(session, requester, row.kind, call, row.cwd)
        if judged.verdict.decision == "deny":
            why = f"The edited input is not allowed: {judged.verdict.why}"
            raise HutchError(Reason.POLICY_FORBIDS, why, rule=judged.verdict.rule)
        return EditedCall(call, input_digest(row.call.agent_tool, updated), judged.version)
