"""Layers, and what no layer can do to another one."""

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
def test_no_layer_loosens_what_the_host_denies(name: LayerName, rule: str) -> None:
    """What the host denies is denied, whatever another layer allows, even a trusted project."""
    verdict = decide([HOST, Layer(name, allow=(rule,), base="/w", trusted=True)], "curl x")

    assert (verdict.decision, verdict.layer) == ("deny", "host")


@pytest.mark.parametrize("name", ["account", "project", "session", "answered"])
def test_no_layer_loosens_what_the_host_asks(name: LayerName) -> None:
    """What the host asks about is asked, whatever another layer allows."""
    verdict = decide([Layer(name, allow=("Bash(git push:*)",), base="/w", trusted=True), HOST], "git push")

    assert (verdict.decision, verdict.layer) == ("ask", "host")


@pytest.mark.parametrize("mode", ["ask", "accept_edits", "plan", "bypass", "unattended"])
def test_no_mode_loosens_what_the_host_denies(mode: PermissionMode) -> None:
    """A deny rule holds in every mode."""
    assert decide([HOST], "curl x", mode).decision == "deny"


def test_the_host_can_forbid_bypass() -> None:
    """Where the host forbids it, `bypass` decides as `ask` does."""
    assert decide([Layer("host")], "make all", "bypass").decision == "allow"
    assert decide([HOST], "make all", "bypass").decision == "ask"


@pytest.mark.parametrize("name", ["account", "project", "session", "answered"])
def test_only_the_host_forbids_or_permits_bypass(name: LayerName) -> None:
    """What another layer says of `bypass` changes nothing."""
    assert not compile_policy([Layer(name, forbid_bypass=True)], home="/").bypass_forbidden
    assert compile_policy([HOST, Layer(name, forbid_bypass=False)], home="/").bypass_forbidden


def test_a_repository_allows_itself_nothing() -> None:
    """A project's rules that allow count only when its owner trusted the file; its other rules always do."""
    untrusted = Layer("project", ("Bash(make all)",), (), ("Bash(rm:*)",), "/w", ".hutch/policy.toml")
    trusted = replace(untrusted, trusted=True)

    assert decide([untrusted], "make all").decision == "ask"
    assert decide([trusted], "make all").decision == "allow"
    assert decide([untrusted], "rm x").decision == "deny"
    several = replace(untrusted, allow=("Bash(make all)", "Bash(make)"))
    (one,), (two,) = (compile_policy([layer], home="/").problems for layer in (untrusted, several))
    assert one.endswith(": 1 rule that allows is ignored until the project is trusted")
    assert two.endswith(": 2 rules that allow are ignored until the project is trusted")


def test_a_bad_rule_that_allows_is_left_out_and_told() -> None:
    """A rule that cannot be read allows nothing, and does not harm the others."""
    layers = [Layer("account", allow=("Bash(ls", "Bash(ls:*)"), origin="mine")]

    assert decide(layers, "ls").decision == "allow"
    assert compile_policy(layers, home="/").problems == (
        "mine: allow 'Bash(ls': it is not of the form Tool or Tool(specifier)",
    )


@pytest.mark.parametrize("effect", ["ask", "deny"])
def test_a_bad_rule_that_stops_makes_everything_ask(effect: str) -> None:
    """Nobody knows what it was to stop."""
    ask, deny = (("Bash(rm",), ()) if effect == "ask" else ((), ("Bash(rm",))
    layers = [Layer("account", ("Bash(ls:*)",), ask, deny, origin="mine")]

    assert decide(layers, "ls").decision == "ask"
    assert "cannot be read" in decide(layers, "ls").why
    assert decide(layers, "ls", "bypass").decision == "ask"
    assert decide(layers, "ls", "unattended").decision == "deny"


def test_a_policy_file_is_read() -> None:
    """The lists of a file become a layer; only the host's may forbid `bypass`."""
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
def test_what_is_wrong_with_a_file_is_told_and_everything_asks(text: str, problem: str) -> None:
    """A file that cannot be read as a policy might have denied anything."""
    layer, problems = parse_policy_toml(text, "account", "/", "file")

    assert any(problem in line for line in problems), problems
    assert compile_policy([layer], home="/").broken is not None


def test_a_wrong_word_about_bypass_forbids_it() -> None:
    """A host that tried to forbid `bypass` and failed has forbidden it."""
    layer, problems = parse_policy_toml("[permissions]\nforbid_bypass = 'yes'\n", "host", "/", "file")

    assert layer.forbid_bypass
    assert "neither true nor false" in problems[0]
