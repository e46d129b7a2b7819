"""The settings in force: read at the start and at SIGHUP. A file that cannot be used changes nothing."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Sequence
from typing import Final

import anyio
import structlog

from hutch_daemon.environments.accounts import groups_of
from hutch_daemon.service import Service
from hutch_daemon.settings import Settings, SettingsError, SocketSettings, load
from hutch_shared.logs import set_up_logs
from hutch_shared.paths import Paths

__all__ = ["SettingsInForce"]

_log: Final = structlog.get_logger("hutchd")


class SettingsInForce:
    """The settings that count now, and what was wrong with the last file that was read."""

    def __init__(self, paths: Paths, settings: Settings, service: Service) -> None:
        """Start with `settings`; `service` learns of a reload."""
        self.paths = paths
        self.settings = settings
        self.changed = anyio.Event()
        """Set when other settings come into force, which bring a new event."""
        self._service = service
        self._trouble = ""
        self._admins = _uids(settings)

    def __call__(self) -> Settings:
        """Return the settings in force."""
        return self.settings

    def sockets(self) -> SocketSettings:
        """Return the part of the settings that sockets use."""
        return self.settings.sockets

    def reload(self) -> None:
        """Read the file again; if it cannot be used, the notices say so and nothing changes."""
        self._service.reloading()
        self._reload()
        self._service.say("READY=1", self._service.status(self._trouble or f"Serves at {self.paths.client_socket}"))

    def _reload(self) -> None:
        try:
            self.settings = load(self.paths.config)
        except SettingsError as error:
            self._trouble = f"The settings were not taken over: {error}"
            _log.error("settings refused", error=str(error))
            return
        self._trouble = ""
        self._admins = _uids(self.settings)
        set_up_logs(self.settings.logs.level)
        self.changed.set()
        self.changed = anyio.Event()
        _log.info("settings read", path=str(self.paths.config))

    def is_admin(self, uid: int) -> bool:
        """Tell whether a uid is root or an administrator."""
        if uid == 0 or uid in self._admins:
            return True
        groups = self.settings.admins.groups
        return bool(groups) and not groups_of(uid).isdisjoint(groups)

    def notices(self) -> tuple[str, ...]:
        """Return what is wrong with the settings."""
        return (self._trouble,) if self._trouble else ()


def _uids(settings: Settings) -> frozenset[int]:
    """Return the uids of the administrators that are named as users; an unknown name is logged."""
    found = set()
    for name in settings.admins.users:
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            _log.warning("no such account", admin=name)
    for name in _unknown_groups(settings.admins.groups):
        _log.warning("no such group", admins=name)
    return frozenset(found)


def _unknown_groups(names: Sequence[str]) -> list[str]:
    known = {group.gr_name for group in grp.getgrall()} if names else set()
    return [name for name in names if name not in known]
