"""Finds the origin of each setting: the line in the file, an environment variable, or the defaults.

tomllib does not report line numbers. So the file is parsed line by line: lines are added to a statement until tomllib
accepts it, because it rejects an incomplete statement (an open string or bracket). The keys of the statement belong to
its first line. This way the parser that reads the settings also decides what is a key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from hutch_daemon.settings import Settings, parse, read

__all__ = ["Setting", "Shown", "lines_of", "show"]

Key = tuple[str, ...]

_VARIABLES: Final[dict[Key, str]] = {("logs", "level"): "HUTCH_LOG_LEVEL"}
_USER_OF_ADDRESS: Final = re.compile(r"(?<=://)[^/@\s]+@")


class Setting(msgspec.Struct, frozen=True, omit_defaults=True, rename={"origin": "from"}):
    """A setting and its origin. `line` is set for `file`, `variable` for `environment`. An empty table is a value."""

    key: Key
    value: Any
    origin: Literal["default", "file", "environment"]
    line: int | None = None
    variable: str | None = None


class Shown(msgspec.Struct, frozen=True):
    """All settings, in the order of their types. `there` is True if the file exists."""

    file: str
    there: bool
    settings: tuple[Setting, ...]


def show(path: Path, environ: Mapping[str, str] = os.environ, *, system: bool = False) -> Shown:
    """Return the settings of a hutchd that would start now. SettingsError if it would not start.

    No setting is meant to contain a secret; still, user and password in a URL are masked.
    """
    text = read(path)
    settings = msgspec.to_builtins(_in_force(parse(text, str(path), environ), system=system))
    given, lines = tomllib.loads(text), lines_of(text)
    found = (_setting(key, value, given, lines, environ) for key, value in _leaves(settings))
    return Shown(str(path), path.exists(), tuple(found))


def _in_force(settings: Settings, *, system: bool) -> Settings:
    """Fill in the defaults that differ between user mode and system mode."""
    least = settings.isolation.require or ("account" if system else "reduced")
    isolation = msgspec.structs.replace(settings.isolation, require=least)
    return msgspec.structs.replace(settings, limits=settings.bounds(system=system), isolation=isolation)


def lines_of(text: str) -> dict[Key, int]:
    """Return the line number (from 1) at which each key or table of valid TOML first appears.

    The time is linear in the text, except that a value of n lines is parsed n times.
    """
    found: dict[Key, int] = {}
    table: Key = ()
    statement, begin = "", 0
    for number, line in enumerate(text.split("\n"), 1):
        begin = begin if statement else number
        statement += f"{line}\n"
        try:
            tree = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # the statement is not complete yet
        header = statement.lstrip().startswith("[")
        keys = [(*(() if header else table), *key) for key in _keys(tree)]
        for key in keys:
            found.setdefault(key, begin)
        if header:
            table = keys[-1]
        statement = ""
    return found


def _keys(tree: dict[str, Any]) -> Iterator[Key]:
    """Yield the key of each table and value, tables before their content."""
    for name, value in tree.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *key) for key in _keys(value))


def _leaves(tree: dict[str, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _setting(
    key: Key, value: Any, given: dict[str, Any], lines: Mapping[Key, int], environ: Mapping[str, str]
) -> Setting:
    variable = _VARIABLES.get(key)
    if variable is not None and environ.get(variable):
        return Setting(key, _masked(value), "environment", variable=variable)
    if _is_given(key, given):
        return Setting(key, _masked(value), "file", line=lines[key])
    return Setting(key, value, "default")


def _is_given(key: Key, tree: Any) -> bool:
    for name in key:
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = tree[name]
    return True


def _masked(value: Any) -> Any:
    match value:
        case str():
            return _USER_OF_ADDRESS.sub("***@", value)
        case list() | tuple():
            return [_masked(one) for one in value]
        case _:
            return value
