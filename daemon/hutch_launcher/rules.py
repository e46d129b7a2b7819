"""What may be asked, and for whom: the configuration, the request, the account. Nothing here changes anything.

Whatever does not fit raises `Refused`, whose text is a sentence for its reader.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import grp
import os
import pwd
import re
import stat
import struct
import time
import tomllib
from dataclasses import dataclass, replace
from typing import Any, Final

__all__ = ["CONFIG", "KILL", "NOBODY", "PROBE", "START", "SWEEP", "Config", "Refused", "Request"]
__all__ += ["check_account", "check_output", "named", "read_config", "read_request"]

CONFIG: Final = "/etc/hutch/launcher.toml"
PROBE, START, KILL, SWEEP = 1, 2, 3, 4
NOBODY: Final = 0xFFFF_FFFF

REQUEST: Final = struct.Struct(">8sBxxxI32sQIIII56x")
MAGIC: Final = b"hutchL01"
_EXECUTOR: Final = re.compile(rb"x-[0-9a-hjkmnp-tv-z]{16}")
_BOUNDS: Final = {"memory": 1 << 62, "pids": 1 << 22, "cpu_weight": 10_000, "open_files": 1 << 20}
_LARGEST_CONFIG: Final = 64 * 1024
_NO_SHELLS: Final = frozenset({"nologin", "false", "sync", "halt", "shutdown"})


class Refused(Exception):  # noqa: N818 - it is the answer, not a fault
    """What is asked for is not done; the text says why."""


# ---------------------------------------------------------------- configuration


@dataclass(frozen=True)
class Config:
    """`launcher.toml`. It is read at every request, so that a change counts at once."""

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
    def served(self) -> int:
        """The uid of the account that may ask."""
        if (found := named(self.serve)) is None:
            raise Refused(f"There is no account {self.serve!r}, which the configuration says to serve.")
        return found.pw_uid


def read_config(path: str, default_interpreter: str) -> Config:
    """Read a file that is root's alone, in a directory that is, all the way up."""
    _check_directory(os.path.dirname(path), path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise Refused(f"The configuration {path} {why}.") from None
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
            raise Refused(f"The configuration {path} must be a file of root's that nobody else may write.")
        text = file.read(_LARGEST_CONFIG + 1)
    try:
        if len(text) > _LARGEST_CONFIG:
            raise ValueError("it is too large")
        config = Config(**_values(tomllib.loads(text.decode())))
        return replace(config, interpreter=_interpreter(config.interpreter or default_interpreter))
    except ValueError as error:
        raise Refused(f"The configuration {path} cannot be used: {error}.") from None


def _values(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as they are kept; ValueError for one that does not exist or has the wrong type."""
    known: dict[str, Any] = vars(Config())
    for name, value in given.items():
        default: Any = known.get(name)
        if isinstance(default, tuple):
            fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
        else:
            fits = type(value) is type(default) and (value >= 0 if type(value) is int else "\0" not in value)
        if not fits:
            raise ValueError(f"{name!r} is no setting" if default is None else f"{name!r} has a value of another kind")
        if name in ("spool", "interpreter") and not value.startswith("/"):
            raise ValueError(f"{name!r} must be an absolute path")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _interpreter(path: str) -> str:
    """Return the path of what every account will run: root's, or it would be its owner who decides what that does."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise ValueError(f"the interpreter {path} cannot be used: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
        raise ValueError(f"the interpreter {path} must be root's, and writable by nobody else")
    _check_way(path)  # a pyvenv.cfg beside it, or one directory up, decides what it does
    return path


def _check_directory(directory: str, path: str) -> None:
    if not path.startswith("/") or os.path.realpath(directory) != directory:
        raise Refused(f"{path} must be an absolute path without symbolic links.")
    _check_way(directory, sticky=True)


def _check_way(path: str, sticky: bool = False) -> None:
    """Check all that decides what is at a path: it, the directories above it, and the same of each link on the way.

    With `sticky` those above may be everybody's where what is root's stays root's.
    """
    ways = [path]
    while ways:
        place = ways.pop()
        try:
            found = os.lstat(place)
            if stat.S_ISLNK(found.st_mode):
                ways.append(os.path.join(os.path.dirname(place), os.readlink(place)))
        except OSError as error:
            raise Refused(f"{place} cannot be looked at: {error.strerror}.") from None
        kept = stat.S_ISLNK(found.st_mode) or (sticky and place != path and found.st_mode & stat.S_ISVTX)
        if found.st_uid != 0 or (found.st_mode & 0o022 and not kept):
            raise Refused(f"{place} must be root's, and writable by nobody else.")
        if place != "/":
            ways.append(os.path.dirname(place))


# ---------------------------------------------------------------- request


@dataclass(frozen=True)
class Request:
    """One message, read. Limits are 0 where none is asked for."""

    op: int
    uid: int
    executor: str
    memory: int
    pids: int
    cpu_weight: int
    open_files: int


def read_request(packet: bytes, descriptors: int) -> Request:
    """Read one message of exactly the one form there is; `descriptors` came along."""
    if len(packet) != REQUEST.size:
        raise Refused(f"A request has {REQUEST.size} bytes.")
    values = REQUEST.unpack(packet)
    magic, op, uid, name, memory, pids, cpu_weight, open_files, flags = values
    if magic != MAGIC or op not in (PROBE, START, KILL, SWEEP) or flags or REQUEST.pack(*values) != packet:
        raise Refused("This is no request of this protocol.")
    if descriptors != (1 if op == START else 0):
        raise Refused("A start brings exactly one descriptor, for the output; nothing else brings any.")
    executor = name.rstrip(b"\0")
    if not (_EXECUTOR.fullmatch(executor) if op in (START, KILL) else executor == b""):
        raise Refused("The name of the executor is none.")
    request = Request(op, uid, executor.decode(), memory, pids, cpu_weight, open_files)
    for limit, most in _BOUNDS.items():
        if getattr(request, limit) > (most if op == START else 0):
            raise Refused(f"The limit of {limit} is out of range.")
    return request


def check_output(fd: int) -> None:
    """Check the descriptor of a start: it must only take what is added to it."""
    kind, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
    writable = flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
    if not writable or not (stat.S_ISFIFO(kind) or (stat.S_ISREG(kind) and flags & os.O_APPEND)):
        raise Refused("The output must be a file opened for appending, or a pipe.")


# ---------------------------------------------------------------- account


def named(name: str) -> pwd.struct_passwd | None:
    """Return the account of that name, if there is one."""
    try:
        return pwd.getpwnam(name)
    except (KeyError, ValueError):
        return None


def check_account(uid: int, config: Config) -> tuple[pwd.struct_passwd, list[int]]:
    """Return the account and its groups as they are now, when its agents may run here."""
    try:
        account = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        raise Refused(f"There is no account with the uid {uid}.") from None
    name = account.pw_name
    if uid == 0 or uid in (os.getuid(), os.geteuid()) or uid == config.served:
        raise Refused(f"Agents never run as {name}.")
    if not config.uid_min <= uid <= config.uid_max:
        raise Refused(f"{name} has the uid {uid}, which is not from {config.uid_min} to {config.uid_max}.")
    if name in config.deny or any((other := named(one)) and other.pw_uid == uid for one in config.deny):
        raise Refused(f"The launcher's configuration denies {name}.")
    groups = os.getgrouplist(name, account.pw_gid)
    if name not in config.users and not any(_gid(group) in groups for group in config.groups):
        raise Refused(f"{name} is neither among the users nor in one of the groups of the launcher's configuration.")
    if os.path.basename(account.pw_shell) in _NO_SHELLS and name not in config.dedicated:
        raise Refused(f"{name} has no login shell ({account.pw_shell}), and is not dedicated to Hutch.")
    _check_expiry(name)
    return account, groups


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
    """Refuse an account that the administrator has let expire; one without an entry never does."""
    look_up = ctypes.CDLL(None, use_errno=True).getspnam  # `spwd` is gone from Python 3.13 on
    look_up.restype = ctypes.POINTER(_Shadow)
    ctypes.set_errno(0)
    entry = look_up(os.fsencode(name))
    if not entry:
        if ctypes.get_errno() in (errno.EACCES, errno.EPERM):
            raise Refused(f"Whether {name} has expired cannot be told: the launcher may not read /etc/shadow.")
        return
    if 0 <= entry.contents.expire <= time.time() // 86_400:
        raise Refused(f"The account {name} has expired.")
