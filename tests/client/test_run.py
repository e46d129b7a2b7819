from __future__ import annotations

import io
import json
import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Event
from tests.client.conftest import Hutch
from tests.client.fake_daemon import CALL, PERMISSION, SESSION, TURN, FakeDaemon, event
from tests.client.terminal import at_terminal
from tests.client.test_daemon import STATUS
from tests.preloaded import PRELOADED

STARTED = event(1, "turn_started", {"prompt": "fix it", "number": 1})
CALLED = event(2, "tool_call", {"call": CALL})
ASKED = event(3, "permission_asked", {"permission": PERMISSION})


def _ended(state: str, seq: int = 9) -> Event:
    return event(seq, "turn_ended", {"state": state, "reason": "end_turn", "message": "So it is."})


def _plays(daemon: FakeDaemon, *events: Event) -> None:
    """Publish the events when the prompt arrives."""

    def submit(_: m.SubmitPrompt) -> m.Turn:
        daemon.publish(*events)
        return TURN

    daemon.answers["submit_prompt"] = submit


def _answers(daemon: FakeDaemon, *then: Event) -> None:
    """Publish the events when an answer arrives."""

    def answer(_: m.AnswerPermission) -> m.Permission:
        daemon.publish(*then)
        return PERMISSION

    daemon.answers["answer_permission"] = answer


def test_words_are_data_and_all_else_is_talk(daemon: FakeDaemon, hutch: Hutch) -> None:
    """In a pipe, standard output has only the agent's answer."""
    _plays(daemon, STARTED, CALLED, event(3, "text", {"text": "Done."}), _ended("completed"))

    code, out, err = hutch("run", "fix it")

    assert (code, out) == (0, "Done.\n")
    assert err == (
        "s-0000000000000001  fix  claude  as ann  isolation: reduced  keys: exposed\n"
        "● run npm install\n\n\n✓ done in 8.0 s\n"
    )


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("failed", 1), ("timed_out", 124), ("stopped", 130)])
def test_the_turns_end_is_the_exit_code(daemon: FakeDaemon, hutch: Hutch, state: str, code: int) -> None:
    """Each terminal state has its exit code."""
    _plays(daemon, STARTED, _ended(state))

    assert hutch("run", "fix it")[0] == code


def test_a_session_is_opened_as_the_options_say(daemon: FakeDaemon, hutch: Hutch, tmp_path: Path) -> None:
    """Paths become absolute, and the turn's time limit goes with the prompt."""
    _plays(daemon, _ended("completed"))
    script = tmp_path / "x.jsonl"
    script.touch()
    options = (
        f"--agent script --script {script} --name n --mode plan --model big --when-nobody deny --timeout 5"
        " --account alice --isolation account"
    )

    code, *_ = hutch(
        "run", "hi", "-C", str(tmp_path), *options.split(), "--allow", "Read", "--deny", "Bash", "--deny", "Edit"
    )

    (opened,), (submitted,) = daemon.asked("open_session"), daemon.asked("submit_prompt")
    assert code == 0
    assert msgspec.structs.replace(opened, idempotency_key=None) == m.OpenSession(
        "script",
        str(tmp_path),
        "n",
        permission_mode="plan",
        when_nobody="deny",
        rules=m.Rules(allow=("Read",), deny=("Bash", "Edit")),
        options=m.AgentOptions(model="big", script=str(script)),
        account="alice",
        isolation="account",
        real_cwd=True,
    )
    assert (submitted.session, submitted.prompt, submitted.timeout) == (SESSION.id, "hi", 5.0)


def test_a_long_prompt_comes_from_standard_input(
    daemon: FakeDaemon, hutch: Hutch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read with `-` or from a pipe, because argv could not hold it."""
    _plays(daemon, _ended("completed"))
    prompt = "é" * 200_000
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))

    assert hutch("run", "-")[0] == 0
    assert daemon.asked("submit_prompt")[0].prompt == prompt


def test_jsonl_is_the_events_and_json_the_turn(daemon: FakeDaemon, hutch: Hutch) -> None:
    """`-o jsonl` prints the events and `-o json` the turn; both escape control characters."""
    _plays(daemon, STARTED, event(2, "text", {"text": "\u009b2J"}), _ended("completed"))
    daemon.answers["get_turn"] = msgspec.structs.replace(TURN, state="completed", result="ok")

    lines = hutch("run", "hi", "-o", "jsonl")[1]
    daemon.events.clear()
    record = hutch("run", "hi", "-o", "json")[1]

    assert [json.loads(line)["seq"] for line in lines.splitlines()] == [1, 2, 9]
    assert "\\u009b2J" in lines
    assert json.loads(record)["result"] == "ok"


def test_a_detached_run_prints_the_session(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The command exits at once."""
    assert hutch("run", "-d", "hi") == (0, f"{SESSION.id}\n", "")
    assert daemon.asked("follow_events") == []


def test_no_input_ends_with_5_on_a_permission_request(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The error names the command that answers; the turn goes on waiting."""
    _plays(daemon, STARTED, CALLED, ASKED)

    code, _, err = hutch("run", "hi", "--no-input")

    assert code == 5
    assert err.endswith(
        f"● run npm install\n? Allow? {PERMISSION.id}\n"
        f"Waiting for a decision: `hutch approve {PERMISSION.id}` or `hutch deny {PERMISSION.id}`.\n"
    )


def test_options_of_a_new_session_do_not_go_with_an_old_one(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Options that would have no effect on an existing session are a usage error."""
    code, _, err = hutch("run", "--session", "fix", "--mode", "bypass", "hi")

    assert (code, err) == (2, "hutch: --mode is for a new session; fix has its own.\n")
    assert daemon.asked("submit_prompt") == []


def test_logs_print_the_record_page_by_page(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The command prints the events from the given number on."""
    events = [STARTED, event(2, "text", {"text": "One."}), _ended("completed")]

    def page(params: m.ReadEvents) -> m.EventsPage:
        found = [msgspec.Raw(msgspec.json.encode(one)) for one in events if one.seq > params.after][:1]
        return m.EventsPage(tuple(found), "j-1", 9, more=bool(found))

    daemon.answers["read_events"] = page

    code, out, err = hutch("logs", "fix")
    later = hutch("logs", "fix", "--since", "2", "-o", "jsonl")[1]

    assert (code, out, err) == (0, "One.\n", "❯ fix it\n\n\n✓ done in 8.0 s\n")
    assert json.loads(later)["seq"] == 9


def test_wait_ends_when_no_turn_is_left(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The exit code is that of the last turn."""
    busy = msgspec.structs.replace(SESSION, active_turn=TURN.id, active_state="running")

    def looked_at(_: m.SessionRef) -> m.Session:
        looks = len(daemon.asked("get_session"))
        if looks == 2:
            daemon.publish(_ended("failed"))
        return busy if looks <= 2 else SESSION

    daemon.answers |= {
        "get_session": looked_at,
        "list_turns": m.Turns((msgspec.structs.replace(TURN, state="failed"),)),
    }

    assert hutch("wait", "fix")[0] == 1


def test_wait_reports_that_the_turn_waits_for_a_permission(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Once, with the command that lists the request."""
    daemon.answers["get_session"] = msgspec.structs.replace(
        SESSION, active_turn=TURN.id, active_state="awaiting_permission", pending=1
    )

    code, out, err = hutch("wait", "fix", "--timeout", "0.2")

    assert (code, out) == (124, "")
    assert err.splitlines()[0] == "fix is awaiting permission: `hutch pending fix`."


def test_wait_stops_at_its_timeout(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The exit code is 124, and the session goes on."""
    daemon.answers["get_session"] = msgspec.structs.replace(SESSION, queued=1)

    assert hutch("wait", "fix", "--timeout", "0.05")[0] == 124


def test_a_question_is_answered_inline(daemon: FakeDaemon) -> None:
    """After an invalid reply the user is asked again; the follower counts as a present client."""
    _plays(daemon, STARTED, CALLED, ASKED)
    _answers(
        daemon,
        event(4, "permission_settled", {"permission": PERMISSION.id, "state": "allowed", "by": "uid 1000 (hutch 1)"}),
        event(5, "tool_result", {"call_id": "c1", "text": "added 1 package"}),
        _ended("completed"),
    )

    with at_terminal("run", "fix it") as terminal:
        terminal.wait_for("[y]es")
        terminal.type("maybe\n")
        terminal.wait_for("maybe")
        terminal.type("s\n")
        code = terminal.wait()

    assert code == 0
    assert daemon.asked("answer_permission") == [m.AnswerPermission(PERMISSION.id, "allow", "session")]
    assert [asked.answers for asked in daemon.asked("follow_events")] == [True]
    assert "\x1b[34m●\x1b[0m \x1b[1mrun\x1b[0m npm install" in terminal.raw
    assert "✓ allowed by uid 1000 (hutch 1)" in terminal.screen
    assert "⎿ added 1 package" in terminal.screen


def test_an_agents_question_and_its_plan_are_answered_inline(daemon: FakeDaemon) -> None:
    """The user chooses by number, one question after the other. For a plan no scope is offered."""
    questions = (m.Question("Which?", "Colour", (m.Choice("Red"), m.Choice("Blue"))), m.Question("Why?", "Reason"))
    question = msgspec.structs.replace(PERMISSION, kind="question", questions=questions)
    plan = msgspec.structs.replace(PERMISSION, id="p-2", kind="plan", plan="1. paint")
    _plays(daemon, STARTED, event(2, "permission_asked", {"permission": question}))

    def answer(given: m.AnswerPermission) -> m.Permission:
        if given.decision == "answer":
            daemon.publish(event(3, "permission_asked", {"permission": plan}))
        else:
            daemon.publish(_ended("completed"))
        return PERMISSION

    daemon.answers["answer_permission"] = answer

    with at_terminal("run", "fix it", environment={"NO_COLOR": "1"}) as terminal:
        terminal.wait_for("Colour ›")
        terminal.type("2\n")
        terminal.wait_for("Reason ›")
        terminal.type("it is calm\n")
        terminal.wait_for("[y]es")
        terminal.type("a\nn not yet\n")
        code = terminal.wait()

    assert code == 0
    assert daemon.asked("answer_permission") == [
        m.AnswerPermission(PERMISSION.id, "answer", answers={"Which?": "Blue", "Why?": "it is calm"}),
        m.AnswerPermission("p-2", "deny", message="not yet"),
    ]
    assert "\x1b[1m" not in terminal.raw


def test_lines_typed_before_a_request_decide_nothing(daemon: FakeDaemon) -> None:
    """Half a line that was typed for an earlier request decides nothing either."""
    _plays(daemon, STARTED, CALLED)
    other = msgspec.structs.replace(PERMISSION, id="p-2")
    settled = {"permission": PERMISSION.id, "state": "expired", "by": "expiry"}

    with at_terminal("run", "fix it") as terminal:
        terminal.wait_for("npm install")
        terminal.type("y\n")
        daemon.publish(ASKED)
        terminal.wait_for("[y]es")
        terminal.type("y")
        daemon.publish(event(4, "permission_settled", settled), event(5, "permission_asked", {"permission": other}))
        terminal.wait_for("p-2", "[y]es")
        terminal.type("\n")
        daemon.publish(_ended("completed"))
        terminal.wait()

    assert daemon.asked("answer_permission") == []


def test_a_request_decided_by_another_client_disappears(daemon: FakeDaemon) -> None:
    """The prompt is erased, and the turn goes on."""
    _plays(daemon, STARTED, CALLED, ASKED)

    with at_terminal("run", "fix it") as terminal:
        terminal.wait_for("[y]es")
        settled = {"permission": PERMISSION.id, "state": "denied", "by": "uid 0 (hutch 7)"}
        daemon.publish(event(4, "permission_settled", settled), _ended("completed"))
        code = terminal.wait()

    assert code == 0
    assert "✗ denied by uid 0 (hutch 7)" in terminal.screen
    assert daemon.asked("answer_permission") == []


def test_a_sent_answer_is_not_withdrawn(daemon: FakeDaemon) -> None:
    """The event about it may arrive before the reply. Neither this nor the connection's log disturbs the screen."""
    seen = threading.Event()
    _plays(daemon, STARTED, CALLED, ASKED)

    def answer(_: m.AnswerPermission) -> m.Permission:
        daemon.publish(event(4, "permission_settled", {"permission": PERMISSION.id, "state": "allowed", "by": "me"}))
        assert seen.wait(30)
        return PERMISSION

    daemon.answers["answer_permission"] = answer

    with at_terminal("run", "fix it") as terminal:
        terminal.wait_for("[y]es")
        terminal.type("y\n")
        terminal.wait_for("✓ allowed by me")
        seen.set()
        daemon.publish(_ended("completed"))
        code = terminal.wait()

    assert code == 0
    assert "dropped" not in terminal.screen


def test_ctrl_c_detaches_and_says_how_to_stop(daemon: FakeDaemon) -> None:
    """The turn goes on."""
    _plays(daemon, STARTED, CALLED)

    with at_terminal("run", "fix it") as terminal:
        terminal.wait_for("npm install")
        terminal.press_ctrl_c()
        code = terminal.wait()

    assert code == 130
    assert f"`hutch interrupt {SESSION.id}` stops it." in terminal.screen
    assert daemon.asked("interrupt_turn") == []


def test_ctrl_c_leaves_an_idle_session_at_once(daemon: FakeDaemon) -> None:
    """No turn runs that Ctrl-C could stop."""
    daemon.events = [STARTED, _ended("completed")]

    with at_terminal("logs", "fix", "-f") as terminal:
        terminal.wait_for("✓ done")
        terminal.press_ctrl_c()
        code = terminal.wait()

    assert code == 130
    assert "Ctrl-C" not in terminal.screen


def test_ctrl_c_twice_interrupts_the_turn(daemon: FakeDaemon) -> None:
    """The end of the turn is still shown."""
    _plays(daemon, STARTED, CALLED)

    def interrupt(_: m.InterruptTurn) -> m.Turn:
        daemon.publish(_ended("stopped"))
        return TURN

    daemon.answers["interrupt_turn"] = interrupt

    with at_terminal("run", "fix it") as terminal:
        terminal.wait_for("npm install")
        terminal.press_ctrl_c()
        terminal.wait_for("Ctrl-C again")
        terminal.press_ctrl_c()
        code = terminal.wait()

    assert code == 130
    assert "■ stopped" in terminal.screen
    assert daemon.asked("interrupt_turn") == [m.InterruptTurn(SESSION.id, TURN.id)]


def test_attach_asks_about_earlier_requests(daemon: FakeDaemon) -> None:
    """A permission request is a record, so a later client can decide it."""
    daemon.answers["list_permissions"] = m.Permissions((PERMISSION,))
    _answers(daemon)

    with at_terminal("attach", "fix") as terminal:
        terminal.wait_for("[y]es")
        terminal.type("y\n")
        daemon.wait(lambda: bool(daemon.asked("answer_permission")))

    assert "● run npm install" in terminal.screen


def test_pending_watch_prints_each_question_once(daemon: FakeDaemon) -> None:
    """It prints the pending ones, then each new one; the watcher counts as a present client."""
    daemon.answers["list_permissions"] = m.Permissions((PERMISSION,))
    other = msgspec.structs.replace(PERMISSION, id="p-2")

    with at_terminal("pending", "--watch") as terminal:
        terminal.wait_for("Bash npm install")
        daemon.publish(ASKED, event(4, "permission_asked", {"permission": other}))
        terminal.wait_for("p-2")
        terminal.press_ctrl_c()
        code = terminal.wait()

    assert code == 130
    assert terminal.screen.count("npm install") == 2
    assert daemon.asked("follow_events")[0].answers


@pytest.mark.parametrize(
    "words",
    [
        ["--script", "not-there.jsonl"],
        ["--script", "."],
        ["--agent", "claude", "--script", __file__],
        ["--timeout", "0"],
        ["--timeout", "nan"],
        ["-C", "/not-there"],
        ["-C", __file__],
    ],
)
def test_wrong_options_are_reported_before_a_session_is_opened(
    daemon: FakeDaemon, hutch: Hutch, words: list[str]
) -> None:
    """The error comes before a session is opened, so none is left behind."""
    code, out, err = hutch("run", "hi", *words)

    assert (code, out) == (2, "")
    assert "Errno" not in err
    assert daemon.asked("open_session") == []


@pytest.mark.parametrize("conversation", [None, "c-1"])
def test_a_closed_session_is_refused_with_the_alternatives(
    daemon: FakeDaemon, hutch: Hutch, conversation: str | None
) -> None:
    """The error suggests a fork, if there is a conversation, or a new session."""
    daemon.answers["get_session"] = msgspec.structs.replace(SESSION, state="closed", agent_session=conversation)

    code, _, err = hutch("run", "--session", "fix", "hi")

    assert code == 1
    assert err.startswith("hutch: fix is closed: ")
    assert ("`hutch fork fix`" in err) == (conversation is not None)
    assert err.endswith("`hutch run` without --session opens a new one.\n")
    assert daemon.asked("submit_prompt") == []


@pytest.fixture
def draining(daemon: FakeDaemon) -> threading.Event:
    """A hutchd that accepts no new work until the event is set."""
    ready = threading.Event()

    def open_session(_: m.OpenSession) -> m.Session:
        if not ready.is_set():
            raise HutchError(Reason.SHUTTING_DOWN)
        return SESSION

    daemon.answers["open_session"] = open_session
    _plays(daemon, STARTED, _ended("completed"))
    return ready


def test_a_delayed_run_reports_it_in_one_line(draining: threading.Event) -> None:
    """Without a terminal the command prints one line on standard error; then it goes on."""
    argv = [*PRELOADED.argv("hutch"), "run", "hi"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        draining.set()
        rest = process.stderr.read()

    assert first == "Waiting for hutchd: hutchd is stopping and takes no new work.\n"
    assert "Waiting" not in rest
    assert process.returncode == 0


def test_a_delayed_run_shows_the_reason_on_a_terminal(draining: threading.Event) -> None:
    """The line is erased afterwards."""
    with at_terminal("run", "hi") as terminal:
        terminal.wait_for("s) for hutchd: hutchd is stopping and takes no new work.")
        draining.set()
        code = terminal.wait()

    assert code == 0
    assert "✓ done" in terminal.screen


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (msgspec.structs.replace(STATUS, draining=True), "waiting for the next hutchd"),
        (
            msgspec.structs.replace(STATUS, store=m.StoreStatus(False, "j-1", "/s", detail="The disk is full.")),
            "waiting for space in the store: The disk is full.",
        ),
        (STATUS, "waiting for an executor"),
    ],
)
def test_a_turn_that_does_not_start_says_why(daemon: FakeDaemon, status: m.Status, words: str) -> None:
    """The client asks hutchd for the reason."""
    daemon.answers["get_status"] = status
    argv = [*PRELOADED.argv("hutch"), "run", "hi"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        told = next(line for line in lines if "not started" in line)
        daemon.publish(STARTED, _ended("completed"))
        rest = list(lines)

    assert told.startswith(f"The turn has not started yet: {words}")
    assert not any("not started" in line for line in rest)
    assert process.returncode == 0


def test_a_turn_that_does_not_start_says_why_on_a_terminal(daemon: FakeDaemon) -> None:
    """The reason is shown beside the spinner."""
    daemon.answers["get_status"] = STATUS

    with at_terminal("run", "hi") as terminal:
        terminal.wait_for("waiting for an executor")
        daemon.publish(STARTED, _ended("completed"))
        code = terminal.wait()

    assert code == 0


@pytest.mark.parametrize("width", [0, 30])
def test_the_waiting_line_fits_the_terminal(draining: threading.Event, width: int) -> None:
    """A wrapped line could not be erased. A terminal of unknown width counts as 80 columns."""
    with at_terminal("run", "hi", width=width) as terminal:
        terminal.wait_for("Waiting (")
        draining.set()
        terminal.wait()

    lines = [line.partition("\x1b")[0] for line in terminal.raw.split("\x1b[2K") if line.startswith("Waiting (")]
    assert lines
    assert all(20 < len(line.rstrip("\r")) < (width or 80) for line in lines)


@pytest.mark.parametrize(
    ("said", "printed"),
    [
        (
            "There is no cgroup here.",
            "There is no cgroup here. `hutch status` shows what this host offers, `hutch doctor`",
        ),
        ("No sandbox. `hutch doctor` says more.", "No sandbox. `hutch doctor` says more.\n"),
    ],
)
def test_unavailable_isolation_is_refused_with_advice(
    daemon: FakeDaemon, hutch: Hutch, said: str, printed: str
) -> None:
    """The exit code is 1, and no prompt is submitted."""

    def refuse(_: m.OpenSession) -> m.Session:
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, said)

    daemon.answers["open_session"] = refuse

    code, out, err = hutch("run", "--isolation", "strict", "fix it")

    assert (code, out) == (1, "")
    assert err.startswith(f"hutch: {printed}")
    assert daemon.asked("submit_prompt") == []


def test_a_session_that_goes_on_keeps_its_account_and_isolation(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Both are set when a session is opened; with an existing session the options are a usage error."""
    account, level = (
        hutch("run", "--session", "fix", *words, "hi")
        for words in (
            ("--account", "bob"),
            ("--isolation", "strict"),
        )
    )

    assert account == (2, "", "hutch: --account is for a new session; fix has its own.\n")
    assert level == (2, "", "hutch: --isolation is for a new session; fix has its own.\n")


def test_an_account_of_ones_own_is_not_mentioned(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The output names an account only if it is another one."""
    own = pwd.getpwuid(os.geteuid()).pw_name
    daemon.answers["open_session"] = msgspec.structs.replace(SESSION, account=own)
    _plays(daemon, _ended("completed"))

    assert hutch("run", "hi")[2].startswith(f"{SESSION.id}  fix  claude  isolation: reduced  keys: exposed\n")
