"""config show, path, check: the settings of hutchd and the origin of each.

The program `hutchd` reads and prints them, since only it knows their defaults: the settings that a hutchd would have if
it started now. No hutchd needs to run.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hutch_client import exits
from hutch_client.commands import Command, group, output
from hutch_client.endpoint import find_endpoint
from hutch_client.starting import run_hutchd
from hutch_client.tables import print_json
from hutch_client.untrusted import one_line, plain
from hutch_shared.errors import HutchError, Reason
from hutch_shared.paths import find_paths

if TYPE_CHECKING:
    from tomlkit.container import Container
    from tomlkit.items import Table

__all__ = ["COMMANDS"]


class _Setting(NamedTuple):
    key: tuple[str, ...]
    value: Any
    origin: str
    record: dict[str, Any]
    """The setting as `-o json --origin` prints it."""


def _system_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system",
        action="store_true",
        help="the settings of the host's hutchd (default: yours, or the host's if you use that one)",
    )


def _is_system(given: argparse.Namespace) -> bool:
    return bool(given.system) or find_endpoint().kind == "host"


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "setting", metavar="SECTION[.KEY]", nargs="?", help="print only this, such as limits or limits.memory"
    )
    parser.add_argument(
        "--origin",
        action="store_true",
        help="with where each value comes from: file:line, environment, default",
    )
    _system_argument(parser)
    output(parser, "text", "json")


def _show(given: argparse.Namespace) -> int:
    asked = _key(given.setting) if given.setting else ()
    shown = json.loads(run_hutchd("--show-config", system=_is_system(given)))
    settings = [_setting(one, shown["file"]) for one in shown["settings"]]
    chosen = [one for one in settings if one.key[: len(asked)] == asked]
    if not chosen:
        raise HutchError(Reason.INVALID_PARAMS, _unknown(asked, settings))
    if given.output == "json" and given.origin:
        print_json([one.record for one in chosen])
    elif given.output == "json":
        print_json(chosen[0].value if chosen[0].key == asked else _values(_tree(chosen, below=len(asked))))
    else:
        if not asked:
            print(f"# {one_line(shown['file'])}{'' if shown['there'] else ' does not exist: these are the defaults'}")
            print("# No setting holds a secret: `hutch key` stores model keys, encrypted.\n")
        print(_toml(chosen, origin=given.origin))
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
        raise HutchError(Reason.INVALID_PARAMS, f"`{text}` is not the name of a setting. Give SECTION or SECTION.KEY.")
    return tuple(key)


def _unknown(asked: tuple[str, ...], settings: list[_Setting]) -> str:
    import difflib

    known = {_dotted(one.key[:length]): None for one in settings for length in range(1, len(one.key) + 1)}
    near = difflib.get_close_matches(_dotted(asked), known, 1)
    hint = f"Did you mean {near[0]}?" if near else "`hutch config show` lists them."
    return f"There is no setting {_dotted(asked)}. {hint}"


def _setting(shown: dict[str, Any], file: str) -> _Setting:
    key = tuple(shown["key"])
    record = {**shown, "key": _dotted(key)}
    match shown["from"]:
        case "file":
            origin, record["file"] = f"{file}:{shown['line']}", file
        case "environment":
            origin = f"environment: {shown['variable']}"
        case _:
            origin = "default"
    return _Setting(key, shown["value"], origin, record)


def _tree(settings: list[_Setting], below: int = 0) -> dict[str, Any]:
    """Return the settings as nested tables; the first `below` parts of each key are left out."""
    tree: dict[str, Any] = {}
    for one in settings:
        table = tree
        for name in one.key[below:-1]:
            table = table.setdefault(name, {})
        table[one.key[-1]] = one
    return tree


def _values(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: one.value if isinstance(one, _Setting) else _values(one) for name, one in tree.items()}


def _toml(settings: list[_Setting], *, origin: bool) -> str:
    """Return settings as a TOML file. A setting without a value becomes a comment, since TOML has no null."""
    from tomlkit import document, dumps

    file = document()
    _fill(file, _tree(settings), origin=origin)
    text = dumps(file).strip("\n")
    return "".join(one if one == "\n" or one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def _fill(table: Container | Table, tree: dict[str, Any], *, origin: bool) -> None:
    """Add settings to a table, then the tables below it."""
    from tomlkit import comment, item, key, nl
    from tomlkit import table as new_table

    here = [one for one in tree.values() if isinstance(one, _Setting)]
    lines = [(one, key(one.key[-1]), item(one.value)) for one in here if one.value is not None]
    width = max((len(f"{name.as_string()} = {value.as_string()}") for _, name, value in lines), default=0)
    for one, name, value in lines:
        if origin:
            used = len(f"{name.as_string()} = {value.as_string()}")
            value.comment(one_line(one.origin))
            value.trivia.comment_ws = " " * max(2, min(width, _COLUMN) - used + 2)
        table.add(name, value)
    for one in here:
        if one.value is None:
            table.add(comment(f"{_dotted(one.key[-1:])} is not set"))
    if here:
        table.add(nl())
    for child, below in tree.items():
        if not isinstance(below, _Setting):
            inner = new_table()
            _fill(inner, below, origin=origin)
            table.add(key(child), inner)


_COLUMN: Final = 60
"""Comments are aligned up to this column; beyond it they follow their value."""


def _dotted(names: tuple[str, ...]) -> str:
    """Return a key as TOML spells it."""
    from tomlkit import key

    return key(names).as_string()


def _path(given: argparse.Namespace) -> int:
    print(find_paths(system=_is_system(given)).config)
    return exits.OK


def _check(given: argparse.Namespace) -> int:
    print(plain(run_hutchd("--check", system=_is_system(given))), end="")
    return exits.OK


_VERBS = {
    "show": Command(
        _show_arguments, _show, "Print the settings in force as TOML; with --origin, also where each is from."
    ),
    "path": Command(_system_argument, _path, "Print the path of the settings file."),
    "check": Command(_system_argument, _check, "Check the settings; exit 2 with the reason if they cannot be used."),
}
COMMANDS = {"config": group(_VERBS, "Show and check the settings of hutchd; no hutchd needs to run.")}
