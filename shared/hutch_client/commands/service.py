"""service: install hutchd for systemd or launchd, and hutch-launcher on a host with many users.

`hutch_client.install` does the work: it makes a pure plan, which `--dry-run` prints, and carries it out.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Final

from hutch_client import exits
from hutch_client.commands import Command, group, output
from hutch_client.install.execute import execute
from hutch_client.install.place import UnitPlace, find_place
from hutch_client.install.plan import (
    MAKE_CREDENTIAL,
    CopyFile,
    KeepFile,
    Plan,
    RemoveFile,
    RunCommand,
    Step,
    WriteFile,
    plan_install,
    plan_uninstall,
)
from hutch_client.install.status import ManagerStatus, read_installed, read_status, systemd_version
from hutch_client.tables import ago, fields, print_json
from hutch_shared.errors import HutchError, Reason
from hutch_shared.host_mark import host_socket
from hutch_shared.paths import LAUNCHER_SOCKET_UNIT

__all__ = ["COMMANDS", "install", "uninstall"]


def install(place: UnitPlace, *, force: bool = False, now: bool = False, only_plan: bool = False) -> Plan:
    """Install the service; with `now` start hutchd too. Return the plan; `only_plan` does not carry it out.

    HutchError, before anything is written: WRONG_STATE if no manager would read the files, another hutchd runs, or
    hutchd's account is missing or cannot run hutchd; NOT_ALLOWED if accounts other than root could change a host's
    service; CONFLICT for edited files whose edits cannot be kept.
    """
    manager = ManagerStatus() if only_plan else read_status(place).manager
    plan = plan_install(
        place,
        read_installed(place, manager),
        interpreter=Path(os.path.realpath(sys.executable)),
        user=pwd.getpwuid(os.getuid()).pw_name,
        force=force,
        now=now,
    )
    return plan if only_plan else _carry_out(plan)


def uninstall(place: UnitPlace, *, force: bool = False, now: bool = False, only_plan: bool = False) -> Plan:
    """Remove the files that Hutch wrote; with `now` stop the service first. Return the plan.

    HutchError: WRONG_STATE if the service is in use and `now` is not given, CONFLICT for edited files.
    """
    plan = plan_uninstall(place, read_installed(place, read_status(place).manager), force=force, now=now)
    return plan if only_plan else _carry_out(plan)


def _carry_out(plan: Plan) -> Plan:
    for sentence in execute(plan):
        print(sentence, file=sys.stderr)
    return plan


# ---------------------------------------------------------------- the commands


def _scope(parser: argparse.ArgumentParser) -> None:
    scope = parser.add_mutually_exclusive_group(required=True)
    scope.add_argument("--user", action="store_false", dest="system", help="your own hutchd")
    scope.add_argument("--system", action="store_true", help="the hutchd of the whole host")
    output(parser, "text", "json")


def _install_arguments(parser: argparse.ArgumentParser) -> None:
    _scope(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    parser.add_argument("--force", action="store_true", help="overwrite edited files")
    parser.add_argument("--now", action="store_true", help="start hutchd too, now and at each boot or log-in")
    parser.add_argument(
        "--credential",
        metavar="FILE",
        help="with --system: let systemd open the master key from FILE, which systemd-creds sealed to this machine",
    )


def _uninstall_arguments(parser: argparse.ArgumentParser) -> None:
    _scope(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    parser.add_argument("--force", action="store_true", help="remove edited files too")
    parser.add_argument("--now", action="store_true", help="stop the service first if it is in use")


def _install(given: argparse.Namespace) -> int:
    if given.credential is not None and not given.system:
        raise HutchError(Reason.INVALID_PARAMS, f"--credential needs --system. {MAKE_CREDENTIAL}")
    place = find_place(system=given.system, systemd_version=systemd_version, credential=given.credential)
    plan = install(place, force=given.force, now=given.now, only_plan=given.dry_run)
    if not given.system and host_socket() is not None:
        print("This host has a hutchd for everybody: `hutch --private COMMAND` talks to yours.", file=sys.stderr)
    return _report(given, place, plan)


def _uninstall(given: argparse.Namespace) -> int:
    place = find_place(system=given.system, systemd_version=systemd_version)
    return _report(given, place, uninstall(place, force=given.force, now=given.now, only_plan=given.dry_run))


def _report(given: argparse.Namespace, place: UnitPlace, plan: Plan) -> int:
    """Print the plan with `--dry-run`; otherwise print the service's status with `-o json`."""
    if given.dry_run and given.output == "json":
        print_json(_plan_as_json(plan))
    elif given.dry_run:
        print("\n".join(_plan_as_text(plan)))
    elif given.output == "json":
        print_json(read_status(place).as_json())
    return exits.OK


def _plan_as_json(plan: Plan) -> dict[str, Any]:
    return {
        "problems": [{"reason": problem.reason.value, "message": problem.message} for problem in plan.problems],
        "checks": [str(check) for check in plan.checks],
        "files": {str(step.path): step.content for step in plan.steps if isinstance(step, WriteFile)},
        "steps": [_step_as_json(step) for step in plan.steps],
        "commands": [step.argv for step in plan.steps if isinstance(step, RunCommand)],
    }


def _step_as_json(step: Step) -> dict[str, Any]:
    match step:
        case WriteFile(path, _, _, mode):
            return {"step": "write", "path": str(path), "mode": f"{mode:04o}"}
        case CopyFile(source, path, mode):
            return {"step": "copy", "source": str(source), "path": str(path), "mode": f"{mode:04o}"}
        case KeepFile(path):
            return {"step": "keep", "path": str(path)}
        case RemoveFile(path):
            return {"step": "remove", "path": str(path)}
        case RunCommand(argv):
            return {"step": "run", "command": argv}


def _plan_as_text(plan: Plan) -> list[str]:
    lines = [f"!! {problem.message}" for problem in plan.problems]
    lines += [f"check: {check}" for check in plan.checks]
    for step in plan.steps:
        match step:
            case WriteFile(path, content):
                lines.append(f"==> {path} <==\n{content}")
            case CopyFile(source, path, mode):
                lines.append(f"copy: {source} to {path}, mode {mode:04o}")
            case KeepFile(path, outcome):
                lines.append(f"keep: {path}, {outcome}")
            case RemoveFile(path):
                lines.append(f"remove: {path}")
            case RunCommand(argv):
                lines.append(f"run: {shlex.join(argv)}")
    return lines


def _status(given: argparse.Namespace) -> int:
    status = read_status(find_place(system=given.system, systemd_version=systemd_version))
    manager, installed = status.manager, status.installed
    if given.output == "json":
        print_json(status.as_json())
        return exits.OK if manager.up else exits.NO_DAEMON
    words = {None: "unknown", True: "yes", False: "no"}
    print(
        fields(
            [
                ("service", f"{'system' if status.place.system else 'user'}, {status.place.manager}"),
                ("installed", _INSTALLED[installed]),
                *((str(path), state) for path, state in status.files.items() if installed != "absent"),
                *((str(path), "your drop-in") for path in status.drop_ins),
                ("enabled", words[manager.enabled]),
                ("running", _running_words(manager)),
                ("launcher", _launcher_words(manager.launcher)),
                ("trouble", manager.trouble),
            ]
        )
    )
    return exits.OK if manager.up else exits.NO_DAEMON


def _running_words(manager: ManagerStatus) -> str:
    if manager.running is None:
        return "unknown"
    if not manager.running:
        return "no: it starts when a client connects" if manager.listening else "no"
    began = f"for {ago(manager.since, time.time())}, since {manager.since}" if manager.since else "yes"
    return f"{began}, pid {manager.pid}" if manager.pid else began


def _launcher_words(launcher: dict[str, Any] | None) -> str | None:
    match launcher:
        case None:
            return None
        case {"running": True, "pid": pid}:
            return f"yes, pid {pid}" if pid else "yes"
        case {"listening": True}:
            return "no: it starts when hutchd connects"
    return f"NO: no agent can start. Run: systemctl start {LAUNCHER_SOCKET_UNIT}"


_INSTALLED: Final = {
    "absent": "no",
    "partly": "in part: `hutch service install` completes it",
    "current": "yes",
    "older": "yes, for another version or other directories: `hutch service install` updates it",
    "changed": "yes, edited: `hutch service install` moves your edits into a drop-in",
}
_VERBS: Final = {
    "install": Command(_install_arguments, _install, "Write what systemd or launchd needs to run hutchd."),
    "uninstall": Command(_uninstall_arguments, _uninstall, "Remove it again."),
    "status": Command(_scope, _status, "Show whether it is installed, edited, enabled and running; exit 3 if not up."),
}
COMMANDS: Final = {"service": group(_VERBS, "Let systemd or launchd run hutchd.")}
