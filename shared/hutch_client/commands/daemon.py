"""status, doctor, version and daemon: hutchd itself."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hutch_client import exits
from hutch_client.blocking import PROTOCOL, BlockingConnection
from hutch_client.commands import Command, group, number, output, seconds
from hutch_client.commands.sessions import isolation_fields
from hutch_client.endpoint import is_named, socket_path
from hutch_client.tables import ago, count, fields, print_json, table
from hutch_client.untrusted import one_line, plain
from hutch_shared import __version__
from hutch_shared.errors import HutchError, Reason
from hutch_shared.paths import LAUNCHER_CONFIG, find_host
from hutch_shared.unix import start_time

__all__ = ["COMMANDS"]


def _output(parser: argparse.ArgumentParser) -> None:
    output(parser, "text", "json")


def _nothing(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""


def _status(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        status = hutch.call("get_status")
    if given.output == "json":
        print_json(status)
        return exits.OK
    store, isolation, get = status["store"], status["isolation"], status.get
    print(
        fields(
            [
                ("hutchd", f"{status['version']}, pid {status['pid']}, {status['mode']} mode"),
                ("up", ago(status["started_at"], time.time())),
                ("state", "draining: takes no new work" if status["draining"] else "ready"),
                ("sessions", f"{get('sessions_open', 0)} open"),
                ("turns", f"{get('turns_running', 0)} running, {get('turns_queued', 0)} queued"),
                ("questions", f"{get('permissions_pending', 0)} waiting"),
                (
                    "store",
                    f"{'ok' if store['ok'] else 'FAILING'}, {count(store.get('events', 0), 'event')}, {store['path']}",
                ),
                ("store says", store.get("detail")),
                *isolation_fields(isolation),
                ("keys", f"{status['keys']} (master key: {status['master_key']})"),
                ("why", isolation.get("keys_why")),
                ("broker", _broker_words(get("broker"))),
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
    for notice in get("notices", ()):
        print(f"! {one_line(notice)}", file=sys.stderr)
    return exits.OK


def _broker_words(broker: dict[str, Any] | None) -> str | None:
    """Return `up: 2 leases, …`, or why it is not up."""
    match broker:
        case None:
            return None
        case {"state": "up"}:
            counts = (count(broker.get(f"{noun}s", 0), noun) for noun in ("lease", "stream", "request"))
            return f"up: {', '.join(counts)}, {broker.get('refused', 0):,} refused"
        case {"state": "idle"}:
            return "not started: no key was needed yet"
        case _:
            return f"DOWN: {broker.get('detail') or 'it is started'}"


def _version(given: argparse.Namespace) -> int:
    told: dict[str, Any] = {"client": {"version": __version__, "protocol": PROTOCOL}}
    try:
        with BlockingConnection() as hutch:
            told["daemon"] = hutch.server
    except HutchError as error:
        told["daemon"], why = None, error.message
    if given.output == "json":
        print_json(told)
        return exits.OK
    print(f"hutch {__version__} (protocol {PROTOCOL})")
    if told["daemon"]:
        print(f"hutchd {one_line(told['daemon']['version'])} (protocol {told['daemon']['protocol']})")
    else:
        print(plain(why), file=sys.stderr)
    return exits.OK


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    _output(parser)
    parser.add_argument(
        "--system", action="store_true", help="look at the host's hutchd (the default where the host is set up for it)"
    )
    parser.add_argument(
        "--sudo", action="store_true", help="print the one sudo rule that hutch-launcher needs where it has no unit"
    )


def _doctor(given: argparse.Namespace) -> int:
    if given.sudo:
        return _sudo_rule()
    findings = list(_examine(system=given.system))
    if given.output == "json":
        print_json([{"ok": advice is None, "subject": what, "advice": advice} for what, advice in findings])
    else:
        for what, advice in findings:
            print(f"{'ok' if advice is None else '!!'}  {one_line(what)}")
            if advice:
                print(f"    → {one_line(advice)}")
    return exits.OK if all(advice is None for _, advice in findings) else exits.FAILED


def _sudo_rule() -> int:
    """Print the content of sudo's file as hutchd's program knows it; visudo checks it where there is one."""
    import shutil
    import subprocess

    from hutch_client.starting import run_hutchd

    text = run_hutchd("--sudo-rule", system=True)
    print(text, end="")
    visudo = shutil.which("visudo", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if visudo is None:
        print("There is no visudo here: the rule was not checked.", file=sys.stderr)
        return exits.OK
    checked = subprocess.run([visudo, "-cf", "-"], input=text, capture_output=True, text=True, check=False)
    if checked.returncode:
        print(f"visudo refuses the rule: {plain(checked.stderr or checked.stdout).strip()}", file=sys.stderr)
        return exits.FAILED
    print(
        "visudo accepts the rule. As root: hutch doctor --sudo | install -m 440 /dev/stdin /etc/sudoers.d/hutch",
        file=sys.stderr,
    )
    return exits.OK


def _examine(*, system: bool) -> Iterator[tuple[str, str | None]]:
    """Yield (what was looked at, what to do about it or None), as far as a client can see."""
    path, host = socket_path(), find_host({}, system=True)
    if system or (not is_named() and not path.exists() and os.path.exists(LAUNCHER_CONFIG)):
        path = host
    yield f"hutch {__version__} looks for hutchd at {path}", None
    yield from _examine_inside(path)
    try:
        with BlockingConnection(path) as hutch:
            yield f"hutchd {hutch.server['version']} answers", None
            status = hutch.call("get_status")
            keys = hutch.call("list_api_keys")["keys"]
    except HutchError as error:
        yield error.message, _REMEDIES.get(error.reason, "Look at `hutch daemon logs`.")
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
        words, up = _broker_words(broker), broker["state"] != "down"
        yield f"broker: {words}", None if up else "Agents reach no model until it is up; it is tried again by itself."
    own = keys or status["mode"] == "system"  # each person's own there, and who looks may want none
    yield f"model keys: {len(keys)}", None if own else "Add one: `hutch key add anthropic`."
    for key in keys:
        if trouble := key.get("trouble"):
            yield f"model key {key['provider']} {key['name']}", trouble
    for one in status.get("executors", ()):
        if one["state"] == "quarantined":
            yield (
                f"executor {one['id']} (pid {one['pid']})",
                f"It could not be shown to be gone: {one.get('detail', '')}",
            )
    for notice in status.get("notices", ()):
        yield "notice", notice


def _examine_inside(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield what hutchd's own program finds in its settings and files, as far as we may look at them."""
    import subprocess

    from hutch_client.starting import HUTCHD

    system = path == find_host({}, system=True)
    if os.environ.get("HUTCH_HOST"):
        return  # somebody else's, or not on this host
    argv = [*HUTCHD, "--doctor", *(["--system"] if system else [])]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_EXAMINATION)
        found = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        yield "hutchd's own look at its files", f"It failed: {error.stderr.strip()}"
    except (subprocess.TimeoutExpired, ValueError) as error:
        yield "hutchd's own look at its files", f"It failed: {error}"
    else:
        yield from ((one["subject"], one["advice"]) for one in found)


_EXAMINATION = 200.0
_REMEDIES = {
    Reason.CONNECTION_LOST: "Start it: `hutch daemon start`.",
    Reason.NOT_ALLOWED: "Unset HUTCH_HOST, or ask whoever runs this host.",
    Reason.PROTOCOL_MISMATCH: "Update the older of the two and restart hutchd.",
}


def _start_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="S", help="wait so long for it (default: %(default)g)"
    )


def _start(given: argparse.Namespace) -> int:
    from hutch_client.starting import log_path, start

    pid = start(timeout=given.timeout)
    words = f"Started hutchd, pid {pid}; its log is {log_path()}" if pid else "hutchd is running already."
    print(words, file=sys.stderr)
    return exits.OK


def _stop_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    parser.set_defaults(how="drain")
    for word, doc in _WAYS.items():
        how.add_argument(f"--{word}", action="store_const", dest="how", const=word, help=doc)
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="drain so long (default: %(default)g)"
    )


_WAYS = {
    "drain": "let running turns end first (the default)",
    "leave": "leave executors and their turns running; the next hutchd adopts them",
    "stop": "stop running turns",
}
_GRACE = 30.0  # over the time it was given: to close what is open


def _stop(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        pid = hutch.call("get_status")["pid"]
        started = start_time(pid)
        hutch.call("stop_daemon", how=given.how, timeout=given.timeout)
        if not hutch.wait_closed(given.timeout + _GRACE):
            raise HutchError(
                Reason.TIMED_OUT, "hutchd has not ended yet. `hutch daemon status` shows what it waits for."
            )
    deadline = time.monotonic() + _GRACE
    while started is not None and start_time(pid) == started and time.monotonic() < deadline:
        time.sleep(0.02)
    return exits.OK


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*", help="go to hutchd as they are; after `--`")


def _run(given: argparse.Namespace) -> int:
    from hutch_client.starting import HUTCHD

    os.execv(HUTCHD[0], [*HUTCHD, *given.arguments])  # noqa: S606 - an argv list, and no shell


def _logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--lines", type=number, default=50, metavar="N", help="the last N lines (default: %(default)d)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes")


def _logs(given: argparse.Namespace) -> int:
    from hutch_client.starting import log_path, log_tail

    log = log_path()
    if not log.exists():
        raise HutchError(Reason.NOT_FOUND, f"There is no {log}: only a hutchd started by `hutch` writes one.")
    if given.follow:
        os.execvp("tail", ["tail", "-n", str(given.lines), "-F", str(log)])  # noqa: S606 - an argv list, and no shell
    print(plain(log_tail(log, lines=given.lines)))
    return exits.OK


def _backup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", help="where to; it must not exist")


def _backup(given: argparse.Namespace) -> int:
    with BlockingConnection(timeout=3600.0) as hutch:
        done = hutch.call("backup_store", path=os.path.abspath(given.path))
    if os.access(os.path.dirname(done["path"]), os.X_OK) and not os.path.lexists(done["path"]):
        raise HutchError(
            Reason.NOT_FOUND,
            f"hutchd wrote {done['path']}, but not where you see it: its service has a /tmp of its own. Choose a"
            " directory that is hutchd's to write to.",
        )
    print(f"{done['path']}: {done['bytes']:,} bytes, journal {done['journal']}", file=sys.stderr)
    return exits.OK


def _restore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", help="a copy that `hutch daemon backup` wrote")
    parser.add_argument("--system", action="store_true", help="of the whole host's hutchd")


def _restore(given: argparse.Namespace) -> int:
    from hutch_client.starting import HUTCHD

    argv = [*HUTCHD, "--restore", os.path.abspath(given.path), *(["--system"] if given.system else [])]
    os.execv(HUTCHD[0], argv)  # noqa: S606 - an argv list, and no shell


_VERBS = {
    "start": Command(_start_arguments, _start, "Start hutchd in the background."),
    "stop": Command(_stop_arguments, _stop, "End hutchd, and wait until it has."),
    "status": Command(_output, _status, "Show its health."),
    "run": Command(_run_arguments, _run, "Run hutchd in the foreground."),
    "logs": Command(_logs_arguments, _logs, "Print its log."),
    "backup": Command(_backup_arguments, _backup, "Write a consistent copy of the database."),
    "restore": Command(
        _restore_arguments, _restore, "Put a backup in the place of the database; hutchd must be stopped."
    ),
}
COMMANDS = {
    "status": Command(_output, _status, "Health of hutchd: executors, queue, store, isolation and keys."),
    "doctor": Command(_doctor_arguments, _doctor, "Find what is wrong and say what to do; exit 1 if something is."),
    "version": Command(_output, _version, "Versions of both sides."),
    "daemon": group(_VERBS, "Start, stop, run, back up and restore hutchd."),
}
