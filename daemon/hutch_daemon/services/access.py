"""The caller of a method, and the records that it may see. For a caller, another user's records do not exist.

The kernel reports a caller's uid and pid; the settings name the administrators. A caller whose process belongs to an
executor is an insider: this distinguishes agents from users.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from posixpath import isabs

import structlog

from hutch_daemon.environments.accounts import groups_of
from hutch_daemon.environments.cgroups import PREFIX
from hutch_daemon.environments.port import MARK
from hutch_daemon.permissions.paths import can_be_path
from hutch_daemon.pool.executors import Executor
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import sessions, turns
from hutch_daemon.store.events import EVERY
from hutch_daemon.store.rows import SessionRow, TurnRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.processes import ancestors, cgroup_parts, variable_of
from hutch_shared.times import from_wire

__all__ = ["Access", "Administrators", "Caller", "InsiderLookup", "insider_of", "parse_time", "require_absolute"]

_log = structlog.get_logger("hutchd")


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer of a client connection. Everything but `client` comes from the kernel or the settings."""

    uid: int
    gid: int
    pid: int
    client: str = ""
    """The name that the client gives itself; only for the audit."""
    admin: bool = False
    """True for root and for administrators named in the settings. They may see and control everything."""
    insider: str | None = None
    """The executor to which the calling process belongs, or None. An insider changes nothing and is never `admin`."""

    @property
    def scope(self) -> int | None:
        """The uid whose records the caller may see; None means all users'."""
        return None if self.admin else self.uid

    def may_see(self, owner: int) -> bool:
        """Return whether the caller may see and control records of `owner`."""
        return self.admin or owner == self.uid

    def __str__(self) -> str:
        return f"uid {self.uid} ({self.client or 'a client'}, pid {self.pid})"


class Administrators:
    """The users who see and control every session: root, and those that the settings name."""

    def __init__(self, settings: SettingsInForce) -> None:
        """Call `look_up` after each change of the settings."""
        self._settings = settings
        self._uids = frozenset[int]()

    def look_up(self) -> None:
        """Look up the uids of the users in the settings. Names that do not exist are logged."""
        admins, found = self._settings.current.admins, set()
        for name in admins.users:
            try:
                found.add(pwd.getpwnam(name).pw_uid)
            except KeyError:
                _log.warning("no such account", admin=name)
        for name in _unknown_groups(admins.groups):
            _log.warning("no such group", admins=name)
        self._uids = frozenset(found)

    def is_admin(self, uid: int) -> bool:
        """Return whether a uid is root or an administrator."""
        if uid == 0 or uid in self._uids:
            return True
        groups = self._settings.current.admins.groups
        return bool(groups) and not groups_of(uid).isdisjoint(groups)


class InsiderLookup:
    """Finds the executor that a process belongs to."""

    def __init__(self, executors: Mapping[str, Executor]) -> None:
        """`executors` holds the executors that may have processes, by id, at each look-up."""
        self._executors = executors

    def insider_of(self, pid: int) -> str | None:
        """Return the executor that `pid` belongs to, or None; see the function `insider_of`."""
        launched = [(one.launched, one.id) for one in self._executors.values()]
        return insider_of(pid, {process.pid: executor for process, executor in launched if process is not None})


class Access:
    """Finds the records that a caller names, if the caller may see them. Knows whether hutchd accepts new work."""

    def __init__(self, store: Store) -> None:
        """Look up records in `store`."""
        self._store = store
        self.draining = False
        """True if hutchd accepts no new work. `start_draining` sets it."""

    def start_draining(self) -> None:
        """Accept no new work from now on."""
        self.draining = True

    def require_serving(self) -> None:
        """Raise `shutting_down` if hutchd accepts no new work."""
        if self.draining:
            raise HutchError(Reason.SHUTTING_DOWN)

    async def session(self, caller: Caller, ref: str) -> SessionRow:
        """Return the session with this id, prefix or name. `not_found`; `invalid_params` if several match."""
        return await self._store.read(lambda conn: sessions.find(conn, caller.scope, ref, first=caller.uid))

    async def session_by_id(self, caller: Caller, session: str) -> SessionRow:
        """Return a session by its whole id; `not_found` if it does not exist or belongs to another user."""
        row = await self._store.read(lambda conn: sessions.get(conn, session))
        if row is None or not caller.may_see(row.owner):
            raise HutchError(Reason.NOT_FOUND)
        return row

    async def followed_session(self, caller: Caller, params: m.FollowEvents | m.ReadEvents) -> str:
        """Return the id of the session to follow or read, or `"*"` for all.

        `journal_replaced` if the cursor belongs to another journal.
        """
        if params.journal is not None and params.journal != self._store.journal:
            raise HutchError(Reason.JOURNAL_REPLACED, journal=self._store.journal)
        return params.session if params.session == EVERY else (await self.session(caller, params.session)).id

    async def turn(self, caller: Caller, ref: str) -> tuple[SessionRow, TurnRow]:
        """Return a turn with its session; `not_found` if it does not exist or belongs to another user."""
        turn = await self._store.read(lambda conn: turns.get(conn, ref))
        if turn is None:
            raise HutchError(Reason.NOT_FOUND)
        return await self.session_by_id(caller, turn.session), turn


def insider_of(
    pid: int,
    executors: Mapping[int, str],
    *,
    line: Callable[[int], list[int]] = ancestors,
    mark: Callable[[int, str], str | None] = variable_of,
    group: Callable[[int], tuple[str, ...]] = cgroup_parts,
) -> str | None:
    """Return the executor that `pid` belongs to, or None.

    `executors` maps the pids of live executors to their ids; without any there is nothing to look up. The look-up uses,
    in this order: the cgroup, which is the hardest to leave; the ancestors; the mark in the environment of the process
    or of an ancestor.

    `not_allowed` if the ancestors of `pid` cannot be found, for example because it has ended: it may have passed its
    connection to another process in order to hide it. The caller checks afterwards that `pid` still lives.
    """
    if not executors:
        return None
    known = {f"{PREFIX}{executor}": executor for executor in executors.values()}
    for part in group(pid):
        if part in known:
            return known[part]
    descent = line(pid)
    if not descent and line(os.getpid()):  # if hutchd's own are not found either, this system has no look-up
        raise HutchError(Reason.NOT_ALLOWED, "The ancestors of the process that made this connection cannot be found.")
    for one in descent:
        if one in executors:
            return executors[one]
    marks = (mark(one, MARK) for one in descent)
    return next((executor for executor in marks if executor in known.values()), None)


def _unknown_groups(names: Sequence[str]) -> list[str]:
    known = {group.gr_name for group in grp.getgrall()} if names else set()
    return [name for name in names if name not in known]


def require_absolute(path: str, what: str) -> None:
    """Raise `invalid_params` if a path is relative, or cannot be the path of a file."""
    if not (isabs(path) and can_be_path(path)):
        raise HutchError(Reason.INVALID_PARAMS, f"The {what} must be an absolute path of at most 4,096 characters.")


def parse_time(text: str | None) -> int | None:
    """Convert a time of the wire to milliseconds since 1970; `invalid_params` if it cannot be read."""
    if text is None:
        return None
    try:
        return from_wire(text)
    except ValueError as error:
        raise HutchError(Reason.INVALID_PARAMS, f"The time cannot be read: {error}.") from error
