"""The configuration and its checks: the account that may send requests, and the accounts of executors.

Changes nothing. A failed check raises `Refused`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import grp
import os
import pwd
import stat
import sys
import time
import tomllib
from dataclasses import dataclass, replace
from typing import Any, Final

from hutch_launcher.packets import Refused

__all__ = ["CONFIG", "Config", "ConfigFile", "LaunchAccount", "check_account", "check_output"]

CONFIG: Final = "/etc/hutch/launcher.toml"
_LARGEST_CONFIG: Final = 64 * 1024
_NO_LOGIN: Final = frozenset({"nologin", "false", "sync", "halt", "shutdown"})


# ---------------------------------------------------------------- configuration


@dataclass(frozen=True)
class Config:
    """The settings of `launcher.toml`."""

    serve: str = "hutch"
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    uid_min: int = 1000
    uid_max: int = 60000
    deny: tuple[str, ...] = ()
    dedicated: tuple[str, ...] = ()
    path: str = "/usr/local/bin:/usr/bin:/bin"
    spool: str = "/var/lib/hutch-launcher/spool"
    gone_after: int = 3600
    interpreter: str = ""

    @property
    def served_uid(self) -> int:
        """The uid of the account that may send requests."""
        if (found := _account_named(self.serve)) is None:
            raise Refused(f"The configuration serves the account {self.serve!r}, which does not exist.")
        return found.pw_uid


class ConfigFile:
    """The configuration file, read again for each request: a change applies to the next one."""

    def __init__(self, path: str) -> None:
        """Read the file. Refused unless it is valid, and only root can change it."""
        self._path = path
        self.current = self.read()

    def read(self) -> Config:
        """Read the file again. On Refused `current` stays as it was."""
        self.current = _read(self._path)
        return self.current


def _read(path: str) -> Config:
    _check_directory(os.path.dirname(path), path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise Refused(f"The configuration {path} {why}.") from None
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
            raise Refused(f"The configuration {path} must be a file that root owns and only root can write.")
        text = file.read(_LARGEST_CONFIG + 1)
    try:
        if len(text) > _LARGEST_CONFIG:
            raise ValueError("it is too large")
        config = Config(**_values(tomllib.loads(text.decode())))
        return replace(config, interpreter=_checked_interpreter(config.interpreter or _own_interpreter()))
    except ValueError as error:
        raise Refused(f"The configuration {path} cannot be used: {error}.") from None


def _values(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Config. ValueError for an unknown setting or a value of the wrong type."""
    defaults: dict[str, Any] = vars(Config())
    for name, value in settings.items():
        default: Any = defaults.get(name)
        if isinstance(default, tuple):
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        else:
            fits = type(value) is type(default) and (value >= 0 if type(value) is int else "\0" not in value)
        if not fits:
            why = "is not a setting" if default is None else "has a value of another type"
            raise ValueError(f"{name!r} {why}")
        if name in ("spool", "interpreter") and not value.startswith("/"):
            raise ValueError(f"{name!r} must be an absolute path")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _own_interpreter() -> str:
    """Return `hutch-python` beside our own interpreter, if it exists; otherwise our own interpreter.

    `hutch-python` is a copy that accounts can execute but not read, so the kernel does not let them inspect its
    processes.
    """
    unreadable = os.path.join(os.path.dirname(sys.executable), "hutch-python")
    return unreadable if os.path.exists(unreadable) else sys.executable


def _checked_interpreter(path: str) -> str:
    """Return the path. ValueError if an account other than root could change it: every account will run it."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise ValueError(f"the interpreter {path} cannot be used: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
        raise ValueError(f"root must own the interpreter {path}, and only root may write it")
    _check_way(path)  # a pyvenv.cfg beside it or one directory up changes what it imports
    return path


def _check_directory(directory: str, path: str) -> None:
    if not path.startswith("/") or os.path.realpath(directory) != directory:
        raise Refused(f"{path} must be an absolute path without symbolic links.")
    _check_way(directory, sticky=True)


def _check_way(path: str, sticky: bool = False) -> None:
    """Refuse a path if an account other than root could change the file, a directory above it, or a link on the way.

    With `sticky` a directory above may be writable by everybody if only owners can rename its entries.
    """
    unchecked = [path]
    while unchecked:
        place = unchecked.pop()
        try:
            found = os.lstat(place)
            if stat.S_ISLNK(found.st_mode):
                unchecked.append(os.path.join(os.path.dirname(place), os.readlink(place)))
        except OSError as error:
            raise Refused(f"{place} cannot be examined: {error.strerror}.") from None
        protected = stat.S_ISLNK(found.st_mode) or (sticky and place != path and found.st_mode & stat.S_ISVTX)
        if found.st_uid != 0 or (found.st_mode & 0o022 and not protected):
            raise Refused(f"Root must own {place}, and only root may write it.")
        if place != "/":
            unchecked.append(os.path.dirname(place))


# ---------------------------------------------------------------- account


@dataclass(frozen=True)
class LaunchAccount:
    """An account that executors may run as. `groups` are its groups as of this request."""

    uid: int
    gid: int
    name: str
    home: str
    shell: str
    groups: tuple[int, ...]


def check_account(uid: int, config: Config) -> LaunchAccount:
    """Return the account. Refused if its agents may not run here."""
    try:
        account = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        raise Refused(f"There is no account with the uid {uid}.") from None
    name = account.pw_name
    if uid == 0 or uid in (os.getuid(), os.geteuid()) or uid == config.served_uid:
        raise Refused(f"Agents never run as {name}.")
    if not config.uid_min <= uid <= config.uid_max:
        raise Refused(f"{name} has the uid {uid}, which is not from {config.uid_min} to {config.uid_max}.")
    if name in config.deny or any((other := _account_named(one)) and other.pw_uid == uid for one in config.deny):
        raise Refused(f"The launcher's configuration denies {name}.")
    groups = os.getgrouplist(name, account.pw_gid)
    if name not in config.users and not any(_gid(group) in groups for group in config.groups):
        raise Refused(f"{name} is neither among the users nor in one of the groups of the launcher's configuration.")
    if os.path.basename(account.pw_shell) in _NO_LOGIN and name not in config.dedicated:
        raise Refused(f"{name} has no login shell ({account.pw_shell}), and is not dedicated to Hutch.")
    _check_expiry(name)
    return LaunchAccount(uid, account.pw_gid, name, account.pw_dir, account.pw_shell, tuple(groups))


def _account_named(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except (KeyError, ValueError):
        return None


def _gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        return None


class _Shadow(ctypes.Structure):
    """`struct spwd` of shadow.h."""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("name", "password")),
        *((name, ctypes.c_long) for name in ("changed", "min", "max", "warn", "inactive", "expire")),
        ("flag", ctypes.c_ulong),
    )


def _check_expiry(name: str) -> None:
    """Refuse an account that has expired. An account without an entry in shadow(5) never expires."""
    look_up = ctypes.CDLL(None, use_errno=True).getspnam  # Python 3.13 has no `spwd`
    look_up.restype = ctypes.POINTER(_Shadow)
    ctypes.set_errno(0)
    entry = look_up(os.fsencode(name))
    if not entry:
        if ctypes.get_errno() in (errno.EACCES, errno.EPERM):
            raise Refused(f"Whether {name} has expired is unknown: the launcher may not read /etc/shadow.")
        return
    if 0 <= entry.contents.expire <= time.time() // 86_400:
        raise Refused(f"The account {name} has expired.")


# ---------------------------------------------------------------- output


def check_output(fd: int) -> None:
    """Refuse an output descriptor with which an executor could do more than append."""
    kind, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
    writable = flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
    if not writable or not (stat.S_ISFIFO(kind) or (stat.S_ISREG(kind) and flags & os.O_APPEND)):
        raise Refused("The output must be a file opened for appending, or a pipe.")
