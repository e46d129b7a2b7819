"""Whether this host has a hutchd of its own, which serves every account, and where its socket is.

Decided by what says that one serves here: one of hutchd's units is installed, or a `hutchd --system` has left its mark
in its state directory, which `hutch service uninstall` removes. Never decided by the directory of the sockets, which
comes and goes with a process, nor by `/etc/hutch`, which holds a host's rules for users' private hutchds too.

Only root can install a unit or own `/var/lib/hutch`, so no user can mislead another one. HUTCH_STATE_DIR changes the
answer for the processes that have it in their environment, and for these only.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from hutch_shared.paths import HOST_ACCOUNT, HOST_STATE, find_host

__all__ = [
    "BOOTED",
    "CLIENT_SOCKET_UNIT",
    "DAEMON_UNIT",
    "LAUNCHD_UNITS",
    "MARK",
    "PLIST",
    "STATE_MODE",
    "SYSTEMD_UNITS",
    "host_socket",
    "is_marked",
    "leave_mark",
    "service_account",
    "start_command",
]

SYSTEMD_UNITS: Final = Path("/etc/systemd/system")
LAUNCHD_UNITS: Final = Path("/Library/LaunchDaemons")
"""The folders of a host's units."""
BOOTED: Final = Path("/run/systemd/system")
"""Exists where systemd is the running init."""
DAEMON_UNIT: Final = "hutchd.service"
CLIENT_SOCKET_UNIT: Final = "hutchd.socket"
PLIST: Final = "io.hutch.hutchd.plist"
"""launchd's description of hutchd."""
MARK: Final = "serves-this-host"
"""The name of the mark, a file in the state directory; its text is the path of the client socket."""
STATE_MODE: Final = 0o711
"""The mode of a marked state directory: every account finds the mark by its name, and can list nothing."""

_LISTEN: Final = re.compile(r"^ListenStream=(/.+)$", re.MULTILINE)
_USER: Final = re.compile(r"^User=(.+)$", re.MULTILINE)


def host_socket(root: Path = Path("/")) -> Path | None:
    """Return the client socket of the host's own hutchd, whether or not that runs; None if the host has none.

    `root` replaces `/` for everything that is looked up. Reads at most two small files.
    """
    listen = _LISTEN.search(_text(_below(root, SYSTEMD_UNITS / CLIENT_SOCKET_UNIT)))
    if listen is not None:
        return Path(listen[1].strip().replace("%%", "%"))
    if any(os.path.lexists(_below(root, unit)) for unit in _units()):
        return find_host({}, system=True)
    mark = _below(root, HOST_STATE) / MARK
    if not os.path.lexists(mark):
        return None
    socket = Path(_text(mark).strip())
    return socket if socket.is_absolute() else find_host({}, system=True)


def is_marked(state: Path) -> bool:
    """Return whether a `hutchd --system` has left its mark in this state directory."""
    return os.path.lexists(state / MARK)


def leave_mark(state: Path, socket: Path) -> str | None:
    """Leave the mark in our state directory: from now on the host has a hutchd of its own, whose socket is `socket`.

    Every account may then pass through the directory, so its other entries are closed to other accounts first, except
    for the directory of the socket, if that is here. Returns a sentence if an entry cannot be closed: the state
    directory then stays closed, and only its owner and root see the mark. OSError if the mark cannot be written.
    """
    entries = [state / name for name in sorted(os.listdir(state))]
    still_open = [entry for entry in entries if entry not in (state / MARK, socket.parent) and not _close(entry)]
    if _text(state / MARK) != f"{socket}\n":
        _write_mark(state, f"{socket}\n")
    if still_open:
        return (
            f"{still_open[0]} is open to other accounts and belongs to another one, so {state} stays closed,"
            " and users do not see that this host has a hutchd while it is stopped: chmod go= that file and restart."
        )
    state.chmod(STATE_MODE)
    return None


def service_account(root: Path = Path("/"), state: Path = HOST_STATE) -> str | None:
    """Return the name of the account that the host's hutchd runs as, or None if nothing says which that is.

    That is `User=` of the installed unit, of its last drop-in first; without a unit the owner of `state`.
    """
    unit = _below(root, SYSTEMD_UNITS / DAEMON_UNIT)
    drop_ins = sorted(unit.with_name(f"{DAEMON_UNIT}.d").glob("*.conf"), key=lambda path: path.name)
    named = [found for path in (unit, *drop_ins) for found in _USER.finditer(_text(path))]
    if named:
        return str(named[-1][1]).strip()
    return _owner(_below(root, state))


def start_command(root: Path = Path("/")) -> str:
    """Return the command with which root starts the host's hutchd."""
    units = [unit for unit in _units() if os.path.lexists(_below(root, unit))]
    if any(unit.parent == SYSTEMD_UNITS for unit in units) and _below(root, BOOTED).is_dir():
        return f"systemctl start {DAEMON_UNIT.removesuffix('.service')}"
    if LAUNCHD_UNITS / PLIST in units:
        return f"launchctl kickstart system/{PLIST.removesuffix('.plist')}"
    return f"runuser -u {service_account(root) or HOST_ACCOUNT} -- hutchd --system"


def _units() -> tuple[Path, ...]:
    return (SYSTEMD_UNITS / DAEMON_UNIT, SYSTEMD_UNITS / CLIENT_SOCKET_UNIT, LAUNCHD_UNITS / PLIST)


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _text(path: Path) -> str:
    """Return the text of a small file; empty if it is missing, closed to us or not a text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _close(path: Path) -> bool:
    """Close an entry of our directory to other accounts; return whether it is closed."""
    try:
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
    except FileNotFoundError:  # it was removed meanwhile
        return True
    except PermissionError:
        return False
    return True


def _write_mark(state: Path, text: str) -> None:
    new = state / f".{MARK}.new"
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "w") as file:
        os.fchmod(file.fileno(), 0o644)  # whatever the umask is
        file.write(text)
    new.replace(state / MARK)


def _owner(path: Path) -> str | None:
    """Return the name of the account that owns a directory, unless that is root."""
    import pwd

    try:
        uid = path.stat().st_uid
        return pwd.getpwuid(uid).pw_name if uid else None
    except (OSError, KeyError):
        return None
