"""What people ask and change about the policy."""

from __future__ import annotations

from posixpath import isabs, normpath

import anyio

from hutch_daemon.permissions.cases import run_cases
from hutch_daemon.permissions.paths import can_be_path
from hutch_daemon.permissions.policy import judge, paths_to_resolve
from hutch_daemon.permissions.rules import BadRuleError, parse_rule
from hutch_daemon.services.access import Caller, SessionOf
from hutch_daemon.services.parts import Parts
from hutch_daemon.services.policy_layers import Policies
from hutch_daemon.store import audit, rules
from hutch_daemon.store.rows import AuditRow, RuleEffect, RuleRow, SessionRow, TrustRow
from hutch_daemon.store.tx import Tx
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.times import now_ms
from hutch_shared.vocabulary import to_call

__all__ = ["PolicySide", "demand_absolute", "with_tools"]

_EFFECTS: tuple[RuleEffect, ...] = ("allow", "ask", "deny")


def with_tools(given: m.Rules, options: m.AgentOptions) -> m.Rules:
    """Return the rules of a session together with those that the agent's options name as tools."""
    allow = dict.fromkeys((*given.allow, *options.allowed_tools))
    deny = dict.fromkeys((*given.deny, *options.disallowed_tools))
    return m.Rules(tuple(allow), given.ask, tuple(deny))


class PolicySide:
    """The policy methods of the client socket."""

    def __init__(self, parts: Parts, policies: Policies, session_of: SessionOf) -> None:
        self._parts = parts
        self._policies = policies
        self._session_of = session_of

    async def refuse_forbidden_mode(self, session: SessionRow) -> None:
        """Refuse `bypass` where the host forbids it: said when it is asked for, not when the first call comes."""
        if session.permission_mode == "bypass" and (await self._policies(session, None)).bypass_forbidden:
            raise HutchError(Reason.POLICY_FORBIDS, "The host's policy forbids the mode bypass.")

    def refuse_bad_rules(self, owner: int, given: m.Rules, *, base: str) -> None:
        """Raise `invalid_rule` for the first that cannot be read."""
        home = self._parts.account_of(owner).home
        for effect in _EFFECTS:
            for text in getattr(given, effect):
                try:
                    parse_rule(text, effect, "session", "given", base=base, home=home)
                except BadRuleError as error:
                    raise HutchError(Reason.INVALID_RULE, f"The rule {text!r} cannot be used: {error}.") from error

    async def show_policy(self, caller: Caller, params: m.ShowPolicy) -> m.PolicyView:
        """Return the layers in force."""
        session = await self._session_of(caller, params.session) if params.session is not None else None
        default = self._parts.settings().permissions.mode
        cwd = session.cwd if session is not None else normpath(params.cwd or "/")
        mode = session.permission_mode if session is not None else default
        return await self._policies.show(caller, cwd, session, mode, params.project)

    async def explain_policy(self, caller: Caller, params: m.ExplainPolicy) -> m.Explanation:
        """Return what would be decided. Without a live executor paths count as they are written."""
        session = await self._session_of(caller, params.session) if params.session is not None else None
        owner = session.owner if session is not None else caller.uid
        cwd = normpath(params.cwd or (session.cwd if session is not None else "/"))
        workspace = session.cwd if session is not None else cwd
        mode = params.mode or (session.permission_mode if session else self._parts.settings().permissions.mode)
        found = await self._policies.layered(owner, workspace, session, params.project)
        policy = found.policy()
        call = to_call(params.agent_tool, params.input, "explain", cwd)
        paths = paths_to_resolve(call, cwd, found.home)
        real = {path: path for path in paths}
        executor = self._parts.pool.of_session(session.id) if session is not None else None
        if session is not None and executor is not None and executor.peer is not None and paths:
            resolved: m.ResolvedPaths = await executor.call("resolve_paths", m.ResolvePaths(session.id, paths), 10.0)
            real = resolved.real
        verdict = judge(policy, call, mode=mode, cwd=cwd, real=real, home=found.home, workspace=workspace)
        return m.Explanation(
            decision=verdict.decision,
            why=verdict.why,
            rule=verdict.rule,
            layer=verdict.layer,
            programs=verdict.programs,
            suggestions=verdict.suggestions,
            problems=(*found.problems, *policy.problems),
        )

    async def test_policy(self, caller: Caller, params: m.TestPolicy) -> m.CasesReport:
        """Run cases in a worker thread."""
        report = await anyio.to_thread.run_sync(run_cases, params.cases.splitlines())
        if report.unreadable:
            raise HutchError(Reason.INVALID_PARAMS, f"These lines are no cases: {'; '.join(report.unreadable[:5])}.")
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
        """Add and remove rules of the caller's account; `invalid_rule` changes nothing."""
        if params.cwd is not None:
            demand_absolute(params.cwd, "directory")
        project = normpath(params.cwd) if params.cwd is not None else None
        self.refuse_bad_rules(caller.uid, params.add, base=project or "/")

        def change(tx: Tx) -> None:
            for effect in _EFFECTS:
                for text in getattr(params.add, effect):
                    row = RuleRow(
                        owner=caller.uid,
                        effect=effect,
                        rule=text,
                        created_at=now_ms(),
                        project=project,
                        origin=str(caller),
                    )
                    if rules.add(tx, row):
                        audit.write(tx, _line(caller, "change_rules", "added", text, {"effect": effect}))
                for text in getattr(params.remove, effect):
                    if not rules.remove(tx, caller.uid, effect, text, project=project):
                        where = f"for {project}" if project is not None else "for all projects"
                        raise HutchError(Reason.NOT_FOUND, f"You have no rule to {effect} {text!r} {where}.")
                    audit.write(tx, _line(caller, "change_rules", "removed", text, {"effect": effect}))

        await self._parts.store.write(change)
        return await self._policies.show(caller, project or "/", None, self._parts.settings().permissions.mode)

    async def trust_policy(self, caller: Caller, params: m.TrustPolicy) -> m.Nothing:
        """Trust a project's file while it has this digest, or no longer."""

        def change(tx: Tx) -> None:
            if params.trust:
                rules.trust(tx, TrustRow(owner=caller.uid, path=params.path, digest=params.digest, at=now_ms()))
            else:
                rules.distrust(tx, caller.uid, params.path)
            outcome = "trusted" if params.trust else "distrusted"
            audit.write(tx, _line(caller, "trust_policy", outcome, None, {"path": params.path}, params.digest))

        await self._parts.store.write(change)
        return m.Nothing()


def demand_absolute(path: str, what: str) -> None:
    """Refuse a path that is relative, or that no file could have."""
    if not (isabs(path) and can_be_path(path)):
        raise HutchError(Reason.INVALID_PARAMS, f"The {what} must be an absolute path of at most 4,096 characters.")


def _line(
    caller: Caller, action: str, outcome: str, rule: str | None, details: dict[str, str], digest: str | None = None
) -> AuditRow:
    return AuditRow(
        at=now_ms(),
        owner=caller.uid,
        actor=str(caller),
        action=action,
        outcome=outcome,
        rule=rule,
        digest=digest,
        details=details,
    )
