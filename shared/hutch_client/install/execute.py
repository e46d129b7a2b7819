"""Carries out a plan: makes sure that every check holds, then takes the steps in order.

It decides nothing. If the plan has a problem or a check fails, it writes nothing. If a step fails, the steps before it
stay; a new plan has the remaining steps.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from hutch_client.install.commands import failure_text, try_command
from hutch_client.install.plan import (
    AccountCanUse,
    AccountExists,
    AccountOwns,
    Check,
    CopyFile,
    FileExists,
    KeepFile,
    NoOtherDaemon,
    OnlyRootChanges,
    Plan,
    RemoveFile,
    RunCommand,
    RunsAsRoot,
    Step,
    WriteFile,
)
from hutch_shared.errors import HutchError, Reason
from hutch_shared.paths import find_host
from hutch_shared.reach import PathReader, closed
from hutch_shared.unix import check_directory

__all__ = ["check", "execute"]


def execute(plan: Plan) -> Iterator[str]:
    """Carry out `plan`; yield a sentence for each step, then the plan's own. HutchError for a problem or a failure."""
    for problem in plan.problems:
        raise problem
    for one in plan.checks:
        check(one)
    for step in plan.steps:
        _take(step)
        if not isinstance(step, RunCommand):
            yield str(step)
    yield from plan.sentences


def check(one: Check) -> None:
    """Raise HutchError, with advice, unless the check holds."""
    match one:
        case RunsAsRoot():
            if os.geteuid() != 0:
                raise HutchError(
                    Reason.NOT_ALLOWED, "Only root may change the host's services; `--user` is for your own."
                )
        case OnlyRootChanges(path, program):
            _check_only_root_changes(path, program)
        case AccountExists(account):
            if _find(account).uid == 0:
                raise HutchError(
                    Reason.NOT_ALLOWED, f"The account {account} is root under another name: give it a uid of its own."
                )
        case AccountCanUse(account, path):
            bits = 1 if path.is_dir() or os.access(path, os.X_OK) else 4
            if why := closed(path, _find(account), bits):
                raise HutchError(
                    Reason.WRONG_STATE,
                    f"The account {account} cannot use {path}: {why}. Install Hutch, and the Python that it runs with,"
                    " where every account may read it: /opt/hutch, with the system's Python, for example.",
                )
        case AccountOwns(account, folder, mode):
            if not folder.is_dir() or folder.stat().st_uid != _find(account).uid:
                raise HutchError(
                    Reason.WRONG_STATE,
                    f"{folder} must be a directory of {account}. Make it: install -d -o {account} -g {account}"
                    f" -m {mode} {shlex.quote(str(folder))}",
                )
        case FileExists(path, advice):
            if not path.is_file():
                raise HutchError(Reason.WRONG_STATE, f"{path} does not exist. {advice}")
        case NoOtherDaemon(system):
            if _answers(system=system):
                raise HutchError(
                    Reason.WRONG_STATE,
                    "A hutchd runs that is not the service. Stop it first: `hutch daemon stop`. Nothing was written.",
                )


def _check_only_root_changes(path: Path, program: str) -> None:
    try:
        check_directory(path if path.is_dir() else path.parent)
    except FileNotFoundError:
        pass
    except HutchError as error:
        raise HutchError(
            Reason.NOT_ALLOWED,
            f"Root would run {program}, which others can change: {error.message} Install Hutch where only root can"
            " change it.",
        ) from None


def _find(account: str) -> PathReader:
    try:
        return PathReader.named(account)
    except KeyError:
        raise HutchError(
            Reason.WRONG_STATE,
            f"There is no account {account}, which hutchd needs to run as. Make it:"
            f" useradd --system --home-dir /var/lib/hutch --shell /usr/sbin/nologin {account}",
        ) from None


def _answers(*, system: bool) -> bool:
    from hutch_client.starting import is_running

    environ = {name: value for name, value in os.environ.items() if name != "HUTCH_HOST"}
    return is_running(find_host(environ, system=system))


def _take(step: Step) -> None:
    match step:
        case WriteFile(path, content, _, mode):
            _write(path, content.encode(), mode)
        case CopyFile(source, path, mode):
            _write(path, source.read_bytes(), mode)
        case RemoveFile(path):
            path.unlink(missing_ok=True)
            if path.parent.suffix == ".d":
                with contextlib.suppress(OSError):  # a user's drop-in remains
                    path.parent.rmdir()
        case RunCommand(argv):
            done = try_command(argv)
            if done.returncode:
                raise HutchError(Reason.WRONG_STATE, f"`{shlex.join(argv)}` failed: {failure_text(done)}")
        case KeepFile():
            pass


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file completely, or leave the old one. A link at that path is replaced, not followed."""
    for folder in reversed([one for one in path.parents if not one.exists()]):
        folder.mkdir()
        folder.chmod(0o755)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
