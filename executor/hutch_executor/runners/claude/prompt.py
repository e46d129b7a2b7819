"""A prompt as a line for the CLI. Pure.

`client_composed` makes the CLI deliver the words exactly as they are. Without it, words that begin with the name of a
built-in command run that command and never reach the model.

The line's `uuid` follows from the turn. The CLI stores it with the prompt in the transcript, and never runs a prompt
whose uuid the conversation already contains; so the transcript shows whether the CLI has accepted a turn's prompt.
"""

from __future__ import annotations

import json
import uuid
from typing import Final

__all__ = ["compact_line", "prompt_line", "prompt_uuid"]

_NAMESPACE: Final = uuid.UUID("5b0f2c34-6b1e-5c0a-9a83-0f3a54c0c8a5")


def prompt_uuid(turn: str) -> str:
    """Return the uuid of the prompt of a turn."""
    return str(uuid.uuid5(_NAMESPACE, turn))


def prompt_line(text: str, turn: str, recap: str | None = None) -> str:
    """Return the line that submits the prompt of a turn; the model gets `text` unchanged, after `recap` if given."""
    if recap is None:
        return _line(text, turn, client_composed=True)
    blocks = [{"type": "text", "text": block} for block in (recap, text)]
    return _line(blocks, turn, client_composed=True)


def compact_line(words: str, turn: str) -> str:
    """Return the line that makes the CLI replace the conversation by a summary. `words` say what it must keep."""
    return _line(f"/compact {words}".rstrip(), turn)


def _line(content: str | list[dict[str, str]], turn: str, **more: object) -> str:
    line = {
        "type": "user",
        "message": {"role": "user", "content": content},
        "parent_tool_use_id": None,
        "session_id": "default",
        "uuid": prompt_uuid(turn),
        **more,
    }
    return f"{json.dumps(line)}\n"
