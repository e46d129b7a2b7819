"""Runs test cases of a policy. A case is a line of JSON with rules, mode, call and the expected decision.

A case has `id`, `rules` (`allow`, `ask`, `deny`), `mode`, `tool` and `input` as Claude names them, `cwd`, `want`.
It may have `home`, `real` (path → resolved path; other paths resolve to themselves), `agent_dir`, `mcp_servers` (the
names of the session's MCP servers), `why`, and `ok` (other decisions that are right too).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from hutch_daemon.permissions.layers import Layer, compile_policy
from hutch_daemon.permissions.policy import Verdict, judge, paths_to_resolve
from hutch_shared.messages import PermissionMode, Rules
from hutch_shared.vocabulary import to_call

_Decision = Literal["allow", "ask", "deny"]
_STRICTNESS = {"allow": 0, "ask": 1, "deny": 2}


class Case(msgspec.Struct, frozen=True):
    """One line of a file of cases."""

    id: str
    tool: str
    input: dict[str, Any]
    want: _Decision
    rules: Rules = Rules()
    mode: PermissionMode = "ask"
    cwd: str = "/w"
    home: str = "/home/u"
    real: dict[str, str] = {}
    agent_dir: str | None = None
    mcp_servers: tuple[str, ...] | None = None
    ok: tuple[_Decision, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """The verdict on one case."""

    case: Case
    verdict: Verdict

    @property
    def right(self) -> bool:
        return self.verdict.decision in {self.case.want, *self.case.ok}


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all cases. Wrong decisions are listed by kind, because some kinds are worse than others."""

    results: tuple[CaseVerdict, ...]
    unreadable: tuple[str, ...]
    """One sentence for each line that is not a case."""

    def _ids(self, decided: str, wanted: set[str]) -> tuple[str, ...]:
        return tuple(
            result.case.id
            for result in self.results
            if not result.right and result.verdict.decision == decided and result.case.want in wanted
        )

    @property
    def right(self) -> int:
        return sum(result.right for result in self.results)

    @property
    def unsafe_allows(self) -> tuple[str, ...]:
        """Ids of cases that were allowed but should have been asked or denied."""
        return self._ids("allow", {"ask", "deny"})

    @property
    def missed_denies(self) -> tuple[str, ...]:
        """Ids of cases that were asked but should have been denied."""
        return self._ids("ask", {"deny"})

    @property
    def needless_asks(self) -> tuple[str, ...]:
        """Ids of cases that were asked but should have been allowed."""
        return self._ids("ask", {"allow"})

    @property
    def needless_denies(self) -> tuple[str, ...]:
        """Ids of cases that were denied but should have been allowed or asked."""
        return self._ids("deny", {"allow", "ask"})

    @property
    def safe(self) -> bool:
        """True if no decision was too permissive and every line was readable."""
        return not (self.unsafe_allows or self.missed_denies or self.unreadable)


def run_case(case: Case) -> CaseVerdict:
    layer = Layer("session", case.rules.allow, case.rules.ask, case.rules.deny, base=case.cwd, origin="case")
    call = to_call(case.tool, case.input, case.id, case.cwd)
    real = {path: path for path in paths_to_resolve(call, case.cwd, case.home)} | case.real
    policy = compile_policy([layer], home=case.home)
    verdict = judge(
        policy,
        call,
        mode=case.mode,
        cwd=case.cwd,
        real=real,
        home=case.home,
        workspace=case.cwd,
        agent_dir=case.agent_dir,
        mcp_servers=case.mcp_servers,
    )
    return CaseVerdict(case, verdict)


def run_cases(lines: Iterable[str | bytes]) -> Report:
    """Run the cases of JSONL lines; blank lines are skipped. A line that is not a case makes the report unsafe."""
    results: list[CaseVerdict] = []
    unreadable: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = msgspec.json.decode(line, type=Case)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            unreadable.append(f"line {number}: {error}")
            continue
        results.append(run_case(case))
    return Report(tuple(results), tuple(unreadable))
