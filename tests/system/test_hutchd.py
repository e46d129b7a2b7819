"""hutchd as a process: its signals, its sockets, its settings, and a second hutchd."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import anyio
import pytest

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.system.host import HUTCHD, Host, host
from tests.system.log import DEADLINE, log_of, wait_for

pytestmark = pytest.mark.system


async def test_sigterm_lets_the_running_turn_end_and_takes_no_new_work() -> None:
    """It exits with 0 after the turn has ended; the record has the end, and the next hutchd runs the queue."""
    async with host("[executors]\nspares = 0\n") as made:
        async with made.client(redial_for=0) as hutch:
            session = await made.script(hutch, [{"wait_file": "go"}, {"text": "done"}])
            async with log_of(hutch, session) as log:
                turn = await hutch.submit_prompt(session.id, "go")
                queued = await hutch.submit_prompt(session.id, "and again")
                await log.until(lambda log: log.of("turn_started"))
                async with anyio.create_task_group() as group:
                    codes: list[int] = []

                    async def stop() -> None:
                        codes.append(await made.stop())

                    group.start_soon(stop)
                    with anyio.fail_after(DEADLINE):
                        while not (await hutch.get_status()).draining:
                            await anyio.sleep(0.02)
                    with pytest.raises(HutchError) as refused:
                        await hutch.submit_prompt(session.id, "too late")
                    Path(session.cwd, "go").touch()
                    end = await log.ended(turn)
        await made.start()
        async with made.client() as hutch, log_of(hutch, session) as log:
            later = await log.ended(queued)
            record = await hutch.list_turns(session.id)

        assert codes == [0]
        assert refused.value.reason is Reason.SHUTTING_DOWN
        assert end.state == "completed"
        assert later.state == "completed"
        assert [(one.id, one.state) for one in record] == [(turn.id, "completed"), (queued.id, "completed")]


async def test_sighup_reads_the_settings_again() -> None:
    """The new settings apply from then on; an invalid file changes nothing and is reported."""
    async with host("[executors]\nspares = 0\nlost_timeout = 1\n") as made, made.client() as hutch:
        before = await made.script(hutch, [{"text": "hello"}], name="kept")
        async with log_of(hutch, before) as log:
            await log.play(before, "go")
        made.settings += "idle_timeout = 0.2\n[permissions]\nexpiry = 0.5\nmode = 'plan'\n"
        made.write_settings()
        made.signal(signal.SIGHUP)
        with anyio.fail_after(DEADLINE):
            while (await hutch.get_session("kept")).executor is not None:
                await anyio.sleep(0.05)
        asks = await made.script(hutch, [{"tool": "Bash", "input": {"command": "touch made"}, "run": True}])
        async with log_of(hutch, asks) as log:
            turn = await hutch.submit_prompt(asks.id, "go")
            end = await log.ended(turn)
        (asked,) = await hutch.list_permissions(m.ListPermissions(asks.id, None))
        made.settings = "[executors]\nspare = 0\n"
        made.write_settings()
        made.signal(signal.SIGHUP)
        with anyio.fail_after(DEADLINE):
            while not (notices := (await hutch.get_status()).notices):
                await anyio.sleep(0.05)
        made.settings = ""

        assert asks.permission_mode == "plan"
        assert (asked.state, asked.settled_by) == ("expired", "expiry")
        assert end.state == "completed"
        assert not Path(asks.cwd, "made").exists()
        assert "executors.spare; did you mean executors.spares?" in notices[0]


async def test_a_second_hutchd_on_the_same_state_or_sockets_is_refused(script_host: Host, tmp_path: Path) -> None:
    """It exits at once with the reason and does not disturb the first."""
    state = await script_host.hutchd(env={"HUTCH_RUNTIME_DIR": str(tmp_path / "run")})
    sockets = await script_host.hutchd(env={"HUTCH_STATE_DIR": str(tmp_path / "state")})
    async with script_host.client() as hutch:
        status = await hutch.get_status()

    assert (state.code, sockets.code) == (1, 1)
    assert str(script_host.state) in state.err
    assert str(script_host.runtime) in sockets.err
    assert "Traceback" not in state.err + sockets.err
    assert status.pid == script_host.pid


async def test_sockets_of_a_dead_hutchd_are_taken_over() -> None:
    """The socket files of a killed hutchd do not keep the next one from listening."""
    async with host("[executors]\nspares = 0\n") as made:
        await made.kill()
        left = made.socket.exists()
        none = await made.hutch("ps", code=3)
        await made.start()
        async with made.client() as hutch:
            status = await hutch.get_status()

        assert left
        assert "daemon start" in none.err or "hutchd" in none.err
        assert status.pid == made.pid


async def test_an_unknown_setting_refuses_to_start_and_names_the_nearest() -> None:
    """hutchd creates nothing, and the exit code is that of a usage error."""
    async with host("[turns]\ntimeuot = 3\n", start=False) as made:
        made.write_settings()
        refused = await made.hutchd()
        checked = await made.hutchd("--check")

        assert (refused.code, checked.code) == (2, 2)
        assert "there is no setting turns.timeuot; did you mean turns.timeout?" in refused.err
        assert list(made.state.iterdir()) == []


async def test_an_executor_that_cannot_start_is_reported(script_host: Host) -> None:
    """An unreadable script fails the turn with the reason."""
    async with script_host.client() as hutch:
        options = m.AgentOptions(script="no such file")
        session = await hutch.open_session(m.OpenSession("script", str(script_host.work), options=options))
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")

            assert (end.state, end.reason) == ("failed", "agent_unavailable")
            assert "no such file" in end.message


async def test_run_starts_a_daemon_if_none_runs() -> None:
    """`hutch run` prints one line about it, the daemon outlives the command, and `hutch daemon stop` stops it."""
    async with host("[executors]\nspares = 0\n", start=False) as made:
        made.write_settings()
        ran = await made.hutch("run", "--agent", "script", "hello", "-o", "json")
        status = await made.hutch("status", "-o", "json")
        again = await made.hutch("daemon", "start")
        await made.hutch("daemon", "stop")
        gone = await made.hutch("status", code=3)
        log = made.state / "hutchd.log"

        assert ran.json["result"] == "hello"
        assert ran.err.splitlines()[0] == (f"Started hutchd (pid {status.json['pid']}); `hutch daemon stop` stops it.")
        assert "runs already" in again.err
        assert gone.out == ""
        assert "hutchd has stopped" in log.read_text()


async def test_after_stop_leave_the_next_hutchd_adopts_the_turn() -> None:
    """`hutch daemon stop --leave` ends hutchd during a turn; the turn goes on and the next hutchd records its end."""
    async with host("[executors]\nspares = 0\n") as made:
        async with made.client(redial_for=0) as hutch:
            session = await made.script(hutch, [{"text": "before"}, {"wait_file": "go"}, {"text": "after"}])
            turn = await hutch.submit_prompt(session.id, "go")
            async with log_of(hutch, session) as log:
                await log.until(lambda log: log.of("text"))
        await made.hutch("daemon", "stop", "--leave")
        code = await made.exited()
        Path(session.cwd, "go").touch()
        await made.start()
        async with made.client() as hutch, log_of(hutch, session) as log:
            end = await log.ended(turn)

            assert code == 0
            assert end.state == "completed"
            assert [one.text for one in log.of("text")] == ["before", "after"]


async def test_daemon_stop_with_stop_ends_running_turns() -> None:
    """`hutch daemon stop --stop` does not wait for the turn, whose command is killed."""
    async with host("[executors]\nspares = 0\n") as made:
        async with made.client(redial_for=0) as hutch:
            call = {"tool": "Bash", "input": {"command": "echo $$ > pid; sleep 600"}, "run": True}
            session = await made.script(hutch, [call], permission_mode="bypass")
            turn = await hutch.submit_prompt(session.id, "go")
            await wait_for(lambda: Path(session.cwd, "pid").exists())
        await made.hutch("daemon", "stop", "--stop")
        await made.exited()
        await made.start()
        async with made.client() as hutch:
            record = await hutch.get_turn(turn.id)

        assert (record.state, record.reason) == ("stopped", "interrupted")


async def test_an_agent_inherits_only_allowed_variables() -> None:
    """It gets the variables on the allow-list, and its home."""
    async with host("[executors]\nspares = 0\n", env={"PRIVATE_THING": "of the shell"}) as made, made.client() as hutch:
        call = {"tool": "Bash", "input": {"command": "env"}, "run": True}
        session = await made.script(hutch, [call], permission_mode="bypass")
        async with log_of(hutch, session) as log:
            await log.play(session, "go")

            (result,) = log.of("tool_result")
            assert f"HOME={made.home}" in result.text.splitlines()
            assert "PRIVATE_THING" not in result.text
            assert "HUTCH_STATE_DIR" not in result.text
            assert "TOKEN" not in result.text


async def test_only_hutchds_account_can_open_its_files(script_host: Host) -> None:
    """This holds for the record, keys, spools, executor logs and sockets."""
    async with script_host.client() as hutch:
        session = await script_host.script(hutch, [{"text": "x"}])
        async with log_of(hutch, session) as log:
            await log.play(session, "go")
    written = [path for place in (script_host.state, script_host.runtime) for path in place.rglob("*")]

    assert {"hutch.db", "master.key", "client.sock", "executor.sock"} <= {path.name for path in written}
    assert [str(path) for path in written if path.lstat().st_mode & 0o077] == []


def test_hutchd_prints_its_version(tmp_path: Path) -> None:
    """The program touches no file."""
    done = subprocess.run([*HUTCHD, "--version"], capture_output=True, text=True, check=True, cwd=tmp_path, env={})

    assert done.stdout.startswith("hutchd ")
    assert list(tmp_path.iterdir()) == []
