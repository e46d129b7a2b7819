"""Tool calls in the common vocabulary, which rules judge and people read, from input that may be hostile."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch_shared import messages as m
from hutch_shared.vocabulary import DIFF_LIMIT, to_call, to_questions

CWD = "/w"


def called(tool: str, **tool_input: Any) -> m.ToolCall:
    return to_call(tool, tool_input, "c-1", CWD, with_diff=True)


@pytest.mark.parametrize(
    ("tool", "tool_input", "action", "fields"),
    [
        ("Bash", {"command": "ls", "description": "List"}, "run_command", {"command": "ls", "description": "List"}),
        ("Read", {"file_path": "/etc/hosts"}, "read", {"paths": ("/etc/hosts",)}),
        ("Read", {"file_path": "a/b"}, "read", {"paths": ("/w/a/b",)}),
        ("Read", {"file_path": "~/.netrc"}, "read", {"paths": ("~/.netrc",)}),
        ("LS", {}, "search", {"paths": ("/w",)}),
        ("LS", {"path": "a"}, "search", {"paths": ("/w/a",)}),
        ("Write", {"file_path": "/w/a", "content": "x"}, "edit", {"paths": ("/w/a",)}),
        ("Edit", {"file_path": "a", "old_string": "x", "new_string": "y"}, "edit", {"paths": ("/w/a",)}),
        ("MultiEdit", {"file_path": "a", "edits": []}, "edit", {"paths": ("/w/a",)}),
        ("NotebookEdit", {"notebook_path": "n", "new_source": "x"}, "edit", {"paths": ("/w/n",)}),
        ("Glob", {"pattern": "*.py"}, "search", {"paths": ("/w",), "query": "*.py"}),
        ("Glob", {"pattern": "/etc/*"}, "search", {"paths": ("/w", "/etc"), "query": "/etc/*"}),
        ("Grep", {"pattern": "/etc/*"}, "search", {"paths": ("/w",), "query": "/etc/*"}),
        ("Grep", {"pattern": "x", "path": "/etc"}, "search", {"paths": ("/etc",), "query": "x"}),
        ("WebFetch", {"url": "https://a.b/c", "prompt": "p"}, "fetch", {"url": "https://a.b/c", "query": "p"}),
        ("WebSearch", {"query": "q"}, "search", {"paths": (), "query": "q"}),
        ("Task", {"prompt": "do", "description": "d"}, "other", {"query": "do", "description": "d"}),
        ("BashOutput", {"bash_id": "b1"}, "other", {"description": "background shell b1"}),
        ("TodoWrite", {"todos": []}, "other", {}),
        ("AskUserQuestion", {"questions": []}, "question", {}),
        ("ExitPlanMode", {"plan": "p"}, "plan", {}),
        ("mcp__git__log", {}, "mcp", {"server": "git", "tool": "log"}),
        ("mcp__git__a__b", {}, "mcp", {"server": "git", "tool": "a__b"}),
        ("mcp__git", {}, "mcp", {"server": "git", "tool": None}),
        ("mcp__", {}, "mcp", {"server": None, "tool": None}),
        ("Frobnicate", {"file_path": "/etc/passwd"}, "other", {"paths": ()}),
    ],
)
def test_a_call_gets_the_common_fields(
    tool: str, tool_input: dict[str, Any], action: str, fields: dict[str, Any]
) -> None:
    """Each tool has its action and the fields by which the action is judged; the input stays unchanged."""
    call = to_call(tool, tool_input, "c-1", CWD)

    assert (call.action, call.agent_tool, call.input, call.call_id) == (action, tool, tool_input, "c-1")
    assert {name: getattr(call, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("**/*.py", ("/w/a",)),
        ("x..y/...", ("/w/a",)),
        ("{b,c}/*", ("/w/a",)),
        ("/etc/passwd", ("/w/a", "/etc/passwd")),
        ("/etc/ssh/*_key", ("/w/a", "/etc/ssh")),
        ("/et*/passwd", ("/w/a", "/")),
        ("~/.ssh/*", ("/w/a", "~/.ssh")),
        ("../b/*", ("/w/a", "/w/a/../b")),
        ("*/../../b", ("/w/a", "/")),
        ("{/etc,b}/*", ("/w/a", "/")),
        ("b/{..,c}/*", ("/w/a", "/")),
        (r"\/etc/*", ("/w/a", "/etc")),
    ],
)
def test_a_pattern_that_leads_elsewhere_is_judged_there(pattern: str, paths: tuple[str, ...]) -> None:
    """All files that a glob can find lie below the paths of its call."""
    assert called("Glob", path="a", pattern=pattern).paths == paths


def test_a_diff_is_made_only_on_request() -> None:
    """Without a diff the call has the same other fields."""
    with_diff = called("Write", file_path="/w/a", content="x")
    without = to_call("Write", {"file_path": "/w/a", "content": "x"}, "c-1", CWD)

    assert with_diff.diff == "--- /w/a\n+++ /w/a\n@@ -0,0 +1 @@\n+x"
    assert without == msgspec.structs.replace(with_diff, diff=None)


def test_an_edit_shows_what_changes() -> None:
    """The call has a unified diff for the permission request."""
    call = called("Edit", file_path="/w/a", old_string="one\ntwo\n", new_string="one\nthree\n")

    assert call.diff == "--- /w/a\n+++ /w/a\n@@ -1,2 +1,2 @@\n one\n-two\n+three"


def test_several_edits_are_one_diff() -> None:
    """The diff has all changes of the file, in order."""
    edits = [{"old_string": "a", "new_string": "b"}, {"old_string": "c", "new_string": "d"}]

    diff = called("MultiEdit", file_path="/w/a", edits=edits).diff

    assert diff is not None
    assert [line for line in diff.splitlines()[2:] if not line.startswith("@@")] == ["-a", "+b", "-c", "+d"]


@pytest.mark.parametrize("text", ["x\n" * 1_000_000, "x" * 1_000_000, "".join(f"{n}\n" for n in range(200_000))])
def test_a_diff_is_bounded(text: str) -> None:
    """A huge diff is cut and ends with a note, so that it does not stall the executor."""
    diff = called("Edit", file_path="/w/a", old_string=text, new_string="y" + text).diff

    assert diff is not None
    assert len(diff) < DIFF_LIMIT + 1000
    assert "… (cut)" in diff


def test_many_edits_are_not_compared_one_by_one_for_ever() -> None:
    """A call compares a bounded number of lines; of the rest only the beginning is shown."""
    edits = [{"old_string": "a\n" * 400, "new_string": "a\n" * 399 + "b\n"} for _ in range(2)]

    diff = called("MultiEdit", file_path="/w/a", edits=edits).diff

    assert diff is not None
    assert diff.splitlines()[-1] == "+b"
    assert "@@ -1,400 +1,400 @@" in diff.splitlines()


def test_questions_are_read_with_their_choices() -> None:
    """A question keeps its header, its text and its choices."""
    found = to_questions(
        {
            "questions": [
                {
                    "question": "Which?",
                    "header": "H",
                    "multiSelect": True,
                    "options": [{"label": "A", "description": "first"}, {"label": 3}, "B"],
                },
                {"header": "no question"},
                7,
            ]
        }
    )

    assert found == (m.Question("Which?", "H", (m.Choice("A", "first"),), several=True),)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)
TOOLS = [
    "Bash",
    "Read",
    "Edit",
    "MultiEdit",
    "Write",
    "NotebookEdit",
    "LS",
    "Glob",
    "BashOutput",
    "WebFetch",
    "mcp__",
    "Task",
    "",
]
FIELDS = [
    "command",
    "file_path",
    "edits",
    "old_string",
    "pattern",
    "path",
    "url",
    "questions",
    "description",
    "bash_id",
]


@given(
    st.sampled_from(TOOLS),
    st.dictionaries(st.sampled_from(FIELDS), json_values),
)
def test_no_input_raises(tool: str, tool_input: dict[str, Any]) -> None:
    """A field of a wrong type counts as missing."""
    call = to_call(tool, tool_input, "c-1", CWD, with_diff=True)

    to_questions(tool_input)
    assert call.input is tool_input
    assert call.command is None or isinstance(call.command, str)
