"""The two readings of a command line: the strict subset and the grammar of tree-sitter."""

from __future__ import annotations

import pytest

from hutch_daemon.permissions.searching import everything_in
from hutch_daemon.permissions.shell.grammar import LONGEST, find
from hutch_daemon.permissions.shell.reader import NotUnderstoodError, understand
from hutch_daemon.permissions.shell.words import Word


def words(line: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in understand(line) if command.words]


def found(line: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in find(line).commands if command.words]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("git status", [["git", "status"]]),
        ("  a\tb  ", [["a", "b"]]),
        ("a && b || c; d & e | f |& g\nh", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"], ["g"], ["h"]]),
        ("a 'b c'\"d e\"f\\ g", [["a", "b cd ef g"]]),
        ('a "\\$x \\"y\\" \\z"', [["a", '$x "y" \\z']]),
        ("a b#c # d\ne", [["a", "b#c"], ["e"]]),
        ("a 2>/dev/null b >&2 c", [["a", "b", "c"]]),
        ("(a && b); c", [["a"], ["b"], ["c"]]),
        ("a \\\n b", [["a", "b"]]),
        ("a HEAD~1 x@{0} {}", [["a", "HEAD~1", "x@{0}", "{}"]]),
        ("a ''", [["a", ""]]),
        ("\n\na\n\n", [["a"]]),
    ],
)
def test_a_line_of_the_subset_gives_its_commands(line: str, wanted: list[list[str]]) -> None:
    """The commands have the words that the shell would pass on, and the grammar finds the same."""
    assert words(line) == wanted
    assert found(line) == wanted


@pytest.mark.parametrize(
    "line",
    [
        "a $x",
        'a "$x"',
        "a `b`",
        "a $(b)",
        "a {b,c}",
        "a <(b)",
        "a <<E\nE",
        "a <<< b",
        "x=$y a",
        "if a; then b; fi",
        "{ a; }",
        "! a",
        "a;;b",
        "a &&",
        "&& a",
        "a 'b",
        'a "b',
        "a \\",
        "((a))",
        "f() { a; }",
        "a)",
        "(a",
        "()",
        "a > $x",
        "a >& b",
        "a <> b",
        "{fd}>x a",
        "a ~bob",
        "a b=~/x",
        "[[ a ]]",
        "é",
        "a\\\nb",
        "a \u00a0b",
        "=a",
        "*x",
        "x=1",
        ">x",
        "a (b)",
        "(a) b",
        "(a) >x",
        "a 'b'~ x:~",
        "'~' a",
        "a '~/x'",
        "a $'b'",
        "coproc a",
        "a | | b",
        "a & & b",
        "$a",
        "a > b*",
    ],
)
def test_a_line_outside_the_subset_is_refused(line: str) -> None:
    """The strict reading refuses a line with any construct that it does not know."""
    with pytest.raises(NotUnderstoodError):
        understand(line)


@pytest.mark.parametrize(
    "line",
    [
        "a; rm x",
        "a $(rm x)",
        'a "`rm x`"',
        "a <(rm x)",
        "if a; then rm x; fi",
        "f() { rm x; }",
        "a <<E\n$(rm x)\nE",
        "! rm x",
        "a <<E\n`rm x`\nE",
        "a ${b:-$(rm x)}",
        "a $((c[$(rm x)]))",
        "for f in a; do rm x; done",
        "(a; (rm x))",
        "a |& rm x",
        "a=b rm x",
        "r\\\nm x",
        "r''m x",
        "\\rm x",
        "<f rm x",
        "rm >f x",
        "a && rm >f x",
        "a 'b\nrm x",
        "{ rm x; }",
        "a & rm x",
    ],
)
def test_every_command_is_found(line: str) -> None:
    """The grammar finds a command anywhere in a line."""
    assert ["rm", "x"] in found(line)


def test_a_glob_pattern_is_marked_as_inexact() -> None:
    """Both readings mark a word that the shell would expand."""
    wanted = (Word("ls"), Word("*.py", sure=False), Word("*.py"))

    assert understand("ls *.py '*.py'")[0].words == wanted
    assert find("ls *.py '*.py'").commands[0].words == wanted


def test_redirections_are_reads_and_writes() -> None:
    """Files of redirections are listed apart from the command's words."""
    (command,) = understand("a <in 2>>log >out 2>&1")

    assert [word.text for word in command.reads] == ["in"]
    assert [word.text for word in command.writes] == ["log", "out"]
    assert [word.text for word in find("a <in 2>>log >out 2>&1").commands[0].writes] == ["log", "out"]


@pytest.mark.parametrize(
    "piece", ["$(", "(", "`", "{", "a=(", "x() ", "[[ (", "<<E ", "${", "<", "'", "if ", "\x00", "\ud800"]
)
def test_the_search_survives_any_nesting(piece: str) -> None:
    """The search accepts any text, and reports when it may have missed commands."""
    assert not find(piece * LONGEST).complete


def test_a_line_that_is_too_long_for_the_grammar_is_still_searched() -> None:
    """Beyond ten thousand characters a rough search finds commands, and the result is marked incomplete."""
    result = find("echo " + "a" * LONGEST + "; rm x")

    assert not result.complete
    assert [[word.text for word in command.words] for command in result.commands[1:]] == [["rm", "x"]]


@pytest.mark.parametrize("piece", ["sudo ", "env ", "find -exec ", "docker ", "sudo -u ", "{} "])
def test_a_chain_of_wrappers_is_searched_within_bounds(piece: str) -> None:
    """Even a very long chain of programs that run programs yields no more words than the bound."""
    commands, complete = everything_in(piece * 1_900)

    assert not complete
    assert sum(len(command.words) for command in commands) < 20_000


def test_an_exit_status_variable_is_a_number() -> None:
    """`$?`, quoted or not, is understood; its word is then inexact in both readings."""
    (command,) = understand('a $? "b $?" \'$?\' "\\$?"')

    assert command.words == (Word("a"), Word("$?", False), Word("b $?", False), Word("$?"), Word("$?"))
    assert find('a $? "b $?" \'$?\' "\\$?"').commands[0].words == command.words
