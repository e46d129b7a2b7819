"""What an executor is made of, and what a new one would be made of now. Only an executor that matches is handed out.

An executor keeps the limits, groups and files of its start, while the settings, its account and Hutch's files change.
`MadeOf` records them with the executor. Nothing here is cached for longer than a moment, so a change is seen before the
next session gets an executor.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from hutch_daemon.environments.port import Account
from hutch_daemon.environments.registry import Environments
from hutch_daemon.pool.view import ExecutorKey
from hutch_daemon.settings import SettingsInForce
from hutch_shared import __version__
from hutch_shared import messages as m
from hutch_shared.errors import HutchError

__all__ = ["Composition", "ExecutorFiles", "MadeOf", "read_made_of"]

_PACKAGES: Final = ("hutch_executor", "hutch_shared")
_KEPT: Final = 1.0
"""Seconds for which a look at the accounts and files is used while no session waits for an executor."""


class MadeOf(msgspec.Struct, frozen=True):
    """What an executor is made of. Two that are equal in all but `applied` serve a session equally."""

    account: Account
    """Its account, without the groups."""
    gids: tuple[int, ...]
    """The group ids, sorted: of a started executor as the kernel reports them, otherwise as the account has them."""
    limits: m.ResourceLimits
    """The limits that the settings ask for."""
    settings: str
    """A digest of the other settings that an executor gets at its start."""
    files: str
    """The version of Hutch and a digest of the executor's files."""
    applied: m.ResourceLimits | None = None
    """The limits that the kernel reports; None before the executor has connected."""

    def matches(self, other: MadeOf | None) -> bool:
        """Return whether an executor made of this can stand for one made of `other`."""
        return other is not None and self == msgspec.structs.replace(other, applied=self.applied)

    def on_wire(self) -> m.LimitsApplied | None:
        """Return the limits as clients see them; None if the kernel was not asked."""
        return None if self.applied is None else m.LimitsApplied(self.applied, self.limits)


def read_made_of(stored: dict[str, Any] | None) -> MadeOf | None:
    """Return what a row says; None for a row of an earlier version, or one that cannot be read."""
    try:
        return None if stored is None else msgspec.convert(stored, MadeOf)
    except msgspec.ValidationError:
        return None


class Composition:
    """Tells what a new executor would be made of now."""

    def __init__(
        self,
        account_of: Callable[[int], Account],
        account_named: Callable[[str], Account],
        environments: Environments,
        settings: SettingsInForce,
        files: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        """`account_of` and `account_named` raise HutchError for an account that does not exist.

        `files` returns the version of the files.
        """
        self._account_of = account_of
        self._account_named = account_named
        self._environments = environments
        self._settings = settings
        self._files = files
        self._clock = clock
        self._until = -math.inf
        self._accounts: dict[tuple[int, str], Account | None] = {}
        self._version = ""

    def refresh(self) -> None:
        """Look again at accounts and files. Blocks for the look-up of an account."""
        self._until = -math.inf

    def account(self, key: ExecutorKey) -> Account | None:
        """Return a key's account as it is now; None if no account has its uid and name any more."""
        if self._clock() >= self._until:
            self._accounts.clear()
            self._version = self._files()
            self._until = self._clock() + _KEPT
        who = key.uid, key.name
        if who not in self._accounts:
            looks = (
                partial(self._account_of, key.uid),
                partial(self._account_named, key.name),
            )  # names may share a uid
            found = filter(None, map(_found, looks))
            self._accounts[who] = next((one for one in found if (one.uid, one.name) == who), None)
        return self._accounts[who]

    def of(self, key: ExecutorKey) -> MadeOf | None:
        """Return what a new executor of this key would be made of; None if its account or environment is gone."""
        account, environment = self.account(key), self._environments.get(key.environment)
        if account is None or environment is None:
            return None
        executors, limits = self._settings.current.executors, self._settings.limits
        rest = (executors.memory, executors.heartbeat_timeout)
        return MadeOf(
            account=replace(account, groups=()),
            gids=environment.gids_for(account),
            limits=m.ResourceLimits(
                limits.memory or executors.memory, limits.pids, limits.cpu_weight, limits.open_files
            ),
            settings=hashlib.sha256(repr(rest).encode()).hexdigest()[:16],
            files=self._version,
        )


def _found(look_up: Callable[[], Account]) -> Account | None:
    try:
        return look_up()
    except HutchError:
        return None


class ExecutorFiles:
    """The version of Hutch, with a digest of the files that an executor imports."""

    def __init__(self) -> None:
        """Find the files; read nothing yet."""
        found = [importlib.util.find_spec(name) for name in _PACKAGES]
        self._roots = [os.path.dirname(spec.origin) for spec in found if spec is not None and spec.origin is not None]
        self._stamp: tuple[tuple[str, int, int], ...] | None = None
        self._digest = ""

    def __call__(self) -> str:
        """Return the version. The files are read again only if one of them has another size or time. Blocks."""
        with suppress(OSError):  # they are being replaced: the next look finds the new ones
            stamp = tuple(sorted(found for root in self._roots for found in _python_files(root)))
            if stamp != self._stamp:
                digest = hashlib.sha256()
                for name, size, _ in stamp:
                    digest.update(f"{name}\0{size}\0".encode())
                    digest.update(Path(name).read_bytes())
                self._stamp, self._digest = stamp, digest.hexdigest()[:16]
        return f"{__version__} {self._digest}"


def _python_files(folder: str) -> Iterator[tuple[str, int, int]]:
    """Yield path, size and time of the files below a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _python_files(entry.path)
            elif entry.name.endswith(".py"):
                found = entry.stat()
                yield entry.path, found.st_size, found.st_mtime_ns
