from __future__ import annotations

import os
import pty
from io import StringIO

import anyio
import msgspec
import pytest

from hutch_client.console import Console, Piece
from hutch_client.show import Screen
from hutch_shared import messages as m
from hutch_shared.events import Event
from hutch_shared.times import now_ms, to_wire
from tests.client.fake_daemon import CALL, PERMISSION, event


def _read(console: Console, *events: Event) -> str:
    """Return all text that a user sees, in order."""
    return "".join(piece.text for one in events for piece in console.feed(one))


def _call(**fields: object) -> dict[str, object]:
    return {"call": msgspec.to_builtins(msgspec.structs.replace(CALL, **fields))}


def test_a_turn_reads_from_prompt_to_cost() -> None:
    """The console shows the prompt, the answer, a tool with its output, and the end with its time and price."""
    seen = _read(
        Console(),
        event(1, "turn_started", {"prompt": "fix it\nplease", "number": 1}),
        event(2, "text", {"text": "I look first."}),
        event(3, "tool_call", _call(description="install")),
        event(4, "tool_result", {"call_id": "c1", "text": "added 1 package\n"}),
        event(5, "text", {"text": "Done.\n"}),
        event(6, "usage", {"input_tokens": 5}),
        event(
            7,
            "turn_ended",
            {
                "state": "completed",
                "reason": "end_turn",
                "message": "",
                "result": "Done.",
                "usage": {"input_tokens": 1200, "cache_read_tokens": 34, "output_tokens": 56, "usd": 0.0123},
            },
        ),
    )

    assert seen == (
        "❯ fix it\n  please\n"
        "\nI look first.\n"
        "\n● run npm install  # install\n"
        "  ⎿ added 1 package\n"
        "\nDone.\n"
        "\n✓ done in 6.0 s · 1,234 tokens in, 56 out, $0.0123\n"
    )


def test_only_the_agents_words_are_data() -> None:
    """Everything else is talk, so that a program can use standard output."""
    console = Console()

    pieces = [
        *console.feed(event(1, "tool_call", _call())),
        *console.feed(event(2, "text", {"text": "Words."})),
        *console.feed(event(3, "notice", {"word": "retry", "message": "again"})),
    ]

    assert "".join(piece.text for piece in pieces if piece.to == "data") == "Words.\n"


def test_text_is_shown_live_and_only_once() -> None:
    """At the end of a block only the text that its deltas lacked is shown."""
    console = Console(live=True)

    pieces = [
        console.feed(event(1, "text_delta", {"text": "Hel", "block": "b1"})),
        console.feed(event(2, "text_delta", {"text": "lo", "block": "b1"})),
        console.feed(event(3, "text", {"text": "Hello there", "block": "b1"})),
    ]

    assert pieces == [[Piece("data", "Hel")], [Piece("data", "lo")], [Piece("data", " there"), Piece("data", "\n")]]


def test_deltas_are_not_for_files() -> None:
    """A console that is not live shows whole blocks and no thinking."""
    seen = _read(
        Console(),
        event(1, "thinking", {"text": "hm"}),
        event(2, "text_delta", {"text": "Hel", "block": "b1"}),
        event(3, "text", {"text": "Hello", "block": "b1"}),
    )

    assert seen == "Hello\n"


def test_an_open_line_is_ended_first() -> None:
    """A tool call in the middle of a text begins a line of its own."""
    seen = _read(
        Console(live=True),
        event(1, "thinking_delta", {"text": "hm", "block": "b0"}),
        event(2, "text_delta", {"text": "Hel", "block": "b1"}),
        event(3, "tool_call", _call()),
    )

    assert seen == "hm\n\nHel\n\n● run npm install\n"


def test_an_edit_shows_its_diff_in_colour() -> None:
    """Added lines are green, removed ones red, and their places in the file cyan."""
    diff = "@@ -1 +1 @@\n-old\n+new\n same\n"
    seen = _read(
        Console(colour=True), event(1, "tool_call", _call(action="edit", command=None, paths=("a.py",), diff=diff))
    )

    assert seen == (
        "\x1b[34m●\x1b[0m \x1b[1medit\x1b[0m a.py\n"
        "    \x1b[36m@@ -1 +1 @@\x1b[0m\n"
        "    \x1b[31m-old\x1b[0m\n"
        "    \x1b[32m+new\x1b[0m\n"
        "     same\n"
    )


def test_long_output_is_cut_and_says_by_how_much() -> None:
    """The console says how many lines it leaves out; the record has them all."""
    text = "\n".join(f"line {number}" for number in range(30))
    seen = _read(Console(), event(1, "tool_call", _call()), event(2, "tool_result", {"call_id": "c1", "text": text}))

    assert seen.endswith("    line 7\n    … 22 more lines\n")


def test_results_of_parallel_calls_name_their_call() -> None:
    """A result that does not follow its call directly names the call."""
    seen = _read(
        Console(),
        event(1, "tool_call", _call()),
        event(2, "tool_call", _call(call_id="c2", action="read", command=None, paths=("b",))),
        event(3, "tool_result", {"call_id": "c1", "text": "", "is_error": True}),
    )

    assert seen == "● run npm install\n● read b\n  ⎿ run npm install:\n    (no output)\n"


def test_every_kind_of_call_has_its_words() -> None:
    """The line has the words of the common vocabulary if the call has an action there, otherwise the agent's own."""
    calls = [
        _call(call_id="1", action="fetch", command=None, url="https://x.org/"),
        _call(call_id="2", action="search", command=None, query="needle"),
        _call(call_id="3", action="mcp", command=None, server="db", tool="query", input={"sql": "x"}),
        _call(call_id="4", action="other", command=None, agent_tool="Todo", input={"a": 1}),
        _call(call_id="5", command="a\nb"),
    ]

    assert _read(Console(), *(event(at, "tool_call", call) for at, call in enumerate(calls))) == (
        '● fetch https://x.org/\n● search needle\n● db.query {"sql": "x"}\n● Todo {"a": 1}\n● run a\n    b\n'
    )


def test_a_request_shows_the_call_the_reason_and_the_rule_of_always() -> None:
    """A call that was shown just before is not shown again."""
    asked = msgspec.structs.replace(
        PERMISSION,
        why="no rule covers it",
        layer="account",
        suggestions=(m.Suggestion("Bash(npm install)", "this exact line"), m.Suggestion("Bash(npm ci)")),
    )
    question = event(2, "permission_asked", {"permission": asked})
    words = (
        "? Allow? p-0000000000000001\n"
        "    why: no rule covers it (account)\n"
        "    always: Bash(npm install) — this exact line\n"
        "        or: Bash(npm ci)\n"
    )

    assert _read(Console(), event(1, "tool_call", _call()), question) == f"● run npm install\n{words}"
    assert _read(Console(), question, event(3, "tool_call", _call())) == f"● run npm install\n{words}"


def test_a_request_hides_no_part_of_the_call() -> None:
    """The request shows long text and control characters completely."""
    command = "\n".join([f"echo {number}" for number in range(200)] + ["x\x1b]0;\x07y"])
    asked = msgspec.structs.replace(PERMISSION, call=msgspec.structs.replace(CALL, command=command))

    seen = _read(Console(), event(1, "permission_asked", {"permission": asked}))

    assert "    echo 199\n    x\\x1b]0;\\x07y\n? Allow?" in seen


def test_a_call_that_was_cut_is_shown_whole_in_its_request() -> None:
    """The user sees the whole diff before deciding."""
    diff = "".join(f"+line {number}\n" for number in range(100))
    call = msgspec.structs.replace(CALL, action="edit", command=None, paths=("a",), diff=diff)
    asked = msgspec.structs.replace(PERMISSION, call=call)
    console = Console()

    first = _read(console, event(1, "tool_call", {"call": call}))
    second = _read(console, event(2, "permission_asked", {"permission": asked}))

    assert first.endswith("    +line 59\n    … 40 more lines\n")
    assert second.endswith("    +line 99\n? Allow? p-0000000000000001\n")


def test_thinking_and_text_without_block_names_are_kept_apart() -> None:
    """Thinking and text each begin on a line of their own."""
    seen = _read(
        Console(live=True),
        event(1, "thinking_delta", {"text": "hm"}),
        event(2, "text_delta", {"text": "Hello"}),
        event(3, "text", {"text": "Hello"}),
    )

    assert seen == "hm\n\nHello\n"


def test_parameters_missing_in_the_headline_are_shown() -> None:
    """The user decides about them too; examples are a disabled sandbox, and a file's text without a diff."""
    risky = _call(input={"command": "npm install", "dangerouslyDisableSandbox": True, "run_in_background": False})
    write = _call(call_id="c2", action="edit", command=None, paths=("a",), input={"file_path": "a", "content": "x\x1b"})

    assert _read(Console(), event(1, "tool_call", risky), event(2, "tool_call", write)) == (
        '● run npm install\n    {\n      "dangerouslyDisableSandbox": true\n    }\n'
        '● edit a\n    {\n      "content": "x\\u001b"\n    }\n'
    )


def test_output_keeps_its_columns() -> None:
    """Only lines wider than the terminal are cut."""
    text = "a\tb   c\n  " + "x" * 30
    seen = _read(Console(width=20), event(1, "tool_result", {"call_id": "c1", "text": text}))

    assert seen == f"  ⎿ a       b   c\n      {'x' * 17}…\n"


def test_an_agents_question_lists_its_choices() -> None:
    """Each choice has the number that selects it."""
    question = m.Question("Which colour?", choices=(m.Choice("Red", "warm"), m.Choice("Blue")), several=True)
    call = msgspec.structs.replace(CALL, action="question", agent_tool="AskUserQuestion", command=None)
    asked = msgspec.structs.replace(PERMISSION, kind="question", questions=(question,), call=call)

    assert _read(
        Console(), event(1, "tool_call", {"call": call}), event(2, "permission_asked", {"permission": asked})
    ) == ("? Which colour? (several, by commas)\n    1  Red — warm\n    2  Blue\n")


def test_a_plan_is_shown_whole() -> None:
    """The user decides about the whole plan."""
    asked = msgspec.structs.replace(PERMISSION, kind="plan", plan="1. read\n2. write")

    assert _read(Console(), event(1, "permission_asked", {"permission": asked})) == (
        "? The agent's plan:\n    1. read\n    2. write\n"
    )


def test_decisions_are_shown_with_what_made_them() -> None:
    """The line names the user, the rule or another cause, and has the message to the agent."""

    def settled(state: str, by: str, message: str | None = None) -> str:
        data = {"permission": "p-1", "state": state, "by": by, "message": message}
        return _read(Console(), event(1, "permission_settled", data))

    assert settled("allowed", "rule", "It may.") == "  ✓ allowed by rule: It may.\n"
    assert settled("allowed", "mode bypass") == "  ✓ allowed by mode bypass\n"
    assert settled("allowed", "uid 1000 (hutch 42)") == "  ✓ allowed by uid 1000 (hutch 42)\n"
    assert settled("denied", "rule", "no network") == "  ✗ denied by rule: no network\n"
    assert settled("expired", "expiry", "Nobody answered in time.") == "  ✗ expired: Nobody answered in time.\n"
    assert settled("withdrawn", "the turn ended", "Withdrawn: the turn ended.") == "  ✗ withdrawn: the turn ended\n"


def test_an_unsuccessful_end_has_its_reason() -> None:
    """The result is shown if no text came before."""
    failed = {"state": "failed", "reason": "no_key", "message": "There is no key."}
    quiet = {"state": "completed", "reason": "end_turn", "message": "", "result": "42"}

    assert _read(Console(), event(1, "turn_ended", failed)) == "✗ failed\n  There is no key.\n"
    assert _read(Console(), event(1, "turn_ended", quiet)) == "42\n\n✓ done\n"


def test_an_event_that_cannot_be_read_is_named() -> None:
    """The following events are shown."""
    assert _read(Console(), event(9, "text", {"nothing": 1})) == "! event 9 (text) cannot be read\n"


def test_a_sub_agents_words_are_set_apart() -> None:
    """A sub-agent's text is not the answer."""
    console = Console(live=True)

    pieces = console.feed(event(1, "text", {"text": "found it", "parent": "c1"}))

    assert pieces == [Piece("talk", "  ┊ found it\n")]


def test_no_escape_sequence_of_an_agent_reaches_the_terminal() -> None:
    """No field of an agent's event can contain one."""
    evil = "\x1b]0;x\x07\x1b[2J\u202e"
    call = msgspec.structs.replace(
        CALL, agent_tool=evil, command=evil, description=evil, diff=evil, server=evil, tool=evil, input={"a": evil}
    )
    asked = msgspec.structs.replace(
        PERMISSION,
        call=call,
        why=evil,
        layer=evil,
        plan=evil,
        questions=(m.Question(evil, evil, (m.Choice(evil, evil),)),),
        suggestions=(m.Suggestion(evil, evil),),
    )
    kinds: list[Event] = [
        event(1, "turn_started", {"prompt": evil, "number": 1}),
        event(2, "text_delta", {"text": evil}),
        event(3, "thinking", {"text": evil}),
        event(5, "tool_result", {"call_id": "c1", "text": evil}),
        event(6, "permission_settled", {"permission": evil, "state": "denied", "by": evil, "message": evil}),
        event(7, "notice", {"word": evil, "message": evil}),
        event(8, "stderr", {"text": evil}),
        event(9, "turn_ended", {"state": "failed", "reason": evil, "message": evil, "result": evil}),
    ]
    for action in ("run_command", "mcp", "other"):
        changed = msgspec.structs.replace(call, action=action, call_id=action)
        kinds.append(event(4, "tool_call", {"call": msgspec.to_builtins(changed)}))
    kinds += [
        event(10, "permission_asked", {"permission": msgspec.structs.replace(asked, kind=kind)})
        for kind in ("tool", "question", "plan")
    ]
    console = Console(live=True)

    seen = _read(console, *kinds) + console.doing

    assert not set(seen) & set("\x1b\x07\u202e")


async def test_a_closed_terminal_is_the_end_of_the_input() -> None:
    """A read from a closed terminal fails with EIO."""
    terminal, typed = pty.openpty()
    screen = Screen(Console(), out=StringIO(), err=StringIO(), typed=typed)
    os.close(terminal)
    try:
        with pytest.raises(EOFError):
            await screen.ask("? ")
    finally:
        os.close(typed)


def test_a_running_call_is_shown_until_its_result() -> None:
    """Of parallel calls the oldest that still runs is shown, with the time since it was allowed to run."""
    console, moments = Console(), []
    asked = {"permission": msgspec.structs.replace(PERMISSION, id="p1")}
    steps: list[Event] = [
        event(1, "turn_started", {"prompt": "go", "number": 1}),
        event(2, "tool_call", _call()),
        event(3, "permission_asked", asked),
        event(4, "tool_call", _call(call_id="c2", command="sleep 2")),
        event(5, "permission_settled", {"permission": "p1", "state": "allowed", "by": "ann"}),
        event(6, "tool_result", {"call_id": "c1", "text": "ok"}),
        event(7, "tool_result", {"call_id": "c2", "text": "ok"}),
    ]
    for step in steps:
        console.feed(step)
        moments.append((console.doing, console.doing_since and console.doing_since[17:19]))

    assert moments == [
        ("thinking", None),
        ("run npm install", "02"),
        ("waiting for an answer", None),
        ("run sleep 2", "04"),
        ("run npm install", "05"),
        ("run sleep 2", "04"),
        ("thinking", None),
    ]


async def test_the_status_line_counts_from_the_calls_own_begin() -> None:
    """A client that attaches in the middle of a call shows how long the call has been running."""

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen(console := Console(), out=StringIO(), err=(err := Terminal()))
    begun = msgspec.structs.replace(event(1, "tool_call", _call()), at=to_wire(now_ms() - 75_000))
    console.feed(begun)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(screen.spin)
            while "npm" not in err.getvalue():
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()

    assert "run npm install · 75 s" in err.getvalue()
