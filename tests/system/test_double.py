"""One set of dialogues with the Claude CLI and with its double: Hutch must record the same for both.

Both run in the same folder, one after the other, and the model reports the same token counts to both. So digests and
costs are equal too. Behaviour of the double that no dialogue here covers may differ from the CLI's.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hutch_shared import messages as m
from hutch_shared.events import TurnEnded, TurnKind
from tests.rehearsal import (
    Drop,
    Pause,
    Refuse,
    Reply,
    Request,
    Say,
    Script,
    Stall,
    Step,
    Steps,
    Think,
    Usage,
    Use,
    anything,
)
from tests.system.claude_stage import Stage, allow, answer, deny, stage
from tests.system.double import double_cli

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

COUNTS = Usage(1000, 20, 300, 200)
FAILURES: dict[str, Reply] = {
    "400": Refuse(400),
    "401": Refuse(401),
    "403": Refuse(403),
    "429": Refuse(429, retry_after=0),
    "500": Refuse(500),
    "an error after half the answer": [Say("half"), Refuse(529)],
    "dropped": Drop(),
    "dropped after half the answer": [Say("half"), Stall(0.3), Drop()],
}
QUESTIONS = [
    {"question": f"{name}?", "header": name, "options": [{"label": one, "description": one} for one in "AB"]}
    | {"multiSelect": several}
    for name, several in (("Which", False), ("Many", True))
]

Record = list[Any]


def counted(script: Script) -> Script:
    """Return the script with the same token counts in every answer, whatever the length of the request."""

    def answer(request: Request) -> Reply:
        reply = script(request)
        return [*(reply if isinstance(reply, list | tuple) else [reply]), COUNTS]

    return answer


def bash(command: str) -> Use:
    """Return a Bash call."""
    return Use("Bash", {"command": command})


def decide(call: m.ToolCall) -> m.PermissionDecision:
    """Decide a call by the words in its command."""
    command = call.command or ""
    if call.agent_tool == "AskUserQuestion":
        return answer(call, {"Which?": "B", "Many": ["A", "B"]})
    if "denied" in command:
        return deny(call, "not in this house", interrupt="stop" in command)
    return allow(call, {"command": "touch edited"} if "asked" in command else None)


class Player:
    """Plays dialogues on a stage, and records for each what Hutch and the model received."""

    def __init__(self, on: Stage, record: Record) -> None:
        self.on = on
        self.record = record

    async def play(
        self, name: str, script: Script, prompt: str = "go", meanwhile: Any = None, kind: TurnKind = "prompt"
    ) -> TurnEnded:
        """Play one turn with `meanwhile` beside it; append the record."""
        on, daemon = self.on, self.on.daemon
        events, asks, turns = len(daemon.events), len(daemon.asks), len(on.model.turns)
        on.model.script = counted(script)
        ends: list[TurnEnded] = []

        async def turn() -> None:
            ends.append(await on.turn(prompt, kind))

        async with anyio.create_task_group() as group:
            group.start_soon(turn)
            if meanwhile is not None:
                await meanwhile(on)
        record: dict[str, Any] = {"end": msgspec.to_builtins(ends[0])}
        for event, data, _ in daemon.events[events:]:
            if event != "stderr":
                record.setdefault(event, []).append(msgspec.to_builtins(data))
        record["asked"] = [
            {**msgspec.to_builtins(ask.call), "kind": ask.kind, "cwd": ask.cwd, "plan": ask.plan}
            | {"questions": msgspec.to_builtins(ask.questions)}
            for ask in daemon.asks[asks:]
        ]
        for calls in (record["asked"], record.get("tool_result", [])):  # parallel calls come in any order
            calls.sort(key=lambda call: str(call["call_id"]))
        record["model"] = _told(on.model.turns[turns:])
        record["files"] = {path.name: path.read_text() for path in on.cwd.iterdir() if path.name != "pid"}
        self.record.append((name, _plain(record, {})))
        return ends[0]


def _told(requests: list[Request]) -> Any:
    """Return the requests that the model received.

    The CLI repeats some refused requests without some features: count them once.
    """
    told = [
        {
            "heard": _heard(request.heard),
            "results": [] if _asks_for_summary(request.heard) else _results(request),
            "remembers": "Grüße 🐑, all" in str(request.messages[:-1]),
            "model": request.body["model"],
            "bearer": "authorization" in request.headers,
            "instructions": "Speak like a shepherd." in str(request.body["system"]),
        }
        for request in requests
    ]
    return [one for at, one in enumerate(told) if at == 0 or one != told[at - 1]]


def _results(request: Request) -> list[tuple[str, bool]]:
    return sorted((result.text, result.is_error) for result in request.fresh)


def _asks_for_summary(text: str) -> bool:
    return "summary of the conversation" in text


def _heard(text: str) -> str:
    """Return the text of a request without the CLI's own words about a summary."""
    if _asks_for_summary(text):
        return f"summarise; {'the sheep' in text}"
    return text.rpartition("</local-command-stdout>")[2].strip()


def _plain(value: Any, messages: dict[str, str]) -> Any:
    """Return the value without the parts that differ between runs: ids, ports, times, the list of tools.

    `messages` numbers the model's messages in the order of their appearance.
    """
    if isinstance(value, dict):
        if value.get("word") == "agent_ready":
            return "ready"
        digest = {"digest": "of a plan"} if "/plans/" in str(value) and value.get("digest") else {}
        return {key: _plain(one, messages) for key, one in {**value, **digest}.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, messages) for one in value]
    if not isinstance(value, str):
        return value
    if value.startswith("This session is being continued"):
        return f"summary: {'of sheep' in value}"

    def number(found: re.Match[str]) -> str:
        return messages.setdefault(found[1], f"message {len(messages) + 1}")

    value = re.sub(r"(?:msg|toolu)_([0-9a-f]{8}[0-9]{6})", number, value)
    for pattern, by in (
        (r"[0-9a-f]{8}-[0-9a-f-]{27}", "(id)"),
        (r"plans/[\w-]+\.md", "plans/(name).md"),
        (r"127\.0\.0\.1:[0-9]+", "(address)"),
        (r"in [0-9.]+ s\.", "soon."),
        (r"has [0-9,]+ characters", "is long"),
    ):
        value = re.sub(pattern, by, value)
    return value


async def conversation(player: Player) -> None:
    """Text and tools, and the actions of users on calls and turns."""
    cwd = player.on.cwd
    file = str(cwd / "file.txt")
    Path(file).write_text("hello\nworld\n")
    done = ("", Say("done"))
    await player.play("plain text", lambda _: [Think("hm"), Say("Grüße 🐑, all", 4)])
    calls: Reply = [Say("both"), bash("echo one"), Use("Read", {"file_path": "file.txt", "limit": 1})]
    await player.play("two calls side by side", Steps(("go", calls), done))
    await player.play("two calls in turn", Steps(("go", [bash("echo 1 > first"), bash("cat first > then")]), done))
    await player.play("failing commands", Steps(("go", [bash("echo out; echo err >&2; exit 3"), bash("true")]), done))
    late = Use("Bash", {"command": "echo begun; sleep 30", "timeout": 1000})
    await player.play("a command that takes too long", Steps(("go", late), done))
    edit = Use("Edit", {"file_path": file, "old_string": "hello", "new_string": "bye"})
    write = [Use("Write", {"file_path": name, "content": "new\n"}) for name in (file, "other.txt", "other.txt")]
    await player.play("edits", Steps(("go", Use("Read", {"file_path": file})), ("hello", [edit, *write]), done))
    wrong = [Use("Read", {"file_path": "/none"}), Use("Edit", {**edit.input, "file_path": "/none"}), edit]
    unknown = [Use("Nothing", {"a": 1}), Use("Bash", {"cmd": "x"}), Use("Read", {"file_path": str(cwd)})]
    await player.play("calls that cannot run", Steps(("go", [*wrong, *unknown]), done))
    await player.play("a denial", Steps(("go", bash("touch denied")), ("house", Say("understood"))))
    await player.play("a denial that stops", Steps(("go", [bash("touch denied; stop"), bash("touch more")]), done))
    await player.play("an edited input", Steps(("go", bash("touch asked")), done))
    await player.play("a question", Steps(("go", Use("AskUserQuestion", {"questions": QUESTIONS})), done))
    plan = Steps(("plan", _plan), ("created", Use("ExitPlanMode", {})), done)
    await player.on.runner.set_mode("plan")
    await player.play("a plan", plan, "plan it")
    await player.on.runner.set_mode("ask")
    entered = Steps(
        ("plan", [Use("EnterPlanMode", {})]), ("Entered", _plan), ("updated", Use("ExitPlanMode", {})), done
    )
    await player.play("a plan that the agent begins", entered, "plan something")
    summary = Say("<analysis>hm</analysis><summary>of sheep</summary>")
    await player.play("a summary", lambda _: summary, "the sheep", kind="compact")
    await player.play("the prompt after the summary", lambda _: Say("again"), "/status and now")


def _plan(request: Request) -> Reply:
    found = re.search(r"/[^\s\"'`\\]*/plans/[^\s\"'`\\]*\.md", request.raw.decode())
    assert found is not None
    return Use("Write", {"file_path": found[0], "content": "# Shear the sheep"})


async def interrupts(player: Player) -> None:
    """A turn is interrupted, or its CLI is killed, in each of its phases; the conversation goes on."""
    calls = [bash("echo $$ > pid; sleep 600"), bash("touch late")]
    await player.play("an interrupt of a tool", Steps(("go", calls)), meanwhile=_when(_tool_runs))
    await player.play("an interrupt of an answer", lambda _: [Say("half"), Pause()], meanwhile=_when(_answer_began))
    player.on.daemon.decide = None
    await player.play(
        "an interrupt of a request", Steps(("go", calls)), meanwhile=_when(_asked(len(player.on.daemon.asks)))
    )
    player.on.daemon.decide = decide
    await player.play("the next prompt", lambda _: Say("again"), "and now")

    def kill(begun: Callable[[Stage], Any]) -> Callable[[Stage], Any]:
        async def kill(on: Stage) -> None:
            await begun(on)
            os.kill(on.pid, signal.SIGKILL)

        return kill

    Path(player.on.cwd, "pid").unlink()
    await player.play("a CLI that is killed beside a tool", Steps(("go", calls)), meanwhile=kill(_tool_runs))
    await player.play("the prompt after that", lambda _: Say("again"), "and then")
    await player.play("a CLI that is killed", lambda _: [Say("half"), Pause()], meanwhile=kill(_answer_began))
    await player.play("the prompt after that too", lambda _: Say("again"), "and again")


def _when(begun: Callable[[Stage], Any]) -> Callable[[Stage], Any]:
    async def interrupt(on: Stage) -> None:
        await begun(on)
        await on.runner.interrupt()
        for ask in on.daemon.asks:
            if ask.decision is None:
                ask.settle(deny(ask.call))  # hutchd withdraws the request

    return interrupt


async def _tool_runs(on: Stage) -> None:
    with anyio.fail_after(60):
        while not ((path := on.cwd / "pid").exists() and path.read_text()):
            await anyio.sleep(0.02)


async def _answer_began(on: Stage) -> None:
    before = len(on.daemon.of("text_delta"))
    await on.daemon.until(lambda daemon: len(daemon.of("text_delta")) > before)


def _asked(before: int) -> Callable[[Stage], Any]:
    async def asked(on: Stage) -> None:
        await on.daemon.until(lambda daemon: len(daemon.asks) > before)

    return asked


async def failures(player: Player) -> None:
    """The provider fails in each way, and once temporarily."""
    for name, reply in FAILURES.items():
        await player.play(name, Steps(Step(anything, reply, None)), name)
    await player.play("a failure that passes", Steps((anything, Refuse(500)), (anything, Say("ok"))))


async def all_dialogues(root: Path, cli: str | None) -> Record:
    """Play all dialogues with one CLI; return the record."""
    record: Record = []

    @asynccontextmanager
    async def opened(**more: Any) -> AsyncIterator[Player]:
        async with stage(root, lambda _: Say("ok"), decide=decide, cli=cli, **more) as on:
            yield Player(on, record)

    (root / "work").mkdir(parents=True)
    (root / "work" / "CLAUDE.md").write_text("Speak like a shepherd.")
    async with opened() as player:
        await conversation(player)
        await interrupts(player)
        await failures(player)
        await player.play("an empty conversation", lambda _: Say("ok"), "", kind="clear")
        end = await player.play("the last prompt", lambda _: Say("ok"))
    fork: dict[str, Any] = {"resume": end.agent_session, "fork": True, "auth": "bearer"}
    choice = m.AgentOptions(model="claude-of-choice", disallowed_tools=("WebSearch",))
    async with opened(**fork, limits=m.Limits(max_turns=2), options=choice) as player:
        await player.play("a fork", lambda _: Say("ok"))
        await player.play("too many requests", lambda _: bash("true"))
    return record


async def test_hutch_records_the_same_of_the_cli_and_of_its_double(tmp_path: Path) -> None:
    """This covers events, permission requests, ends, usage, files, and the model's requests."""
    root = tmp_path / "stage"
    real = await all_dialogues(root, None)
    root.rename(tmp_path / "real")
    double = await all_dialogues(root, str(double_cli()))

    assert [name for name, _ in real] == [name for name, _ in double]
    for (name, expected), (_, found) in zip(real, double, strict=True):
        assert found == expected, name
