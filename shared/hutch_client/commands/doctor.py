"""doctor: finds the problems that a client can see, with advice; `hutchd --doctor` examines hutchd's own files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Final

from hutch_client import exits
from hutch_client.blocking import BlockingConnection
from hutch_client.commands import Command, output
from hutch_client.commands.daemon import broker_words
from hutch_client.endpoint import Endpoint, find_endpoint
from hutch_client.private import private_record
from hutch_client.tables import print_json
from hutch_client.untrusted import one_line, plain
from hutch_shared import __version__
from hutch_shared.errors import HutchError, Reason
from hutch_shared.host_mark import host_socket, start_command
from hutch_shared.paths import LAUNCHER_CONFIG, find_host

__all__ = ["COMMANDS"]


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    output(parser, "text", "json")
    parser.add_argument(
        "--system",
        action="store_true",
        help="examine the host's hutchd (the default on a host that has one of its own)",
    )
    parser.add_argument(
        "--account",
        metavar="ACCOUNT",
        help="on a host: find what keeps agents from running as ACCOUNT (default: you, and the launcher's list)",
    )
    parser.add_argument(
        "--sudo", action="store_true", help="print the sudo rule that hutch-launcher needs if it has no unit"
    )


def _doctor(given: argparse.Namespace) -> int:
    if given.sudo:
        return _sudo_rule()
    findings = list(_examine(given.account, system=given.system))
    if given.output == "json":
        print_json([{"ok": advice is None, "subject": what, "advice": advice} for what, advice in findings])
    else:
        for what, advice in findings:
            print(f"{'ok' if advice is None else '!!'}  {one_line(what)}")
            if advice:
                print(f"    → {one_line(advice)}")
    return exits.OK if all(advice is None for _, advice in findings) else exits.FAILED


def _sudo_rule() -> int:
    """Print the sudo rule for hutch-launcher, as `hutchd` gives it; visudo checks the rule if it is installed."""
    import shutil
    import subprocess

    from hutch_client.starting import run_hutchd

    text = run_hutchd("--sudo-rule", system=True)
    print(text, end="")
    visudo = shutil.which("visudo", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if visudo is None:
        print("There is no visudo here: the rule was not checked.", file=sys.stderr)
        return exits.OK
    checked = subprocess.run([visudo, "-cf", "-"], input=text, capture_output=True, text=True, check=False, cwd="/")
    if checked.returncode:
        print(f"visudo refuses the rule: {plain(checked.stderr or checked.stdout).strip()}", file=sys.stderr)
        return exits.FAILED
    print(
        "visudo accepts the rule. As root: hutch doctor --sudo | install -m 440 /dev/stdin /etc/sudoers.d/hutch",
        file=sys.stderr,
    )
    return exits.OK


def _examine(account: str | None, *, system: bool) -> Iterator[tuple[str, str | None]]:
    """Yield (subject, advice) for each thing that was examined; the advice is None if nothing is wrong."""
    endpoint = Endpoint(host_socket() or find_host({}, system=True), "host") if system else find_endpoint()
    if account is not None and endpoint.kind != "host":
        raise HutchError(
            Reason.INVALID_PARAMS, "--account is for a host's hutchd; this one runs agents as yourself (see --system)."
        )
    yield f"hutch {__version__} talks to {endpoint}", None
    yield from _examine_choice(endpoint)
    yield from _examine_inside(endpoint, account)
    try:
        with BlockingConnection(endpoint.socket) as hutch:
            yield f"hutchd {hutch.server['version']} answers", None
            status = hutch.call("get_status")
            keys = hutch.call("list_api_keys")["keys"]
    except HutchError as error:
        down = error.reason is Reason.CONNECTION_LOST and endpoint.kind == "host"
        start = f"As root: `{start_command()}`." if down else None
        yield (
            error.message,
            error.details.get("remedy") or start or _REMEDIES.get(error.reason, "Look at `hutch daemon logs`."),
        )
        return
    store, isolation = status["store"], status["isolation"]
    same = status["version"] == __version__
    yield (
        f"versions: hutch {__version__}, hutchd {status['version']}",
        None if same else "Restart hutchd after an update.",
    )
    yield f"store: {store['path']}", None if store["ok"] else store.get("detail", "It cannot write.")
    kept = status["keys"] != "exposed"
    safe = kept or isolation["level"] != "reduced"
    more = isolation.get("missing") if safe else None
    yield f"isolation: {isolation['level']}{f'; for more: {more}' if more else ''}", None if safe else isolation["why"]
    yield (
        f"keys: {status['keys']}",
        None if kept else isolation.get("keys_why", "An agent could read your model keys here."),
    )
    yield f"master key in use: {status['master_key']}", None
    if broker := status.get("broker"):
        words, up = broker_words(broker), broker["state"] != "down"
        yield (
            f"broker: {words}",
            None if up else "Agents reach no model until it is up. hutchd restarts it.",
        )
    # In system mode each user has their own keys; an administrator may need none.
    own = keys or status["mode"] == "system"
    yield f"model keys: {len(keys)}", None if own else "Add one: `hutch key add anthropic`."
    for key in keys:
        if trouble := key.get("trouble"):
            yield f"model key {key['provider']} {key['name']}", trouble
    for one in status.get("executors", ()):
        if one["state"] == "quarantined":
            yield (
                f"executor {one['id']} (pid {one['pid']})",
                f"hutchd could not verify that its processes are gone: {one.get('detail', '')}",
            )
    for notice in status.get("notices", ()):
        yield "notice", notice


def _examine_choice(endpoint: Endpoint) -> Iterator[tuple[str, str | None]]:
    """Name the other hutchd that the caller could talk to."""
    host = host_socket()
    if endpoint.kind == "host" and (own := private_record()) is not None:
        yield f"{own}; its record is in {own.state}", None
    elif endpoint.kind == "private" and host is not None:
        yield f"the host's hutchd, for everybody, is at {host}: commands without --private use it", None
    elif endpoint.kind == "private" and os.geteuid() == 0 and os.path.exists(LAUNCHER_CONFIG):
        install = "`hutch service install --system --now` installs one, `hutch doctor --system` examines what is there"
        yield f"{LAUNCHER_CONFIG} exists, but the host has no hutchd of its own: {install}", None


def _examine_inside(endpoint: Endpoint, account: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the findings of `hutchd --doctor` in hutchd's settings and files, as far as the caller may read them."""
    import subprocess

    from hutch_client.starting import HUTCHD

    if endpoint.kind == "named":
        return  # hutchd's files may be elsewhere
    argv = [*HUTCHD, "--doctor", *(["--system"] if endpoint.kind == "host" else [])]
    argv += ["--account", account] if account is not None else []
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_EXAMINATION)
        found = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        yield "hutchd's files", f"`hutchd --doctor` failed: {error.stderr.strip()}"
    except (subprocess.TimeoutExpired, ValueError) as error:
        yield "hutchd's files", f"`hutchd --doctor` failed: {error}"
    else:
        yield from ((one["subject"], one["advice"]) for one in found)


_EXAMINATION: Final = 200.0
_REMEDIES: Final = {
    Reason.CONNECTION_LOST: "Start it: `hutch daemon start`.",
    Reason.NOT_ALLOWED: "Use your own with --private, or ask the host's administrator.",
    Reason.PROTOCOL_MISMATCH: "Update the older of the two and restart hutchd.",
}
COMMANDS = {
    "doctor": Command(_doctor_arguments, _doctor, "Find problems and say what to do; exit 1 if there are any."),
}
