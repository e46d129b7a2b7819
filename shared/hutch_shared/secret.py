"""A secret text that cannot reach a log, a traceback or a message by accident."""

from __future__ import annotations

import hmac
from typing import NoReturn

__all__ = ["Secret"]


class Secret:
    """Holds a secret text. Only `reveal()` returns it; grep finds its callers."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        """Keep `value`. ValueError for an empty one, which redaction would find everywhere."""
        if not value:
            raise ValueError("a secret cannot be empty")
        self._value = value

    def reveal(self) -> str:
        """Return the value itself."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __repr__(self) -> str:
        return "Secret(…)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")
