"""status, version, daemon: the health of hutchd, and starting, stopping, backing up and restoring it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from hutch_client import exits
from hutch_client.blocking import PROTOCOL, BlockingConnection
from hutch_client.commands import Command, group, number, output, seconds
from hutch_client.commands.sessions import isolation_fields, limits_words
from hutch_client.endpoint import find_endpoint, host_is_down
from hutch_client.private import private_record
from hutch_client.tables import ago, count, fields, print_json, table
from hutch_client.untrusted import one_line, plain
from hutch_shared import __version__
from hutch_shared.encoding import require_utf8
from hutch_shared.errors import HutchError, Reason

__all__ = ["COMMANDS", "broker_words"]


def _output(parser: argparse.ArgumentParser) -> None:
    output(parser, "text", "json")


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""


def _status(given: argparse.Namespace) -> int:
    endpoint = find_endpoint()
    with BlockingConnection(endpoint.socket) as hutch:
        status = hutch.call("get_status")
    own = private_record() if endpoint.kind == "host" else None
    if given.output == "json":
        private = None if own is None else {"state": str(own.state), "sessions_open": own.sessions}
        print_json({**status, "which": endpoint.kind, "socket": str(endpoint.socket), "private": private})
        return exits.OK
    store, isolation, get = status["store"], status["isolation"], status.get
    print(
        fields(
            [
                ("hutchd", f"{status['version']}, pid {status['pid']}, {status['mode']} mode"),
                ("this is", endpoint),
                ("up", ago(status["started_at"], time.time())),
                ("state", "draining: accepts no new work" if status["draining"] else "ready"),
                ("sessions", f"{get('sessions_open', 0)} open"),
                ("turns", _turns_words(status)),
                ("requests", f"{count(get('permissions_pending', 0), 'permission request')} pending"),
                (
                    "store",
                    f"{'ok' if store['ok'] else 'FAILING'}, {count(store.get('events', 0), 'event')}, {store['path']}",
                ),
                ("store detail", store.get("detail")),
                *isolation_fields(isolation),
                ("keys", f"{status['keys']} (master key: {status['master_key']})"),
                ("why", isolation.get("keys_why")),
                ("broker", broker_words(get("broker"))),
                *get("paths", {}).items(),
            ]
        )
    )
    if executors := get("executors", ()):
        rows = (
            (
                one["id"],
                one["account"],
                one["agent"],
                one["state"],
                one["pid"],
                one.get("session", ""),
                one.get("detail", ""),
            )
            for one in executors
        )
        print()
        print(table(("EXECUTOR", "ACCOUNT", "AGENT", "STATE", "PID", "SESSION", ""), rows))
        made = [(one["id"], limits_words(one["limits"])) for one in executors if one.get("limits")]
        if made:
            print()
            print(table(("EXECUTOR", "LIMITS APPLIED"), made))
    for notice in (*([] if own is None else [f"Beside it, {own}."]), *get("notices", ())):
        print(f"! {one_line(notice)}", file=sys.stderr)
    return exits.OK


def _turns_words(status: dict[str, Any]) -> str:
    awaiting = status.get("turns_awaiting_permission", 0)
    running = status.get("turns_running", 0) - awaiting
    waits = f", {awaiting} awaiting permission" if awaiting else ""
    return f"{running} running{waits}, {status.get('turns_queued', 0)} queued"


def broker_words(broker: dict[str, Any] | None) -> str | None:
    """Return `up: 2 leases, …`, or why the broker is not up."""
    match broker:
        case None:
            return None
        case {"state": "up"}:
            counts = (count(broker.get(f"{noun}s", 0), noun) for noun in ("lease", "stream", "request"))
            return f"up: {', '.join(counts)}, {broker.get('refused', 0):,} refused"
        case {"state": "idle"}:
            return "not started: no key has been needed yet"
        case _:
            return f"DOWN: {broker.get('detail') or 'it is starting'}"


def _version(given: argparse.Namespace) -> int:
    versions: dict[str, Any] = {"client": {"version": __version__, "protocol": PROTOCOL}}
    try:
        with BlockingConnection() as hutch:
            versions["daemon"] = hutch.server
    except HutchError as error:
        versions["daemon"], why = None, error.message
    if given.output == "json":
        print_json(versions)
        return exits.OK
    print(f"hutch {__version__} (protocol {PROTOCOL})")
    if versions["daemon"]:
        print(f"hutchd {one_line(versions['daemon']['version'])} (protocol {versions['daemon']['protocol']})")
    else:
        print(plain(why), file=sys.stderr)
    return exits.OK


def _start_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="S", help="wait S seconds for it (default: %(default)g)"
    )


def _start(given: argparse.Namespace) -> int:
    from hutch_client.starting import log_path, start

    pid = start(timeout=given.timeout)
    words = f"Started hutchd, pid {pid}; its log is {log_path()}" if pid else "hutchd runs already."
    print(words, file=sys.stderr)
    return exits.OK


def _stop_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    parser.set_defaults(how="drain")
    for word, doc in _WAYS.items():
        how.add_argument(f"--{word}", action="store_const", dest="how", const=word, help=doc)
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="drain for S seconds (default: %(default)g)"
    )


_NOTHING = "No hutchd runs, and nothing of it is left."
_WAYS = {
    "drain": "wait for running turns to end, and leave those that do not (the default)",
    "leave": "leave executors and their turns running; the next hutchd adopts them",
    "stop": "stop running turns, so that nothing is left; also what a hutchd that is gone has left",
}


def _stop(given: argparse.Namespace) -> int:
    from hutch_client.stopping import end_processes, stop
    from hutch_shared.process_record import BROKER

    stopped = stop(given.how, given.timeout)
    left = stopped.left
    if given.how == "stop" and left:
        left = end_processes(left)
        if not stopped.ran and not left:
            print(f"Ended what an earlier hutchd had left: {count(len(stopped.left), 'process')}.", file=sys.stderr)
    if left:
        print("hutchd is stopped. Left running:" if stopped.ran else "No hutchd runs. Left running:", file=sys.stderr)
        for one in left:
            until = ", until the last executor ends" if one.name == BROKER else ""
            print(f"  {one_line(str(one))}{until}", file=sys.stderr)
        if given.how == "stop":
            return exits.FAILED
        print("`hutch daemon stop --stop` ends them; the next hutchd takes them over.", file=sys.stderr)
    elif not stopped.ran and (endpoint := find_endpoint()).kind == "host" and (given.how != "stop" or os.geteuid()):
        raise host_is_down(endpoint.socket)  # what the host's has left only root can find and end
    elif not stopped.ran and given.how != "stop":
        raise HutchError(Reason.CONNECTION_LOST, _NOTHING)
    elif not stopped.ran and not stopped.left:
        print(_NOTHING, file=sys.stderr)
    return exits.OK


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*", help="arguments of hutchd, after `--`")


def _run(given: argparse.Namespace) -> int:
    from hutch_client.starting import HUTCHD

    if not given.arguments and find_endpoint().kind == "host":
        raise HutchError(
            Reason.WRONG_STATE,
            "This host has a hutchd of its own, for everybody. `hutch --private daemon run` runs one of yours.",
        )
    os.execv(HUTCHD[0], [*HUTCHD, *given.arguments])  # noqa: S606 - an argv list, and no shell


def _logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--lines", type=number, default=50, metavar="N", help="the last N lines (default: %(default)d)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="continue with new lines")


def _logs(given: argparse.Namespace) -> int:
    from hutch_client.starting import log_path, log_tail

    log = log_path()
    if not log.exists():
        raise HutchError(
            Reason.NOT_FOUND,
            f"{log} does not exist: only a hutchd that `hutch` started writes it.",
        )
    if given.follow:
        os.chdir("/")
        os.execvp("tail", ["tail", "-n", str(given.lines), "-F", str(log)])  # noqa: S606 - an argv list, and no shell
    print(plain(log_tail(log, lines=given.lines)))
    return exits.OK


def _backup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", help="the new file; it must not exist")


def _backup(given: argparse.Namespace) -> int:
    with BlockingConnection(timeout=3600.0) as hutch:
        done = hutch.call("backup_store", path=require_utf8(os.path.abspath(given.path)))
    if os.access(os.path.dirname(done["path"]), os.X_OK) and not os.path.lexists(done["path"]):
        raise HutchError(
            Reason.NOT_FOUND,
            f"hutchd wrote {done['path']} where you cannot see it: its service has a private /tmp. Choose a directory"
            " that hutchd's service may write to.",
        )
    print(f"{done['path']}: {done['bytes']:,} bytes, journal {done['journal']}", file=sys.stderr)
    return exits.OK


def _restore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", help="a backup that `hutch daemon backup` wrote")
    parser.add_argument("--system", action="store_true", help="the host's hutchd")


def _restore(given: argparse.Namespace) -> int:
    from hutch_client.starting import HUTCHD

    argv = [*HUTCHD, "--restore", os.path.abspath(given.path), *(["--system"] if given.system else [])]
    os.execv(HUTCHD[0], argv)  # noqa: S606 - an argv list, and no shell


_VERBS = {
    "start": Command(_start_arguments, _start, "Start hutchd in the background."),
    "stop": Command(_stop_arguments, _stop, "Stop hutchd, and wait for its end."),
    "status": Command(_output, _status, "Show the health of hutchd."),
    "run": Command(_run_arguments, _run, "Run hutchd in the foreground."),
    "logs": Command(_logs_arguments, _logs, "Print its log."),
    "backup": Command(_backup_arguments, _backup, "Write a consistent copy of the database."),
    "restore": Command(_restore_arguments, _restore, "Replace the database by a backup; hutchd must be stopped."),
}
COMMANDS = {
    "status": Command(_output, _status, "Health of hutchd: executors, queue, store, isolation and keys."),
    "version": Command(_output, _version, "Versions of client and daemon."),
    "daemon": group(_VERBS, "Start, stop, run, back up and restore hutchd."),
}
