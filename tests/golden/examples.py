"""An example of every type that crosses a socket, with each field filled, built from the types alone."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from hutch_shared import events, methods
from hutch_shared import messages as m

Struct = msgspec.Struct


def wire_types() -> list[type[Struct]]:
    """Return all parameters and results of the method tables, the data of each kind of event, and the boot line."""
    kinds: list[type[Struct]] = [*events.DATA_OF_KIND.values(), m.Boot]
    for table in (methods.CLIENT, methods.TO_CLIENT, methods.EXECUTOR, methods.TO_EXECUTOR):
        for method in table.values():
            kinds += [method.params, *([method.result] if method.result is not None else [])]
    found: dict[str, type[Struct]] = {kind.__name__: kind for kind in kinds}
    return [found[name] for name in sorted(found)]


def example(kind: type[Struct]) -> Struct:
    """Return a value of `kind` in which no field has its default, so that every field is in the JSON."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], name) for name in kind.__struct_fields__})


def _value(kind: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _value(next(one for one in arguments if one not in (type(None), msgspec.UnsetType)), name)
    if origin is typing.Literal:
        return arguments[-1]
    if origin is tuple:
        return tuple(_values(arguments, name))
    if origin is dict:
        return {"key": _value(arguments[1], name)}
    if kind is Any:
        return f"any {name}"
    if kind is msgspec.Raw:
        return msgspec.Raw(b'{"raw":"%s"}' % name.encode())
    if isinstance(kind, type) and issubclass(kind, Struct):
        return example(kind)
    return {str: f"a {name}", int: 7, float: 1.5, bool: True, bytes: b"bytes"}[kind]


def _values(arguments: tuple[Any, ...], name: str) -> Iterator[Any]:
    for one in arguments:
        if one is not Ellipsis:
            yield _value(one, name)
