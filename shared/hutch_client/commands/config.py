"""config show, path, check: the settings of hutchd, and where each of them comes from.

They are read by hutchd's own program, which alone knows them and their defaults; no hutchd needs to run. What it says
is what a hutchd that started here and now would have.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any, Final, NamedTuple

from hutch_client import exits
from hutch_client.commands import Command, group, output
from hutch_client.endpoint import socket_path
from hutch_client.starting import run_hutchd
from hutch_client.tables import print_json
from hutch_client.untrusted import one_line, plain
from hutch_shared.errors import HutchError, Reason
from hutch_shared.paths import find_host, find_paths

__all__ = ["COMMANDS"]


class _Setting(NamedTuple):
    key: tuple[str, ...]
    value: Any
    origin: str
    record: dict[str, Any]
    """As `-o json --origin` prints it."""


def _which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system",
        action="store_true",
        help="those of the host's hutchd (default: yours, or the host's where it is the one that you talk to)",
    )


def _is_system(given: argparse.Namespace) -> bool:
    return bool(given.system) or socket_path() == find_host({}, system=True)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "setting", metavar="SECTION[.KEY]", nargs="?", help="that alone, such as limits or limits.memory"
    )
    parser.add_argument(
        "--origin", action="store_true", help="with where each is from: file:line, environment, default"
    )
    _which(parser)
    output(parser, "text", "json")


def _show(given: argparse.Namespace) -> int:
    asked = _key(given.setting) if given.setting else ()
    told = json.loads(run_hutchd("--show-config", system=_is_system(given)))
    settings = [_setting(one, told["file"]) for one in told["settings"]]
    chosen = [one for one in settings if one.key[: len(asked)] == asked]
    if not chosen:
        raise HutchError(Reason.INVALID_PARAMS, _unknown(asked, settings))
    if given.output == "json" and given.origin:
        print_json([one.record for one in chosen])
    elif given.output == "json":
        print_json(chosen[0].value if chosen[0].key == asked else _values(_tree(chosen, below=len(asked))))
    else:
        if not asked:
            print(f"# {one_line(told['file'])}{'' if told['there'] else ' is not there: all of this is default'}")
            print("# No setting holds a secret: model keys are kept by `hutch key`, and encrypted.\n")
        lines = [*_toml(_tree(chosen), (), origin=given.origin)]
        print("\n".join(lines).strip("\n"))
    return exits.OK


def _key(text: str) -> tuple[str, ...]:
    """Read a key as TOML spells it, `providers."my.own".base_url`; INVALID_PARAMS."""
    import tomllib

    try:
        tree: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        tree = None
    key = []
    while isinstance(tree, dict) and len(tree) == 1:
        ((name, tree),) = tree.items()
        key.append(name)
    if tree != 0:
        raise HutchError(Reason.INVALID_PARAMS, f"`{text}` is no name of a setting: SECTION or SECTION.KEY.")
    return tuple(key)


def _unknown(asked: tuple[str, ...], settings: list[_Setting]) -> str:
    import difflib

    known = {_dotted(one.key[:length]): None for one in settings for length in range(1, len(one.key) + 1)}
    near = difflib.get_close_matches(_dotted(asked), known, 1)
    hint = f"Did you mean {near[0]}?" if near else "`hutch config show` lists them."
    return f"There is no setting {_dotted(asked)}. {hint}"


def _setting(told: dict[str, Any], file: str) -> _Setting:
    key = tuple(told["key"])
    record = {**told, "key": _dotted(key)}
    match told["from"]:
        case "file":
            origin, record["file"] = f"{file}:{told['line']}", file
        case "environment":
            origin = f"environment: {told['variable']}"
        case _:
            origin = "default"
    return _Setting(key, told["value"], origin, record)


def _tree(settings: list[_Setting], below: int = 0) -> dict[str, Any]:
    """Return nested tables whose values are the settings; keys without their first `below` parts."""
    tree: dict[str, Any] = {}
    for one in settings:
        table = tree
        for name in one.key[below:-1]:
            table = table.setdefault(name, {})
        table[one.key[-1]] = one
    return tree


def _values(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: one.value if isinstance(one, _Setting) else _values(one) for name, one in tree.items()}


def _toml(tree: dict[str, Any], table: tuple[str, ...], *, origin: bool) -> list[str]:
    """Return the lines of `tree`. A setting without a value stands there as a comment: TOML has no word for it."""
    here = [one for one in tree.values() if isinstance(one, _Setting)]
    lines = [f"{_name(one.key[-1])} = {_literal(one.value)}" for one in here if one.value is not None]
    if origin:
        valued = (one for one in here if one.value is not None)
        width = min(max(map(len, lines), default=0), _FAR)
        lines = [f"{line:<{width}}  # {one_line(one.origin)}" for line, one in zip(lines, valued, strict=True)]
    lines += [f"# {_name(one.key[-1])} is not set" for one in here if one.value is None]
    if here:
        lines = [*([f"[{_dotted(table)}]"] if table else []), *lines, ""]
    for name, inner in tree.items():
        if not isinstance(inner, _Setting):
            lines += _toml(inner, (*table, name), origin=origin)
    return lines


_FAR: Final = 60
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def _dotted(key: tuple[str, ...]) -> str:
    return ".".join(map(_name, key))


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def _literal(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _quoted(value)
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case dict():
            return "{}"
        case _:
            return repr(value)


def _quoted(text: str) -> str:
    """Return a basic string of TOML; what JSON escapes TOML reads, and nothing gets out that drives a terminal."""
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in json.dumps(text, ensure_ascii=False))


def _path(given: argparse.Namespace) -> int:
    print(find_paths(system=_is_system(given)).config)
    return exits.OK


def _check(given: argparse.Namespace) -> int:
    print(plain(run_hutchd("--check", system=_is_system(given))), end="")
    return exits.OK


_VERBS = {
    "show": Command(_show_arguments, _show, "Print the settings in force as TOML, on request with where each is from."),
    "path": Command(_which, _path, "Print where the settings file is, or would be."),
    "check": Command(_which, _check, "Say whether the settings can be used; exit 2 and the reason when not."),
}
COMMANDS = {"config": group(_VERBS, "Show and check the settings of hutchd; no hutchd needs to run.")}
