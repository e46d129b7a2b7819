"""Reads the settings file at start and at SIGHUP. If the file cannot be used, the settings stay unchanged."""

from __future__ import annotations

import anyio
import structlog

from hutch_daemon.service import Service
from hutch_daemon.services.access import Administrators
from hutch_daemon.settings import Settings, SettingsError, SettingsInForce, load
from hutch_shared.logs import set_up_logs
from hutch_shared.paths import Paths

__all__ = ["SettingsFile"]

_log = structlog.get_logger("hutchd")


class SettingsFile:
    """Puts the file's settings into force, and keeps the problem with the last file that was read."""

    def __init__(self, paths: Paths, settings: Settings, service: Service) -> None:
        """Start with `settings`. `service` is notified of each reload."""
        self.paths = paths
        self.in_force = SettingsInForce(settings, system=paths.system)
        self.administrators = Administrators(self.in_force)
        self.administrators.look_up()
        self.changed = anyio.Event()
        """Set when the settings change, and then replaced by a new event."""
        self._service = service
        self._trouble = ""

    def reload(self) -> None:
        """Read the file again. If it cannot be used, nothing changes and the notices contain the reason."""
        self._service.reloading()
        self._reload()
        self._service.say("READY=1", self._service.status(self._trouble or f"Serves at {self.paths.client_socket}"))

    def _reload(self) -> None:
        try:
            settings = load(self.paths.config)
        except SettingsError as error:
            self._trouble = f"The new settings are not in force: {error}"
            _log.error("settings refused", error=str(error))
            return
        self._trouble = ""
        self.in_force.replace(settings)
        self.administrators.look_up()
        set_up_logs(settings.logs.level)
        self.changed.set()
        self.changed = anyio.Event()
        _log.info("settings read", path=str(self.paths.config))

    def notices(self) -> tuple[str, ...]:
        """Return the problem with the settings file, if there is one."""
        return (self._trouble,) if self._trouble else ()
