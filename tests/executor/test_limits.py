"""The limits of a session's cgroup: read from the kernel's counters, and reported once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hutch_executor.process.cgroups import LimitGroup, own_groups
from hutch_executor.process.limits import LimitWatch
from hutch_executor.process.oom import agent_first, find_choom
from tests.executor.fake_hutchd import WAIT, FakeHutchd, boot, prepare, prompt

MIB = 1 << 20


def write(directory: Path, **files: str) -> None:
    """Write the files of a group; `__` in a name stands for a dot."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def two(directory: Path, *, kills: int = 0, full: int = 0, forks: int = 0, memory: str = "max") -> LimitWatch:
    """Write the files of version 2; return a watch on them."""
    write(
        directory,
        memory__events=f"low 0\nhigh 0\nmax 3\noom 9\noom_kill {kills}\noom_group_kill 0\n",
        memory__events__local=f"oom {full}\noom_kill {kills}\n",
        memory__max=f"{memory}\n",
        pids__events=f"max {forks}\n",
        pids__max="64\n",
    )
    return LimitWatch({"memory": LimitGroup(directory, 2), "pids": LimitGroup(directory, 2)})


def test_kills_for_memory_are_reported_once(tmp_path: Path) -> None:
    """The notice has the limit and its value; earlier events are not reported."""
    watch = two(tmp_path, kills=2, full=1, memory=str(512 * MIB))
    before = watch.take_notices()
    two(tmp_path, kills=3, full=2, memory=str(512 * MIB))
    told, again = watch.take_notices(), watch.take_notices()

    assert before == again == []
    assert [notice.word for notice in told] == ["over_limit"]
    assert told[0].message == "The session exceeded its memory limit of 512 MiB: 1 process was killed."
    assert told[0].details == {"limit": "memory", "value": 512 * MIB, "killed": 1}


@pytest.mark.parametrize(("full", "memory"), [(0, str(512 * MIB)), (1, "max")])
def test_a_machine_without_memory_is_not_the_sessions_fault(tmp_path: Path, full: int, memory: str) -> None:
    """The session did not reach its own limit, or has no limit."""
    watch = two(tmp_path)
    two(tmp_path, kills=2, full=full, memory=memory)

    assert [(notice.word, notice.message) for notice in watch.take_notices()] == [
        ("out_of_memory", "The machine ran out of memory: 2 processes were killed in this session.")
    ]


def test_refused_forks_are_reported(tmp_path: Path) -> None:
    """The notice counts the refused forks."""
    watch = two(tmp_path)
    two(tmp_path, forks=12)

    assert [notice.message for notice in watch.take_notices()] == [
        "The session exceeded its limit of 64 processes and threads: 12 more could not be started."
    ]


def test_version_1_counts_in_other_files(tmp_path: Path) -> None:
    """There, a missing limit is a large number."""
    files = {"memory__limit_in_bytes": str(1536 * MIB), "memory__failcnt": "0"}
    write(tmp_path, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", **files)
    watch = LimitWatch({"memory": LimitGroup(tmp_path, 1)})
    write(tmp_path, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", memory__failcnt="7")
    told = watch.take_notices()
    write(
        tmp_path,
        memory__oom_control="oom_kill 2\n",
        memory__failcnt="9",
        memory__limit_in_bytes="9223372036854771712\n",
    )

    assert [notice.message for notice in told] == [
        "The session exceeded its memory limit of 1.5 GiB: 1 process was killed."
    ]
    assert [notice.word for notice in watch.take_notices()] == ["out_of_memory"]


def test_a_removed_group_reports_nothing(tmp_path: Path) -> None:
    """Its files are missing, as on a host without cgroups."""
    watch = two(tmp_path / "group", kills=2)
    for file in (tmp_path / "group").iterdir():
        file.unlink()

    assert watch.take_notices() == []


def places(tmp_path: Path, cgroup: str, mounts: list[tuple[str, str, str, str]]) -> dict[Any, LimitGroup]:
    """Return the groups found in a /proc with this content; `mounts` are (root, mount point, type, options)."""
    write(
        tmp_path / "proc",
        cgroup=cgroup,
        mountinfo="".join(
            f"{n} 1 0:{n} {root} {tmp_path}{point} rw,relatime shared:{n} - {kind} {kind} {options}\n"
            for n, (root, point, kind, options) in enumerate(mounts, 30)
        ),
    )
    return own_groups(tmp_path / "proc")


def test_each_controller_is_read_in_its_own_hierarchy(tmp_path: Path) -> None:
    """A host may have memory in version 1 and pids in version 2."""
    write(tmp_path / "memory" / "a" / "hutch-x-1", memory__oom_control="oom_kill 0\n")
    write(tmp_path / "unified" / "b", pids__events="max 0\n", memory__events="oom_kill 0\n")
    found = places(
        tmp_path,
        "4:memory:/a/hutch-x-1\n1:cpu,cpuacct:/\n1:name=systemd:/c\n0::/b\n",
        [("/", "/memory", "cgroup", "rw,memory"), ("/", "/unified", "cgroup2", "rw")],
    )

    assert found == {
        "memory": LimitGroup(tmp_path / "memory" / "a" / "hutch-x-1", 1),
        "pids": LimitGroup(tmp_path / "unified" / "b", 2),
    }


def test_a_part_of_a_hierarchy_may_be_mounted(tmp_path: Path) -> None:
    """In a container, paths are relative to the mounted part; the rest cannot be read."""
    write(tmp_path / "cg" / "own", memory__events="oom_kill 0\n", pids__events="max 0\n")
    mounts = [("/docker/1", "/cg", "cgroup2", "rw")]

    assert places(tmp_path, "0::/docker/1/own\n", mounts)["memory"].path == tmp_path / "cg" / "own"
    assert places(tmp_path, "0::/docker/12/own\n", mounts) == {}
    assert places(tmp_path, "0::/../own\n", [("/", "/cg", "cgroup2", "rw")]) == {}


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    """The root group has no counters, and other systems have no /proc."""
    (tmp_path / "cg").mkdir()

    assert places(tmp_path, "0::/\n", [("/", "/cg", "cgroup2", "rw")]) == {}
    assert own_groups(tmp_path / "none") == {}
    assert LimitWatch({}).take_notices() == []


def test_the_agents_processes_are_killed_first() -> None:
    """When memory runs out, the kernel kills the agent before the executor, which holds the events."""
    if find_choom() is None:
        assert agent_first(["a", "b"]) == ("a", "b")
        return
    found = subprocess.run(agent_first(["cat", "/proc/self/oom_score_adj"]), capture_output=True, check=True)

    assert int(found.stdout) > int(Path("/proc/self/oom_score_adj").read_text())


# ---------------------------------------------------------------- real groups


@pytest.fixture
def limited() -> Iterator[Limited]:
    """A group of the test, with space for an executor and little more."""
    group = Limited()
    try:
        group.make()
        yield group
    finally:
        group.remove()


class Limited:
    """A real group in each hierarchy that counts memory and pids, beside the test's own group."""

    memory = 192 * MIB
    pids = 40

    def __init__(self) -> None:
        self.groups: list[Path] = []

    def make(self) -> None:
        """Create the groups; skip the test if that is not possible."""
        if os.geteuid() != 0:
            pytest.skip("only root can make a cgroup with limits")
        name = f"hutch-test-{os.getpid()}"
        own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        if "memory" in own:
            self._limit(_mounted("memory") / own["memory"].lstrip("/") / name, "memory.limit_in_bytes", self.memory)
            self._limit(_mounted("pids") / own["pids"].lstrip("/") / name, "pids.max", self.pids)
            return
        top = Path("/sys/fs/cgroup")
        try:
            (top / "cgroup.subtree_control").write_text("+memory +pids")
        except OSError as error:
            pytest.skip(f"kernel: no cgroup with limits can be made here ({error})")
        self._limit(top / name, "memory.max", self.memory)
        (top / name / "pids.max").write_text(str(self.pids))
        with suppress(OSError):
            (top / name / "memory.swap.max").write_text("0")

    def _limit(self, path: Path, name: str, value: int) -> None:
        path.mkdir()
        self.groups.append(path)
        (path / name).write_text(str(value))

    def enter(self, pid: int) -> None:
        for group in self.groups:
            (group / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove the groups once their processes are gone."""
        until = time.monotonic() + 20
        for group in self.groups:
            while group.exists():
                with suppress(OSError):
                    group.rmdir()
                assert time.monotonic() < until, f"{group} still has {(group / 'cgroup.procs').read_text().split()}"
                time.sleep(0.01)


def _mounted(controller: str) -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if kind == "cgroup" and controller in options.split(","):
            return Path(where)
    pytest.skip(f"kernel: the controller {controller} is not mounted here")


@asynccontextmanager
async def executor(hutchd: FakeHutchd, limited: Limited) -> AsyncIterator[None]:
    """Yield an executor in that group."""
    process = await anyio.open_process(
        [sys.executable, "-P", "-m", "hutch_executor"], stdout=None, stderr=None, cwd="/", start_new_session=True
    )
    try:
        limited.enter(process.pid)
        assert process.stdin is not None
        await process.stdin.send(msgspec.json.encode(boot(hutchd.path)) + b"\n")
        yield
        process.terminate()
        with anyio.fail_after(WAIT):
            assert await process.wait() == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


def bash(command: str) -> dict[str, Any]:
    return {"tool": "Bash", "input": {"command": command}, "run": True}


@pytest.fixture
def hutchd(tmp_path: Path) -> FakeHutchd:
    return FakeHutchd(tmp_path / "executor.sock")


HOG = "head -c 2000000000 /dev/zero | tail; echo rest"
DIED = {"end": {"state": "failed", "reason": "agent_died", "message": "The agent was ended by signal 9."}}


@pytest.mark.system
async def test_a_turn_whose_agent_died_of_its_limit_says_so(
    hutchd: FakeHutchd, limited: Limited, tmp_path: Path
) -> None:
    """The kernel kills the hog. The executor reports the limit in this turn only."""
    (tmp_path / "work").mkdir()
    sentence = "The session exceeded its memory limit of 192 MiB: 1 process was killed."
    async with hutchd.up(), executor(hutchd, limited):
        await hutchd.call("prepare_session", prepare(tmp_path / "work"))
        await hutchd.call("execute_prompt", prompt("\n".join(map(json.dumps, [bash(HOG), DIED]))))
        first = await hutchd.ended()
        await hutchd.call("execute_prompt", prompt(json.dumps(DIED), turn="t-2"))
        second = await hutchd.ended("t-2")

    assert [(notice["word"], notice["message"]) for notice in hutchd.of_kind("notice")] == [("over_limit", sentence)]
    assert (first["state"], first["reason"]) == ("failed", "over_limit")
    assert first["message"] == f"{sentence} The agent was ended by signal 9."
    assert second["reason"] == "agent_died"


@pytest.mark.system
async def test_a_command_that_died_of_the_limit_does_not_fail_the_turn(
    hutchd: FakeHutchd, limited: Limited, tmp_path: Path
) -> None:
    """The agent goes on, and the user gets a notice: for the limit of processes and for that of memory."""
    (tmp_path / "work").mkdir()
    forks = "for n in $(seq 60); do sleep 20 & done; echo never"
    async with hutchd.up(), executor(hutchd, limited):
        await hutchd.call("prepare_session", prepare(tmp_path / "work"))
        await hutchd.call("execute_prompt", prompt("\n".join(map(json.dumps, [bash(HOG), bash(forks)]))))
        ended = await hutchd.ended()

    told = {notice["details"]["limit"]: notice for notice in hutchd.of_kind("notice")}
    assert ended["state"] == "completed"
    assert set(told) == {"memory", "pids"}
    assert {notice["word"] for notice in told.values()} == {"over_limit"}
    assert "its limit of 40 processes and threads: " in told["pids"]["message"]


BOMB = """
import os, time
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError:
        pass
    time.sleep(0.001)
"""


@pytest.mark.system
async def test_an_executor_outlives_a_fork_bomb_in_its_session(
    hutchd: FakeHutchd, limited: Limited, tmp_path: Path
) -> None:
    """The executor reports the limit, runs the next turn, ends in order and kills the fork bomb."""
    cwd = tmp_path / "work"
    cwd.mkdir()
    (cwd / "bomb.py").write_text(BOMB)
    plant = bash(f"setsid {sys.executable} bomb.py >/dev/null 2>&1 & sleep 1; echo planted")
    async with hutchd.up(), executor(hutchd, limited):
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call(
            "execute_prompt", prompt("\n".join(map(json.dumps, [plant, {"pause": 0.3}, bash("echo second")])))
        )
        ended = await hutchd.ended()
        await hutchd.call("execute_prompt", prompt(json.dumps(bash("echo third")), turn="t-2"))
        await hutchd.ended("t-2")

    said = [result["text"] for result in hutchd.of_kind("tool_result")]
    refused = "The command could not be started: Resource temporarily unavailable."
    assert ended["state"] == "completed"
    assert said[:2] == ["planted\n", refused]
    assert said[2] in (refused, "third\n")
    assert {notice["word"] for notice in hutchd.of_kind("notice")} == {"over_limit"}
    assert list((tmp_path / "spool").iterdir()) == []
