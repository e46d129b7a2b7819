"""Refuses what is not UTF-8: everything that Hutch stores and sends is. Pure.

Python gives arguments, paths and variables that are not UTF-8 as text with lone surrogates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from hutch_shared.errors import HutchError, Reason
from hutch_shared.text import is_valid_text

__all__ = ["encoding_fault", "require_utf8"]

_READ: Final = ("HOME", "PATH", "SHELL", "TMPDIR", "USER", "LOGNAME", "VISUAL", "EDITOR", "COMP_LINE")
_READ_WITH: Final = ("HUTCH_", "XDG_")
"""The variables that Hutch reads; others do not matter."""


def encoding_fault(words: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return a sentence about the first argument or variable that is not UTF-8; None if there is none."""
    for word in words:
        if not is_valid_text(word):
            return f"The argument {_shown(word)} is not UTF-8."
    for name, value in environ.items():
        if (name in _READ or name.startswith(_READ_WITH)) and not is_valid_text(name + value):
            return f"The variable {_shown(name)} is not UTF-8: {_shown(value)}."
    return None


def require_utf8(path: str) -> str:
    """Return `path`. HutchError INVALID_PARAMS if it is not UTF-8."""
    if not is_valid_text(path):
        raise HutchError(Reason.INVALID_PARAMS, f"The path {_shown(path)} is not UTF-8, so Hutch cannot use it.")
    return path


def _shown(text: str) -> str:
    r"""Return the text with bytes that are not UTF-8 as `\xe9`, at most a line's length."""
    return os.fsencode(text).decode(errors="backslashreplace")[:200]
