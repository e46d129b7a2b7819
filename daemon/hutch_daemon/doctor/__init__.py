"""hutchd's part of `hutch doctor`: examines hutchd's settings, database and keys, and the accounts of a host.

The examination changes nothing, works whether hutchd runs or not, and continues after the first fault. Each finding
names the thing examined, with advice if something is wrong. A thing that this account may not examine is a finding too.

The state directory is examined as its owner, so that no files of another account are left in it. In system mode root
starts a process under that account for this; other accounts skip this part.
"""

from __future__ import annotations

import os
import platform
import pwd
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from hutch_daemon.doctor.accounts import examine_accounts
from hutch_daemon.doctor.delegate import ask_as
from hutch_daemon.doctor.finding import Finding
from hutch_daemon.doctor.launcher import LauncherConfig, examine_launcher, examine_socket, hutchd_account, read_config
from hutch_daemon.doctor.record import examine_record
from hutch_daemon.doctor.sandboxes import examine_sandboxes, try_as_caller
from hutch_daemon.doctor.space import examine_space
from hutch_daemon.doctor.sudo import examine_sudo
from hutch_daemon.environments.accounts import account_of
from hutch_daemon.settings import Settings, SettingsError, load
from hutch_shared import __version__
from hutch_shared.errors import HutchError
from hutch_shared.paths import LAUNCHER_CONFIG, Paths, find_paths
from hutch_shared.reach import PathReader
from hutch_shared.unix import PATH_LIMIT, check_directory

__all__ = ["Finding", "as_service", "examine"]


def examine(paths: Paths, account: str | None = None) -> Iterator[Finding]:
    """Examine everything, one thing after the other. Takes up to a minute if the database is large.

    In system mode it examines the accounts on the launcher's list, and before them `account`, by default the one that
    the caller's agents run as.
    """
    yield Finding(f"hutchd {__version__}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}")
    settings, finding = _settings(paths.config)
    yield finding
    if not paths.system:
        yield from _sockets(paths, os.geteuid())
        yield from examine_record(paths, settings)
        own = account_of(os.geteuid(), home=os.environ.get("HOME", "/"))
        yield from examine_space(own.name, own.home, paths.state / "spool" / "agents")
        yield from examine_sandboxes(settings, paths, own.name, try_as_caller)
        return
    config, findings = read_config()
    yield from findings
    service, finding = _account(config, paths)
    yield finding
    if service is not None:
        yield from _sockets(paths, service.uid)
        yield from _inside(paths, settings, service)
    if config is not None:
        yield from examine_accounts(config, settings, paths, account or _callers_account(settings, service))
    yield from examine_sudo(settings, service)


def as_service() -> Iterator[Finding]:
    """Examine the things that only hutchd's own account may: the state directory, and the launcher's replies."""
    paths = find_paths(system=True)
    settings, _ = _settings(paths.config)
    yield from examine_record(paths, settings)
    yield from examine_launcher(settings)


def _settings(path: Path) -> tuple[Settings, Finding]:
    try:
        return load(path), Finding(f"settings: {path}{'' if path.exists() else ' is missing: defaults apply'}")
    except (SettingsError, OSError) as error:
        return Settings(), Finding(
            f"settings: {path}", f"{error} Correct it; `hutchd --check` says whether it can be used."
        )


def _callers_account(settings: Settings, service: PathReader | None) -> str | None:
    """Return the account that the caller's agents run as; None for root and hutchd, who usually have none."""
    uid = os.geteuid()
    if uid == 0 or (service is not None and uid == service.uid):
        return None
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
    return settings.accounts.map.get(name, name)


def _account(config: LauncherConfig | None, paths: Paths) -> tuple[PathReader | None, Finding]:
    """Return the account of the host's hutchd. The launcher must serve this account."""
    name = hutchd_account(config, paths)
    try:
        who = PathReader.named(name)
    except KeyError:
        make = f"useradd --system --home-dir /var/lib/hutch --shell /usr/sbin/nologin {name}"
        return None, Finding(f"account of hutchd: {name}", f"It does not exist. Make it: {make}")
    if who.uid == 0:
        return None, Finding(
            f"account of hutchd: {name}", "It is root: on a host, hutchd runs as an account of its own."
        )
    wrong = None
    if config is not None and config.serve != name:
        wrong = f'The launcher serves {config.serve}, so no agent starts: set serve = "{name}" in {LAUNCHER_CONFIG}.'
    return who, Finding(f"account of hutchd: {name}", wrong)


def _inside(paths: Paths, settings: Settings, account: PathReader) -> Iterator[Finding]:
    """Examine the things that belong to hutchd, or report which accounts may do so."""
    if os.geteuid() == account.uid:
        yield from as_service()
    elif os.geteuid() == 0:
        yield from ask_as(account)
    else:
        yield Finding(f"database, keys, launcher: not examined; only root and {account.name} may")
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
            yield Finding(subject, f"Other accounts than hutchd's can change it: chown {owner} and chmod go-w.")
            return
    except HutchError as error:
        yield Finding(subject, error.message)
        return
    advice = f"The sockets' paths have {longest} bytes, but this system allows {PATH_LIMIT}: set HUTCH_RUNTIME_DIR."
    yield Finding(subject, advice if longest > PATH_LIMIT else None)
