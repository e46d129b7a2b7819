"""Every case in `policy_cases` gets the decision that it states."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from hutch_daemon.permissions.cases import Report, run_cases

CASES = Path(__file__).resolve().parents[1] / "policy_cases"


@cache
def _report(name: str) -> Report:
    return run_cases((CASES / f"{name}.jsonl").read_bytes().splitlines())


@pytest.mark.parametrize("name", ["field", "own"])
def test_each_case_gets_its_decision(name: str) -> None:
    """A case states one wanted decision, and may state others that are also right."""
    wrong = {
        result.case.id: result.verdict
        for result in _report(name).results
        if result.verdict.decision not in {result.case.want, *result.case.ok}
    }

    assert wrong == {}


@pytest.mark.parametrize(("name", "least"), [("field", 169), ("own", 150)])
def test_the_cases_have_no_unsafe_decision(name: str, least: int) -> None:
    """No case is allowed wrongly, none that should be denied is asked about, and almost none is asked about
    needlessly."""
    report = _report(name)

    assert len(report.results) >= least
    assert (report.unsafe_allows, report.missed_denies, report.unreadable) == ((), (), ())
    assert len(report.needless_asks) <= 3


def test_an_unreadable_case_makes_the_report_unsafe() -> None:
    """A file of cases with an unreadable line does not pass."""
    report = run_cases(['{"id": "1"}', "", "nonsense", b"\xff"])

    assert not report.safe
    assert [problem.split(":")[0] for problem in report.unreadable] == ["line 1", "line 3", "line 4"]


def test_mistakes_are_counted_by_their_kind() -> None:
    """The report lists the ids of unsafe allows, missed denials, needless requests and needless denials separately."""
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
