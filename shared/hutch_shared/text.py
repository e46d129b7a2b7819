"""Text from outside as valid Unicode, and JSON from a lax writer. Pure.

A lone surrogate is half of a character outside the Basic Multilingual Plane: JavaScript strings may hold one, and JSON
can spell one (`"\\ud83d"`). It has no UTF-8 form, so a strict reader refuses everything around it. Hutch reads such
input and replaces what has no valid form: invalid text by U+FFFD, a number that no reader can hold by null.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

__all__ = ["is_valid_text", "read_lax_json", "split_surrogate", "valid_text", "valid_value"]

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_DIGITS: Final = 400
"""Digits of an integer that every reader of the wire accepts; see `rpc.envelope`."""
_LARGEST: Final = 10**_DIGITS - 1


def is_valid_text(text: str) -> bool:
    """Tell whether `text` has a UTF-8 form. Python reads bytes that are not UTF-8 as lone surrogates."""
    return text.isascii() or _SURROGATE.search(text) is None


def valid_text(text: str) -> str:
    """Return `text` with its halves of surrogate pairs joined, and each lone half replaced by U+FFFD."""
    if is_valid_text(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def split_surrogate(text: str) -> tuple[str, str]:
    """Return `text` without a high surrogate at its end, and that surrogate: its other half may follow later."""
    return (text[:-1], text[-1]) if "\ud800" <= text[-1:] <= "\udbff" else (text, "")


def valid_value(value: Any) -> Any:
    """Return a JSON value with valid text, keys included, and null for a number that is infinite or too long.

    Of keys that become equal, the last one stays. RecursionError if it is nested too deeply.
    """
    match value:
        case str():
            return valid_text(value)
        case dict():
            return {valid_text(key): valid_value(item) for key, item in value.items()}
        case list():
            return [valid_value(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
        case int():
            return value if -_LARGEST <= value <= _LARGEST else None
        case _:
            return value


def read_lax_json(line: bytes) -> Any:
    """Return the JSON value in `line`. Its strings may hold lone surrogates; `valid_value` replaces them.

    Bytes that are not UTF-8 become U+FFFD, and control characters in strings are accepted. ValueError if it is not
    JSON, RecursionError if it is nested too deeply.
    """
    return json.loads(line.decode(errors="replace"), strict=False, parse_int=_integer)


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS else math.inf
