"""service: have systemd or launchd run hutchd, and hutch-launcher where there are many people.

What they read is written by `hutch_shared.units` alone. A file that a person changed is theirs: nothing here overwrites
or removes it without `--force`. What runs is changed with `--now` only. Configuration is written where there is none,
and never changed or removed; accounts are looked at, and never made.
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from hutch_client import exits
from hutch_client.commands import Command, group, output
from hutch_client.tables import ago, fields, print_json
from hutch_shared import units
from hutch_shared.errors import HutchError, Reason
from hutch_shared.paths import find_host
from hutch_shared.reach import Who, closed
from hutch_shared.unix import check_directory

__all__ = ["COMMANDS", "Place", "install", "look", "place", "uninstall"]

_BOOTED: Final = Path("/run/systemd/system")
_TIMEOUT: Final = 120.0
_SHOWN: Final = "Id,ActiveState,SubState,UnitFileState,MainPID,ActiveEnterTimestampMonotonic"

State = Literal["absent", "current", "older", "changed"]
"""Of a file: not there; as it would be written now; as Hutch wrote it for another place or version; a person's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a service of Hutch is described, what its files hold, and who reads them."""

    folder: Path
    texts: dict[str, str]
    program: str
    """What they start."""
    system: bool
    manager: Literal["systemd", "launchd"]
    here: bool
    """Whether that manager runs this host."""
    templates: dict[Path, str] = field(default_factory=dict)
    """Configuration that is written where there is none."""
    owned: tuple[Path, ...] = ()
    """Directories that must be there and belong to hutchd's account: systemd makes them only in their usual places."""
    closed: Path | None = None
    """The copy of the interpreter that accounts may execute and not read."""
    credential: Path | None = None
    """The sealed master key."""
    code: tuple[Path, ...] = ()
    """What the programs are made of, beside themselves: root runs it, and hutchd's account must be able to."""
    account: str = units.ACCOUNT
    """What a host's hutchd runs as."""

    @property
    def systemctl(self) -> tuple[str, ...]:
        """Return the command to tell systemd something."""
        return ("systemctl",) if self.system else ("systemctl", "--user")

    @property
    def domain(self) -> str:
        """Return where launchd keeps the service."""
        return "system" if self.system else f"gui/{os.getuid()}"

    @property
    def starting(self) -> list[list[str]]:
        """Return the commands that have the manager read the files and start hutchd, now and at each boot or log-in."""
        if self.manager == "launchd":
            return [["launchctl", "bootstrap", self.domain, str(self.folder / f"{units.LABEL}.plist")]]
        return [[*self.systemctl, "daemon-reload"], [*self.systemctl, "enable", "--now", *self.texts]]

    @property
    def ending(self) -> list[str]:
        """Return the command that undoes it."""
        if self.manager == "launchd":
            return ["launchctl", "bootout", f"{self.domain}/{units.LABEL}"]
        return [*self.systemctl, "disable", "--now", *self.texts]

    def states(self) -> dict[Path, State]:
        """Look at each file."""
        return {self.folder / name: _state(self.folder / name, text) for name, text in self.texts.items()}


def place(*, system: bool, credential: str | None = None) -> Place:
    """Return the place for this person and this Hutch. HutchError INVALID_PARAMS for what no unit could hold.

    A host's unit that loads the master key from a file goes on doing so unless `credential` is another one.
    """
    argv = _argv("hutchd", "hutch_daemon")
    if sys.platform == "darwin":
        folder = Path("/Library/LaunchDaemons") if system else Path.home() / "Library/LaunchAgents"
        texts = units.launchd(argv, os.environ, system=system)
        return Place(folder, texts, argv[0], system, "launchd", here=True)
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    folder = Path("/etc/systemd/system") if system else Path(config, "systemd/user")
    if not system:
        texts = units.systemd(argv, os.environ, system=False)
        return Place(folder, texts, argv[0], False, "systemd", here=_BOOTED.is_dir())
    sealed = credential or _credential_of(folder / units.SERVICE)
    texts = units.systemd(
        argv,
        os.environ,
        system=True,
        launcher=_argv("hutch-launcher", "hutch_launcher"),
        credential=sealed,
        version=_systemd_version(),
    )
    return Place(
        folder,
        texts,
        argv[0],
        True,
        "systemd",
        here=_BOOTED.is_dir(),
        templates={
            Path(path): text
            for path, text in units.templates().items()
            if path == units.LAUNCHER_CONFIG or not os.environ.get("HUTCH_CONFIG")
        },
        owned=tuple(
            Path(os.environ[name]) for name in ("HUTCH_STATE_DIR", "HUTCH_RUNTIME_DIR") if os.environ.get(name)
        ),
        closed=Path(argv[0]).with_name("hutch-python"),
        credential=Path(sealed) if sealed else None,
        code=tuple(
            Path(os.path.realpath(path))
            for path in (sys.executable, __file__, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
        ),
    )


def install(where: Place, *, force: bool = False, now: bool = False) -> list[str]:
    """Write the files, start hutchd with `now`; return the sentences that tell it.

    HutchError: WRONG_STATE where nothing would read them, another hutchd is in the way, or hutchd's account is not
    there or cannot run it; NOT_ALLOWED where a host's service would not be root's alone, CONFLICT for files that a
    person changed. Nothing is written then.
    """
    _check_kind(where)
    if not where.here:
        raise HutchError(
            Reason.WRONG_STATE,
            f"systemd does not run this host (there is no {_BOOTED}): nothing would read the units. `--dry-run` prints"
            " them; `hutch daemon start` starts hutchd without a service.",
        )
    _check_rights(where)
    if where.system:
        _check_account(where)
    states = where.states()
    changed = [str(path) for path, state in states.items() if state == "changed"]
    if changed and not force:
        raise HutchError(
            Reason.CONFLICT,
            f"{_and(changed)} {'is' if len(changed) == 1 else 'are'} not as Hutch wrote it: nothing was written."
            " `--dry-run` prints what would be; `--force` overwrites it.",
        )
    if now and not look(where)["up"] and _answers(where):
        raise HutchError(
            Reason.WRONG_STATE,
            "A hutchd runs that is no service: end it first (`hutch daemon stop`). Nothing was written.",
        )
    where.folder.mkdir(parents=True, exist_ok=True)
    for path, state in states.items():
        if state != "current":
            _write(path, where.texts[path.name])
    told = [
        f"{path}: {'as it was' if state == 'current' else 'written'}{_about(where, path.name)}"
        for path, state in states.items()
    ]
    told += _configure(where)
    if where.closed is not None:
        _write(where.closed, Path(os.path.realpath(sys.executable)).read_bytes(), 0o711)
        told.append(f"{where.closed}: a copy of the interpreter that accounts may run and not read, for executors")
    if now:
        for command in where.starting:
            _run(command)
        told.append("hutchd is started, now and whenever the host is." if where.system else "hutchd is started.")
    else:
        told.append(f"To start it: {' && '.join(shlex.join(command) for command in where.starting)}")
    if where.manager == "systemd" and not where.system:
        told.append(f"It runs while you are logged in; to have it run always: loginctl enable-linger {_account()}")
    if where.system:
        told += [
            f"Whose agents may run, {units.LAUNCHER_CONFIG} says: name accounts or groups there. It counts at once.",
            "`hutch doctor`, as root, tells what is missing.",
        ]
    return told


def uninstall(where: Place, *, force: bool = False, now: bool = False) -> list[str]:
    """Remove the files that Hutch wrote, and end the service before with `now`; return the sentences that tell it.

    HutchError: WRONG_STATE when it is in use and `now` was not given, CONFLICT for files that a person changed.
    """
    _check_rights(where)
    states = {path: state for path, state in where.states().items() if state != "absent"}
    changed = [str(path) for path, state in states.items() if state == "changed"]
    if changed and not force:
        raise HutchError(
            Reason.CONFLICT, f"{_and(changed)}: not as Hutch wrote it. Nothing was removed; `--force` removes it."
        )
    if not states:
        return [f"There is no service of hutchd in {where.folder}."]
    found = look(where)
    if found["up"] or found["enabled"]:
        if not now:
            raise HutchError(
                Reason.WRONG_STATE,
                f"The service is in use. `--now` ends it first, as does: {' '.join(where.ending)}",
            )
        _run(where.ending)
    for path in states:
        path.unlink()
    if where.closed is not None:
        where.closed.unlink(missing_ok=True)
    if where.here and where.manager == "systemd":
        _run([*where.systemctl, "daemon-reload"])
    kept = [*where.templates, *([Path("/var/lib/hutch"), Path("/var/lib/hutch-launcher")] if where.system else [])]
    left = _and([str(path) for path in kept if path.exists()])
    return [*(f"{path}: removed" for path in states), *([f"Left as they are: {left}"] if left else [])]


def look(where: Place) -> dict[str, Any]:
    """Return what there is: `files`, `installed` (absent, partly, or what the files are), and what the manager says.

    `enabled`, `running`, `listening` are None where no manager can be asked; `up` is whether either of the last is so.
    """
    states = where.states()
    kinds = set(states.values())
    if "changed" in kinds:
        installed = "changed"
    elif "absent" in kinds:
        installed = "absent" if kinds == {"absent"} else "partly"
    else:
        installed = "older" if "older" in kinds else "current"
    found: dict[str, Any] = {
        "mode": "system" if where.system else "user",
        "manager": where.manager,
        "installed": installed,
        "files": {str(path): state for path, state in states.items()},
        **dict.fromkeys(("enabled", "running", "listening", "since", "pid", "launcher", "trouble")),
    }
    if not where.here:
        found["trouble"] = "systemd does not run this host"
    elif where.manager == "systemd":
        found |= _ask_systemd(where)
    else:
        found |= _ask_launchd(where)
    return found | {"up": bool(found["running"] or found["listening"])}


def _ask_systemd(where: Place) -> dict[str, Any]:
    asked = _try([*where.systemctl, "show", f"--property={_SHOWN}", *where.texts])
    if asked.returncode:
        return {"trouble": _said(asked)}
    told = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in asked.stdout.split("\n\n")]
    by_name = {one.get("Id"): one for one in told}
    service = by_name.get(units.SERVICE, {})
    sockets = [by_name.get(name, {}) for name in units.SOCKETS.values()]
    running = service.get("ActiveState") in ("active", "reloading")
    entered = service.get("ActiveEnterTimestampMonotonic", "")
    since = None
    if running and entered.isdecimal():
        at = time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - int(entered) / 1_000_000)
        since = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    failed = [str(one.get("Id")) for one in by_name.values() if one.get("ActiveState") == "failed"]
    return {
        "enabled": any(one.get("UnitFileState") == "enabled" for one in by_name.values()),
        "running": running,
        "listening": all(one.get("ActiveState") == "active" for one in sockets),
        "since": since,
        "pid": _pid(service),
        "launcher": _launcher_of(by_name) if where.system else None,
        "trouble": f"failed: {_and(failed)}" if failed else None,
    }


def _launcher_of(by_name: dict[str | None, dict[str, str]]) -> dict[str, Any]:
    service, socket = by_name.get(units.LAUNCHER, {}), by_name.get(units.LAUNCHER_SOCKET, {})
    return {
        "running": service.get("ActiveState") in ("active", "reloading"),
        "listening": socket.get("ActiveState") == "active",
        "pid": _pid(service),
    }


def _pid(shown: dict[str, str]) -> int | None:
    pid = shown.get("MainPID", "0")
    return int(pid) if pid.isdecimal() and pid != "0" else None


def _ask_launchd(where: Place) -> dict[str, Any]:
    asked = _try(["launchctl", "print", f"{where.domain}/{units.LABEL}"])
    lines = dict(line.strip().partition(" = ")[::2] for line in asked.stdout.splitlines())
    pid = lines.get("pid", "")
    return {
        "enabled": not asked.returncode,
        "running": pid.isdecimal(),
        "listening": False,
        "pid": int(pid) if pid.isdecimal() else None,
    }


def _state(path: Path, text: str) -> State:
    try:
        found = path.read_text()
    except FileNotFoundError:
        return "changed" if path.is_symlink() else "absent"
    except (OSError, ValueError):
        return "changed"
    if found == text:
        return "current"
    return "older" if units.seal_of(found) == "whole" else "changed"


def _check_kind(where: Place) -> None:
    if where.system and where.manager == "launchd":
        raise HutchError(
            Reason.WRONG_STATE,
            "On macOS there is no hutchd for many people: nothing there can start agents as other accounts and end all"
            " that they leave. `--user` has a hutchd for each person, with agents under that person's own account.",
        )


def _check_rights(where: Place) -> None:
    """Refuse where not only root decides what root runs: the programs, the interpreter, what it imports."""
    if not where.system:
        return
    if os.geteuid() != 0:
        raise HutchError(Reason.NOT_ALLOWED, "Only root may change the host's services; `--user` is for your own.")
    for folder in dict.fromkeys(
        [Path(where.program).parent, *(one if one.is_dir() else one.parent for one in where.code)]
    ):
        try:
            check_directory(folder)
        except FileNotFoundError:
            continue
        except HutchError as error:
            raise HutchError(
                Reason.NOT_ALLOWED,
                f"Root would run {where.program}, which others can change: {error.message} Install Hutch where only"
                " root can.",
            ) from None


def _check_account(where: Place) -> None:
    """Refuse where hutchd's account is missing or could not run it: making it is the administrator's."""
    try:
        who = Who.named(where.account)
    except KeyError:
        raise HutchError(
            Reason.WRONG_STATE,
            f"There is no account {where.account}, which hutchd is to run as. Make it:"
            f" useradd --system --home-dir /var/lib/hutch --shell /usr/sbin/nologin {where.account}",
        ) from None
    if who.uid == 0:
        raise HutchError(Reason.NOT_ALLOWED, f"The account {where.account} is root by another name: give it a uid.")
    for path in (Path(where.program), *where.code):
        if why := closed(path, who, 1 if path.is_dir() or os.access(path, os.X_OK) else 4):
            raise HutchError(
                Reason.WRONG_STATE,
                f"The account {where.account} cannot use {path}: {why}. Install Hutch, and the Python it runs with,"
                " where every account may read it: /opt/hutch, with the system's Python, for example.",
            )
    for folder in where.owned:
        if not folder.is_dir() or folder.stat().st_uid != who.uid:
            mode = "0755" if str(folder) == os.environ.get("HUTCH_RUNTIME_DIR") else "0700"
            raise HutchError(
                Reason.WRONG_STATE,
                f"{folder} must be a directory of {where.account}: install -d -o {where.account} -g {where.account}"
                f" -m {mode} {shlex.quote(str(folder))}",
            )
    if where.credential is not None and not where.credential.is_file():
        raise HutchError(Reason.WRONG_STATE, f"{where.credential} is not there. {_MAKE_CREDENTIAL}")


_MAKE_CREDENTIAL: Final = (
    "To seal the master key that hutchd has: systemd-creds encrypt --name=hutch-master-key /var/lib/hutch/master.key"
    " FILE; to begin with a new one: head -c 32 /dev/urandom | base64 | systemd-creds encrypt --name=hutch-master-key"
    " - FILE. It can be opened on this machine only: keep the key itself in a safe place, since your stored keys hang"
    " on it."
)


def _configure(where: Place) -> list[str]:
    """Write the configuration that is not there; tell of each."""
    told = []
    for path, text in where.templates.items():
        if path.exists() or path.is_symlink():
            told.append(f"{path}: yours, as it was")
            continue
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)
        _write(path, text)
        told.append(f"{path}: written, for you to fill in{_about(where, path.name)}")
    return told


def _about(where: Place, name: str) -> str:
    """Return what a file is for, of those that only a host has."""
    return f" ({_ABOUT[name]})" if where.system and name in _ABOUT else ""


_ABOUT: Final = {
    units.SERVICE: f"hutchd and its broker, as the account {units.ACCOUNT}, shut in",
    units.SOCKETS["client"]: "where everybody reaches hutchd",
    units.SOCKETS["executor"]: "where executors reach it",
    units.LAUNCHER: "the one part with privileges: starts agents as the accounts it was told of",
    units.LAUNCHER_SOCKET: "where hutchd alone reaches that",
    "launcher.toml": "whose agents may run here: nobody's yet",
    "hutch.toml": "the settings of hutchd",
}


def _credential_of(path: Path) -> str | None:
    """Return what an installed unit loads the master key from, if Hutch wrote that."""
    try:
        text = path.read_text()
    except (OSError, ValueError):
        return None
    found = re.search(r"^LoadCredentialEncrypted=hutch-master-key:(.+)$", text, re.MULTILINE)
    return found[1].replace("%%", "%") if found is not None and units.seal_of(text) == "whole" else None


def _systemd_version() -> int:
    """Return the version of the systemd here, 0 where there is none."""
    found = re.match(r"systemd (\d+)", _try(["systemctl", "--version"]).stdout)
    return int(found[1]) if found else 0


def _argv(name: str, module: str) -> list[str]:
    """Return a program that belongs to this hutch."""
    program = Path(os.path.realpath(sys.prefix), "bin", name)
    return [str(program)] if program.exists() else [sys.executable, "-P", "-m", module]


def _answers(where: Place) -> bool:
    from hutch_client.starting import is_running

    environ = {name: value for name, value in os.environ.items() if name != "HUTCH_HOST"}
    return is_running(find_host(environ, system=where.system))


def _account() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file that is whole or not there; what the name stood for before is replaced, not followed."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _try(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(command), 1, "", str(error))


def _run(command: Sequence[str]) -> None:
    done = _try(command)
    if done.returncode:
        raise HutchError(Reason.WRONG_STATE, f"`{' '.join(command)}` failed: {_said(done)}")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"


def _and(names: Sequence[str]) -> str:
    return ", ".join(names)


# ---------------------------------------------------------------- the commands


def _whose(parser: argparse.ArgumentParser) -> None:
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--user", action="store_false", dest="system", help="your own hutchd")
    whose.add_argument("--system", action="store_true", help="the whole host's")
    output(parser, "text", "json")


def _install_arguments(parser: argparse.ArgumentParser) -> None:
    _whose(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the files and do nothing")
    parser.add_argument("--force", action="store_true", help="overwrite files that a person changed")
    parser.add_argument("--now", action="store_true", help="start it too, now and at each boot or log-in")
    parser.add_argument(
        "--credential",
        metavar="FILE",
        help="with --system: have systemd open the master key from FILE, which systemd-creds sealed to this machine",
    )


def _uninstall_arguments(parser: argparse.ArgumentParser) -> None:
    _whose(parser)
    parser.add_argument("--force", action="store_true", help="remove files that a person changed, too")
    parser.add_argument("--now", action="store_true", help="end the service first, if it is in use")


def _install(given: argparse.Namespace) -> int:
    if given.credential is not None and not given.system:
        raise HutchError(Reason.INVALID_PARAMS, f"--credential is for --system. {_MAKE_CREDENTIAL}")
    where = place(system=given.system, credential=given.credential)
    if given.dry_run:
        _check_kind(where)
        files = {str(where.folder / name): text for name, text in where.texts.items()}
        files |= {str(path): text for path, text in where.templates.items()}
        if given.output == "json":
            print_json({"files": files})
        else:
            print("\n".join(f"==> {path} <==\n{text}" for path, text in files.items()), end="")
        return exits.OK
    return _tell(given, where, install(where, force=given.force, now=given.now))


def _uninstall(given: argparse.Namespace) -> int:
    where = place(system=given.system)
    return _tell(given, where, uninstall(where, force=given.force, now=given.now))


def _tell(given: argparse.Namespace, where: Place, told: Sequence[str]) -> int:
    if given.output == "json":
        print_json(look(where))
    else:
        print("\n".join(told), file=sys.stderr)
    return exits.OK


def _status(given: argparse.Namespace) -> int:
    found = look(place(system=given.system))
    if given.output == "json":
        print_json(found)
        return exits.OK if found["up"] else exits.NO_DAEMON
    words = {None: "unknown", True: "yes", False: "no"}
    running = words[found["running"]]
    if found["running"]:
        running = ", ".join(
            [
                *([f"for {ago(found['since'], time.time())}, since {found['since']}"] if found["since"] else ["yes"]),
                *([f"pid {found['pid']}"] if found["pid"] else []),
            ]
        )
    elif found["listening"]:
        running = "no: it is started by the first who connects"
    print(
        fields(
            [
                ("service", f"{found['mode']}, {found['manager']}"),
                ("installed", _INSTALLED[found["installed"]]),
                *((path, state) for path, state in found["files"].items() if found["installed"] != "absent"),
                ("enabled", words[found["enabled"]]),
                ("running", running),
                ("launcher", _launcher_words(found["launcher"])),
                ("trouble", found["trouble"]),
            ]
        )
    )
    return exits.OK if found["up"] else exits.NO_DAEMON


def _launcher_words(found: dict[str, Any] | None) -> str | None:
    match found:
        case None:
            return None
        case {"running": True, "pid": pid}:
            return f"yes, pid {pid}" if pid else "yes"
        case {"listening": True}:
            return "no: it is started when hutchd asks it"
    return f"NO: no agent can be started. systemctl start {units.LAUNCHER_SOCKET}"


_INSTALLED: Final = {
    "absent": "no",
    "partly": "in part: `hutch service install` completes it",
    "current": "yes",
    "older": "yes, as another version or for other places: `hutch service install` brings it up to date",
    "changed": "yes, changed by hand",
}
_VERBS: Final = {
    "install": Command(_install_arguments, _install, "Write what systemd or launchd needs to run hutchd."),
    "uninstall": Command(_uninstall_arguments, _uninstall, "Remove that again."),
    "status": Command(_whose, _status, "Show whether it is installed, changed, enabled and running; exit 3 if not up."),
}
COMMANDS: Final = {"service": group(_VERBS, "Have systemd or launchd run hutchd.")}
