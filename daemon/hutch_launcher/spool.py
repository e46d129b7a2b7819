"""The spool directory: a directory for each account, and a record of each executor that outlives the launcher."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from hutch_launcher.packets import Refused
from hutch_launcher.rules import ConfigFile, LaunchAccount

__all__ = ["ExecutorRecords", "make_account_directory"]


def make_account_directory(spool: str, account: LaunchAccount) -> None:
    """Make the account's directory. Refused if another file has its path."""
    for directory in reversed([Path(spool), *Path(spool).parents]):
        if not directory.exists():
            directory.mkdir()
            directory.chmod(0o711)
    found = os.lstat(spool)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise Refused(f"The spool {spool} must be a directory that root owns and only root can write.")
    path = os.path.join(spool, str(account.uid))
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        os.chown(path, account.uid, account.gid)
        found = os.lstat(path)
    if found.st_uid == account.uid and stat.S_IMODE(found.st_mode) != 0o700:  # the account has changed its mode
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.fchmod(fd, 0o700)
            os.close(fd)
        found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != account.uid or found.st_mode & 0o077:
        raise Refused(f"{path} must be a directory that {account.name} owns, with mode 0700. Remove it.")


class ExecutorRecords:
    """A file for each executor that was started and not ended: `pid start uid`, or empty before the fork."""

    def __init__(self, config: ConfigFile) -> None:
        """Keep the records in the spool of the current configuration."""
        self._config = config

    def _path(self, executor: str = "") -> Path:
        return Path(self._config.current.spool, ".executors", executor)

    def create(self, executor: str) -> None:
        """Create an empty record. FileExistsError if there is one."""
        self._path().mkdir(mode=0o700, exist_ok=True)
        self._path(executor).touch(exist_ok=False)

    def write(self, executor: str, pid: int, start: int, uid: int) -> None:
        """Write the executor's process."""
        self._path(executor).write_text(f"{pid} {start} {uid}")

    def read(self, executor: str) -> tuple[int, int, int] | None:
        """Return (pid, start, uid), or None if there is no record."""
        with suppress(OSError, ValueError):
            pid, start, uid = map(int, self._path(executor).read_text().split())
            return pid, start, uid
        return None

    def remove(self, executor: str) -> None:
        """Remove the record, if there is one."""
        with suppress(OSError):
            self._path(executor).unlink()

    def executors(self) -> set[str]:
        """Return the executors that have a record."""
        with suppress(OSError):
            return set(os.listdir(self._path()))
        return set()
