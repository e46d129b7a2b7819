"""The methods with which users read, test and change the policy."""

from __future__ import annotations

from collections.abc import Mapping
from posixpath import normpath
from typing import Final

import anyio

from hutch_daemon.permissions.cases import run_cases
from hutch_daemon.permissions.policy import judge, paths_to_resolve
from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.pool import Pool
from hutch_daemon.services.access import Access, Caller, require_absolute
from hutch_daemon.services.executors import served_session
from hutch_daemon.services.policy_layers import EFFECTS, PolicyLayers, rules_of
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import audit, rules
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import RuleRow, TrustRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.times import now_ms
from hutch_shared.vocabulary import to_call

__all__ = ["PolicyService"]

_RESOLVE_TIMEOUT: Final = 10.0


class PolicyService:
    """The policy methods of the client socket, and the one of the executor socket that judges instruction files."""

    def __init__(
        self,
        store: Store,
        access: Access,
        layers: PolicyLayers,
        pool: Pool,
        settings: SettingsInForce,
    ) -> None:
        """Show and change `layers`; executors in `pool` resolve paths."""
        self._store = store
        self._access = access
        self._layers = layers
        self._pool = pool
        self._settings = settings

    async def show_policy(self, caller: Caller, params: m.ShowPolicy) -> m.PolicyView:
        """Return the current layers."""
        session = await self._access.session(caller, params.session) if params.session is not None else None
        default = self._settings.current.permissions.mode
        cwd = session.cwd if session is not None else normpath(params.cwd or "/")
        mode = session.permission_mode if session is not None else default
        return await self._layers.show(caller, cwd, session, mode, params.project)

    async def explain_policy(self, caller: Caller, params: m.ExplainPolicy) -> m.Explanation:
        """Return the decision about a hypothetical call. Without a live executor, symbolic links are not resolved."""
        session = await self._access.session(caller, params.session) if params.session is not None else None
        owner = session.owner if session is not None else caller.uid
        cwd = normpath(params.cwd or (session.cwd if session is not None else "/"))
        workspace = session.cwd if session is not None else cwd
        mode = params.mode or (session.permission_mode if session else self._settings.current.permissions.mode)
        found = await self._layers.layered(owner, workspace, session, params.project)
        policy = found.policy()
        servers = session.options.mcp_servers if session is not None else None
        call = to_call(params.agent_tool, params.input, "explain", cwd, servers=servers)
        paths = paths_to_resolve(call, cwd, found.home)
        real = {path: path for path in paths}
        executor = self._pool.roster.serving.get(session.id) if session is not None else None
        if session is not None and executor is not None and executor.peer is not None and paths:
            resolved: m.ResolvedPaths = await executor.call(
                "resolve_paths", m.ResolvePaths(session.id, paths), _RESOLVE_TIMEOUT
            )
            real = resolved.real
        verdict = judge(
            policy,
            call,
            mode=mode,
            cwd=cwd,
            real=real,
            home=found.home,
            workspace=workspace,
            agent_dir=session.agent_dir if session is not None else None,
            mcp_servers=servers,
        )
        return m.Explanation(
            decision=verdict.decision,
            why=verdict.why,
            rule=verdict.rule,
            layer=verdict.layer,
            programs=verdict.programs,
            suggestions=verdict.suggestions,
            problems=(*found.problems, *policy.problems),
        )

    async def judge_reads(self, executor: Executor, params: m.JudgeReads) -> m.ReadsJudged:
        """Return the instruction files that a rule denies.

        Of imported files also those that a rule asks about, since nobody is asked, and all of them while a rule to deny
        or ask cannot be read.
        """
        session = await served_session(self._store, executor, params.session)
        self._layers.note_project(session.id, params.project)
        policy = await self._layers(session)
        withheld: dict[str, str] = {}
        for path, real in (params.named | params.imported).items():
            verdict = judge(
                policy,
                to_call("Read", {"file_path": path}, "instructions", session.cwd),
                mode="ask",
                cwd=session.cwd,
                real={path: real},
                home=policy.home,
                workspace=session.cwd,
            )
            asks = path in params.imported and (verdict.rule is not None or policy.broken is not None)
            if verdict.decision == "deny" or (verdict.decision == "ask" and asks):
                withheld[path] = verdict.why
        return m.ReadsJudged(withheld)

    async def test_policy(self, caller: Caller, params: m.TestPolicy) -> m.CasesReport:
        """Run test cases in a worker thread."""
        report = await anyio.to_thread.run_sync(run_cases, params.cases.splitlines())
        if report.unreadable:
            raise HutchError(Reason.INVALID_PARAMS, f"These lines are not cases: {'; '.join(report.unreadable[:5])}.")
        return m.CasesReport(
            total=len(report.results),
            right=report.right,
            unsafe_allows=report.unsafe_allows,
            missed_denies=report.missed_denies,
            needless_asks=report.needless_asks,
            cases=tuple(
                m.CaseResult(
                    id=one.case.id,
                    want=one.case.want,
                    got=one.verdict.decision,
                    right=one.right,
                    rule=one.verdict.rule,
                    why=one.verdict.why,
                )
                for one in report.results
            ),
        )

    async def change_rules(self, caller: Caller, params: m.ChangeRules) -> m.PolicyView:
        """Add and remove rules of the caller's account. On an error (`invalid_rule`, `not_found`), nothing changes."""
        if params.cwd is not None:
            require_absolute(params.cwd, "directory")
        project = normpath(params.cwd) if params.cwd is not None else None
        self._layers.check_rules(caller.uid, params.add, base=project or "/")

        def change(tx: Tx) -> None:
            for effect in EFFECTS:
                for text in rules_of(params.add, effect):
                    row = RuleRow(
                        owner=caller.uid,
                        effect=effect,
                        rule=text,
                        created_at=now_ms(),
                        project=project,
                        origin=str(caller),
                    )
                    if rules.add(tx, row):
                        _record(tx, caller, "change_rules", "added", text, {"effect": effect})
                for text in rules_of(params.remove, effect):
                    if not rules.remove(tx, caller.uid, effect, text, project=project):
                        where = f"for {project}" if project is not None else "for all projects"
                        raise HutchError(Reason.NOT_FOUND, f"You have no rule to {effect} {text!r} {where}.")
                    _record(tx, caller, "change_rules", "removed", text, {"effect": effect})

        await self._store.write(change)
        return await self._layers.show(caller, project or "/", None, self._settings.current.permissions.mode)

    async def trust_policy(self, caller: Caller, params: m.TrustPolicy) -> m.Nothing:
        """Trust a project's file while it has this digest, or stop trusting it."""

        def change(tx: Tx) -> None:
            if params.trust:
                rules.trust(tx, TrustRow(owner=caller.uid, path=params.path, digest=params.digest, at=now_ms()))
            else:
                rules.distrust(tx, caller.uid, params.path)
            outcome = "trusted" if params.trust else "distrusted"
            _record(tx, caller, "trust_policy", outcome, None, {"path": params.path}, params.digest)

        await self._store.write(change)
        return m.Nothing()


def _record(
    tx: Tx,
    caller: Caller,
    action: str,
    outcome: str,
    rule: str | None,
    details: Mapping[str, str],
    digest: str | None = None,
) -> None:
    audit.record(
        tx,
        actor=str(caller),
        owner=caller.uid,
        action=action,
        outcome=outcome,
        rule=rule,
        digest=digest,
        details=details,
    )
