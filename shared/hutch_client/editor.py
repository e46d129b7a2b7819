"""The user's editor, for changing a tool's input before it runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from typing import Any

from hutch_client.questions import editable, edited
from hutch_shared.errors import HutchError, Reason

__all__ = ["edit_input"]


def edit_input(tool_input: dict[str, Any]) -> dict[str, Any]:
    """Let the user edit the input in `$VISUAL`, `$EDITOR` or vi; block until the editor ends.

    Raises HutchError INVALID_PARAMS if the editor fails or its text is not a valid input.
    """
    text, suffix = editable(tool_input)
    wanted = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    try:
        command = shlex.split(wanted) or ["vi"]
    except ValueError as error:
        raise HutchError(Reason.INVALID_PARAMS, f"The editor `{wanted}` cannot be run: {error}.") from None
    with tempfile.TemporaryDirectory(prefix="hutch-") as place:  # 0700: the input may be private
        path = os.path.join(place, f"input{suffix}")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            subprocess.run([*command, path], check=True, cwd=place)  # editors obey files in their working directory
            with open(path, encoding="utf-8") as file:
                return edited(tool_input, file.read())
        except (OSError, subprocess.CalledProcessError) as error:
            raise HutchError(
                Reason.INVALID_PARAMS, f"The editor `{command[0]}` failed: {error}. Set EDITOR to another one."
            ) from None
        except (ValueError, RecursionError) as error:
            raise HutchError(Reason.INVALID_PARAMS, f"The edited text is not a valid input: {error}") from None
