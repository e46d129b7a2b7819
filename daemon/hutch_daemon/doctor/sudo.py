"""Examines the sudo rule for the launcher: it must exist, allow nothing else, and name a program that is safe."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hutch_daemon.doctor import sudoers
from hutch_daemon.doctor.finding import Finding
from hutch_daemon.doctor.launcher import command_of, hutchd_account, read_config
from hutch_daemon.settings import Settings, load
from hutch_shared.errors import HutchError
from hutch_shared.host_mark import DAEMON_UNIT, SYSTEMD_UNITS
from hutch_shared.paths import Paths
from hutch_shared.reach import PathReader
from hutch_shared.unix import check_directory

__all__ = ["examine_sudo", "sudo_rule"]

_TIMEOUT: Final = 20.0
_UNIT: Final = SYSTEMD_UNITS / DAEMON_UNIT


def sudo_rule(paths: Paths) -> str:
    """Return the text of sudo's file for the launcher in the settings. SettingsError, HutchError."""
    return sudoers.rule(command_of(load(paths.config)), hutchd_account(read_config()[0], paths))


def examine_sudo(settings: Settings, account: PathReader | None) -> Iterator[Finding]:
    """Examine the rule. Return no finding if the settings do not use sudo and no rule exists."""
    used = settings.isolation.launcher == "sudo"
    file = Path(sudoers.FILE)
    if not used and not file.exists():
        return
    command = command_of(settings)
    yield Finding(f"sudo rule: {command}", _program(command))
    if used and _UNIT.exists() and "NoNewPrivileges=yes" in _UNIT.read_text(errors="replace").splitlines():
        yield Finding(
            'settings: [isolation] launcher = "sudo"',
            f"{_UNIT} forbids sudo (NoNewPrivileges), being written for the launcher's own unit: remove that line.",
        )
    if account is None:
        return
    if os.geteuid() not in (0, account.uid):
        yield Finding(f"sudo's rules: not examined; only root and {account.name} may")
    elif shutil.which("sudo") is None:
        yield Finding("sudo's rules", "sudo is not installed.")
    else:
        yield from _rules(command, account)


def _program(command: str) -> str | None:
    """Return the reason why it is not safe that root runs this command, or None."""
    path = Path(os.path.realpath(command))
    if not path.is_file():
        return "It does not exist."
    found = path.stat()
    if found.st_uid != 0 or found.st_mode & 0o022:
        return (
            f"Other accounts than root can change {path}, and would become root by this rule: chown root, chmod go-w."
        )
    try:
        check_directory(path.parent)
    except HutchError as error:
        return f"Other accounts could replace it, and would become root by this rule: {error.message}"
    return None


def _rules(command: str, account: PathReader) -> Iterator[Finding]:
    words = ["sudo", "-n", "-l", *(["-U", account.name] if os.geteuid() == 0 else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_TIMEOUT, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("sudo's rules", f"They cannot be listed: {error}.")
        return
    faults = sudoers.faults(sudoers.allowed(done.stdout), command)
    for fault in faults:
        yield Finding(f"sudo's rules for {account.name}", f"{fault} `hutch doctor --sudo` shows the needed rule.")
    if not faults:
        yield Finding(f"sudo's rules for {account.name}: exactly the needed rule")
    if os.geteuid() == 0:
        file = Path(sudoers.FILE)
        try:
            whole = file.read_text()
            good = whole == sudoers.rule(command, account.name)
        except (OSError, HutchError):
            return
        advice = "It differs from what `hutch doctor --sudo` prints: the rule works only together with its Defaults."
        yield Finding(f"sudo's file: {file}", None if good else advice)
