"""Which environment serves an account."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hutch_daemon.environments.launcher_client import LauncherClient, LauncherReply, LauncherStatus
from hutch_daemon.environments.port import Account
from hutch_daemon.environments.registry import Environments
from hutch_daemon.environments.same_user import SameUser
from hutch_daemon.environments.unix_user import UnixUser
from hutch_shared.errors import HutchError, Reason

OWN = Account(os.getuid(), os.getgid(), "own", "/")
OTHER = Account(os.getuid() + 1, os.getgid(), "other", "/")


@pytest.fixture
def unix_user(tmp_path: Path) -> UnixUser:
    """Return an environment whose launcher is missing."""
    return UnixUser(LauncherClient(tmp_path / "launcher.sock"))


def test_the_first_environment_that_serves_an_account_is_chosen(unix_user: UnixUser) -> None:
    """On a host, hutchd's own account uses same-user, and every other account unix-user."""
    host = Environments(unix_user, SameUser())

    assert host.choose(None, OTHER).name == "unix-user"
    assert host.choose(None, OWN).name == "same-user"


def test_an_account_that_no_environment_serves_gets_the_default() -> None:
    """The default environment then says why it refuses the account."""
    assert Environments(SameUser()).choose(None, OTHER).name == "same-user"


def test_a_named_environment_is_chosen_for_any_account(unix_user: UnixUser) -> None:
    """An unknown name is refused with the known ones."""
    host = Environments(unix_user, SameUser())

    assert host.choose("unix-user", OWN).name == "unix-user"
    assert host.get("slurm") is None
    with pytest.raises(HutchError, match=r"no environment slurm here; known: unix-user, same-user\.") as refused:
        host.choose("slurm", OWN)
    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE


class RefusingLauncher(LauncherClient):
    """Refuses every account."""

    def probe(self, uid: int | None = None) -> LauncherReply:
        return LauncherReply(LauncherStatus.REFUSED, 0, 0, 0, 0, 0, "The launcher's configuration denies other.")


async def test_a_refused_user_is_sent_to_the_doctor_of_that_account(tmp_path: Path) -> None:
    """The launcher's own sentence comes first; doctor examines the refused account, for every caller."""
    refusing = UnixUser(RefusingLauncher(tmp_path / "launcher.sock"))

    with pytest.raises(HutchError) as refused:
        await refusing.check_account(OTHER)

    assert refused.value.message == (
        "The launcher's configuration denies other. `hutch doctor --account other` says what to change."
    )


async def test_a_probe_asks_the_default_environment(unix_user: UnixUser) -> None:
    """The probe reports an unreachable launcher."""
    assert "cannot be reached" in await Environments(unix_user, SameUser()).probe()
    assert repr(Environments(unix_user, SameUser())) == "<Environments unix-user same-user>"
