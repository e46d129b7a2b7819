"""Rules as people write them."""

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
def test_what_allows_is_read_narrowly(text: str, command: str, spelled: int | None) -> None:
    """A rule that allows compares words from the first one on, and says how many it spells."""
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
def test_what_denies_is_read_broadly(text: str, command: str, fit: str) -> None:
    """A rule that asks or denies sees through options, order, case and paths, and says where it cannot tell."""
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
def test_what_is_no_rule_is_refused(text: str) -> None:
    """A text that cannot be read as a rule that allows is refused with a reason for a person."""
    with pytest.raises(BadRuleError, match=r"\w+"):
        parse_rule(text, "allow", "account", "test", base="/w", home="/home/u")


def test_a_line_of_several_commands_denies_nothing() -> None:
    """Only a rule that allows may be an exact line: what is to be denied is named command by command."""
    assert rule("Bash(a && b)").line == "a && b"
    with pytest.raises(BadRuleError, match="command by command"):
        rule("Bash(a && b)", "deny")


@pytest.mark.parametrize(("mine", "common"), [("Bash(ls)", "run_command(ls)"), ("Bash(ls:*)", "Bash(ls *)")])
def test_a_rule_may_be_written_in_two_ways(mine: str, common: str) -> None:
    """Claude's names and the common ones are the same rule, as are the two ways to leave the end open."""
    first, second = rule(mine), rule(common)

    assert (first.words, first.open) == (second.words, second.open)


def test_a_rule_for_a_server_is_one_for_its_tools() -> None:
    """`mcp__server` and `mcp__server__*` name all tools of this server and of no other one."""
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
def test_a_star_is_any_characters(pieces: tuple[str, ...], text: str, fits: bool) -> None:
    """Pieces between stars stand in the text in order and do not overlap."""
    assert Glob(pieces).fits(text) is fits
