"""Three walks through the real processes: a prompt, a permission request, a key."""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hutch_client.client import HutchClient
from tests.rehearsal import Model, Say, Steps, Think, Use
from tests.system import processes
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import log_of, wait_for, without_gaps

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
async def claude_host(model: Model) -> AsyncIterator[Host]:
    """A host with a key, whose Claude uses `model`: here everything but the model is real."""
    async with host(settings_for(model)) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made


async def test_a_prompt_goes_to_the_model_and_its_stream_comes_back(claude_host: Host, model: Model) -> None:
    """`hutch run` submits, the model gets the prompt, each event arrives in order, and the record has them all."""
    model.script = Steps(("count the sheep", [Think("hm"), Say("Drei Schafe 🐑🐑🐑, fertig", chunks=5)]))
    cwd = claude_host.folder("prompt")
    ran = await claude_host.hutch("run", "-C", str(cwd), "--name", "sheep", "-o", "jsonl", "count the sheep")
    logged = await claude_host.hutch("logs", "sheep", "-o", "jsonl")
    inspected = await claude_host.hutch("inspect", "sheep", "-o", "json")
    used = await claude_host.hutch("usage", "--session", "sheep", "-o", "json")

    events = [json.loads(line) for line in ran.out.splitlines()]
    record = [json.loads(line) for line in logged.out.splitlines()]
    assert model.turns[-1].heard == "count the sheep"
    deltas = [event["data"]["text"] for event in events if event["kind"] == "text_delta"]
    assert len(deltas) == 5
    assert "".join(deltas) == "Drei Schafe 🐑🐑🐑, fertig"
    assert [event["kind"] for event in events if event["kind"].startswith("turn_")] == ["turn_started", "turn_ended"]
    assert {"text", "thinking", "usage"} <= {event["kind"] for event in events}
    assert [event["seq"] for event in record] == list(range(1, len(record) + 1))
    assert [event for event in record if event["seq"] >= events[0]["seq"]] == events
    assert [turn["state"] for turn in inspected.json["all_turns"]] == ["completed"]
    assert inspected.json["all_turns"][0]["result"] == "Drei Schafe 🐑🐑🐑, fertig"
    (row,) = used.json
    assert (row["of"], row["turns"]) == (inspected.json["id"], 1)
    assert row["usage"]["output_tokens"] > 0
    assert row["usage"]["usd"] > 0


async def test_a_tool_call_waits_for_the_user_and_runs_when_allowed(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """No command runs before the decision, which the user makes with `hutch` and the record keeps."""
    model.script = Steps(("make it", Use("Bash", {"command": "touch made && echo did it"})), ("did it", Say("made")))
    session = await claude_host.claude(hutch, "permission", "ask")
    made = Path(session.cwd, "made")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "make it")
        asked = await log.asked()
        listed = await claude_host.hutch("pending", session.id, "-o", "json")
        waiting = await hutch.get_turn(turn.id)
        before = made.exists()
        await claude_host.hutch("approve", asked.id[:-2])
        end = await log.ended(turn)
        late = await claude_host.hutch("approve", asked.id, code=1)

        assert [one["id"] for one in listed.json] == [asked.id]
        assert (asked.call.action, asked.call.command) == ("run_command", "touch made && echo did it")
        assert waiting.awaiting_permission
        assert not before
        assert made.exists()
        assert (end.state, end.result) == ("completed", "made")
        settled = log.of("permission_settled")[0]
        assert (settled.permission, settled.state) == (asked.id, "allowed")
        assert f"uid {os.getuid()}" in settled.by
        assert "settled" in late.err
        assert log.of("tool_result")[0].digest == asked.digest
        assert without_gaps(log.events)


async def test_the_key_reaches_the_model_and_not_the_agent(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """The agent can read it in no environment, command line, file or log; in the database it is encrypted."""
    look = "env; tr '\\0' '\\n' < /proc/$PPID/environ; touch looked; while [ ! -e go ]; do sleep 0.05; done"
    model.script = Steps(("look around", Use("Bash", {"command": look})), ("PATH=", Say("seen")))
    session = await claude_host.claude(hutch, "key")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "look around")
        await wait_for(Path(session.cwd, "looked").exists)
        found = processes.family(claude_host.pid)
        shown = [(process.command, _shown_by(process.pid)) for process in found]
        kept = {path: path.read_bytes() for path in _files(claude_host.root)}
        Path(session.cwd, "go").touch()
        end = await log.ended(turn)

        assert end.state == "completed", end
        assert {request.key for request in model.requests} == {KEY}
        assert any("claude" in command for command, _ in shown)
        assert any(command.endswith("hutch_executor --reaper") for command, _ in shown)
        assert {path.name for path in kept} >= {"hutch.db", "hutch.db-wal", "hutchd.log", "master.key"}
        assert [command for command, data in shown if _has_key(data)] == []
        assert [str(path) for path, data in kept.items() if _has_key(data)] == []
        assert "HOME=" in log.of("tool_result")[0].text
        assert not any(_has_key(bytes(event.data) + bytes(event.native or b"")) for event in log.events)


def _has_key(data: bytes) -> bool:
    key = KEY.encode()
    return key in data or key.hex().encode() in data or base64.b64encode(key)[:-4] in data


def _shown_by(pid: int) -> bytes:
    """Return the data of a process that its account can read: environment, command line, open plain files."""
    shown = b""
    with suppress(PermissionError, FileNotFoundError, ProcessLookupError):  # not dumpable, or ended meanwhile
        shown += Path(f"/proc/{pid}/cmdline").read_bytes()
        shown += Path(f"/proc/{pid}/environ").read_bytes()
        shown += b"".join(file.read_bytes() for file in _open_files(pid))
    return shown


def _open_files(pid: int) -> Iterator[Path]:
    for opened in Path(f"/proc/{pid}/fd").iterdir():
        found = opened.stat()
        if stat.S_ISREG(found.st_mode) and found.st_size < 1 << 26:
            yield opened


def _files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
