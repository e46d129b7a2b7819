"""What an agent has of its account's own set-up: PATH as at a login, and the umask of a tree that is shared.

Both are for the agent, what it runs and the notify command. The executor finds its own tools by the PATH that it was
started with: a program that an agent put into its account's `~/.local/bin` must not be taken for bubblewrap. And it
makes its own files with modes of its own.
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

__all__ = ["Setup", "login_path", "set_up", "umask_for"]

LOGIN_DEADLINE: Final = 5.0
"""Seconds for the login shell, the account's own files that it reads included."""
_SAID_LIMIT: Final = 64 << 10
_PATH_LIMIT: Final = 16 << 10
_NO_SHELLS: Final = frozenset({"", "nologin", "false", "true", "sync", "halt", "shutdown"})
_PRIVATE: Final = 0o022
_SHARED: Final = 0o002

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setup:
    """How what runs for the agent differs from the executor."""

    path: str | None = None
    """PATH; None: the executor's own."""
    umask: int = -1
    """-1: the executor's own."""

    def environ(self, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the executor's environment as the agent has it."""
        return {**given} if self.path is None else {**given, "PATH": self.path}


async def set_up(wanted: m.AccountSetup, cwd: str, home: str) -> Setup:
    """Find out what the account's set-up is, for an agent in `cwd`. Never fails: what cannot be had is left out."""
    path = await login_path(home) if wanted.path == "login" else None
    return Setup(path, await to_thread.run_sync(umask_for, wanted.umask, cwd))


async def login_path(home: str, shell: str | None = None, *, deadline: float = LOGIN_DEADLINE) -> str | None:
    """Return PATH as the account's login shell sets it; None where that is not to be had.

    The shell runs as the account, in its home, with a clean environment, for `deadline` seconds; its process group
    ends with it, and what it left behind ends with the executor. Of PATH only absolute directories are taken.
    """
    shell = _shell() if shell is None else shell
    if os.path.basename(shell) in _NO_SHELLS or not os.path.isabs(shell):
        _log.info("the account has no login shell: its PATH is the executor's")
        return None
    mark = secrets.token_hex(16)
    argv = (shell, "-l", "-c", f"printf %s {mark}; /usr/bin/printenv PATH; printf %s {mark}")
    env = {name: os.environ[name] for name in ("PATH", "USER", "LOGNAME", "LANG") if name in os.environ}
    env |= {"HOME": home, "SHELL": shell}
    said = bytearray()
    code: int | None = None
    try:
        with anyio.move_on_after(deadline):
            code = await run_command(
                argv, lambda chunk: said.extend(chunk[: _SAID_LIMIT - len(said)]), env=env, cwd=_enterable(home)
            )
    except (OSError, ValueError) as error:
        _log.info("the login shell %s cannot be started: %s", shell, error)
        return None
    parts = bytes(said).split(mark.encode())
    path = _checked(parts[1]) if len(parts) == 3 else None
    if path is None:
        how = f"did not end within {deadline:g} s" if code is None else f"ended with code {code}"
        _log.info("the login shell %s %s and told no PATH that can be used", shell, how)
    return path


def umask_for(wanted: str, cwd: str) -> int:
    """Return the umask for `auto`, octal digits, or nothing (-1). Looks at `cwd`."""
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


def _enterable(home: str) -> str:
    return home if os.access(home, os.X_OK) and os.path.isdir(home) else "/"


def _checked(said: bytes) -> str | None:
    """Return the absolute directories of a PATH, each once, in their order; None when there are none."""
    if len(said) > _PATH_LIMIT:
        return None
    try:
        text = said.decode().removesuffix("\n")
    except UnicodeDecodeError:
        return None
    if not text.isprintable():
        return None
    return ":".join(dict.fromkeys(part for part in text.split(":") if part.startswith("/"))) or None
