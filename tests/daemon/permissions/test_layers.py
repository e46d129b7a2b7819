"""Policy layers, and the limits of their effect on one another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hutch_daemon.permissions.layers import LARGEST_FILE, Layer, compile_policy, parse_policy_toml
from hutch_daemon.permissions.policy import Verdict, judge, paths_to_resolve
from hutch_daemon.permissions.rules import LayerName
from hutch_shared.messages import PermissionMode
from hutch_shared.vocabulary import to_call

HOST = Layer(
    "host", ask=("Bash(git push:*)",), deny=("Bash(curl:*)",), origin="/etc/hutch/policy.toml", forbid_bypass=True
)


def decide(layers: list[Layer], command: str, mode: PermissionMode = "ask") -> Verdict:
    call = to_call("Bash", {"command": command}, "c", "/w")
    real = {path: path for path in paths_to_resolve(call, "/w", "/home/u")}
    policy = compile_policy(layers, home="/home/u")
    return judge(policy, call, mode=mode, cwd="/w", real=real, home="/home/u", workspace="/w")


@pytest.mark.parametrize("name", ["account", "project", "session", "answered"])
@pytest.mark.parametrize("rule", ["Bash", "Bash(*)", "Bash(curl:*)", "Bash(curl x)"])
def test_no_layer_allows_what_the_host_denies(name: LayerName, rule: str) -> None:
    """A host's deny rule holds even against a trusted project's allow rule."""
    verdict = decide([HOST, Layer(name, allow=(rule,), base="/w", trusted=True)], "curl x")

    assert (verdict.decision, verdict.layer) == ("deny", "host")


@pytest.mark.parametrize("name", ["account", "project", "session", "answered"])
def test_no_layer_allows_what_the_host_asks_about(name: LayerName) -> None:
    """A host's ask rule holds whatever another layer allows."""
    verdict = decide([Layer(name, allow=("Bash(git push:*)",), base="/w", trusted=True), HOST], "git push")

    assert (verdict.decision, verdict.layer) == ("ask", "host")


@pytest.mark.parametrize("mode", ["ask", "accept_edits", "plan", "bypass", "unattended"])
def test_no_mode_allows_what_the_host_denies(mode: PermissionMode) -> None:
    """A deny rule holds in every mode."""
    assert decide([HOST], "curl x", mode).decision == "deny"


def test_the_host_can_forbid_bypass() -> None:
    """If the host forbids it, the mode `bypass` decides like `ask`."""
    assert decide([Layer("host")], "make all", "bypass").decision == "allow"
    assert decide([HOST], "make all", "bypass").decision == "ask"


@pytest.mark.parametrize("name", ["account", "project", "session", "answered"])
def test_only_the_host_forbids_or_permits_bypass(name: LayerName) -> None:
    """A statement about `bypass` in another layer changes nothing."""
    assert not compile_policy([Layer(name, forbid_bypass=True)], home="/").bypass_forbidden
    assert compile_policy([HOST, Layer(name, forbid_bypass=False)], home="/").bypass_forbidden


def test_an_untrusted_project_allows_nothing() -> None:
    """A project's allow rules apply only if the owner trusted the file; its other rules always apply."""
    untrusted = Layer("project", ("Bash(make all)",), (), ("Bash(rm:*)",), "/w", ".hutch/policy.toml")
    trusted = replace(untrusted, trusted=True)

    assert decide([untrusted], "make all").decision == "ask"
    assert decide([trusted], "make all").decision == "allow"
    assert decide([untrusted], "rm x").decision == "deny"
    several = replace(untrusted, allow=("Bash(make all)", "Bash(make)"))
    (one,), (two,) = (compile_policy([layer], home="/").problems for layer in (untrusted, several))
    assert one.endswith(": 1 rule that allows is ignored until the project is trusted")
    assert two.endswith(": 2 rules that allow are ignored until the project is trusted")


def test_an_unreadable_allow_rule_is_skipped_and_reported() -> None:
    """The other rules still apply."""
    layers = [Layer("account", allow=("Bash(ls", "Bash(ls:*)"), origin="mine")]

    assert decide(layers, "ls").decision == "allow"
    assert compile_policy(layers, home="/").problems == (
        "mine: allow 'Bash(ls': it is not of the form Tool or Tool(specifier)",
    )


@pytest.mark.parametrize("effect", ["ask", "deny"])
def test_an_unreadable_deny_or_ask_rule_makes_everything_ask(effect: str) -> None:
    """Nobody knows what the rule was meant to stop."""
    ask, deny = (("Bash(rm",), ()) if effect == "ask" else ((), ("Bash(rm",))
    layers = [Layer("account", ("Bash(ls:*)",), ask, deny, origin="mine")]

    assert decide(layers, "ls").decision == "ask"
    assert "cannot be read" in decide(layers, "ls").why
    assert decide(layers, "ls", "bypass").decision == "ask"
    assert decide(layers, "ls", "unattended").decision == "deny"


def test_a_policy_file_is_read() -> None:
    """The lists of a file become a layer; only the host's file may forbid `bypass`."""
    text = '[permissions]\nallow = ["Bash(ls)"]\nask = ["Edit"]\ndeny = ["Bash(rm:*)"]\n'

    layer, problems = parse_policy_toml(text, "account", "/base", "file")
    host, host_problems = parse_policy_toml(text + "forbid_bypass = true\n", "host", "/", "file")

    assert problems == host_problems == ()
    assert layer == Layer("account", ("Bash(ls)",), ("Edit",), ("Bash(rm:*)",), "/base", "file")
    assert host.forbid_bypass


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[permission]\n", "unknown key 'permission'; did you mean permissions?"),
        ("[permissions]\ndenied = []\n", "unknown key 'denied'; did you mean deny?"),
        ("[permissions]\nforbid_bypass = true\n", "unknown key 'forbid_bypass'; known keys: deny, ask, allow"),
        ("[permissions]\ndeny = 'x'\n", "deny is not a list of strings"),
        ("permissions = 3\n", "permissions is not a table"),
        ("nonsense", "file: Expected"),
        ("x = " + "[" * 30_000, "not a TOML file"),
        ("#" * (LARGEST_FILE + 1), "longer than 65536 characters"),
    ],
)
def test_an_unreadable_policy_file_is_reported_and_makes_everything_ask(text: str, problem: str) -> None:
    """The file might have denied anything."""
    layer, problems = parse_policy_toml(text, "account", "/", "file")

    assert any(problem in line for line in problems), problems
    assert compile_policy([layer], home="/").broken is not None


def test_an_invalid_bypass_setting_forbids_bypass() -> None:
    """The host probably meant to forbid it."""
    layer, problems = parse_policy_toml("[permissions]\nforbid_bypass = 'yes'\n", "host", "/", "file")

    assert layer.forbid_bypass
    assert "neither true nor false" in problems[0]
