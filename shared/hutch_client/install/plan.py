"""Plans the installation and the removal of the service: checks, steps and sentences, as data.

Pure: a plan follows from the place and the files installed there. `execute` carries it out; `--dry-run` prints it.

What is always true: a unit or drop-in that a user edited is not overwritten or removed without `--force`; an edited
unit of Hutch is replaced only after its edits have gone into a drop-in. A user's own drop-ins are never touched.
Configuration is written only where there is none and is never changed or removed; accounts are never created.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from hutch_client.install.edits import edits_of
from hutch_client.install.place import UnitPlace
from hutch_client.install.units import CREDENTIAL, DAEMON, EDITED, LAUNCHER, SOCKETS, credential_of, seal_of
from hutch_shared.errors import HutchError, Reason
from hutch_shared.host_mark import BOOTED
from hutch_shared.paths import LAUNCHER_CONFIG, LAUNCHER_SOCKET_UNIT

__all__ = [
    "MAKE_CREDENTIAL",
    "AccountCanUse",
    "AccountExists",
    "AccountOwns",
    "Check",
    "CopyFile",
    "FileExists",
    "FileState",
    "Installed",
    "InstalledFile",
    "KeepFile",
    "NoOtherDaemon",
    "OnlyRootChanges",
    "Plan",
    "RemoveFile",
    "RunCommand",
    "RunsAsRoot",
    "Step",
    "WriteFile",
    "file_state",
    "plan_install",
    "plan_uninstall",
]

FileState = Literal["absent", "current", "older", "changed"]
"""`absent`: missing. `current`: as Hutch would write it now. `older`: as Hutch wrote it for another place or version.
`changed`: edited by a user."""


class InstalledFile(NamedTuple):
    """A file of the service as it is on the disk."""

    state: FileState
    text: str | None = None
    """None if there is no file, or it is not a text in a regular file."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The state of a place before the plan."""

    files: Mapping[Path, InstalledFile]
    """Each file of the place."""
    existing: frozenset[Path] = frozenset()
    """The other paths that the plan asks about and that exist: configuration, state, users' drop-ins."""
    up: bool = False
    """Whether the service runs or its sockets listen."""
    enabled: bool = False


# ---------------------------------------------------------------- checks, which must hold before the first step


@dataclass(frozen=True, slots=True)
class RunsAsRoot:
    """The caller is root."""

    def __str__(self) -> str:
        return "root runs this command"


@dataclass(frozen=True, slots=True)
class OnlyRootChanges:
    """Only root can change `path`, a folder or a file with code of `program`, which root runs."""

    path: Path
    program: str

    def __str__(self) -> str:
        return f"only root can change {self.path}"


@dataclass(frozen=True, slots=True)
class AccountExists:
    """The account exists and is not root."""

    account: str

    def __str__(self) -> str:
        return f"the account {self.account} exists and is not root"


@dataclass(frozen=True, slots=True)
class AccountCanUse:
    """The account can execute a program, read a file, or pass through a folder."""

    account: str
    path: Path

    def __str__(self) -> str:
        return f"the account {self.account} can use {self.path}"


@dataclass(frozen=True, slots=True)
class AccountOwns:
    """The folder exists and belongs to the account; `mode` is for the command that creates it."""

    account: str
    folder: Path
    mode: str

    def __str__(self) -> str:
        return f"{self.folder} is a directory of the account {self.account}"


@dataclass(frozen=True, slots=True)
class FileExists:
    """The file exists; `advice` tells how to make it."""

    path: Path
    advice: str

    def __str__(self) -> str:
        return f"{self.path} exists"


@dataclass(frozen=True, slots=True)
class NoOtherDaemon:
    """No hutchd runs except the service's."""

    system: bool

    def __str__(self) -> str:
        return "no hutchd runs outside the service"


Check = RunsAsRoot | OnlyRootChanges | AccountExists | AccountCanUse | AccountOwns | FileExists | NoOtherDaemon

# ---------------------------------------------------------------- steps


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write a file; the target is whole or unchanged."""

    path: Path
    content: str
    outcome: str = "written"
    mode: int = 0o644

    def __str__(self) -> str:
        return f"{self.path}: {self.outcome}"


@dataclass(frozen=True, slots=True)
class KeepFile:
    """Leave a file as it is."""

    path: Path
    outcome: str = "unchanged"

    def __str__(self) -> str:
        return f"{self.path}: {self.outcome}"


@dataclass(frozen=True, slots=True)
class CopyFile:
    """Copy a file; the target is whole or unchanged."""

    source: Path
    path: Path
    mode: int
    outcome: str

    def __str__(self) -> str:
        return f"{self.path}: {self.outcome}"


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Remove a file if it exists, and a drop-in's folder if it is empty then."""

    path: Path

    def __str__(self) -> str:
        return f"{self.path}: removed"


@dataclass(frozen=True, slots=True)
class RunCommand:
    """Run a command of the service manager."""

    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"run: {shlex.join(self.argv)}"


Step = WriteFile | KeepFile | CopyFile | RemoveFile | RunCommand


@dataclass(frozen=True, slots=True)
class Plan:
    """Checks, then steps, then sentences for the user. Nothing is done if there is a problem or a check fails."""

    checks: tuple[Check, ...] = ()
    steps: tuple[Step, ...] = ()
    sentences: tuple[str, ...] = ()
    problems: tuple[HutchError, ...] = ()
    """Reasons, known before any check, to refuse the plan."""


MAKE_CREDENTIAL: Final = (
    "To seal the master key that hutchd has: systemd-creds encrypt --name=hutch-master-key /var/lib/hutch/master.key"
    " FILE; to begin with a new one: head -c 32 /dev/urandom | base64 | systemd-creds encrypt --name=hutch-master-key"
    " - FILE. FILE can be opened on this machine only: keep a copy of the key itself in a safe place, since without it"
    " your stored keys are lost."
)
_PURPOSE: Final = {
    DAEMON: "hutchd and its broker, as the account {account}, hardened",
    SOCKETS["client"]: "the socket for everybody's hutch",
    SOCKETS["executor"]: "the socket for executors",
    LAUNCHER: "the only privileged part: starts agents as the accounts that its configuration names",
    LAUNCHER_SOCKET_UNIT: "the launcher's socket, for hutchd alone",
    CREDENTIAL: "loads the sealed master key",
    "launcher.toml": "the accounts whose agents may run; empty so far",
    "hutch.toml": "the settings of hutchd",
}
_STATE_FOLDERS: Final = (Path("/var/lib/hutch"), Path("/var/lib/hutch-launcher"))


def file_state(found: str | None, text: str) -> FileState:
    """Compare a file of the service with the text that would be written now. `found` is None if it is not a text."""
    if found == text:
        return "current"
    return "older" if found is not None and seal_of(found) == "whole" else "changed"


def plan_install(
    place: UnitPlace, installed: Installed, *, interpreter: Path, user: str, force: bool = False, now: bool = False
) -> Plan:
    """Plan the installation; with `now` also the start. `interpreter` is the running Python, `user` the caller's name.

    Problems: WRONG_STATE where no manager would read the files, or on a macOS host; CONFLICT for edited files that
    cannot be taken over.
    """
    problems = [*_wrong_manager(place)]
    steps: list[Step] = []
    sentences: list[str] = []
    for path, found in installed.files.items():
        name = str(path.relative_to(place.folder))
        if found.state == "changed" and not force:
            taken = _take_over(place, name, found, installed.existing)
            if taken is None:
                problems.append(_conflict(path, "nothing was written"))
                continue
            steps += taken.steps
            sentences += taken.sentences
        elif found.state == "current":
            steps.append(KeepFile(path, f"unchanged{_purpose(place, name)}"))
        else:
            steps.append(WriteFile(path, place.texts[name], f"written{_purpose(place, name)}"))
    for path, text in place.templates.items():
        if path in installed.existing:
            steps.append(KeepFile(path, "yours, unchanged"))
        else:
            steps.append(WriteFile(path, text, f"written, for you to fill in{_purpose(place, path.name)}"))
    if place.interpreter is not None:
        outcome = "a copy of the interpreter for executors: accounts may run it and not read it"
        steps.append(CopyFile(interpreter, place.interpreter, 0o711, outcome))
    if now:
        steps += [RunCommand(command) for command in place.start_commands]
        sentences.append("hutchd is started, now and at each boot." if place.system else "hutchd is started.")
    else:
        sentences.append(f"To start it: {' && '.join(shlex.join(command) for command in place.start_commands)}")
    if place.manager == "systemd" and not place.system:
        sentences.append(f"It runs while you are logged in. To let it run always: loginctl enable-linger {user}")
    if place.system:
        sentences += [
            f"{LAUNCHER_CONFIG} lists the accounts whose agents may run: add some. A change takes effect at once.",
            "`hutch doctor`, as root, reports what is missing.",
        ]
    checks = [*_checks(place, account=True), *([NoOtherDaemon(place.system)] if now and not installed.up else [])]
    return Plan(tuple(checks), tuple(steps), tuple(sentences), tuple(problems))


def plan_uninstall(place: UnitPlace, installed: Installed, *, force: bool = False, now: bool = False) -> Plan:
    """Plan the removal of the files that Hutch wrote; with `now` the service is stopped first.

    It removes the mark of the host's hutchd too: from then on the host has none of its own.

    Problems: WRONG_STATE if the service is in use and `now` is not given; CONFLICT for edited files.
    """
    checks = _checks(place, account=False)
    there = {path: found for path, found in installed.files.items() if found.state != "absent"}
    mark = [RemoveFile(place.mark)] if place.mark is not None and place.mark in installed.existing else []
    if not there:
        return Plan(checks, tuple(mark), (f"There is no service of hutchd in {place.folder}.",))
    edited = [path for path, found in there.items() if found.state == "changed"]
    problems = [] if force else [_conflict(path, "nothing was removed") for path in edited]
    in_use = installed.up or installed.enabled
    if in_use and not now:
        problems.append(
            HutchError(
                Reason.WRONG_STATE,
                f"The service is in use. Stop it with `--now`, or before with: {shlex.join(place.stop_command)}",
            )
        )
    steps: list[Step] = [RunCommand(place.stop_command)] if in_use else []
    steps += [RemoveFile(path) for path in there]
    if place.interpreter is not None and place.interpreter in installed.existing:
        steps.append(RemoveFile(place.interpreter))
    if place.here and place.manager == "systemd":
        steps.append(RunCommand(place.reload_command))
    steps += mark
    candidates = [*place.templates, *(_STATE_FOLDERS if place.system else ())]
    kept = [str(path) for path in candidates if path in installed.existing]
    kept += sorted(str(path) for path in installed.existing if _is_users(path) and path not in there)
    return Plan(checks, tuple(steps), (f"Kept: {', '.join(kept)}",) if kept else (), tuple(problems))


class _TakenOver(NamedTuple):
    steps: list[Step]
    sentences: list[str]


def _take_over(place: UnitPlace, name: str, found: InstalledFile, existing: frozenset[Path]) -> _TakenOver | None:
    """Return the steps that replace an edited file and keep its edits; None if there are none."""
    path = place.folder / name
    if found.text is None or place.manager != "systemd":
        return None
    if "/" in name:  # an edited drop-in stays if it still loads the master key from the right file
        same = credential_of(found.text) == credential_of(place.texts[name])
        return _TakenOver([KeepFile(path, "yours, unchanged")], []) if same else None
    if seal_of(found.text) != "broken":
        return None
    edits = edits_of(found.text, place.texts[name])
    steps: list[Step] = []
    sentences: list[str] = []
    if edits.drop_in:
        drop_in = _free_name(path.with_name(f"{name}.d") / EDITED, existing)
        steps.append(WriteFile(drop_in, edits.drop_in, f"written, with what you had edited in {path}"))
    if edits.lost:
        backup = _free_name(path.with_name(f"{name}.edited"), existing)
        steps.append(WriteFile(backup, found.text, f"written, a copy of {path} as you had edited it"))
        sentences.append(
            f"These edits of {path} are not in the drop-in: {', '.join(edits.lost)}. If you need them, add them with"
            f" `{' '.join(place.systemctl)} edit {name}`."
        )
    return _TakenOver([*steps, WriteFile(path, place.texts[name], f"written{_purpose(place, name)}")], sentences)


def _free_name(path: Path, existing: frozenset[Path]) -> Path:
    """Return `path`, with a number added if a file of an earlier installation has that name."""
    free, number = path, 2
    while free in existing:
        free, number = path.with_name(f"{path.stem}-{number}{path.suffix}"), number + 1
    return free


def _is_users(path: Path) -> bool:
    """Return whether a path beside the units belongs to the user: a drop-in, or the copy of an edited unit."""
    return path.parent.suffix == ".d" or path.suffix.startswith(".edited")


def _wrong_manager(place: UnitPlace) -> list[HutchError]:
    if place.system and place.manager == "launchd":
        sentence = (
            "On macOS one hutchd cannot serve several users: nothing there can start agents as other accounts and end"
            " all their processes. Use `--user`: each user gets a hutchd, with agents under that user's account."
        )
        return [HutchError(Reason.WRONG_STATE, sentence)]
    if not place.here:
        sentence = (
            f"systemd does not run this host ({BOOTED} is missing), so nothing would read the units. `--dry-run` prints"
            " them; `hutch daemon start` starts hutchd without a service."
        )
        return [HutchError(Reason.WRONG_STATE, sentence)]
    return []


def _checks(place: UnitPlace, *, account: bool) -> tuple[Check, ...]:
    """Return the checks for a host's service: of the programs, and with `account` also of hutchd's account."""
    if not place.system or place.manager == "launchd":
        return ()
    code = tuple(dict.fromkeys((Path(place.program), *place.code)))
    checks: list[Check] = [RunsAsRoot(), *(OnlyRootChanges(path, place.program) for path in code)]
    if account:
        checks.append(AccountExists(place.account))
        checks += [AccountCanUse(place.account, path) for path in code]
        checks += [AccountOwns(place.account, *one) for one in place.owned]
        if place.credential is not None:
            checks.append(FileExists(place.credential, MAKE_CREDENTIAL))
    return tuple(checks)


def _conflict(path: Path, outcome: str) -> HutchError:
    return HutchError(
        Reason.CONFLICT,
        f"{path} is not as Hutch wrote it, so {outcome}. `--dry-run` prints what would be done; `--force` does it all"
        " the same.",
    )


def _purpose(place: UnitPlace, name: str) -> str:
    """Return the purpose of a file, in parentheses; an empty text for a user's own service."""
    return f" ({_PURPOSE[name].format(account=place.account)})" if place.system and name in _PURPOSE else ""
