"""Kills of executors under other accounts: what the launcher did not confirm is never reported as gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hutch_daemon.environments.cgroups import Cgroup
from hutch_daemon.environments.kernel_limits import gids_of, limits_of
from hutch_daemon.environments.launcher_client import _REPLY, LauncherClient, LauncherStatus
from hutch_daemon.environments.port import Account, Killed, Launched, combined
from hutch_daemon.environments.processes import look_up
from hutch_daemon.environments.unix_user import UnixUser
from hutch_daemon.settings import SandboxSettings
from hutch_shared.errors import HutchError
from hutch_shared.processes import boot_id

EXECUTOR = "x-0123456789abcdef"


def launched(pid: int, start_time: int = 1, cgroup: str | None = None) -> Launched:
    """Return the launch record of an executor."""
    return Launched(EXECUTOR, pid, start_time, boot_id(), os.getuid(), {"cgroup": cgroup})


@contextmanager
def launcher(path: Path, *statuses: LauncherStatus) -> Iterator[LauncherClient]:
    """Run a launcher that answers each request with the next status, and then closes the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()

        def answer() -> None:
            line = listening.accept()[0]
            for status in statuses:
                line.recv(1024)
                line.send(_REPLY.pack(b"hutchL01", status, 0, 0, 0, 0, 0, b"Some are left."))
            line.close()

        thread = threading.Thread(target=answer)
        thread.start()
        client = LauncherClient(path)
        yield client
        client.close()
        thread.join()


@pytest.fixture
def living() -> Iterator[Launched]:
    """A process that the launcher does not end."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = look_up(process.pid)
        assert found is not None
        yield launched(process.pid, found.start_time)
        process.kill()


async def test_without_the_launcher_a_dead_executor_is_unknown(tmp_path: Path) -> None:
    """hutchd's own look finds no process; that is not enough to say that none is left."""
    killed = await UnixUser(LauncherClient(tmp_path / "none.sock")).kill(launched(1 << 22))

    assert (killed.outcome, killed.left) == ("unknown", ())
    assert "hutch-launcher cannot be reached" in killed.words()


async def test_without_the_launcher_a_living_executor_is_left(tmp_path: Path, living: Launched) -> None:
    """The pids are named."""
    killed = await UnixUser(LauncherClient(tmp_path / "none.sock")).kill(living)

    assert killed == Killed("left", (living.pid,))


async def test_a_launcher_that_dies_during_a_kill_leaves_it_unknown(tmp_path: Path) -> None:
    """It had said that the kill was not complete."""
    with launcher(tmp_path / "l.sock", LauncherStatus.NOT_YET) as client:
        killed = await UnixUser(client).kill(launched(1 << 22))

    assert killed.outcome == "unknown"


async def test_a_refused_kill_is_unknown(tmp_path: Path) -> None:
    """The launcher's words are the reason."""
    with launcher(tmp_path / "l.sock", LauncherStatus.FAILED) as client:
        killed = await UnixUser(client).kill(launched(1 << 22))

    assert killed == Killed("unknown", why="the launcher says: Some are left.")


async def test_hutchds_own_look_must_agree(tmp_path: Path, living: Launched) -> None:
    """A launcher that reports success for a living executor is not believed."""
    with launcher(tmp_path / "l.sock", LauncherStatus.DONE, LauncherStatus.DONE) as client:
        environment = UnixUser(client)
        found = [(await environment.kill(one)).outcome for one in (living, launched(1 << 22))]

    assert found == ["left", "gone"]


def test_a_cgroup_that_cannot_be_read_is_not_empty(tmp_path: Path) -> None:
    """Only one that does not exist is."""
    (tmp_path / "cgroup.procs").mkdir()

    assert Cgroup(tmp_path / "none", 2).pids() == set()
    with pytest.raises(OSError, match="directory"):
        Cgroup(tmp_path, 2).pids()


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([], None),
        ([Killed("gone", scope="namespace"), Killed("gone", scope="cgroup")], "nothing in its cgroup is left"),
        ([Killed("gone", scope="namespace")], "nothing of it is left"),
        ([Killed("gone"), Killed("unknown", why="It is away.")], "what is left of it is unknown: It is away"),
        (
            [Killed("unknown"), Killed("left", (7,)), Killed("left", (5,))],
            "these processes of it could not be ended: 5, 7",
        ),
    ],
    ids=["none", "gone", "in a sandbox", "unknown", "left"],
)
def test_several_kills_are_gone_only_if_all_are(results: list[Killed], expected: str | None) -> None:
    """The words claim no more than the least of them."""
    found = combined(results)

    assert (None if found is None else found.words()) == expected


def test_the_kernel_reports_limits_and_groups() -> None:
    """Of this process, which has no cgroup of an executor."""
    limits, soft = limits_of(os.getpid(), "hutch-none"), os.sysconf("SC_OPEN_MAX")

    assert (limits.open_files, limits.pids, limits.cpu_weight) == (soft, None, None)
    assert gids_of(os.getpid()) == tuple(sorted({os.getegid(), *os.getgroups()}))


async def test_without_the_launcher_no_sandbox_is_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that cannot run is an error for each account; a missing bubblewrap is known without a trial."""
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = UnixUser(LauncherClient(tmp_path / "none.sock"))
    accounts = [Account(uid, uid, "ann", "/home/ann", groups=(uid,)) for uid in (5000, 5001, 5000)]
    for account in accounts:
        with pytest.raises(HutchError, match="hutch-launcher cannot be reached"):
            await environment.probe_sandbox(account, SandboxSettings())
    found = await environment.probe_sandbox(accounts[0], SandboxSettings(kind="bubblewrap"))

    assert (found.landlock, environment.last_probe()) == (None, found)
    assert "not installed" in found.choose("/home/ann/p", "/home/ann", SandboxSettings(kind="bubblewrap")).why
