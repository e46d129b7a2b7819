"""Every case in `policy_cases` is decided as it wants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hutch_daemon.permissions.cases import CaseVerdict, Report, run_cases

CASES = Path(__file__).resolve().parents[1] / "policy_cases"
FIELD = run_cases((CASES / "field.jsonl").read_bytes().splitlines())
OWN = run_cases((CASES / "own.jsonl").read_bytes().splitlines())


@pytest.mark.parametrize("result", [*FIELD.results, *OWN.results], ids=lambda result: result.case.id)
def test_case_is_decided_as_wanted(result: CaseVerdict) -> None:
    """Each case gets the answer it wants, or another one that it calls right."""
    assert result.verdict.decision in {result.case.want, *result.case.ok}, result.verdict.why


@pytest.mark.parametrize(("report", "least"), [(FIELD, 169), (OWN, 150)], ids=["field", "own"])
def test_nothing_is_let_through(report: Report, least: int) -> None:
    """No case is allowed that should not be, none is asked that should be denied, hardly one is asked for nothing."""
    assert len(report.results) >= least
    assert (report.unsafe_allows, report.missed_denies, report.unreadable) == ((), (), ())
    assert len(report.needless_asks) <= 3


def test_a_line_that_is_no_case_makes_the_report_unsafe() -> None:
    """A file of cases with a line that cannot be read does not pass."""
    report = run_cases(['{"id": "1"}', "", "nonsense", b"\xff"])

    assert not report.safe
    assert [problem.split(":")[0] for problem in report.unreadable] == ["line 1", "line 3", "line 4"]


def test_mistakes_are_counted_by_their_kind() -> None:
    """An unsafe allow, a missed deny, a needless ask and a needless deny are listed apart, by their ids."""
    rules = {"allow": ["Bash(ls)"], "deny": ["Bash(rm)"]}

    def case(name: str, command: str, want: str) -> str:
        return json.dumps({"id": name, "rules": rules, "tool": "Bash", "input": {"command": command}, "want": want})

    report = run_cases(
        [
            case("a", "ls", "ask"),
            case("b", "id", "deny"),
            case("c", "id", "allow"),
            case("d", "rm", "allow"),
            case("e", "ls", "allow"),
        ]
    )

    assert report.right == 1
    assert report.unsafe_allows == ("a",)
    assert report.missed_denies == ("b",)
    assert report.needless_asks == ("c",)
    assert report.needless_denies == ("d",)
    assert not report.safe
