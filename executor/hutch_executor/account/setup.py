"""The account's own set-up for its agents: PATH as after a login, and a umask that fits a shared directory.

Both apply to the agent, its commands, and the notify command. The executor itself keeps the PATH that it was started
with, so that a program in the account's `~/.local/bin` is never taken for bubblewrap, and gives its own files explicit
modes.
"""

from __future__ import annotations

import logging
import os
import pwd
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import anyio
from anyio import to_thread

from hutch_executor.account.commands import run_command
from hutch_shared import messages as m

__all__ = ["Setup", "enterable", "login_path", "set_up", "umask_for"]

LOGIN_DEADLINE: Final = 5.0
"""Seconds for the login shell, including the account's own start-up files."""
_OUTPUT_LIMIT: Final = 64 << 10
_PATH_LIMIT: Final = 16 << 10
_NO_SHELLS: Final = frozenset({"", "nologin", "false", "true", "sync", "halt", "shutdown"})
_PRIVATE: Final = 0o022
_SHARED: Final = 0o002

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setup:
    """The PATH and umask of the agent's processes."""

    path: str | None = None
    """PATH; None for the executor's own."""
    umask: int = -1
    """The umask; -1 for the executor's own."""

    def environ(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment for the agent's processes."""
        return {**inherited} if self.path is None else {**inherited, "PATH": self.path}


async def set_up(wanted: m.AccountSetup, cwd: str, home: str) -> Setup:
    """Return the account's set-up for an agent in `cwd`. A PATH that cannot be determined is the executor's."""
    path = await login_path(home) if wanted.path == "login" else None
    return Setup(path, await to_thread.run_sync(umask_for, wanted.umask, cwd))


async def login_path(home: str, shell: str | None = None, *, deadline: float = LOGIN_DEADLINE) -> str | None:
    """Return PATH as the account's login shell sets it; None if there is no usable one.

    The shell runs as the account, in its home, with a clean environment, for at most `deadline` seconds. Its process
    group is killed when it ends; processes that left the group end with the executor. Only absolute directories are
    kept.
    """
    shell = _shell() if shell is None else shell
    if os.path.basename(shell) in _NO_SHELLS or not os.path.isabs(shell):
        _log.info("the account has no login shell: its agents get the executor's PATH")
        return None
    mark = secrets.token_hex(16)
    argv = (shell, "-l", "-c", f"printf %s {mark}; /usr/bin/printenv PATH; printf %s {mark}")
    env = {name: os.environ[name] for name in ("PATH", "USER", "LOGNAME", "LANG") if name in os.environ}
    env |= {"HOME": home, "SHELL": shell}
    output = bytearray()
    code: int | None = None
    try:
        with anyio.move_on_after(deadline):
            code = await run_command(
                argv, lambda chunk: output.extend(chunk[: _OUTPUT_LIMIT - len(output)]), env=env, cwd=enterable(home)
            )
    except (OSError, ValueError) as error:
        _log.info("the login shell %s cannot be started: %s", shell, error)
        return None
    parts = bytes(output).split(mark.encode())
    path = _checked(parts[1]) if len(parts) == 3 else None
    if path is None:
        how = f"did not end within {deadline:g} s" if code is None else f"ended with code {code}"
        _log.info("the login shell %s %s and printed no usable PATH", shell, how)
    return path


def umask_for(wanted: str, cwd: str) -> int:
    """Return the umask for `wanted`: `auto` (which looks at `cwd`), octal digits, or nothing (-1)."""
    if wanted != "auto":
        return int(wanted, 8) if wanted else -1
    try:
        mode = os.stat(cwd).st_mode
    except OSError:
        return _PRIVATE
    return _SHARED if mode & stat.S_ISGID and mode & stat.S_IWGRP else _PRIVATE


def _shell() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        return os.environ.get("SHELL", "")


def enterable(home: str) -> str:
    """Return the home if a program can run in it, otherwise `/`."""
    return home if os.access(home, os.X_OK) and os.path.isdir(home) else "/"


def _checked(path: bytes) -> str | None:
    """Return the absolute directories of a PATH, each once, in their order; None if there are none."""
    if len(path) > _PATH_LIMIT:
        return None
    try:
        text = path.decode().removesuffix("\n")
    except UnicodeDecodeError:
        return None
    if not text.isprintable():
        return None
    return ":".join(dict.fromkeys(part for part in text.split(":") if part.startswith("/"))) or None
