"""The CLI's process and its lines, with small programs in place of the CLI."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from claude_agent_sdk import CLIConnectionError

from hutch_executor.process.oom import find_choom
from hutch_executor.runners.claude import process as claude_process
from hutch_executor.runners.claude.process import BrokenOutput, ClaudeProcess, SkippedMessage
from hutch_executor.runners.claude.spawn import Launch, kill_marked, marked
from hutch_shared.secret import Secret


@asynccontextmanager
async def started(program: str, **more: Any) -> AsyncIterator[tuple[ClaudeProcess, list[dict[str, Any]]]]:
    """Yield a process that runs `program`, and the list of its control messages."""
    process = ClaudeProcess(Launch((sys.executable, "-c", program), "/", {"PATH": os.environ["PATH"]}, **more))
    control: list[dict[str, Any]] = []

    async def read() -> None:
        try:
            async for message in process.read_messages():
                control.append(message)  # noqa: PERF401 -- kept also when the reading fails
        except CLIConnectionError:
            pass

    await process.connect()
    async with anyio.create_task_group() as group:
        group.start_soon(read)
        yield process, control
        group.cancel_scope.cancel()
    await process.close(0)
    process.messages.close()


async def all_of(process: ClaudeProcess) -> list[Any]:
    return [line async for line in process.messages]


async def test_messages_come_as_the_bytes_that_were_written() -> None:
    """Control messages go to the SDK and others to the reader; noise is dropped. UTF-8 may be split anywhere."""
    line = json.dumps({"type": "assistant", "text": "aé€😀"}, ensure_ascii=False).encode() + b"\n"
    control_line = b'{"type":"control_request","request_id":"1","request":{"subtype":"x"}}'
    program = f"""
import sys, time
sys.stdout.buffer.write(b'[SandboxDebug] hello\\n' + {control_line!r} + b'\\n')
for byte in {line!r} * 3:
    sys.stdout.buffer.write(bytes([byte])); sys.stdout.buffer.flush()
"""
    async with started(program) as (process, control):
        messages = await all_of(process)

        assert messages == [line[:-1]] * 3
        assert control == [{"type": "control_request", "request_id": "1", "request": {"subtype": "x"}}]
        assert process.received == 3


async def test_a_line_that_is_too_long_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines around it are read. A request in such a line is refused, so that the CLI does not wait for ever."""
    monkeypatch.setattr(claude_process, "MAX_LINE", 1000)
    program = """
import sys
print('{"type":"assistant","n":1}')
print('{"type":"user","text":"' + 300_000 * 'x' + '"}')
print('{"type":"control_request","request_id":"abc","request":"' + 300_000 * 'x' + '"}', flush=True)
print('{"type":"result","told":' + sys.stdin.readline().strip() + '}')
"""
    async with started(program) as (process, control):
        first, long, question, last = await all_of(process)

        assert first == b'{"type":"assistant","n":1}'
        assert isinstance(long, SkippedMessage)
        assert long.size == 300_025
        assert isinstance(question, SkippedMessage)
        told = json.loads(last)["told"]["response"]
        assert (told["subtype"], told["request_id"]) == ("error", "abc")
        assert control == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
async def test_no_other_process_can_write_to_the_clis_input_or_output() -> None:
    """A pipe could be opened in /proc by each command of the agent, which would then speak for Hutch or the CLI."""
    async with started("import sys; print(sys.stdin.readline(), flush=True)") as (process, _):
        for stream in (0, 1):
            with pytest.raises(OSError, match="No such device or address"):
                os.open(f"/proc/{process.pid}/fd/{stream}", os.O_WRONLY)
        await process.write('{"type":"result"}\n')

        assert await all_of(process) == [b'{"type":"result"}']


async def test_nothing_is_written_after_the_end_of_the_input() -> None:
    """What was written before arrives, however slowly the CLI reads; a later line is an error of the connection."""
    program = 'import sys; print(\'{"type":"result","told":%d}\' % len(sys.stdin.read()), flush=True)'
    async with started(program) as (process, _):
        await process.write("x" * 1_000_000)
        await process.end_input()
        with pytest.raises(CLIConnectionError):
            await process.write("more")

        assert await all_of(process) == [b'{"type":"result","told":1000000}']


async def test_a_line_that_is_not_json_is_a_message_like_others() -> None:
    """Its reader reports it; the lines after it are read."""
    program = """print('{"type":"assistant"}', '{"type":"us', '{"type":"result"}', sep=chr(10))"""
    async with started(program) as (process, _):
        assert await all_of(process) == [b'{"type":"assistant"}', b'{"type":"us', b'{"type":"result"}']


async def test_output_without_lines_of_json_ends_the_messages() -> None:
    """A hundred lines in a row show that the framing is lost; nothing after them can be trusted."""
    program = (
        """print(*(60 * ['{"x'] + ['{"type":"assistant"}'] + 150 * ['{"x'] + ['{"type":"result"}']), sep=chr(10))"""
    )
    async with started(program) as (process, _):
        messages = await all_of(process)

        assert messages[60] == b'{"type":"assistant"}'
        assert isinstance(messages[-1], BrokenOutput)
        assert len(messages) == 162
        assert not process.is_ready()


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b'{"type":"control_request","request_id":"r","x":' + 100_000 * b"[", "it is not readable"),
        (b'{"type":"control_request","request_id":"r","x":' + 5_000 * b"[" + 5_000 * b"]" + b"}", "it is not readable"),
        (b'{"type":"control_request","request_id":"r"}', None),
        (b'{"type":"control_request","request_id":"r","request":{}}', "it names no request"),
        (b'{"type":"control_request","request_id":5,"request":{"subtype":"x"}}', "its id is not text"),
        (b'{"type":"of_tomorrow","request_id":"r","request":{"subtype":"x"}}', "it has another type"),
        (
            b'{"type":"control_request","request_id":"r","request":{"subtype":"can_use_tool","tool_name":"B","input":[]}}',
            "'input' has another type",
        ),
        (b'{"type":"control_response","response":[]}', None),
        (b'{"type":"control_response","response":{"request_id":[]}}', None),
        (b'{"type":"control_cancel_request","request_id":{}}', None),
    ],
)
async def test_a_control_line_that_the_sdk_cannot_read_is_refused(
    line: bytes, answer: str | None, tmp_path: Path
) -> None:
    """The CLI gets an error if the request has an id. The line is reported, and the lines after it are read."""
    lines = tmp_path / "lines"
    lines.write_bytes(line + b"\n")
    program = f"""
import json, shutil, sys
shutil.copyfileobj(open({str(lines)!r}, 'rb'), sys.stdout.buffer); sys.stdout.flush()
if {answer is not None}: print(json.dumps({{"type": "result", "told": json.loads(sys.stdin.readline())}}))
"""
    async with started(program) as (process, control):
        messages = await all_of(process)

        assert control == []
        assert messages[0] == line
        if answer is not None:
            told = json.loads(messages[1])["told"]["response"]
            assert (told["subtype"], told["error"]) == ("error", f"Hutch cannot read this request: {answer}.")


async def test_a_request_that_is_written_twice_is_passed_on_once() -> None:
    """Its text is valid: what is judged is what runs."""
    request = {"subtype": "hook_callback", "callback_id": "h", "input": {"command": "echo \ud99c"}}
    line = json.dumps({"type": "control_request", "request_id": "r", "request": request})
    async with started(f"print(*(2 * [{line!r}]), sep=chr(10))") as (process, control):
        await all_of(process)

        assert [one["request"]["input"] for one in control] == [{"command": "echo \ufffd"}]


async def test_a_line_cut_off_by_the_clis_end_is_not_a_message() -> None:
    """The lines before it are messages."""
    program = """
import os, sys
sys.stdout.write('{"type":"assistant"}\\n{"type":"result","is_err')
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""
    async with started(program) as (process, _):
        messages = await all_of(process)

        assert messages == [b'{"type":"assistant"}']
        assert await process.exit_code() == -9


async def test_a_cli_that_closes_its_input_accepts_no_more() -> None:
    """Its output is still read. A control request fails with a sentence instead of a broken pipe."""
    program = """
import os, time
os.close(0)
print('{"type":"assistant"}', flush=True)
time.sleep(600)
"""

    async def write_on(process: ClaudeProcess) -> None:
        while True:
            await process.write(10_000 * "x" + "\n")

    async with started(program) as (process, _):
        first = await process.next_message()
        with pytest.raises(CLIConnectionError, match="accepts no more input"):
            await write_on(process)
        with pytest.raises(CLIConnectionError, match="not running"):
            await process.control("interrupt")

        assert first == b'{"type":"assistant"}'
        assert not process.is_ready()


async def test_a_cli_that_ends_before_it_reads_its_documents_starts_and_ends() -> None:
    """The pipe breaks while a document is written, and every end of it is closed."""
    before = {*os.listdir("/proc/self/fd")} if os.path.exists("/proc/self/fd") else set()
    document = {"in_variables": {"KEY_FD": Secret("x" * 1_000_000)}}
    async with started("raise SystemExit(3)", **document) as (process, _):
        messages = await all_of(process)
        code = await process.exit_code()
    after = {*os.listdir("/proc/self/fd")} if os.path.exists("/proc/self/fd") else set()

    assert (messages, code) == ([], 3)
    assert after == before


async def test_documents_arrive_whole_and_leave_nothing_behind() -> None:
    """Pipes are passed by number in a variable, or as a path after a flag. A pipe that was read is empty."""
    program = """
import json, os, sys
key = int(os.environ["KEY_FD"])
text = open(sys.argv[sys.argv.index("--text") + 1]).read()
read = [os.read(key, 100).decode() for _ in range(2)]
print(json.dumps({"type": "result", "read": read, "size": len(text)}))
"""
    secrets = {"in_variables": {"KEY_FD": Secret("k-1")}, "after_flags": {"--text": Secret("x" * 300_000)}}
    async with started(program, **secrets) as (process, _):
        (line,) = await all_of(process)

        assert json.loads(line) == {"type": "result", "read": ["k-1", ""], "size": 300_000}


async def test_the_cli_has_a_umask_of_its_own_and_is_killed_first() -> None:
    """The agent's files get the account's umask; the executor keeps its own."""
    program = """
import json, os
score = int(open("/proc/self/oom_score_adj").read()) if os.path.exists("/proc/self/oom_score_adj") else 0
print(json.dumps({"type": "result", "umask": os.umask(0), "score": score}))
"""
    before = os.umask(0o022)
    os.umask(before)
    async with started(program, umask=0o027) as (process, _):
        (line,) = await all_of(process)
    after = os.umask(before)

    told = json.loads(line)
    assert told["umask"] == 0o027
    assert told["score"] == (800 if find_choom() else told["score"])
    assert after == before


async def test_a_reader_that_does_not_read_stops_the_cli() -> None:
    """The CLI's output waits in the pipe, not in memory; nothing is lost."""
    program = """
for n in range(5000): print('{"type":"assistant","n":%d,"x":"%s"}' % (n, 1000 * "x"))
"""
    async with started(program) as (process, _):
        with anyio.fail_after(60):
            while not process.blocked:
                await anyio.sleep(0.01)
        waiting = process.received
        messages = await all_of(process)

        assert waiting < 200
        assert [json.loads(line)["n"] for line in messages] == list(range(5000))


async def test_a_control_request_gets_its_response_beside_the_sdk() -> None:
    """The response does not reach the SDK. A refusal, or the CLI's end, raises an error."""
    program = """
import json, sys
for answer in ({"subtype": "success", "response": {"x": 1}}, {"subtype": "error", "error": "no"}):
    asked = json.loads(sys.stdin.readline())
    response = {**answer, "request_id": asked["request_id"]}
    print(json.dumps({"type": "control_response", "response": response}), flush=True)
sys.stdin.readline()
"""
    async with started(program) as (process, control):
        first = await process.control("get_usage")
        with pytest.raises(CLIConnectionError, match="refused mcp_status: no"):
            await process.control("mcp_status")
        with pytest.raises(CLIConnectionError, match="it has ended"):
            await process.control("mcp_status")

        assert first == {"x": 1}
        assert control == []


async def test_a_missing_program_is_reported() -> None:
    """The error leaves no descriptor open."""
    process = ClaudeProcess(Launch(("/nowhere/claude",), "/nowhere", {}, {"FD": Secret("k")}))
    with pytest.raises(CLIConnectionError, match="could not be started"):
        await process.connect()

    await process.close()
    process.messages.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
async def test_a_start_that_is_cancelled_leaves_nothing_behind() -> None:
    """Whenever the start is cancelled, no process and no descriptor is left after `close`."""
    argv = (sys.executable, "-c", "import time; time.sleep(600)")
    launch = Launch(argv, "/", {"PATH": os.environ["PATH"]}, {"FD": Secret("k" * 300_000)})
    for steps in range(30):
        before = len(os.listdir("/proc/self/fd"))
        process = ClaudeProcess(launch)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(process.connect)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            await process.close(0)

            with anyio.fail_after(20):  # the event loop closes a pipe of a killed process a moment later
                while marked(process._mark) or len(os.listdir("/proc/self/fd")) > before:
                    await anyio.sleep(0.01)
        finally:
            kill_marked(process._mark)
            process.messages.close()
