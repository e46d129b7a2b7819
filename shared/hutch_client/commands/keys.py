"""key: model keys. A secret is read from standard input or a hidden prompt, never from argv: others can see argv."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

from hutch_client import exits
from hutch_client.blocking import BlockingConnection
from hutch_client.commands import Command, group, output
from hutch_client.tables import fields, print_json, table
from hutch_shared.errors import HutchError, Reason
from hutch_shared.secret import Secret
from hutch_shared.times import now_ms, to_wire

__all__ = ["COMMANDS"]

_INPUT_LIMIT: Final = 1 << 16
_OAUTH: Final = ("refresh_token", "refresh_url", "client_id")
"""The fields of a log-in that hutchd gets. A token endpoint may return other fields; those are dropped."""


def _provider(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("provider", metavar="PROVIDER", help="such as anthropic")


def _key_arguments(parser: argparse.ArgumentParser) -> None:
    _provider(parser)
    parser.add_argument(
        "--name", default="default", help="name of the key, if you have several of a provider (default: %(default)s)"
    )


def _output(parser: argparse.ArgumentParser) -> None:
    output(parser, "text", "json")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    _key_arguments(parser)
    parser.set_defaults(
        surplus="a key cannot be an argument, since others can see arguments. Give it on standard input or at the"
        " prompt. If this was a key, your shell's history has it now"
    )
    parser.add_argument("--base-url", metavar="URL", help="send the key only to this address, not to the provider")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--kind",
        choices=("api_key", "gateway", "oauth"),
        default="api_key",
        help="gateway and oauth keys are sent as bearer tokens (default: %(default)s)",
    )
    how.add_argument(
        "--oauth",
        action="store_true",
        help="read a log-in as a JSON object: access_token, and for refreshing it refresh_token, refresh_url,"
        " client_id and expires_in or expires_at",
    )


def _add(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:  # first: without a hutchd the user need not type the key
        what = _read_log_in() if given.oauth else {"kind": given.kind, "secret": _read_key(given.provider).reveal()}
        stored = hutch.call("put_api_key", provider=given.provider, name=given.name, base_url=given.base_url, **what)
    print(f"Stored: {stored['provider']} {stored['name']} {_hint(stored['hint'])}".rstrip(), file=sys.stderr)
    if stored.get("remains"):
        print(f"! The replaced key: {stored['remains']}", file=sys.stderr)
    return exits.OK


def _read_key(provider: str) -> Secret:
    if sys.stdin.isatty():
        import getpass

        try:
            key = getpass.getpass(f"Key for {provider} (not shown): ").strip()
        except EOFError:
            key = ""
    else:
        key = sys.stdin.readline(_INPUT_LIMIT).strip()
    if not key:
        raise HutchError(Reason.INVALID_PARAMS, "There was no key on standard input.")
    return Secret(key)


def _read_log_in() -> dict[str, Any]:
    """Read a log-in as JSON and return the fields of `put_api_key`. No error shows the text."""
    try:
        found = json.loads(sys.stdin.read(_INPUT_LIMIT))
        what = {"kind": "oauth", "secret": found["access_token"], **{name: found.get(name) for name in _OAUTH}}
        if (left := found.get("expires_in")) is not None:
            return {**what, "expires_at": to_wire(now_ms() + int(float(left) * 1000))}
        return {**what, "expires_at": found.get("expires_at")}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError):
        raise HutchError(
            Reason.INVALID_PARAMS,
            f"Give a JSON object on standard input: access_token, and for refreshing it {', '.join(_OAUTH)} and"
            " expires_in (seconds) or expires_at (RFC 3339).",
        ) from None


def _hint(hint: str) -> str:
    return f"…{hint}" if hint else ""


def _ls(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        keys = hutch.call("list_api_keys")["keys"]
    if given.output == "json":
        print_json(keys)
        return exits.OK
    rows = (
        (
            key["provider"],
            key["name"] + (" *" if key.get("chosen") else ""),
            key.get("kind", "api_key"),
            _hint(key["hint"]),
            key.get("uses", 0),
            key.get("last_used_at", "never"),
            key.get("base_url") or "",
        )
        for key in keys
    )
    print(table(("PROVIDER", "NAME", "KIND", "ENDS IN", "USES", "LAST USED", "GOES TO"), rows))
    for key in keys:
        if key.get("trouble"):
            print(f"! {key['provider']} {key['name']}: {key['trouble']}", file=sys.stderr)
    return exits.OK


def _use_arguments(parser: argparse.ArgumentParser) -> None:
    _provider(parser)
    parser.add_argument("name", metavar="NAME", help="which of your keys")


def _use(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        hutch.call("use_api_key", provider=given.provider, name=given.name)
    return exits.OK


def _rm(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        deleted = hutch.call("delete_api_key", provider=given.provider, name=given.name)
    if deleted.get("remains"):
        print(f"! The key is deleted. {deleted['remains']}", file=sys.stderr)
    return exits.OK


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("provider", nargs="?", metavar="PROVIDER", help="such as anthropic")
    parser.add_argument("--session", metavar="SESSION", help="the key of this session: id, prefix of an id, or name")
    _output(parser)


def _explain(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        explained = hutch.call("explain_key", provider=given.provider, session=given.session)
    if given.output == "json":
        print_json(explained)
        return exits.OK
    key = explained["key"]
    print(
        fields(
            [
                ("key", f"{key['provider']} {key['name']} {_hint(key['hint'])}".rstrip()),
                ("why", explained["why"]),
                ("goes to", key.get("base_url") or "where [providers] in the settings says, else the provider itself"),
                ("given as", explained["delivery"]),
                ("since", explained["delivery_why"]),
                ("trouble", key.get("trouble")),
            ]
        )
    )
    return exits.OK


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""


def _rotate(given: argparse.Namespace) -> int:
    with BlockingConnection(timeout=600.0) as hutch:
        done = hutch.call("rotate_master_key")
    wrapped = "1 envelope was" if done["wrapped"] == 1 else f"{done['wrapped']} envelopes were"
    print(
        f"There is a new master key ({done['source']}); {wrapped} wrapped with it."
        " Older backups need the old key: make a new backup.",
        file=sys.stderr,
    )
    return exits.OK


_VERBS = {
    "add": Command(_add_arguments, _add, "Store a key, read from standard input or a hidden prompt."),
    "ls": Command(_output, _ls, "List keys, without their secrets; * marks the one you chose."),
    "use": Command(_use_arguments, _use, "Choose the key for sessions that name none."),
    "rm": Command(_key_arguments, _rm, "Delete a key, and end its use at once."),
    "explain": Command(_explain_arguments, _explain, "Show which key is used, why, and what the agent gets."),
    "rotate-master": Command(_no_arguments, _rotate, "Replace the master key while hutchd works."),
}
COMMANDS = {"key": group(_VERBS, "Add, choose, explain and remove model keys.")}
