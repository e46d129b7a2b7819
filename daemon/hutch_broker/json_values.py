"""Walks through decoded JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["values_in"]


def values_in(value: Any) -> Iterator[Any]:
    """Yield `value` and every value in it, in no certain order. Any depth is allowed: it does not recurse."""
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
