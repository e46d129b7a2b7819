from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import pytest

from hutch_client.commands.policy import tool_input
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from tests.client.conftest import Hutch
from tests.client.fake_daemon import SESSION, FakeDaemon


@pytest.mark.parametrize(
    ("tool", "text", "expected"),
    [
        ("Bash", "git status", {"command": "git status"}),
        ("Bash", "{ ls; }", {"command": "{ ls; }"}),
        ("Edit", "src/a.py", {"file_path": "src/a.py"}),
        ("WebFetch", "https://x.org", {"url": "https://x.org"}),
        ("Write", '{"file_path": "a", "content": "b"}', {"file_path": "a", "content": "b"}),
        ("mcp__db__query", '{"sql": "x"}', {"sql": "x"}),
    ],
)
def test_an_input_may_be_given_in_short(tool: str, text: str, expected: object) -> None:
    """The text is a tool's main parameter, or its whole input as JSON."""
    assert tool_input(tool, text) == expected


@pytest.mark.parametrize(("tool", "text"), [("mcp__db__query", "x"), ("Edit", "{broken"), ("Edit", 10**5 * '{"a":')])
def test_an_input_that_cannot_be_read_is_refused(tool: str, text: str) -> None:
    """For invalid or too deeply nested JSON the error says what to give."""
    with pytest.raises(HutchError, match="JSON object"):
        tool_input(tool, text)


def test_explain_says_what_would_be_decided_and_why(daemon: FakeDaemon, hutch: Hutch) -> None:
    """It shows the rule, its layer, the programs found, and the rule that `always` would add."""
    daemon.answers["explain_policy"] = m.Explanation(
        "ask", "no rule covers it", programs=(("npm", "test"),), suggestions=(m.Suggestion("Bash(npm test)", "this"),)
    )

    code, out, _ = hutch("policy", "explain", "Bash", "npm test", "--session", "fix", "--mode", "plan")

    assert (code, out) == (
        0,
        "decision  ask\nwhy       no rule covers it\nprogram   npm test\nalways    Bash(npm test) — this\n",
    )
    assert daemon.asked("explain_policy") == [
        m.ExplainPolicy("Bash", {"command": "npm test"}, session=SESSION.id, mode="plan")
    ]


def test_show_prints_the_layers_with_deny_first(daemon: FakeDaemon, hutch: Hutch, tmp_path: Path) -> None:
    """Rules are printed in the order of their evaluation; errors go to standard error."""
    daemon.answers["show_policy"] = m.PolicyView(
        (
            m.PolicyLayer("host", "/etc/hutch/policy.toml", m.Rules(allow=("Read",), deny=("Bash(sudo:*)",))),
            m.PolicyLayer("project", "/w/.hutch/policy.toml", m.Rules(), in_force=False, note="not trusted"),
        ),
        "ask",
        problems=("host: Bas(x) is not a rule",),
    )

    code, out, err = hutch("policy", "show", "-C", str(tmp_path))

    assert code == 0
    assert out == (
        "mode: ask\n\nhost  /etc/hutch/policy.toml\n  deny  Bash(sudo:*)\n  allow Read\n"
        "\nproject  /w/.hutch/policy.toml  NOT in force  (not trusted)\n"
    )
    assert err == "! host: Bas(x) is not a rule\n"
    assert daemon.asked("show_policy") == [m.ShowPolicy(cwd=str(tmp_path))]


@pytest.mark.parametrize(
    ("faults", "code"), [({"needless_asks": ("c",)}, 0), ({"unsafe_allows": ("a",)}, 1), ({"missed_denies": ("b",)}, 1)]
)
def test_cases_fail_on_unsafe_answers_only(
    daemon: FakeDaemon, hutch: Hutch, tmp_path: Path, faults: dict[str, tuple[str, ...]], code: int
) -> None:
    """A needless permission request is counted but is no failure."""
    (tmp_path / "cases.jsonl").write_text('{"id": "a"}\n')
    daemon.answers["test_policy"] = m.CasesReport(
        3, 2, cases=(m.CaseResult("a", "ask", "allow", right=False, why="prefix"),), **faults
    )

    got, out, _ = hutch("policy", "test", str(tmp_path / "cases.jsonl"))

    assert got == code
    assert out.startswith("2 of 3 cases right\nunsafe allows: ")
    assert out.endswith("  a: wanted ask, got allow: prefix\n")
    assert daemon.asked("test_policy") == [m.TestPolicy('{"id": "a"}\n')]


def test_rules_are_added_and_removed(daemon: FakeDaemon, hutch: Hutch, tmp_path: Path) -> None:
    """A rule is added for all projects, or for one."""
    daemon.answers["change_rules"] = m.PolicyView((), "ask")

    assert hutch("policy", "add", "allow", "Bash(npm test)", "Read")[0] == 0
    assert hutch("policy", "remove", "deny", "Bash(rm:*)", "-C", str(tmp_path))[0] == 0
    assert daemon.asked("change_rules") == [
        m.ChangeRules(add=m.Rules(allow=("Bash(npm test)", "Read"))),
        m.ChangeRules(remove=m.Rules(deny=("Bash(rm:*)",)), cwd=str(tmp_path)),
    ]


def test_trust_is_bound_to_what_the_file_says_now(daemon: FakeDaemon, hutch: Hutch, tmp_path: Path) -> None:
    """The user sees the text of the file whose digest becomes trusted."""
    view = m.PolicyView((), "ask", problems=("It cannot be read.",))
    daemon.answers |= {"trust_policy": m.Nothing(), "show_policy": view}
    file = tmp_path / ".hutch" / "policy.toml"
    file.parent.mkdir()
    file.write_text('[permissions]\nallow = ["Read"]\n')
    digest = hashlib.sha256(file.read_bytes()).hexdigest()

    code, _, err = hutch("policy", "trust", str(tmp_path))
    hutch("policy", "distrust", str(tmp_path))

    assert code == 0
    assert 'allow = ["Read"]' in err
    assert daemon.asked("trust_policy") == [
        m.TrustPolicy(str(file), digest),
        m.TrustPolicy(str(file), digest, trust=False),
    ]


def test_there_must_be_something_to_trust(hutch: Hutch, tmp_path: Path) -> None:
    """Without a policy file the command fails with a sentence."""
    assert hutch("policy", "trust", str(tmp_path))[0] == 1


def test_the_audit_is_read_to_its_end(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The command reads page by page, and prints JSON lines or a table."""
    entry = partial(m.AuditEntry, at="2026-01-31T12:00:00.000Z", action="permission", outcome="allowed")
    entries = [
        entry(1, actor="uid 1000 (hutch, pid 7)"),
        entry(2, actor="uid 1000 (hutch, pid 7)", owner=1001),
        entry(3, actor="uid 1000 (hutch, pid 7)", owner=1001, account="bob", actor_account="alice"),
    ]

    def page(params: m.ReadAudit) -> m.AuditPage:
        return m.AuditPage(tuple(entries[params.after : params.after + 2]), more=params.after == 0)

    daemon.answers["read_audit"] = page

    code, out, _ = hutch("audit", "--action", "permission", "-o", "jsonl")
    table = hutch("audit")[1]

    assert (code, [json.loads(line)["number"] for line in out.splitlines()]) == (0, [1, 2, 3])
    _, first, second, third = table.splitlines()
    assert "  uid 1000 (hutch, pid 7)" in first
    assert "  uid 1000 (hutch, pid 7)         uid 1001 " in second
    assert "  alice, uid 1000 (hutch, pid 7)  bob, uid 1001 " in third
    assert [(asked.after, asked.action) for asked in daemon.asked("read_audit")][:2] == [
        (0, "permission"),
        (2, "permission"),
    ]
