"""The notify command: its input, its environment and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from hutch_executor.account.environment import without_places
from hutch_executor.account.notify import run_notify
from hutch_executor.account.setup import Setup
from hutch_shared import messages as m
from tests.executor.fake_hutchd import QUESTION, WAIT, dead


def shell(script: str, timeout: float = 30.0, env: tuple[str, ...] = ()) -> m.RunNotify:
    return m.RunNotify(("/bin/sh", "-c", script), QUESTION, timeout, env)


async def test_the_request_comes_as_one_line(tmp_path: Path) -> None:
    """The request comes on standard input, as JSON."""
    found = await run_notify(shell(f"cat > {tmp_path}/got"), Setup())

    text = (tmp_path / "got").read_text()
    assert found.ok
    assert text.count("\n") == 1
    assert json.loads(text)["id"] == "p-1"


async def test_its_environment_is_a_list_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gets only listed variables and those that the settings name."""
    monkeypatch.setenv("HIDDEN", "h")
    monkeypatch.setenv("WANTED", "w")

    await run_notify(shell(f"env > {tmp_path}/env", env=("WANTED", "NOT_SET")), Setup())

    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert {"PATH", "WANTED"} <= names
    assert "HIDDEN" not in names


async def test_it_runs_where_no_agent_could_have_put_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the home. PATH has no relative folder, and none in a folder of a session or for everybody's files."""
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{work}/bin:.::bin:/opt/session/bin:/opt/x:/var/tmp/x:/usr/bin:/bin")
    params = m.RunNotify(("sh", "-c", 'echo "$PATH" > path; pwd > pwd'), QUESTION, 30.0, folders=("/opt/session",))
    done = await run_notify(params, Setup(), (str(work),))

    assert done.ok, done
    assert (home / "path").read_text() == "/opt/x:/usr/bin:/bin\n"
    assert (home / "pwd").read_text() == f"{home}\n"


def test_a_folder_is_left_out_of_a_path_by_each_of_its_names(tmp_path: Path) -> None:
    """A link from outside leads into it, and a link inside leads out of it: an agent could change either."""
    (tmp_path / "work" / "bin").mkdir(parents=True)
    (tmp_path / "usual").symlink_to(tmp_path / "work" / "bin")
    (tmp_path / "work" / "out").symlink_to("/usr/bin")
    (tmp_path / "work2").mkdir()
    path = f"{tmp_path}/usual:{tmp_path}/work/out:{tmp_path}/work/../work/bin:{tmp_path}/work2:/bin"

    assert without_places(path, (f"{tmp_path}/work",)) == f"{tmp_path}/work2:/bin"


async def test_a_failure_is_reported_with_the_commands_output() -> None:
    """The result has the end of its standard error."""
    found = await run_notify(shell("echo no mail >&2; exit 3"), Setup())

    assert found == m.Notified(ok=False, detail="no mail")


async def test_a_command_that_hangs_is_given_up() -> None:
    """The command is killed after its time limit."""
    found = await run_notify(shell("sleep 600", timeout=0.1), Setup())

    assert found == m.Notified(ok=False, detail="It did not end within 0.1 s and was killed.")


async def test_its_children_are_killed_with_it(tmp_path: Path) -> None:
    """After the call no process of its group is left."""
    pid = tmp_path / "pid"

    async with anyio.create_task_group() as group:
        group.start_soon(run_notify, shell(f"sleep 600 & echo $! > {pid}.new; mv {pid}.new {pid}; wait"), Setup())
        with anyio.fail_after(WAIT):
            while not pid.exists():
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()

    await dead(int(pid.read_text()))


async def test_a_child_that_holds_the_output_does_not_delay_the_end() -> None:
    """The call returns when the command itself has ended."""
    found = await run_notify(shell("sleep 600 & exit 0"), Setup())

    assert found.ok


async def test_a_command_that_does_not_read_is_fine() -> None:
    """The command need not read its input."""
    assert (await run_notify(shell("exec <&-; exit 0"), Setup())).ok


@pytest.mark.parametrize("command", [(), ("/no/such/program",), ("a\0b",)])
async def test_a_command_that_cannot_be_started_is_reported(command: tuple[str, ...]) -> None:
    """A mistake in the settings is a result, not an error."""
    found = await run_notify(m.RunNotify(command, QUESTION, 1.0), Setup())

    assert not found.ok
    assert found.detail


def test_an_executor_without_an_absolute_folder_on_path_gets_the_systems() -> None:
    """An empty PATH would name the working directory."""
    program = """
import os
from hutch_executor.account.environment import scrub_environment
scrub_environment()
print(os.environ["PATH"])
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env={"PATH": "bin:."}, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == os.defpath
