"""Examines the accounts on the launcher's list, and one more: can agents run as each of them, and in a sandbox?

Root tries it in a process under that account. Any other account checks owners and modes, which finds most faults.
"""

from __future__ import annotations

import grp
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from hutch_daemon.doctor.delegate import run_as
from hutch_daemon.doctor.finding import Finding
from hutch_daemon.doctor.launcher import LauncherConfig
from hutch_daemon.doctor.sandboxes import examine_sandboxes, try_as_caller
from hutch_daemon.doctor.space import examine_space
from hutch_daemon.settings import Settings
from hutch_shared import __file__ as shared_file
from hutch_shared.paths import LAUNCHER_CONFIG, Paths
from hutch_shared.reach import PathReader, closed, members

__all__ = ["examine_accounts"]

_MAX_ACCOUNTS: Final = 20
"""The largest number of accounts to examine."""
_MAX_SECONDS: Final = 40.0
"""The seconds after which no further account is examined."""
_TRY: Final = 20.0
_SANDBOX: Final = 60.0
_NO_ACCOUNT: Final = "The launcher's list names it, but there is no such account."
_LOAD: Final = "import hutch_executor.run"
_NO_SHELLS: Final = ("nologin", "false", "sync", "halt", "shutdown")
_DAY: Final = 86_400
CLOSED: Final = "hutch-python"
"""The name of a copy of Python that accounts may execute but not read, so that they cannot trace its processes."""


def examine_accounts(
    config: LauncherConfig, settings: Settings, paths: Paths, wanted: str | None = None
) -> Iterator[Finding]:
    """Examine each account, up to `_MAX_ACCOUNTS` of them and for `_MAX_SECONDS`.

    `wanted` is examined first, and whether it is on the list or not.
    """
    if not config.interpreter:
        closed_copy = Path(sys.executable).with_name(CLOSED)
        python = str(closed_copy) if closed_copy.exists() else sys.executable
        config = msgspec.structs.replace(config, interpreter=python)
    yield _interpreter(Path(config.interpreter))
    names: dict[str, None] = dict.fromkeys(([wanted] if wanted is not None else []) + [*config.users])
    for group in config.groups:
        try:
            names |= dict.fromkeys(members(group))
        except KeyError:
            yield Finding(f"group {group}", "The launcher's list names it, but there is no such group.")
    deadline = time.monotonic() + _MAX_SECONDS
    sandbox_tried = False
    for at, name in enumerate(names):
        if at == _MAX_ACCOUNTS or time.monotonic() > deadline:
            yield Finding(f"{len(names) - at} more accounts: not examined, since that would take too long")
            break
        try:
            who = PathReader.named(name)
        except KeyError:
            why = "There is no such account." if name == wanted else _NO_ACCOUNT
            yield Finding(f"account {name}", why)
            continue
        advice = _refused(who, config) or _unusable(who, config)
        yield Finding(f"account {name}", advice)
        if advice is None:
            yield from examine_space(name, who.home, Path(config.spool, str(who.uid)))
        if advice is None and not sandbox_tried:
            sandbox_tried = True
            yield from _sandboxes(who, config, settings, paths)


def _interpreter(path: Path) -> Finding:
    """Check that accounts may execute but not read the interpreter of executors, and that it is up to date."""
    subject = f"executors run {path}"
    mend = f'install -m 711 "{os.path.realpath(sys.executable)}" "{Path(sys.executable).with_name(CLOSED)}"'
    try:
        if path.stat().st_mode & 0o044:
            return Finding(
                subject,
                "Accounts may read it, so for a moment at its start other sessions of its account can look into an"
                f" executor. As root: {mend}",
            )
        if os.geteuid() == 0 and path.name == CLOSED and path.read_bytes() != Path(sys.executable).read_bytes():
            return Finding(subject, f"It is a copy of another Python than Hutch now uses. As root: {mend}")
    except OSError as error:
        return Finding(subject, f"It cannot be examined: {error.strerror}.")
    return Finding(f"{subject}, which accounts may run but not read")


def _refused(who: PathReader, config: LauncherConfig) -> str | None:
    """Return the reason why the launcher would refuse an account, or None."""
    if who.uid == 0 or who.name == config.serve or who.name in config.deny:
        return "The launcher never starts agents as root, hutchd's account or one in `deny`: use another account."
    if not config.uid_min <= who.uid <= config.uid_max:
        return f"Its uid {who.uid} is not from {config.uid_min} to {config.uid_max}, so the launcher refuses it."
    if who.name not in config.users and not any(_is_member(who, group) for group in config.groups):
        change = "" if os.geteuid() == 0 else ", as root"
        return (
            f"The launcher's list does not name it, so no agent runs as it. Add it to `users`, or one of its groups to"
            f" `groups`, in {LAUNCHER_CONFIG}{change}; this takes effect at once."
        )
    if os.path.basename(who.shell) in _NO_SHELLS and who.name not in config.dedicated:
        return (
            f"Its shell {who.shell} admits no login, so the launcher refuses it. If only Hutch uses the account,"
            " name it in `dedicated`."
        )
    if _expired(who.name):
        return "It has expired, so the launcher refuses it. To reopen it: usermod --expiredate ''"
    return None


def _is_member(who: PathReader, group: str) -> bool:
    try:
        return grp.getgrnam(group).gr_gid in who.gids
    except KeyError:
        return False


def _expired(name: str) -> bool:
    """Return whether an account has expired, by /etc/shadow if that can be read."""
    try:
        lines = Path("/etc/shadow").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        fields = line.split(":")
        if fields[0] == name and len(fields) > 7 and fields[7].isdecimal():
            return int(fields[7]) <= time.time() // _DAY
    return False


def _unusable(who: PathReader, config: LauncherConfig) -> str | None:
    """Return the reason why an executor cannot run as an account, or None."""
    if why := _code(who, config):
        return f"{why} Install Hutch, and the Python it runs with, where every account may read it."
    try:
        home = Path(who.home).stat()
    except OSError as error:
        return f"Its home {who.home} cannot be used ({error.strerror}): agents keep their conversations there."
    if home.st_uid != who.uid:
        return f"Its home {who.home} belongs to another account: chown {who.name} {who.home}"
    return None


def _code(who: PathReader, config: LauncherConfig) -> str | None:
    """Return the reason why an account cannot read the interpreter or the code, or None.

    Root tries it; any other account checks owners and modes.
    """
    python = config.interpreter
    places = ((python, 1), (sysconfig.get_path("stdlib"), 5), (sysconfig.get_path("purelib"), 5), (shared_file, 4))
    if os.geteuid() == 0:
        try:
            done = run_as(who, (python, "-P", "-s", "-c", _LOAD), timeout=_TRY, path=config.path)
        except subprocess.TimeoutExpired:
            return f"{python} did not load the executor within {_TRY:g} s."
        except OSError as error:
            why = next(filter(None, (closed(path, who, bits) for path, bits in places)), error.strerror)
            return f"It cannot execute {python}: {why}."
        if done.returncode == 0:
            return None
        last_line = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = next(filter(None, (closed(path, who, bits) for path, bits in places)), " ".join(last_line))
        return f"It cannot load the executor with {python}: {why}."
    why = next(filter(None, (closed(path, who, bits) for path, bits in places)), None)
    return f"It cannot run the executor: {why}." if why else None


def _sandboxes(who: PathReader, config: LauncherConfig, settings: Settings, paths: Paths) -> Iterator[Finding]:
    """Try the sandboxes of agents. They depend on the host, so trying them as one account is enough."""
    if os.geteuid() != 0:
        untried = "not tried: only root can try it as another account"
        yield from examine_sandboxes(settings, paths, "you", try_as_caller, path=config.path, untried=untried)
        return
    command = (config.interpreter, "-P", "-s", "-m", "hutch_executor.sandbox", "--no-new-privileges")

    def try_sandbox(given: bytes) -> subprocess.CompletedProcess[bytes]:
        return run_as(who, command, timeout=_SANDBOX, given=given, path=config.path)

    yield from examine_sandboxes(settings, paths, who.name, try_sandbox, path=config.path)
