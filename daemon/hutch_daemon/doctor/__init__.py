"""What `hutch doctor` cannot see from outside: settings, record and keys of this hutchd, and a host's many accounts.

It looks and changes nothing, works whether a hutchd runs or not, and never stops at the first thing that is wrong.
Each finding is a thing that was looked at, with advice where something is to be done about it; what this account may
not look at is a finding too.

The record is looked at as the account that it belongs to, so that nothing of another's is left in it. In system mode
root therefore asks for that in a process under that account; anybody else gets the part that is for all to see.
"""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from hutch_daemon.doctor.accounts import examine_accounts
from hutch_daemon.doctor.delegate import ask_as
from hutch_daemon.doctor.finding import Finding
from hutch_daemon.doctor.launcher import LauncherConfig, examine_launcher, examine_socket, read_config
from hutch_daemon.doctor.record import examine_record
from hutch_daemon.doctor.sudo import examine_sudo
from hutch_daemon.settings import Settings, SettingsError, load
from hutch_shared import __version__
from hutch_shared.errors import HutchError
from hutch_shared.paths import Paths, find_paths
from hutch_shared.reach import Who
from hutch_shared.unix import PATH_LIMIT, check_directory

__all__ = ["Finding", "as_service", "examine"]


def examine(paths: Paths) -> Iterator[Finding]:
    """Look at everything, one thing after the other. Takes up to a minute where the database is large."""
    yield Finding(f"hutchd {__version__}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}")
    settings, finding = _settings(paths.config)
    yield finding
    if not paths.system:
        yield from _sockets(paths, os.geteuid())
        yield from examine_record(paths, settings)
        return
    config, findings = read_config()
    yield from findings
    account, finding = _account(config)
    yield finding
    if account is not None:
        yield from _sockets(paths, account.uid)
        yield from _inside(paths, settings, account)
    if config is not None:
        yield from examine_accounts(config, settings, paths)
    yield from examine_sudo(settings, account)


def as_service() -> Iterator[Finding]:
    """Look at what only hutchd's own account may: the record, and what the launcher answers it."""
    paths = find_paths(system=True)
    settings, _ = _settings(paths.config)
    yield from examine_record(paths, settings)
    yield from examine_launcher(settings)


def _settings(path: Path) -> tuple[Settings, Finding]:
    try:
        return load(path), Finding(f"settings: {path}{'' if path.exists() else ' is not there: defaults'}")
    except (SettingsError, OSError) as error:
        return Settings(), Finding(f"settings: {path}", f"{error} Mend it; `hutchd --check` says whether it is good.")


def _account(config: LauncherConfig | None) -> tuple[Who | None, Finding]:
    """Return the account of a host's hutchd: the one that the launcher serves."""
    name = LauncherConfig().serve if config is None else config.serve
    try:
        who = Who.named(name)
    except KeyError:
        make = f"useradd --system --home-dir /var/lib/hutch --shell /usr/sbin/nologin {name}"
        return None, Finding(f"account of hutchd: {name}", f"It is not there. Make it: {make}")
    if who.uid == 0:
        return None, Finding(
            f"account of hutchd: {name}", "It is root: hutchd of a host runs as an account of its own."
        )
    return who, Finding(f"account of hutchd: {name}")


def _inside(paths: Paths, settings: Settings, account: Who) -> Iterator[Finding]:
    """Look at what is hutchd's own, or say who may."""
    if os.geteuid() == account.uid:
        yield from as_service()
    elif os.geteuid() == 0:
        yield from ask_as(account)
    else:
        yield Finding(f"record, keys, launcher: not looked at, which only root and {account.name} may")
        yield from examine_socket(settings, account)


def _sockets(paths: Paths, owner: int) -> Iterator[Finding]:
    if not paths.runtime.exists():
        return
    subject = f"sockets: {paths.runtime}"
    longest = max(len(os.fsencode(path)) for path in (paths.executor_socket, paths.client_socket))
    found = paths.runtime.stat()
    try:
        if found.st_uid in (0, os.geteuid()) or not paths.system:
            check_directory(paths.runtime)
        elif found.st_uid != owner or found.st_mode & 0o022:
            yield Finding(subject, f"Others than hutchd can change it: chown {owner} and chmod go-w.")
            return
    except HutchError as error:
        yield Finding(subject, error.message)
        return
    advice = f"The sockets' paths have {longest} bytes, this system takes {PATH_LIMIT}: set HUTCH_RUNTIME_DIR."
    yield Finding(subject, advice if longest > PATH_LIMIT else None)
