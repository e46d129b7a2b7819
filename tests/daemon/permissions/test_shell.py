"""The two readings of a line."""

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
def test_a_plain_line_is_understood(line: str, wanted: list[list[str]]) -> None:
    """A line of the subset gives its commands, as the shell would hand them on, and the grammar finds the same."""
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
def test_what_is_outside_the_subset_is_refused(line: str) -> None:
    """A line that holds anything the strict reading does not know is not understood at all."""
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
    """A command is found wherever it stands in the line."""
    assert ["rm", "x"] in found(line)


def test_a_pattern_of_file_names_is_not_sure() -> None:
    """A word that the shell would expand is known for it in both readings."""
    wanted = (Word("ls"), Word("*.py", sure=False), Word("*.py"))

    assert understand("ls *.py '*.py'")[0].words == wanted
    assert find("ls *.py '*.py'").commands[0].words == wanted


def test_redirections_are_reads_and_writes() -> None:
    """The files that a command is connected to are kept apart from its words."""
    (command,) = understand("a <in 2>>log >out 2>&1")

    assert [word.text for word in command.reads] == ["in"]
    assert [word.text for word in command.writes] == ["log", "out"]
    assert [word.text for word in find("a <in 2>>log >out 2>&1").commands[0].writes] == ["log", "out"]


@pytest.mark.parametrize(
    "piece", ["$(", "(", "`", "{", "a=(", "x() ", "[[ (", "<<E ", "${", "<", "'", "if ", "\x00", "\ud800"]
)
def test_nesting_has_no_depth_that_breaks_the_search(piece: str) -> None:
    """The search for commands takes any text, and says when it may have missed some."""
    assert not find(piece * LONGEST).complete


def test_a_line_that_is_too_long_for_the_grammar_is_still_searched() -> None:
    """Behind ten thousand characters a command is found roughly, and the result is marked incomplete."""
    result = find("echo " + "a" * LONGEST + "; rm x")

    assert not result.complete
    assert [[word.text for word in command.words] for command in result.commands[1:]] == [["rm", "x"]]


@pytest.mark.parametrize("piece", ["sudo ", "env ", "find -exec ", "docker ", "sudo -u ", "{} "])
def test_what_runs_what_runs_is_searched_within_bounds(piece: str) -> None:
    """A program that runs one that runs one, very often, gives no more words than the search may look at."""
    commands, complete = everything_in(piece * 1_900)

    assert not complete
    assert sum(len(command.words) for command in commands) < 20_000


def test_the_result_of_the_command_before_is_a_number() -> None:
    """`$?` is read, in double quotes too; its word is then not known exactly, as the grammar has it."""
    (command,) = understand('a $? "b $?" \'$?\' "\\$?"')

    assert command.words == (Word("a"), Word("$?", False), Word("b $?", False), Word("$?"), Word("$?"))
    assert find('a $? "b $?" \'$?\' "\\$?"').commands[0].words == command.words
