"""The prompts of the load. Each script follows from its key alone, so the text of every turn is known."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.rehearsal import Reply, Request, Say, Use

CLAUDE = "claude"
"""The prefix of keys for the real Claude."""


@dataclass(frozen=True, slots=True)
class Script:
    """The agent's actions for a prompt."""

    prompt: str
    says: tuple[tuple[str, str], ...]
    """(kind, text) of its `text` and `text_delta` events, in order."""


def script_of(key: str) -> Script:
    """Return the script of a key: numbered texts, and one command that appends the key to the file `ran`."""
    if key.startswith(CLAUDE):
        return Script(key, (("text", f"{key} 0"), ("text", f"{key} 1")))
    rng = Random(key)
    steps: list[dict[str, Any]] = []
    says: list[tuple[str, str]] = []
    lines = rng.randint(2, 8)
    runs_at = rng.randrange(lines)
    for number in range(lines):
        steps.append({"text": f"{key} {number}"})
        says.append(("text", f"{key} {number}"))
        if rng.random() < 0.4:
            times = rng.randint(1, 40)
            steps.append({"repeat": {"times": times, "line": {"delta": f"{key}."}}})
            says += [("text_delta", f"{key}.")] * times
        if rng.random() < 0.4:
            steps.append({"pause": round(rng.uniform(0.001, 0.3), 3)})
        if number == runs_at:
            command = f"echo {key} >> ran; sleep {rng.choice((0, 0, 0.05, 0.2))}"
            if key.endswith("-1") or rng.random() < 0.1:
                command += "; (setsid sleep 1000 > /dev/null 2>&1 &)"
            steps.append({"tool": "Bash", "input": {"command": command}, "run": True})
    return Script("\n".join(map(json.dumps, steps)), tuple(says))


def claude(request: Request) -> Reply:
    """Answer as the model, so that Claude follows the script of its key."""
    calls = [result.call for result in request.fresh if result.call is not None]
    if calls:
        return Say(f"{str(calls[0].input['command']).split()[1]} 1", chunks=3)
    key = request.prompt.split()[-1]  # a prompt that got no answer stands before the next one
    return [Say(f"{key} 0", chunks=4, pace=0.02), Use("Bash", {"command": f"echo {key} >> ran"})]
