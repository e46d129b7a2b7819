"""The parsing of rules."""

from __future__ import annotations

import pytest

from hutch_daemon.permissions.rules import BadRuleError, CommandRule, Effect, Glob, NameRule, parse_rule
from hutch_daemon.permissions.shell.words import Word


def rule(text: str, effect: Effect = "allow") -> CommandRule:
    parsed = parse_rule(text, effect, "account", "test", base="/w", home="/home/u")
    assert isinstance(parsed, CommandRule)
    return parsed


def argv(text: str) -> tuple[Word, ...]:
    return tuple(Word(word.removesuffix("?"), not word.endswith("?")) for word in text.split())


@pytest.mark.parametrize(
    ("text", "command", "spelled"),
    [
        ("Bash(git status)", "git status", 2),
        ("Bash(git status)", "git status -s", None),
        ("Bash(git status:*)", "git status -s", 2),
        ("Bash(git status *)", "git status", 2),
        ("Bash(git status:*)", "git stash", None),
        ("Bash(git * main)", "git merge main", 1),
        ("Bash(git * main)", "git -f main", None),
        ("Bash(npm run test*)", "npm run test:e2e -x", 3),
        ("Bash(git status:*)", "/usr/bin/git status", None),
        ("Bash(git status:*)", "git status?", None),
        ("Bash", "anything at all", 0),
    ],
)
def test_an_allow_rule_is_read_narrowly(text: str, command: str, spelled: int | None) -> None:
    """The rule compares words from the first one on, and returns how many of them it spells."""
    assert rule(text).spells(argv(command)) == spelled


@pytest.mark.parametrize(
    ("text", "command", "fit"),
    [
        ("Bash(git push:*)", "git push", "yes"),
        ("Bash(git push:*)", "git -C /x --no-pager push o", "yes"),
        ("Bash(git push:*)", "/usr/bin/GIT push", "yes"),
        ("Bash(git push:*)", "git commit -m push", "no"),
        ("Bash(git push:*)", "git x?", "maybe"),
        ("Bash(git push:*)", "x? push", "maybe"),
        ("Bash(git push)", "git push origin", "no"),
        ("Bash(git push)", "git push -f", "yes"),
        ("Bash(rm -rf:*)", "rm -f -r x", "yes"),
        ("Bash(rm -rf:*)", "rm -f x", "no"),
        ("Bash(git push --force:*)", "git push o --forc", "yes"),
        ("Bash(git * main)", "git push -u origin main", "yes"),
        ("Bash(* main)", "anything main", "yes"),
        ("Bash", "anything", "yes"),
    ],
)
def test_a_deny_rule_is_read_broadly(text: str, command: str, fit: str) -> None:
    """An ask or deny rule matches across options, order, case and paths, and says where it cannot tell."""
    assert rule(text, "deny").forbids(argv(command)) == fit


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Bash(",
        "Bash(ls",
        "Bash()",
        "Bash( )",
        "(ls)",
        "bash ls",
        "Bash(:*)x",
        "Bash('a)",
        "Read(../x)",
        "Read(!x)",
        "Read(~bob/x)",
        "WebFetch(example.com)",
        "WebFetch(domain:)",
        "WebFetch(domain:a b)",
        "WebFetch(domain:0x7f.1)",
        "mcp__",
        "mcp__*__x",
        "mcp__a__",
        "Task(x)",
        "Fro*",
        "Bash(*x)",
        "Bash(a | b:*)",
        "Read(" + "x" * 2000 + ")",
        "Read(a\x00)",
    ],
)
def test_an_unreadable_rule_is_refused(text: str) -> None:
    """An unreadable allow rule is refused with a reason for the user."""
    with pytest.raises(BadRuleError, match=r"\w+"):
        parse_rule(text, "allow", "account", "test", base="/w", home="/home/u")


def test_a_deny_rule_names_one_command() -> None:
    """Only an allow rule may be a whole line of several commands."""
    assert rule("Bash(a && b)").line == "a && b"
    with pytest.raises(BadRuleError, match="command by command"):
        rule("Bash(a && b)", "deny")


@pytest.mark.parametrize(("mine", "common"), [("Bash(ls)", "run_command(ls)"), ("Bash(ls:*)", "Bash(ls *)")])
def test_two_spellings_are_the_same_rule(mine: str, common: str) -> None:
    """Claude's tool names equal the common ones, and so do the two spellings of an open end."""
    first, second = rule(mine), rule(common)

    assert (first.words, first.open) == (second.words, second.open)


def test_a_rule_for_an_mcp_server_covers_its_tools() -> None:
    """`mcp__server` and `mcp__server__*` name all tools of this server and of no other."""
    short = parse_rule("mcp__a", "allow", "account", "test", base="/", home="/")
    long = parse_rule("mcp__a__*", "allow", "account", "test", base="/", home="/")

    assert isinstance(short, NameRule)
    assert isinstance(long, NameRule)
    assert short.name == long.name
    assert short.covers("mcp__a__x")
    assert not short.covers("mcp__ab__x")


@pytest.mark.parametrize(
    ("pieces", "text", "fits"),
    [
        (("a", "b"), "ab", True),
        (("a", "b"), "axb", True),
        (("aa", "aa"), "aaa", False),
        (("", "x", ""), "axb", True),
        (("", "x", "x", ""), "x", False),
        (("a",), "b", False),
        (("", ""), "", True),
    ],
)
def test_a_star_matches_any_characters(pieces: tuple[str, ...], text: str, fits: bool) -> None:
    """The pieces between stars occur in the text in order, without overlap."""
    assert Glob(pieces).fits(text) is fits
