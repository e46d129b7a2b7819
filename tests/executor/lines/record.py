"""Records the lines of the real CLI, turn by turn, for `test_odd_lines`: `python -m tests.executor.lines.record`.

Writes `recorded.jsonl` beside this file: one JSON line per turn, with its name and the lines that the CLI wrote in it.
Run it again when the SDK is updated. Paths, ids and times of this run are replaced.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import anyio

from hutch_executor.runners.claude.process import ClaudeProcess, SkippedMessage
from hutch_executor.runners.claude.turn import ClaudeTimeouts
from hutch_shared import messages as m
from tests.rehearsal import Refuse, Reply, Say, Script, Stall, Step, Steps, Think, Use, anything
from tests.system.claude_stage import Stage, allow, answer, stage

RECORDED: Final = Path(__file__).with_name("recorded.jsonl")
_QUESTIONS: Final = [
    {
        "question": "Which?",
        "header": "H",
        "multiSelect": False,
        "options": [{"label": "A", "description": "a"}, {"label": "B", "description": "b"}],
    }
]
_TURNS: Final[dict[str, tuple[Reply, ...]]] = {
    "text": ([Think("hm, é", 2), Say("Grüße 🐑, done", 3)],),
    "bash": ([Say("I look."), Use("Bash", {"command": "echo hi; echo no >&2", "description": "look"}, 2)], Say("ok")),
    "failing call": (Use("Bash", {"command": "exit 3"}), Say("ok")),
    "write": (Use("Write", {"file_path": "new.txt", "content": "a\nb\n"}), Say("ok")),
    "parallel": ([Use("Bash", {"command": "true"}), Use("Bash", {"command": "false"})], Say("ok")),
    "question": (Use("AskUserQuestion", {"questions": _QUESTIONS}), Say("ok")),
    "retry": (Refuse(500), Say("ok")),
    "provider error": (Refuse(400),),
    "sub-agent": (
        Use("Agent", {"description": "look", "prompt": "inner", "subagent_type": "general-purpose"}),
        [Say("inside"), Use("Bash", {"command": "echo inner"})],
        Say("inner done"),
        Say("ok"),
    ),
    "plan": (Use("EnterPlanMode", {}), Say("planning")),
}


def _decide(call: m.ToolCall) -> m.PermissionDecision:
    return answer(call, {"Which?": "A"}) if call.agent_tool == "AskUserQuestion" else allow(call)


def _script(replies: tuple[Reply, ...]) -> Script:
    return Steps(*(Step(anything, reply) for reply in replies))


async def record() -> dict[str, list[str]]:
    """Play every turn with the real CLI and return its lines."""
    turns: dict[str, list[str]] = {}
    lines: list[str] = []
    split: Callable[..., Any] = ClaudeProcess._lines

    async def tee(self: ClaudeProcess, output: Any) -> AsyncIterator[bytes | SkippedMessage]:
        async for line in split(self, output):
            if isinstance(line, bytes):
                lines.append(line.decode())
            yield line

    with tempfile.TemporaryDirectory() as root, patch.object(ClaudeProcess, "_lines", tee):
        async with stage(Path(root), Steps(), decide=_decide, timeouts=ClaudeTimeouts(retries=1), mode="ask") as s:
            for name, replies in _TURNS.items():
                lines.clear()
                s.model.script = _script(replies)
                end = await s.turn(f"turn {name}")
                turns[name] = [_anonymous(line, root) for line in lines]
                print(f"{name}: {len(lines)} lines, {end.state} {end.reason}")
            lines.clear()
            await _interrupted(s)
            turns["interrupted"] = [_anonymous(line, root) for line in lines]
    return turns


async def _interrupted(s: Stage) -> None:
    s.model.script = _script(([Say("half"), Stall()],))
    before = len(s.daemon.of("text_delta"))
    async with anyio.create_task_group() as group:
        group.start_soon(s.turn)
        await s.daemon.until(lambda daemon: len(daemon.of("text_delta")) > before)
        await s.runner.interrupt()


def _anonymous(line: str, root: str) -> str:
    for path, name in ((f"{root}/work", "/project"), (root, "/recorded")):
        line = line.replace(path, name).replace(path.replace("/", "-"), name.replace("/", "-"))
    return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", _Ids().name, line)


class _Ids:
    names: Final[dict[str, str]] = {}

    def name(self, match: re.Match[str]) -> str:
        return self.names.setdefault(match[0], f"00000000-0000-4000-8000-{len(self.names):012d}")


if __name__ == "__main__":
    with RECORDED.open("w") as file:
        for name, recorded in anyio.run(record).items():
            file.write(json.dumps({"turn": name, "lines": [json.loads(line) for line in recorded]}) + "\n")
