"""Examines hutch-launcher from outside: its configuration, its socket, and its replies to hutchd.

The launcher reads its configuration with its own code, since neither program imports the other. The configuration read
here is used only for advice.
"""

from __future__ import annotations

import os
import stat
import sys
import tomllib
from pathlib import Path
from typing import Final

import msgspec

from hutch_daemon.doctor.finding import Finding
from hutch_daemon.environments.launcher_client import LauncherClient, LauncherStatus, read_abilities
from hutch_daemon.settings import Settings
from hutch_shared.errors import HutchError
from hutch_shared.host_mark import BOOTED, service_account
from hutch_shared.paths import HOST_ACCOUNT, LAUNCHER_CONFIG, LAUNCHER_SOCKET_UNIT, Paths
from hutch_shared.reach import PathReader

__all__ = ["LauncherConfig", "command_of", "examine_launcher", "examine_socket", "hutchd_account", "read_config"]

_ALL: Final = ("memory", "pids", "cpu")


class LauncherConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of the launcher's configuration, with their defaults."""

    serve: str = "hutch"
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    uid_min: int = 1000
    uid_max: int = 60000
    deny: tuple[str, ...] = ()
    dedicated: tuple[str, ...] = ()
    path: str = "/usr/local/bin:/usr/bin:/bin"
    spool: str = "/var/lib/hutch-launcher/spool"
    gone_after: float = 3600
    interpreter: str = ""


def read_config(path: Path = Path(LAUNCHER_CONFIG)) -> tuple[LauncherConfig | None, list[Finding]]:
    """Read the configuration; None if it cannot be read or used."""
    subject = f"launcher's list: {path}"
    try:
        with path.open("rb") as file:
            config = msgspec.convert(tomllib.load(file), LauncherConfig)
            found = os.fstat(file.fileno())
    except FileNotFoundError:
        return None, [
            Finding(subject, "It does not exist: `hutch service install --system` writes it, or write it by hand.")
        ]
    except PermissionError:
        return None, [Finding(f"{subject}: not examined; you may not read it")]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        return None, [Finding(subject, f"The launcher cannot use it: {error}.")]
    if unsafe := _unsafe(path, found):
        return config, [Finding(subject, unsafe)]
    if not config.users and not config.groups:
        return config, [
            Finding(subject, "No account may run agents yet: name accounts in `users` or groups in `groups`.")
        ]
    return config, [Finding(subject)]


def _unsafe(path: Path, found: os.stat_result) -> str | None:
    """Return the reason why the launcher would not trust the file, or None."""
    if not stat.S_ISREG(found.st_mode) or path.is_symlink():
        return "It is not a regular file, so the launcher refuses it."
    for place, one in ((path, found), (path.parent, path.parent.stat())):
        if one.st_uid != 0:
            return f"{place} does not belong to root, so the launcher refuses it: chown root:root {place}"
        if one.st_mode & 0o022:
            return f"Other accounts than root may write to {place}, so the launcher refuses it: chmod go-w {place}"
    return None


def hutchd_account(config: LauncherConfig | None, paths: Paths) -> str:
    """Return the name of the account that the host's hutchd runs as, or would run as on a host without a service."""
    return service_account(state=paths.state) or (HOST_ACCOUNT if config is None else config.serve)


def command_of(settings: Settings) -> str:
    """Return the path of the launcher, as the sudo rule names it."""
    return settings.isolation.launcher_command or os.path.join(sys.prefix, "bin", "hutch-launcher")


def examine_launcher(settings: Settings) -> list[Finding]:
    """Ask the launcher for its abilities, as hutchd does. Takes up to ten seconds if it does not answer."""
    sudo = settings.isolation.launcher == "sudo"
    way = ("sudo", "-n", "--", command_of(settings)) if sudo else Path(settings.isolation.launcher_socket)
    subject = f"launcher: {' '.join(way) if isinstance(way, tuple) else way}"
    launcher = LauncherClient(way)
    try:
        reply = launcher.probe()
    except HutchError as error:
        return [Finding(subject, f"{error.message.partition(' `hutch doctor')[0]} {_start(settings)}")]
    finally:
        launcher.close()
    if reply.status is not LauncherStatus.DONE:
        return [Finding(subject, reply.text or "It reports no abilities.")]
    group = read_abilities(reply.text)
    findings = [Finding(subject, None if group.caps else group.why or "It lacks the rights to become another account.")]
    if not group.cgroup:
        why = group.why or "It can make no cgroup"
        findings.append(
            Finding(
                "isolation account: not available",
                f"{why.rstrip('.')}. Run it as its unit, to which systemd delegates a cgroup, or as root.",
            )
        )
        return findings
    missing = [one for one in _ALL if one not in group.limits]
    bounds = f"cgroup {group.cgroup} at {group.root}, which can limit {', '.join(group.limits) or 'nothing'}"
    advice = (
        f"Limits of {' and '.join(missing)} are not enforced here: {group.why or 'no such controller is delegated.'}"
    )
    findings.append(Finding(f"isolation account: {bounds}", advice if missing else None))
    return findings


def examine_socket(settings: Settings, account: PathReader) -> list[Finding]:
    """Examine the owner and mode of the launcher's socket. Every account may do this."""
    if settings.isolation.launcher == "sudo":
        return []
    path = Path(settings.isolation.launcher_socket)
    subject = f"launcher's socket: {path}"
    try:
        found = path.lstat()
    except FileNotFoundError:
        return [Finding(subject, f"It does not exist. {_start(settings)}")]
    except OSError as error:
        return [Finding(f"{subject}: not examined ({error.strerror})")]
    if not stat.S_ISSOCK(found.st_mode):
        return [Finding(subject, "It is not a socket: remove it.")]
    if found.st_uid not in (0, account.uid) or found.st_mode & 0o077:
        return [
            Finding(
                subject, f"Other accounts than {account.name} may connect to it: chmod 600 and chown {account.name}."
            )
        ]
    return [Finding(subject)]


def _start(settings: Settings) -> str:
    if settings.isolation.launcher == "sudo":
        return "`hutch doctor --sudo` shows the rule that it needs."
    if BOOTED.is_dir():
        return f"Start it: systemctl enable --now {LAUNCHER_SOCKET_UNIT} (`hutch service install --system` writes it)."
    return f"Start it, as root: {command_of(settings)} --listen {settings.isolation.launcher_socket}"
