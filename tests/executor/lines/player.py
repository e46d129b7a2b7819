"""Plays lines as the Claude CLI: `python player.py SCENE`. At each prompt it writes the lines that SCENE then holds.

It stores each prompt and an answer to it in the transcript of the conversation that the lines name, as the CLI does. It
answers the SDK's requests, and waits for an answer to each request of its own, or for `_WAIT` seconds: a request that
the SDK cannot read may have none.
"""

import json
import os
import re
import select
import sys
from typing import Any

_WAIT = 0.3
_rest = b""


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _next(wait: float | None) -> Any:
    """Return the next line of standard input; None after `wait` seconds. The end of the input ends the program."""
    global _rest
    while b"\n" not in _rest:
        if not select.select([0], [], [], wait)[0]:
            return None
        piece = os.read(0, 1 << 16)
        if not piece:
            sys.exit()
        _rest += piece
    line, _, _rest = _rest.partition(b"\n")
    return json.loads(line)


def _answer(request: Any) -> None:
    response = {"subtype": "success", "request_id": request["request_id"]}
    response["response"] = {"hook_on_failure_supported": True}
    _say(json.dumps({"type": "control_response", "response": response}).encode())


def _await_answer() -> None:
    while (got := _next(_WAIT)) is not None:
        if got["type"] == "control_request":
            _answer(got)
        elif got["type"] == "control_response":
            return


def _store(prompt: Any, lines: list[bytes]) -> None:
    names = set(re.findall(rb'"session_id": *"([a-zA-Z0-9-]{1,64})"', b"\n".join(lines)))
    folder = os.path.join(os.environ["CLAUDE_CONFIG_DIR"], "projects", "played")
    os.makedirs(folder, exist_ok=True)
    for name in names:
        with open(os.path.join(folder, f"{name.decode()}.jsonl"), "a") as transcript:
            for line in (prompt, {"type": "assistant"}):
                transcript.write(json.dumps(line) + "\n")


while True:
    got = _next(None)
    if got["type"] == "control_request":
        _answer(got)
    elif got["type"] == "user":
        with open(sys.argv[1], "rb") as scene:
            lines = scene.read().split(b"\n")
        _store(got, lines)
        for line in lines:
            _say(line[1:])
            if line[:1] == b"?":
                _await_answer()
