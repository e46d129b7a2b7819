"""Runs test cases of a policy, each a line of JSON with its rules, mode, call and the answers that are right.

A case names `id`, `rules` (`allow`, `ask`, `deny`), `mode`, `tool` and `input` in Claude's words, `cwd`, and `want`. It
may name `home`, `real` (path → what it resolves to; others resolve to themselves), `ok` (other right answers), `why`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from hutch_daemon.permissions.layers import Layer, compile_policy
from hutch_daemon.permissions.policy import Verdict, judge, paths_to_resolve
from hutch_shared.messages import Action, PermissionMode, Rules, ToolCall

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
    ok: tuple[_Decision, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was decided for one case."""

    case: Case
    verdict: Verdict

    @property
    def right(self) -> bool:
        return self.verdict.decision in {self.case.want, *self.case.ok}


@dataclass(frozen=True, slots=True)
class Report:
    """All outcomes. Those that are wrong are counted apart: not every mistake weighs the same."""

    outcomes: tuple[Outcome, ...]
    unreadable: tuple[str, ...]
    """Lines that are no case, and why."""

    def _ids(self, decided: str, wanted: set[str]) -> tuple[str, ...]:
        return tuple(
            outcome.case.id
            for outcome in self.outcomes
            if not outcome.right and outcome.verdict.decision == decided and outcome.case.want in wanted
        )

    @property
    def right(self) -> int:
        return sum(outcome.right for outcome in self.outcomes)

    @property
    def unsafe_allows(self) -> tuple[str, ...]:
        """Ids: allowed, though a person should have been asked or it should have been denied."""
        return self._ids("allow", {"ask", "deny"})

    @property
    def missed_denies(self) -> tuple[str, ...]:
        """Ids: asked, though it should have been denied."""
        return self._ids("ask", {"deny"})

    @property
    def needless_asks(self) -> tuple[str, ...]:
        """Ids: asked, though it should have been allowed."""
        return self._ids("ask", {"allow"})

    @property
    def needless_denies(self) -> tuple[str, ...]:
        """Ids: denied, though it should have been allowed or asked."""
        return self._ids("deny", {"allow", "ask"})

    @property
    def safe(self) -> bool:
        """Whether nothing was let through that should not have been, and every line could be read."""
        return not (self.unsafe_allows or self.missed_denies or self.unreadable)


_ACTIONS: dict[str, Action] = {
    "Bash": "run_command",
    "Read": "read",
    "NotebookRead": "read",
    "Edit": "edit",
    "Write": "edit",
    "MultiEdit": "edit",
    "NotebookEdit": "edit",
    "Grep": "search",
    "Glob": "search",
    "LS": "search",
    "WebFetch": "fetch",
    "WebSearch": "search",
    "AskUserQuestion": "question",
    "ExitPlanMode": "plan",
}


def call_of(tool: str, given: dict[str, Any], call_id: str = "case") -> ToolCall:
    """A call in the common words, from Claude's name of the tool and its input. A field of a wrong type is missing."""

    def text(name: str) -> str | None:
        value = given.get(name)
        return value if isinstance(value, str) else None

    action: Action = "mcp" if tool.startswith("mcp__") else _ACTIONS.get(tool, "other")
    server, _, of_server = tool[5:].partition("__") if action == "mcp" else ("", "", "")
    path = text("file_path") or text("notebook_path") or text("path")
    if action == "search" and tool != "WebSearch":
        path = path or "."
    return ToolCall(
        call_id=call_id,
        action=action,
        agent_tool=tool,
        input=given,
        command=text("command") if action == "run_command" else None,
        paths=(path,) if path and action in {"read", "edit", "search"} else (),
        url=text("url") if action == "fetch" else None,
        query=(text("query") or text("pattern")) if action == "search" else None,
        server=server or None,
        tool=of_server or None,
    )


def run_case(case: Case) -> Outcome:
    layer = Layer("session", case.rules.allow, case.rules.ask, case.rules.deny, base=case.cwd, origin="case")
    call = call_of(case.tool, case.input)
    real = {path: path for path in paths_to_resolve(call, case.cwd, case.home)} | case.real
    policy = compile_policy([layer], home=case.home)
    verdict = judge(policy, call, mode=case.mode, cwd=case.cwd, real=real, home=case.home, workspace=case.cwd)
    return Outcome(case, verdict)


def run_cases(lines: Iterable[str | bytes]) -> Report:
    """Run the cases of a JSONL text, blank lines aside. A line that is no case makes the report unsafe."""
    outcomes: list[Outcome] = []
    unreadable: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = msgspec.json.decode(line, type=Case)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            unreadable.append(f"line {number}: {error}")
            continue
        outcomes.append(run_case(case))
    return Report(tuple(outcomes), tuple(unreadable))
