"""The command `hutch` as a process: exit codes, output for programs, names and prefixes, records."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import anyio
import pytest

from hutch_shared.events import KINDS
from tests.sampling import sample
from tests.system.host import HUTCH, Host, host

pytestmark = pytest.mark.system


def script(made: Host, name: str, *lines: dict[str, object]) -> list[str]:
    """Return arguments of `hutch run` for a new session of that name, which runs these lines in its own folder."""
    return ["--name", name, "-C", str(made.folder(name)), "--script", made.script_file(name, lines)]


ASK: dict[str, object] = {"tool": "Bash", "input": {"command": "touch made"}, "run": True}


@sample(2)
@pytest.mark.parametrize(
    ("name", "line", "options", "code"),
    [
        ("fine", {"text": "done"}, [], 0),
        ("failing", {"end": {"state": "failed", "reason": "broken", "message": "It broke."}}, [], 1),
        ("asking", ASK, ["--no-input"], 5),
        ("endless", {"wait_file": "never"}, ["--timeout", "0.5"], 124),
    ],
)
async def test_the_exit_code_shows_how_the_turn_ended(
    script_host: Host, name: str, line: dict[str, object], options: list[str], code: int
) -> None:
    """0 completed, 1 failed, 5 needs a decision, 124 timed out."""
    await script_host.hutch("run", *script(script_host, name, line), *options, "go", code=code)
    await script_host.hutch("rm", "-f", name)


async def test_an_interrupted_turn_exits_with_130(script_host: Host) -> None:
    """The exit code is 130 even if another client interrupted it."""
    arguments = script(script_host, "interrupted", {"text": "working"}, {"wait_file": "never"})
    async with script_host.hutch_beside("run", *arguments, "go") as process:
        assert process.stdout is not None
        await process.stdout.receive()
        await script_host.hutch("interrupt", "interrupted")
        code = await process.wait()

    assert code == 130


async def test_a_turn_that_is_interrupted_while_a_request_waits_exits_with_130(script_host: Host) -> None:
    """The request is withdrawn, and the turn has no later event."""
    asked: dict[str, object] = {"tool": "Bash", "input": {"command": "make"}, "result": "made"}
    arguments = script(script_host, "torn", asked, {"text": "went on"})
    async with script_host.client() as hutch, script_host.hutch_beside("run", *arguments, "go") as process:
        with anyio.fail_after(60):
            while not await hutch.list_permissions():
                await anyio.sleep(0.05)
        await script_host.hutch("interrupt", "torn")
        code = await process.wait()
    told = await script_host.hutch("logs", "torn", "-o", "jsonl")

    assert code == 130
    assert "went on" not in told.out


@sample(3)
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--no-such-option", "go"],
        ["run", "-C", "/no/such/directory", "go"],
        ["run", ""],
        ["rum", "go"],
        ["approve"],
        ["mode", "some-session", "yolo"],
        ["key", "add"],
    ],
    ids=" ".join,
)
async def test_a_usage_error_exits_with_2(script_host: Host, arguments: list[str]) -> None:
    """Standard output stays empty."""
    done = await script_host.hutch(*arguments, code=2)

    assert done.out == ""
    assert done.err
    assert "Traceback" not in done.err


async def test_a_refused_command_exits_with_4(script_host: Host) -> None:
    """An agent's `hutch` command reaches hutchd, may read, and is refused a change of its own mode."""
    call = f"HUTCH_RUNTIME_DIR={script_host.runtime} {' '.join(HUTCH)}"
    command = f"{call} ps -q; {call} mode insider plan; echo code $?"
    arguments = script(script_host, "insider", {"tool": "Bash", "input": {"command": command}, "run": True})
    ran = await script_host.hutch("run", *arguments, "--mode", "bypass", "-o", "jsonl", "go")
    inspected = await script_host.hutch("inspect", "insider", "-o", "json")

    (result,) = [
        event["data"]["text"] for event in map(json.loads, ran.out.splitlines()) if event["kind"] == "tool_result"
    ]
    assert inspected.json["id"] in result
    assert result.strip().endswith("code 4")
    assert inspected.json["permission_mode"] == "bypass"


async def test_a_missing_daemon_exits_with_3() -> None:
    """Each command that needs hutchd prints how to start it."""
    async with host(start=False) as made:
        for command in (["ps"], ["status"], ["logs", "x"], ["wait", "x"], ["key", "ls"], ["attach", "x"]):
            done = await made.hutch(*command, code=3)

            assert "hutch" in done.err
            assert done.out == ""


async def test_output_for_programs_is_json_and_nothing_else(script_host: Host) -> None:
    """`-o jsonl` prints the events, `-o json` one record; messages go to standard error."""
    said = script(script_host, "programs", {"delta": "do"}, {"text": "done"})
    lines = await script_host.hutch("run", *said, "-o", "jsonl", "go")
    one = await script_host.hutch("run", "--session", "programs", "-o", "json", "again")
    detached = await script_host.hutch("run", "--session", "programs", "-d", "-o", "json", "and again")
    waited = await script_host.hutch("wait", "programs")
    inspected = await script_host.hutch("inspect", "programs", "-o", "json")
    listed = await script_host.hutch("ps", "-o", "json")
    rows = await script_host.hutch("ps", "-o", "jsonl")
    quiet = await script_host.hutch("ps", "-q")

    events = [json.loads(line) for line in lines.out.splitlines()]
    assert [event["kind"] for event in events] == ["turn_started", "text_delta", "text", "turn_ended"]
    assert {event["kind"] for event in events} <= set(KINDS)
    assert (one.json["state"], one.json["prompt"], one.json["result"]) == ("completed", "again", "done")
    assert detached.json["session"] == inspected.json["id"]
    assert waited.out == ""
    assert [turn["state"] for turn in inspected.json["all_turns"]] == ["completed"] * 3
    assert [row["id"] for row in listed.json] == [json.loads(row)["id"] for row in rows.out.splitlines()]
    assert quiet.out.split() == [row["id"] for row in listed.json]


async def test_text_output_is_the_answer_and_messages_go_to_standard_error(script_host: Host) -> None:
    """A pipe gets no control sequence."""
    done = await script_host.hutch("run", *script(script_host, "text", {"text": "forty-two"}), "go")
    logged = await script_host.hutch("logs", "text")

    assert "forty-two" in done.out
    assert "text" in done.err
    assert "\x1b" not in done.out + done.err
    assert "forty-two" in logged.out


async def test_a_session_is_found_by_id_prefix_or_name(script_host: Host) -> None:
    """An ambiguous or unknown name is an error, and nothing is done."""
    ran = await script_host.hutch("run", *script(script_host, "named", {"text": "x"}), "-d", "go")
    session = ran.out.strip()
    await script_host.hutch("wait", session)
    by = [await script_host.hutch("inspect", ref, "-o", "json") for ref in (session, session[:8], "named")]
    unknown = await script_host.hutch("inspect", "no-such-session", code=1)

    assert {one.json["id"] for one in by} == {session}
    assert "no-such-session" in unknown.err


async def test_a_second_session_in_a_directory_prints_a_warning(script_host: Host) -> None:
    """The warning is one line on standard error."""
    arguments = script(script_host, "here", {"text": "x"})
    first = await script_host.hutch("run", *arguments, "go")
    second = await script_host.hutch("run", *arguments[2:], "go")

    assert "Another open session" not in first.err
    assert [line for line in second.err.splitlines() if "Another open session works in" in line and "here" in line]


async def test_a_session_is_closed_and_then_removed(script_host: Host) -> None:
    """A busy one needs force. A closed one takes no prompt but keeps its record. A removed one is gone."""
    arguments = script(script_host, "closing", {"text": "x"}, {"wait_file": "never"})
    await script_host.hutch("run", *arguments, "-d", "go")
    busy = await script_host.hutch("stop", "closing", code=1)
    open_still = await script_host.hutch("rm", "closing", code=1)
    await script_host.hutch("stop", "-f", "closing")
    closed = await script_host.hutch("run", "--session", "closing", "go", code=1)
    listed = [await script_host.hutch("ps", *option, "-o", "json") for option in ((), ("-a",))]
    inspected = await script_host.hutch("inspect", "closing", "-o", "json")
    await script_host.hutch("rm", "closing")
    gone = await script_host.hutch("logs", "closing", code=1)

    assert "force" in busy.err
    assert "Close it with `hutch stop closing`" in open_still.err
    assert "closed" in closed.err
    assert [("closing" in {one["name"] for one in done.json}) for done in listed] == [False, True]
    assert [turn["state"] for turn in inspected.json["all_turns"]] == ["stopped"]
    assert "closing" in gone.err


async def test_keys_are_listed_without_their_secrets(script_host: Host) -> None:
    """A key is read from standard input, shown by its last characters, and can be removed."""
    added = await script_host.hutch("key", "add", "anthropic", "--name", "mine", input="sk-ant-secret-secret-9876\n")
    listed = await script_host.hutch("key", "ls", "-o", "json")
    await script_host.hutch("key", "rm", "anthropic", "--name", "mine")
    after = await script_host.hutch("key", "ls", "-o", "json")
    empty = await script_host.hutch("key", "add", "anthropic", code=2)

    assert "secret" not in added.out + added.err + listed.out
    assert [(one["provider"], one["name"], one["hint"]) for one in listed.json] == [("anthropic", "mine", "9876")]
    assert after.json == []
    assert "standard input" in empty.err


async def test_wait_stops_at_its_timeout(script_host: Host) -> None:
    """The command exits with 124, and the turn goes on."""
    await script_host.hutch("run", *script(script_host, "waiting", {"wait_file": "go"}), "-d", "go")
    late = await script_host.hutch("wait", "waiting", "--timeout", "0.2", code=124)
    Path(script_host.work, "waiting", "go").touch()
    await script_host.hutch("wait", "waiting")

    assert "The turn goes on" in late.err


async def test_logs_can_be_followed(script_host: Host) -> None:
    """The command prints the history, then new events until the user ends it."""
    await script_host.hutch("run", *script(script_host, "followed", {"text": "old"}, {"wait_file": "go"}), "-d", "go")
    async with script_host.hutch_beside("logs", "followed", "-f", "-o", "jsonl") as process:
        assert process.stdout is not None
        seen = b""
        while b'"old"' not in seen:
            seen += await process.stdout.receive()
        Path(script_host.work, "followed", "go").touch()
        while b"turn_ended" not in seen:
            seen += await process.stdout.receive()
        process.send_signal(signal.SIGINT)
        code = await process.wait()

    assert [json.loads(line)["seq"] for line in seen.splitlines()] == [1, 2, 3]
    assert code == 130


async def test_status_and_version_describe_both_sides(script_host: Host) -> None:
    """They show isolation and keys with reasons, paths, and the versions of client and hutchd."""
    status = await script_host.hutch("status", "-o", "json")
    version = await script_host.hutch("version", "-o", "json")
    text = await script_host.hutch("status")

    assert status.json["store"]["ok"]
    assert status.json["pid"] == script_host.pid
    assert status.json["isolation"]["why"]
    assert version.json["client"] == {key: version.json["daemon"][key] for key in ("version", "protocol")}
    assert str(script_host.state) in text.out
