"""docs/policy.md is true: its examples are decided as it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hutch_daemon.permissions.cases import Case, run_cases
from hutch_daemon.permissions.layers import Layer, compile_policy, parse_policy_toml
from hutch_daemon.permissions.policy import judge, paths_to_resolve
from hutch_shared.messages import PermissionMode
from hutch_shared.vocabulary import to_call

PAGE = Path(__file__).resolve().parents[3] / "docs" / "policy.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
VERDICT = re.compile(r"(allow|ask|deny)\s+(\S+)(?:\s+(.*?))?(?:\s{2,}\((\w+)\))?")
SUBJECT = {
    "Bash": "command",
    "Read": "file_path",
    "Edit": "file_path",
    "Grep": "path",
    "WebFetch": "url",
    "WebSearch": "query",
}
MODES: dict[str | None, PermissionMode] = {
    None: "ask",
    "accept_edits": "accept_edits",
    "plan": "plan",
    "bypass": "bypass",
    "unattended": "unattended",
}


def examples() -> Iterator[tuple[Layer, str]]:
    """Yield each example's decision with the rules above it."""
    layer = Layer("account")
    for kind, body in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "toml":
            layer, problems = parse_policy_toml(body, "account", "/w", "the page")
            assert problems == ()
        elif kind == "verdicts":
            for line in body.splitlines():
                yield layer, line


EXAMPLES = list(examples())


@pytest.mark.parametrize(("layer", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_each_example_is_decided_as_the_page_says(layer: Layer, line: str) -> None:
    """Each example gets the decision that the page gives under the rules above it."""
    match = VERDICT.fullmatch(line)
    assert match is not None
    want, tool, subject, mode = match.groups()
    call = to_call(tool, {SUBJECT[tool]: subject} if tool in SUBJECT else {}, "c", "/w")
    policy = compile_policy([layer], home="/home/u")
    real = {path: path for path in paths_to_resolve(call, "/w", "/home/u")}

    verdict = judge(policy, call, mode=MODES[mode], cwd="/w", real=real, home="/home/u", workspace="/w")

    assert policy.problems == ()
    assert (verdict.decision, verdict.why) == (want, verdict.why)


def test_the_cases_on_the_page_are_right() -> None:
    """The page shows cases in the format of `hutch policy test`."""
    body = next(body for kind, body in FENCE.findall(PAGE.read_text(encoding="utf-8")) if kind == "json")

    report = run_cases(body.splitlines())

    assert report.safe
    assert report.right == len(report.results) == 3


def test_the_page_names_every_field_of_a_case() -> None:
    """The page documents each field that a case may have."""
    text = PAGE.read_text(encoding="utf-8")

    assert [
        name for name in Case.__struct_fields__ if name not in {"id", "why", "want"} and f"`{name}`" not in text
    ] == []
