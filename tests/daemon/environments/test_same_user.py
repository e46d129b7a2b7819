"""The same-user environment with real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from hutch_daemon.environments.accounts import account_of
from hutch_daemon.environments.port import MARK, Account, Alive, Exited, Launched, LaunchSpec
from hutch_daemon.environments.processes import look_up
from hutch_daemon.environments.same_user import SameUser
from hutch_daemon.services.access import insider_of
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id
from tests.fakes.stage import until

# A child that is hard to find: forked twice, in its own session, its parent gone.
DAEMONISE = """
import ctypes, os, signal, sys, time
folder = sys.argv[1]
boot = sys.stdin.readline()
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as executors do
for number in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open(f"{folder}/child-{number}.new", "w").write(str(os.getpid()))
            os.rename(f"{folder}/child-{number}.new", f"{folder}/child-{number}")
            time.sleep(600)
        os._exit(0)
    os.wait()
time.sleep(600)
"""
TELL = """
import json, os, sys
boot = sys.stdin.readline()
told = {"boot": json.loads(boot), "env": dict(os.environ), "argv": sys.argv, "sid": os.getsid(0), "pid": os.getpid()}
open(sys.argv[1] + "/told.new", "w").write(json.dumps(told))
os.rename(sys.argv[1] + "/told.new", sys.argv[1] + "/told")
print("last words")
"""


def spec(folder: Path, account: Account | None = None) -> LaunchSpec:
    """Return the specification of an executor in `folder`."""
    executor = new_id("executor")
    boot = m.Boot(executor, "token-that-is-secret", "/nowhere.sock", os.getuid(), "script")
    account = account or account_of(os.getuid(), home=str(folder))
    return LaunchSpec(executor, account, "script", boot, str(folder), folder / "out" / "x.log", {"EXTRA": "1"})


@asynccontextmanager
async def started(environment: SameUser, what: LaunchSpec) -> AsyncIterator[Launched]:
    """Start an executor, and end all its processes afterwards."""
    launched = await environment.start(what)
    try:
        yield launched
    finally:
        with anyio.CancelScope(shield=True):
            await environment.kill(launched)


READY = "import ctypes, os; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); os.write(0, b'\\n')\n"
"""The first steps of an executor: it hardens itself and reports that it is ready."""


def program(text: str, folder: Path) -> list[str]:
    """Return the command that runs `text`."""
    return [sys.executable, "-c", READY + text, str(folder)]


@pytest.mark.parametrize("cgroup", [True, False])
async def test_kill_ends_every_process_of_an_executor(tmp_path: Path, cgroup: bool) -> None:
    """Children that forked twice into their own sessions end too, and the environment verifies it."""
    environment = SameUser(program(DAEMONISE, tmp_path), cgroup=cgroup)
    async with started(environment, spec(tmp_path)) as launched:
        files = [tmp_path / f"child-{number}" for number in range(3)]
        await until(lambda: all(file.exists() for file in files))
        children = [int(file.read_text()) for file in files]
        owners = [insider_of(pid, {launched.pid: launched.executor}) for pid in (*children, os.getpid())]

        killed = await environment.kill(launched)

        assert owners == [launched.executor] * 3 + [None]
        assert killed.verified
        assert killed.left == ()
        assert [one for pid in children if (one := look_up(pid)) is not None and not one.dead] == []
        assert isinstance(await environment.poll(launched), Exited)


@pytest.mark.parametrize("cgroup", [True, False])
async def test_children_of_a_dead_executor_are_found(tmp_path: Path, cgroup: bool) -> None:
    """After the executor was killed and init adopted its children, they are still ended."""
    environment = SameUser(program(DAEMONISE, tmp_path), cgroup=cgroup)
    async with started(environment, spec(tmp_path)) as launched:
        files = [tmp_path / f"child-{number}" for number in range(3)]
        await until(lambda: all(file.exists() for file in files))
        os.kill(launched.pid, signal.SIGKILL)
        exited = await environment.wait(launched)

        killed = await environment.kill(launched)

        assert exited == Exited(-signal.SIGKILL)
        assert killed.verified
        alive = [one for file in files if (one := look_up(int(file.read_text()))) is not None and not one.dead]
        assert alive == []


async def test_a_kill_reaches_the_cgroups_that_an_executor_made(tmp_path: Path) -> None:
    """A child that left the tree of processes, and moved into a cgroup below its own, is ended with that cgroup."""
    environment = SameUser(program("import time; time.sleep(600)", tmp_path))
    async with started(environment, spec(tmp_path)) as launched:
        if launched.state["cgroup"] is None:
            pytest.skip("kernel: hutchd can make no cgroups here")
        below = Path(launched.state["cgroup"], "below", "deeper")
        below.mkdir(parents=True)
        async with await anyio.open_process(["sleep", "600"]) as child:
            (below / "cgroup.procs").write_text(str(child.pid))

            killed = await environment.kill(launched)

            code = await child.wait()

    assert killed.outcome == "gone"
    assert killed.scope == "cgroup"
    assert code == -signal.SIGKILL
    assert not below.parent.parent.exists()


async def test_an_executor_ends_even_if_its_cgroup_cannot_be_searched(tmp_path: Path) -> None:
    """Then nobody knows what is left, but it does not stay stopped."""
    environment = SameUser(program("import time; time.sleep(600)", tmp_path))
    async with started(environment, spec(tmp_path)) as launched:
        if launched.state["cgroup"] is None:
            pytest.skip("kernel: hutchd can make no cgroups here")
        (tmp_path / "group" / "cgroup.procs").mkdir(parents=True)
        other = replace(launched, state={**launched.state, "cgroup": str(tmp_path / "group")})

        with pytest.raises(OSError, match="directory"):
            await environment.kill(other)

        exited = await environment.wait(launched)

    assert exited == Exited(-signal.SIGKILL)


async def test_a_stopped_executor_is_killed(tmp_path: Path) -> None:
    """SIGSTOP does not protect a process."""
    environment = SameUser(program("import time; time.sleep(600)", tmp_path))
    async with started(environment, spec(tmp_path)) as launched:
        os.kill(launched.pid, signal.SIGSTOP)

        killed = await environment.kill(launched)

        assert killed.verified
        assert isinstance(await environment.poll(launched), Exited)


async def test_the_token_goes_to_standard_input_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment has allowed variables only; standard input carries the boot line; output goes to the log."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of hutchd")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    environment = SameUser(program(TELL, tmp_path))
    what = spec(tmp_path)
    async with started(environment, what) as launched:
        exited = await environment.wait(launched)
        told = json.loads((tmp_path / "told").read_text())

        assert exited == Exited(0)
        assert told["boot"]["token"] == "token-that-is-secret"
        assert "token-that-is-secret" not in json.dumps([told["env"], told["argv"], dict(launched.state)])
        assert "ANTHROPIC_API_KEY" not in told["env"]
        assert {told["env"][name] for name in ("HOME", "EXTRA", MARK)} == {str(tmp_path), "1", what.executor}
        assert told["env"]["LC_ALL"] == "C.UTF-8"
        assert told["sid"] == told["pid"]
        assert what.log_path.read_text() == "last words\n"
        assert what.log_path.stat().st_mode & 0o777 == 0o600


async def test_only_the_recorded_process_is_adopted(tmp_path: Path) -> None:
    """A launch record has pid, start time, boot and account. A reused pid, another boot and a zombie do not match."""
    environment = SameUser(program("import time; time.sleep(600)", tmp_path))
    async with started(environment, spec(tmp_path)) as launched:
        state = dict(launched.state)
        after_restart = SameUser(program("", tmp_path))

        adopted = after_restart.adopt(state)
        alive = await after_restart.poll(launched)
        wrong = [after_restart.adopt(state | change) for change in ({"start_time": 1}, {"boot_id": "x"}, {"pid": 1})]
        await after_restart.kill(launched)
        zombie = after_restart.adopt(state)

        assert adopted == launched
        assert alive == Alive()
        assert wrong == [None, None, None]
        assert zombie is None
        assert after_restart.adopt({}) is None


async def test_the_end_of_an_adopted_executor_is_noticed(tmp_path: Path) -> None:
    """This works although it is not a child of this process."""
    environment = SameUser(program("import time; time.sleep(600)", tmp_path))
    async with started(environment, spec(tmp_path)) as launched:
        os.kill(launched.pid, signal.SIGKILL)

        exited = await SameUser(program("", tmp_path)).wait(launched)

        assert exited == Exited(None)


async def test_another_account_is_refused(tmp_path: Path) -> None:
    """An environment with one account never uses that account in place of another."""
    environment = SameUser(program("", tmp_path))
    other = Account(os.getuid() + 1, 1, "other", "/")

    with pytest.raises(HutchError) as refused:
        await environment.start(spec(tmp_path, other))

    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE


async def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    """The reason is a sentence, and no process or file remains."""
    environment = SameUser([str(tmp_path / "missing")])

    with pytest.raises(HutchError, match="cannot be started: No such file"):
        await environment.start(spec(tmp_path))


async def test_output_is_kept_within_its_bound(tmp_path: Path) -> None:
    """The log keeps its newest part, and the executor continues to write to it."""
    environment = SameUser(program("import time; time.sleep(600)", tmp_path), output=1000)
    what = spec(tmp_path)
    async with started(environment, what) as launched:
        what.log_path.write_bytes(b"a" * 900 + b"z" * 400)

        environment.trim_output(launched)

        assert what.log_path.read_bytes() == b"a" * 100 + b"z" * 400
