"""key add, ls, rm. A key comes from standard input or a hidden prompt, never from argv, which everybody can read."""

from __future__ import annotations

import argparse
import sys

from hutch_client import exits
from hutch_client.blocking import Connection
from hutch_client.commands import Command, group
from hutch_client.tables import print_json, table
from hutch_shared.errors import HutchError, Reason
from hutch_shared.secret import Secret

__all__ = ["COMMANDS"]


def _which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("provider", metavar="PROVIDER", help="such as anthropic")
    parser.add_argument(
        "--name", default="default", help="where there are several of a provider (default: %(default)s)"
    )


def _add(given: argparse.Namespace) -> int:
    with Connection() as hutch:  # first: a key is asked for only when there is somebody to take it
        stored = hutch.call(
            "put_api_key", provider=given.provider, name=given.name, secret=_read_key(given.provider).reveal()
        )
    print(f"Stored: {stored['provider']} {stored['name']} {_hint(stored['hint'])}".rstrip(), file=sys.stderr)
    return exits.OK


def _read_key(provider: str) -> Secret:
    if sys.stdin.isatty():
        import getpass

        key = getpass.getpass(f"Key for {provider} (not shown): ").strip()
    else:
        key = sys.stdin.readline().strip()
    if not key:
        raise HutchError(Reason.INVALID_PARAMS, "No key came on standard input.")
    return Secret(key)


def _hint(hint: str) -> str:
    return f"…{hint}" if hint else ""


def _ls_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def _ls(given: argparse.Namespace) -> int:
    with Connection() as hutch:
        keys = hutch.call("list_api_keys")["keys"]
    if given.output == "json":
        print_json(keys)
    else:
        rows = (
            (
                k["provider"],
                k["name"],
                _hint(k["hint"]),
                k.get("uses", 0),
                k.get("last_used_at", "never"),
                k["created_at"],
            )
            for k in keys
        )
        print(table(("PROVIDER", "NAME", "ENDS IN", "USES", "LAST USED", "CREATED"), rows))
    return exits.OK


def _rm(given: argparse.Namespace) -> int:
    with Connection() as hutch:
        hutch.call("delete_api_key", provider=given.provider, name=given.name)
    return exits.OK


_VERBS = {
    "add": Command(_which, _add, "Store a key, read from standard input or a hidden prompt."),
    "ls": Command(_ls_arguments, _ls, "List keys, without their secrets."),
    "rm": Command(_which, _rm, "Forget a key."),
}
COMMANDS = {"key": group(_VERBS, "Add, list and remove model keys.")}
