"""The MCP server of a tool is one of the session's, and a rule for one server never allows a tool of another."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from random import Random

import pytest

from hutch_daemon.permissions.layers import Layer, compile_policy
from hutch_daemon.permissions.policy import Verdict, judge
from hutch_daemon.permissions.rules import BadRuleError, parse_rule
from hutch_shared.messages import PermissionMode
from hutch_shared.vocabulary import mcp_readings, to_call
from tests.sampling import seed


def decide(
    tool: str,
    servers: Collection[str] | None,
    allow: tuple[str, ...] = (),
    deny: tuple[str, ...] = (),
    mode: PermissionMode = "ask",
) -> Verdict:
    policy = compile_policy([Layer("account", allow=allow, deny=deny)], home="/home/u")
    call = to_call(tool, {}, "c", "/w", servers=servers)
    return judge(policy, call, mode=mode, cwd="/w", real={}, home="/home/u", workspace="/w", mcp_servers=servers)


@pytest.mark.parametrize(
    ("tool", "servers", "rule", "decision"),
    [
        ("mcp__foo__bar__do", ["foo__bar"], "mcp__foo", "ask"),
        ("mcp__foo__bar__do", ["foo__bar"], "mcp__foo__*", "ask"),
        ("mcp__foo__bar__do", ["foo__bar"], "mcp__foo__bar__*", "allow"),
        ("mcp__foo__bar__do", ["foo__bar"], "mcp__foo__bar__do", "allow"),
        ("mcp__foo__bar__do", ["foo__bar"], "mcp__foo__bar", "ask"),
        ("mcp__foo__bar__do", ["foo"], "mcp__foo", "allow"),
        ("mcp__foo__bar__do", ["foo", "foo__bar"], "mcp__foo", "ask"),
        ("mcp__foo__bar__do", ["foo", "foo__bar"], "mcp__foo__bar__*", "allow"),
        ("mcp__foo__do", ["foo", "foo__bar"], "mcp__foo", "allow"),
        ("mcp__foo__bar__do", ["baz"], "mcp__foo", "ask"),
        ("mcp__foo__do", [], "mcp__foo", "ask"),
        ("mcp__foo__do", None, "mcp__foo", "allow"),
        ("mcp__foo__bar__do", None, "mcp__foo", "ask"),
        ("mcp__foo__bar__do", None, "mcp__foo__bar__do", "allow"),
        ("mcp__foo_bar__do", ["foo.bar"], "mcp__foo_bar", "allow"),
        ("mcp__foo_bar__do", ["foo.bar", "foo bar"], "mcp__foo_bar", "ask"),
        ("mcp__foo___do", ["foo_"], "mcp__foo", "ask"),
        ("mcp__foo___do", ["foo_"], "mcp__foo_", "allow"),
        ("mcp__plugin__foo__do", ["plugin:foo"], "mcp__plugin", "ask"),
        ("mcp__foo__bar__do", ["foo😀bar", "foo"], "mcp__foo", "ask"),
        ("mcp__foo__bar__do", ["foo😀bar"], "mcp__foo__bar__*", "allow"),
    ],
)
def test_a_rule_that_allows_spells_the_server(tool: str, servers: list[str] | None, rule: str, decision: str) -> None:
    """With two servers that it may be of, a tool must be allowed as one of each; of no known server, it is asked about.

    Outside of a session the servers are not known, so every way to read the name counts.
    """
    assert decide(tool, servers, allow=(rule,)).decision == decision


@pytest.mark.parametrize(
    ("servers", "rule"),
    [
        (["foo__bar"], "mcp__foo"),
        (["foo__bar"], "mcp__foo__bar"),
        (["foo__bar"], "MCP__foo".lower()),
        (["foo", "foo__bar"], "mcp__foo__bar"),
        (["baz"], "mcp__foo__bar"),
        (None, "mcp__foo__bar"),
        (["foo__bar"], "mcp__Foo__Bar__DO"),
    ],
)
def test_a_rule_that_denies_counts_for_every_server_it_may_name(servers: list[str] | None, rule: str) -> None:
    """A rule that denies has the broader meaning, also in the mode bypass."""
    for mode in ("ask", "bypass"):
        verdict = decide("mcp__foo__bar__do", servers, allow=("mcp__foo__bar__do",), deny=(rule,), mode=mode)
        assert verdict.decision == "deny"


def test_the_request_shows_the_server_and_why_it_is_asked() -> None:
    """The longest name of the session's servers is shown; the sentence names what is unclear."""
    call = to_call("mcp__foo__bar__do", {}, "c", "/w", servers=["foo", "foo__bar"])
    both = decide("mcp__foo__bar__do", ["foo", "foo__bar"], allow=("mcp__foo",))
    none = decide("mcp__foo__bar__do", ["baz"])

    assert (call.server, call.tool) == ("foo__bar", "do")
    assert both.why.startswith("The tool may be of the MCP server foo__bar, and no rule")
    assert none.why == "The session has no MCP server of which mcp__foo__bar__do could be a tool."
    assert none.suggestions == ()


def test_the_suggested_rule_allows_the_tool() -> None:
    """It is the tool's whole name."""
    for servers in (["foo__bar"], ["foo", "foo__bar"], ["foo"], None):
        (suggestion,) = decide("mcp__foo__bar__do", servers).suggestions
        assert decide("mcp__foo__bar__do", servers, allow=(suggestion.rule,)).decision == "allow"


def test_a_name_of_any_length_is_judged_at_once() -> None:
    """A name that no provider accepts has no reading, so no rule allows it."""
    tool = "mcp__" + "a__" * 500_000

    assert mcp_readings(tool, None) == ()
    assert decide(tool, None, allow=("mcp__a",)).decision == "ask"
    assert decide(tool, ["a"], deny=("mcp__a",)).decision == "deny"


# ---------------------------------------------------------------- generated names

PARTS = ("foo", "bar", "_", "__", "a", "foo__bar", "Foo", "-", ".", " ", ":", "é", "😀", "", "\x00", "1", "*", "do")


def _word(random: Random) -> str:
    return "".join(random.choice(PARTS) for _ in range(random.randint(1, 4)))


def _owners(tool: str, servers: list[str]) -> list[str]:
    """Return the spelled names of the servers that may own a tool: the specification, written plainly."""
    found = []
    for server in servers:
        units = server.replace("😀", "??")
        for name in {server, units, units.replace(":", "__")}:
            spelled = "".join(char if char.isascii() and (char.isalnum() or char in "_-") else "_" for char in name)
            if tool.startswith(f"mcp__{spelled}__") and tool != f"mcp__{spelled}__":
                found.append(spelled)
    return found


def variants(count: int, number: int) -> dict[str, int]:
    """Judge random tools of random servers by one random rule; return how often each decision was made."""
    random = Random(number)
    decisions: dict[str, int] = {}
    for at in range(count):
        servers = list(dict.fromkeys(_word(random) for _ in range(random.randint(0, 3))))
        owner = random.choice([*servers, _word(random)])
        tool = f"mcp__{owner}__{_word(random)}" if random.random() < 0.9 else _word(random)
        rule = random.choice([f"mcp__{owner}", f"mcp__{owner}__*", tool, f"mcp__{_word(random)}", f"{tool[:-1]}*"])
        try:
            parse_rule(rule, "allow", "account", "test", base="/", home="/")
        except BadRuleError:
            continue
        allowed = decide(tool, servers, allow=(rule,)).decision
        denied = decide(tool, servers, deny=(rule,)).decision
        owners = _owners(tool, servers)
        where = f"variant {at}: {tool!r} of {servers!r} by {rule!r}"
        if tool.startswith("mcp__"):
            if allowed == "allow":
                assert owners, where
                server_rule = f"{rule}__*" if "__" not in rule.removeprefix("mcp__") else rule
                for spelled in owners:
                    assert server_rule.startswith(f"mcp__{spelled}__"), where
                assert fnmatchcase(tool, server_rule.replace("[", "[[]")), where
                assert denied == "deny", where
            if len(owners) == 1 and rule == f"mcp__{owners[0]}__*":
                assert (allowed, denied) == ("allow", "deny"), where
            if servers and {server for server, _ in mcp_readings(tool, servers)} != set(owners):
                raise AssertionError(where)
        key = f"{allowed}/{denied}"
        decisions[key] = decisions.get(key, 0) + 1
    return decisions


def test_no_name_makes_a_rule_allow_another_servers_tool() -> None:
    """Of 500 random servers, tools and rules, what is allowed is spelled by the rule, up to the end of the server."""
    print(f"seed {seed()}")

    decisions = variants(500, seed())

    assert decisions.get("allow/deny", 0) > 20, f"seed {seed()}: {decisions}"


@pytest.mark.full
def test_no_name_of_many_makes_a_rule_allow_another_servers_tool() -> None:
    """The same of 20,000."""
    print(f"seed {seed()}", variants(20_000, seed()))
