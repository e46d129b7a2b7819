"""The rules that a permission request suggests."""

from __future__ import annotations

import pytest

from hutch_daemon.permissions.layers import Layer, compile_policy
from hutch_daemon.permissions.policy import Verdict, judge, paths_to_resolve
from hutch_shared.vocabulary import to_call


def decide(tool: str, text: str, *allow: str, ask: tuple[str, ...] = ()) -> Verdict:
    key = {"Bash": "command", "WebFetch": "url"}.get(tool, "file_path")
    call = to_call(tool, {key: text}, "c", "/w")
    real = {path: path for path in paths_to_resolve(call, "/w", "/home/u")}
    policy = compile_policy([Layer("answered", allow=allow, ask=ask, base="/w")], home="/home/u")
    return judge(policy, call, mode="ask", cwd="/w", real=real, home="/home/u", workspace="/w")


PROPOSED = [
    ("Bash", "npm run test -- -x", ["Bash(npm run test:*)"]),
    ("Bash", "git status -s", ["Bash(git status:*)"]),
    ("Bash", "git push origin main", ["Bash(git push origin main)"]),
    ("Bash", "python3 -m pytest -q", ["Bash(python3 -m pytest:*)"]),
    ("Bash", "python3 x.py", ["Bash(python3 x.py)"]),
    ("Bash", "python3 -c 'a b'", ["Bash(python3 -c 'a b')"]),
    ("Bash", "make test", ["Bash(make test:*)"]),
    ("Bash", "ls -la", ["Bash(ls:*)"]),
    ("Bash", "ls && git diff --stat", ["Bash(ls:*)", "Bash(git diff:*)"]),
    ("Bash", "rm -rf build", ["Bash(rm -rf build)"]),
    ("Bash", "./run.sh a", ["Bash(./run.sh a)"]),
    ("Bash", "sudo ls", ["Bash(sudo ls)"]),
    ("Bash", "npm install x", ["Bash(npm install x)"]),
    ("Bash", "sort -o x y", ["Bash(sort -o x y)"]),
    ("Bash", "ls $HOME", ["Bash(ls $HOME)"]),
    ("Edit", "/w/src/a.py", ["Edit(//w/src/a.py)"]),
    ("Edit", "/w/src/[id].ts", ["Edit(//w/src/[[]id].ts)"]),
    ("Read", "/etc/hosts", ["Read(//etc/hosts)"]),
    ("WebFetch", "https://example.com/x", ["WebFetch(domain:example.com)"]),
    ("mcp__a__b", "", ["mcp__a__b"]),
]


@pytest.mark.parametrize(("tool", "text", "rules"), PROPOSED, ids=[text or tool for tool, text, _ in PROPOSED])
def test_a_suggestion_is_narrow_and_sufficient(tool: str, text: str, rules: list[str]) -> None:
    """It is the narrowest useful rule, and it allows the same call."""
    verdict = decide(tool, text)

    assert verdict.decision == "ask"
    assert [suggestion.rule for suggestion in verdict.suggestions] == rules
    assert decide(tool, text, *rules).decision == "allow"


@pytest.mark.parametrize("text", ["npm run test", "make test", "python3 x.py", "./run.sh", "cargo test"])
def test_a_suggestion_warns_about_code_of_the_repository(text: str) -> None:
    """A rule for a script that the agent may edit says so."""
    assert "code in this repository" in decide("Bash", text).suggestions[0].note


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("Bash", "ls > out"),
        ("Bash", "ls && for f in *; do id; done"),
        ("Bash", "ls\n'"),
        ("Edit", "/w/.git/config"),
        ("Bash", "cd /tmp && ls"),
        ("Bash", "git add *"),
        ("Bash", "rm -rf /"),
        ("WebFetch", "http://1/"),
        ("Read", ""),
    ],
)
def test_no_suggestion_is_insufficient_or_too_broad(tool: str, text: str) -> None:
    """If no narrow rule lets the call pass, the request suggests none."""
    verdict = decide(tool, text)

    assert (verdict.decision, verdict.suggestions) == ("ask", ())


def test_an_ask_rule_gets_no_suggestion() -> None:
    """No allow rule overrides an ask rule, so `always` is not offered."""
    assert decide("Bash", "git push", ask=("Bash(git push:*)",)).suggestions == ()
