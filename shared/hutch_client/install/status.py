"""The state of the service: the installed files, and the report of systemd or launchd."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from hutch_client.install.commands import failure_text, try_command
from hutch_client.install.place import UnitPlace
from hutch_client.install.plan import FileState, Installed, InstalledFile, file_state
from hutch_client.install.units import DAEMON, LABEL, LAUNCHER, SOCKETS
from hutch_shared.paths import LAUNCHER_SOCKET_UNIT

__all__ = ["ManagerStatus", "ServiceStatus", "read_installed", "read_status", "systemd_version"]

_SHOWN: Final = "Id,ActiveState,SubState,UnitFileState,MainPID,ActiveEnterTimestampMonotonic"
_STATE_FOLDERS: Final = (Path("/var/lib/hutch"), Path("/var/lib/hutch-launcher"))


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    """The service manager's report. None means unknown."""

    enabled: bool | None = None
    running: bool | None = None
    listening: bool | None = None
    since: str | None = None
    pid: int | None = None
    launcher: dict[str, Any] | None = None
    trouble: str | None = None

    @property
    def up(self) -> bool:
        """Whether the service runs, or starts when a client connects."""
        return bool(self.running or self.listening)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The data that `hutch service status` shows."""

    place: UnitPlace
    files: dict[Path, FileState]
    drop_ins: tuple[Path, ...]
    """Drop-ins that are not Hutch's: systemd applies them too."""
    manager: ManagerStatus

    @property
    def installed(self) -> Literal["absent", "partly", "older", "current", "changed"]:
        """The state of all files together; see `FileState`."""
        kinds = set(self.files.values())
        if "changed" in kinds:
            return "changed"
        if "absent" in kinds:
            return "absent" if kinds == {"absent"} else "partly"
        return "older" if "older" in kinds else "current"

    def as_json(self) -> dict[str, Any]:
        """Return the status as `-o json` prints it."""
        return {
            "mode": "system" if self.place.system else "user",
            "manager": self.place.manager,
            "installed": self.installed,
            "files": {str(path): state for path, state in self.files.items()},
            "drop_ins": [str(path) for path in self.drop_ins],
            **{field.name: getattr(self.manager, field.name) for field in fields(self.manager)},
            "up": self.manager.up,
        }


def read_installed(place: UnitPlace, manager: ManagerStatus) -> Installed:
    """Return the state of every file that a plan depends on."""
    existing = {path for path in (*place.templates, *_STATE_FOLDERS) if path.exists() or path.is_symlink()}
    existing |= {path for path in (place.interpreter, place.mark) if path is not None and os.path.lexists(path)}
    for name in place.units:
        existing |= {*place.folder.glob(f"{name}.d/*"), *place.folder.glob(f"{name}.edited*")}
    return Installed(
        {place.folder / name: _file(place.folder / name, text) for name, text in place.texts.items()},
        frozenset(existing),
        up=manager.up,
        enabled=bool(manager.enabled),
    )


def read_status(place: UnitPlace) -> ServiceStatus:
    """Return the state of each file, and the manager's report if a manager runs."""
    if not place.here:
        manager = ManagerStatus(trouble="systemd does not run this host")
    elif place.manager == "systemd":
        manager = _ask_systemd(place)
    else:
        manager = _ask_launchd(place)
    installed = read_installed(place, manager)
    drop_ins = (path for path in installed.existing if path.suffix == ".conf" and path not in installed.files)
    files = {path: found.state for path, found in installed.files.items()}
    return ServiceStatus(place, files, tuple(sorted(drop_ins)), manager)


def systemd_version() -> int:
    """Return the version of this host's systemd, 0 if there is none."""
    found = re.match(r"systemd (\d+)", try_command(["systemctl", "--version"]).stdout)
    return int(found[1]) if found else 0


def _file(path: Path, text: str) -> InstalledFile:
    if not path.exists() and not path.is_symlink():
        return InstalledFile("absent")
    try:
        found = path.read_text() if path.is_file() and not path.is_symlink() else None
    except (OSError, ValueError):
        found = None
    return InstalledFile(file_state(found, text), found)


def _ask_systemd(place: UnitPlace) -> ManagerStatus:
    asked = try_command([*place.systemctl, "show", f"--property={_SHOWN}", *place.units])
    if asked.returncode:
        return ManagerStatus(trouble=failure_text(asked))
    units = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in asked.stdout.split("\n\n")]
    by_name = {unit.get("Id"): unit for unit in units}
    service = by_name.get(DAEMON, {})
    sockets = [by_name.get(name, {}) for name in SOCKETS.values()]
    running = service.get("ActiveState") in ("active", "reloading")
    entered = service.get("ActiveEnterTimestampMonotonic", "")
    since = None
    if running and entered.isdecimal():
        at = time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - int(entered) / 1_000_000)
        since = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    failed = [str(unit.get("Id")) for unit in by_name.values() if unit.get("ActiveState") == "failed"]
    return ManagerStatus(
        enabled=any(unit.get("UnitFileState") == "enabled" for unit in by_name.values()),
        running=running,
        listening=all(unit.get("ActiveState") == "active" for unit in sockets),
        since=since,
        pid=_pid(service),
        launcher=_launcher_of(by_name) if place.system else None,
        trouble=f"failed: {', '.join(failed)}" if failed else None,
    )


def _launcher_of(by_name: dict[str | None, dict[str, str]]) -> dict[str, Any]:
    service, socket = by_name.get(LAUNCHER, {}), by_name.get(LAUNCHER_SOCKET_UNIT, {})
    return {
        "running": service.get("ActiveState") in ("active", "reloading"),
        "listening": socket.get("ActiveState") == "active",
        "pid": _pid(service),
    }


def _pid(unit: dict[str, str]) -> int | None:
    pid = unit.get("MainPID", "0")
    return int(pid) if pid.isdecimal() and pid != "0" else None


def _ask_launchd(place: UnitPlace) -> ManagerStatus:
    asked = try_command(["launchctl", "print", f"{place.domain}/{LABEL}"])
    lines = dict(line.strip().partition(" = ")[::2] for line in asked.stdout.splitlines())
    pid = lines.get("pid", "")
    return ManagerStatus(
        enabled=not asked.returncode,
        running=pid.isdecimal(),
        listening=False,
        pid=int(pid) if pid.isdecimal() else None,
    )
