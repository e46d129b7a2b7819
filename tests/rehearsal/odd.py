"""What a model or its gateway may send that is unusual. Add a new one here: one entry.

`ODD_LINES` come between the events of a stream, `ODD_REPLIES` are whole replies. `tests/system/test_odd_replies.py`
plays each of them to the real CLI.
"""

from __future__ import annotations

from typing import Final

from tests.rehearsal.parts import ABSENT, Replace, Reply, Say, Think, Use

ODD_LINES: Final[dict[str, bytes]] = {
    "comment": b": keep-alive\n\n",
    "unknown event": b'event: weather\ndata: {"type":"weather","sky":"clear"}\n\n',
    "event without data": b"event: ping\n\n",
}
"""Name of the line, and its bytes."""

_USAGE: Final = ("usage", "input_tokens")
ODD_REPLIES: Final[dict[str, Reply]] = {
    "half a character in text": Say("half \ud83d and rest"),
    "a character in two deltas": Say("whole \ud83d\ude00 and rest", 17),
    "half a character in thinking": [Think("hm \ude00", 2), Say("ok")],
    "half a character in a tool's input": Use("Bash", {"command": "echo \ud99c hi", "description": "x \ud99c"}),
    "half a character in a name of a tool's input": Use("Bash", {"command": "true", "x\ud99c": 1}),
    "half a character in a question": Use(
        "AskUserQuestion",
        {
            "questions": [
                {
                    "question": "Which?",
                    "header": "H",
                    "multiSelect": False,
                    "options": [{"label": "A", "description": "x \ud82d y"}, {"label": "B", "description": "b"}],
                }
            ]
        },
    ),
    "usage as text": [
        Say("hello there"),
        Replace("message_start", ("message", *_USAGE), "12"),
        Replace("message_delta", _USAGE, "12"),
        Replace("message_delta", ("usage", "output_tokens"), "5"),
    ],
    "usage of no kind": [Say("hello"), Replace("message_delta", ("usage",), [])],
    "negative usage": [Say("hello"), Replace("message_delta", _USAGE, -5)],
    "no reason to stop": [Say("hello"), Replace("message_delta", ("delta", "stop_reason"), ABSENT)],
    "an unknown reason to stop": [Say("hello"), Replace("message_delta", ("delta", "stop_reason"), "tired")],
}
"""Name of the reply, and its parts."""
