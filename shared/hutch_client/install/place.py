"""The place of a service: its folder, files, programs and account, for the present user and installation."""

from __future__ import annotations

import grp
import os
import pwd
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hutch_client.install.units import (
    CREDENTIAL,
    DAEMON,
    LABEL,
    PLIST,
    config_templates,
    credential_of,
    render_launchd,
    render_systemd,
    seal_of,
)
from hutch_shared.host_mark import BOOTED, LAUNCHD_UNITS, MARK, SYSTEMD_UNITS, service_account
from hutch_shared.paths import HOST_ACCOUNT, HOST_STATE, LAUNCHER_CONFIG

__all__ = ["UnitPlace", "find_place", "installed_credential"]


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """One service of Hutch: the folder and the texts of its files, and the manager that reads them."""

    folder: Path
    texts: dict[str, str]
    """The text of each file by its path below `folder`: units, and drop-ins such as `hutchd.service.d/x.conf`."""
    program: str
    """The program that the service starts."""
    system: bool
    manager: Literal["systemd", "launchd"]
    here: bool
    """Whether the manager runs on this host."""
    templates: dict[Path, str] = field(default_factory=dict)
    """Configuration that is written only where there is none."""
    owned: tuple[tuple[Path, str], ...] = ()
    """Directories that hutchd's account must own, with their modes. systemd creates them only in their usual places."""
    interpreter: Path | None = None
    """The copy of the interpreter that accounts may execute but not read."""
    credential: Path | None = None
    """The sealed master key."""
    code: tuple[Path, ...] = ()
    """The code of the programs. Root runs it, so only root may change it; hutchd's account must be able to read it."""
    account: str = HOST_ACCOUNT
    """The account of a host's hutchd."""
    mark: Path | None = None
    """The mark that a host's hutchd leaves."""

    @property
    def units(self) -> list[str]:
        """The names of the units, without drop-ins."""
        return [name for name in self.texts if "/" not in name]

    @property
    def systemctl(self) -> tuple[str, ...]:
        """The beginning of each command to systemd."""
        return ("systemctl",) if self.system else ("systemctl", "--user")

    @property
    def domain(self) -> str:
        """launchd's domain of the service."""
        return "system" if self.system else f"gui/{os.getuid()}"

    @property
    def reload_command(self) -> tuple[str, ...]:
        """The command that makes systemd read the files again."""
        return (*self.systemctl, "daemon-reload")

    @property
    def start_commands(self) -> list[tuple[str, ...]]:
        """The commands that make the manager read the files and start hutchd, now and at each boot or log-in."""
        if self.manager == "launchd":
            return [("launchctl", "bootstrap", self.domain, str(self.folder / PLIST))]
        return [self.reload_command, (*self.systemctl, "enable", "--now", *self.units)]

    @property
    def stop_command(self) -> tuple[str, ...]:
        """The command that reverses `start_commands`."""
        if self.manager == "launchd":
            return ("launchctl", "bootout", f"{self.domain}/{LABEL}")
        return (*self.systemctl, "disable", "--now", *self.units)


def find_place(*, system: bool, systemd_version: Callable[[], int], credential: str | None = None) -> UnitPlace:
    """Return the place for this user and this Hutch. HutchError INVALID_PARAMS for a path that no unit can hold.

    Without `credential`, a host's unit loads the master key from the same file as the installed unit.
    """
    argv = _argv("hutchd", "hutch_daemon")
    if sys.platform == "darwin":
        folder = LAUNCHD_UNITS if system else Path.home() / "Library/LaunchAgents"
        texts = render_launchd(argv, os.environ, system=system)
        return UnitPlace(folder, texts, argv[0], system, "launchd", here=True)
    if not system:
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        texts = render_systemd(argv, os.environ, system=False)
        return UnitPlace(Path(config, "systemd/user"), texts, argv[0], False, "systemd", here=BOOTED.is_dir())
    folder = SYSTEMD_UNITS
    sealed = credential or installed_credential(folder)
    state = Path(os.environ.get("HUTCH_STATE_DIR") or HOST_STATE)
    account = service_account(state=state) or _served_account() or HOST_ACCOUNT
    texts = render_systemd(
        argv,
        os.environ,
        system=True,
        launcher=_argv("hutch-launcher", "hutch_launcher"),
        credential=sealed,
        version=systemd_version(),
        account=account,
        group=_group_of(account),
    )
    return UnitPlace(
        folder,
        texts,
        argv[0],
        True,
        "systemd",
        here=BOOTED.is_dir(),
        templates={
            Path(path): text
            for path, text in config_templates(account).items()
            if path == LAUNCHER_CONFIG or not os.environ.get("HUTCH_CONFIG")
        },
        owned=tuple(
            (Path(os.environ[name]), mode)
            for name, mode in (("HUTCH_STATE_DIR", "0700"), ("HUTCH_RUNTIME_DIR", "0755"))
            if os.environ.get(name)
        ),
        interpreter=Path(argv[0]).with_name("hutch-python"),
        credential=Path(sealed) if sealed else None,
        code=tuple(
            Path(os.path.realpath(path))
            for path in (sys.executable, __file__, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
        ),
        account=account,
        mark=state / MARK,
    )


def installed_credential(folder: Path) -> str | None:
    """Return the file from which the installed hutchd loads the master key.

    A drop-in names the file; in units of earlier versions the unit itself does.
    """
    for name in (CREDENTIAL, DAEMON):
        try:
            text = (folder / name).read_text()
        except (OSError, ValueError):
            continue
        found = credential_of(text)
        if found is not None and (name == CREDENTIAL or seal_of(text) != "none"):
            return found
    return None


def _served_account() -> str | None:
    """Return the account that the launcher's configuration names as hutchd's."""
    try:
        served = tomllib.loads(Path(LAUNCHER_CONFIG).read_text(encoding="utf-8")).get("serve")
    except (OSError, ValueError):
        return None
    return served if isinstance(served, str) and served else None


def _group_of(account: str) -> str:
    """Return the primary group of an account; of one that does not exist yet, the group that `useradd` makes for it."""
    try:
        return grp.getgrgid(pwd.getpwnam(account).pw_gid).gr_name
    except KeyError:
        return account


def _argv(name: str, module: str) -> list[str]:
    """Return the command that runs another program of this installation."""
    program = Path(os.path.realpath(sys.prefix), "bin", name)
    return [str(program)] if program.exists() else [sys.executable, "-P", "-m", module]
