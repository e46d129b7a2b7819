"""A disk that is really full, under a real hutchd with running sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from hutch_shared import messages as m
from tests.crash.disks.disk import PROMPTLY, fill, give_back, healed, named, record, refused, tmpfs
from tests.system import processes
from tests.system.host import Host, host
from tests.system.log import DEADLINE, log_of, wait_for, without_gaps

pytestmark = pytest.mark.system

SPOOLED = 3_500_000
"""The size in bytes that the spool exceeds once it has all events of the turn."""
ROOM = 1_500_000
"""The free bytes of the disk then: fewer than the record needs for the spool's events."""
SETTINGS = "[executors]\nspares = 0\nlost_timeout = 2\nheartbeat_timeout = 6\n[turns]\ninterrupt_grace = 5\n"
"""The disk stays full longer than these timeouts. hutchd must not give up an executor because of that."""


@pytest.fixture
async def tiny() -> AsyncIterator[Host]:
    """A host whose state directory is a small file system; record, log and spools share it."""
    async with host(SETTINGS, start=False) as made:
        with tmpfs(made.state, "12m"):
            await made.start()
            try:
                yield made
            finally:
                with anyio.CancelScope(shield=True):
                    if made.daemon is not None:
                        await made.kill()
                    processes.kill(processes.marked(made.mark))
                    await processes.gone(made.mark)


async def test_a_full_disk_stops_promises_until_there_is_space(tiny: Host) -> None:
    """Prompts are refused, and the status says why. Running turns lose nothing, and no restart is needed."""
    async with tiny.client() as hutch:
        session = await tiny.script(
            hutch, [{"text": "before"}, {"wait_file": "go"}, {"repeat": {"times": 300, "line": {"text": "x" * 2000}}}]
        )
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await log.until(lambda log: log.of("text"))
            free = fill(tiny.state)
            error = await refused(hutch, session)
            Path(session.cwd, "go").touch()
            status = await hutch.get_status()
            shown = await tiny.hutch("status")
            promised = [named(event) for event in log.events]
            during = await record(hutch, session)
            await anyio.sleep(3)  # longer than the executors' timeout for a lost connection
            (executor,) = (await hutch.get_status()).executors
            free()
            await healed(hutch)
            end = await log.ended(turn)
            queued = await hutch.submit_prompt(session.id, "again")
            later = await log.ended(queued)
            after = await record(hutch, session)
            again = await hutch.get_status()

        assert "full" in error.message
        assert (status.store.ok, shown.code) == (False, 0)
        assert "FAILING" in shown.out
        assert "full" in status.store.detail
        assert during == promised
        assert (end.state, later.state) == ("completed", "completed")
        assert [one.text for one in log.of("text")][:302] == ["before", *["x" * 2000] * 300, "before"]
        assert without_gaps(log.events)
        assert [named(event) for event in log.events] == after
        assert [turn.state for turn in await hutch.list_turns(session.id)] == ["completed", "completed"]
        assert [one.pid for one in again.executors] == [executor.pid]
        assert again.pid == status.pid


async def test_interrupt_and_deny_work_on_a_full_disk(tiny: Host) -> None:
    """Both take effect at once, and are recorded once there is space."""
    async with tiny.client() as hutch:
        asks = await tiny.script(
            hutch, [{"tool": "Bash", "input": {"command": "touch ran"}, "run": True}, {"wait_file": "end"}]
        )
        runs = await tiny.script(
            hutch,
            [{"tool": "Bash", "input": {"command": "echo $$ > pid; exec sleep 600"}, "run": True}, {"text": "never"}],
            permission_mode="bypass",
        )
        async with log_of(hutch, asks) as asked, log_of(hutch, runs) as ran:
            waiting = await hutch.submit_prompt(asks.id, "go")
            running = await hutch.submit_prompt(runs.id, "go")
            question = await asked.asked()
            pid = int(await wait_for(lambda: _text(Path(runs.cwd, "pid"))))
            free = fill(tiny.state)
            await refused(hutch, asks)
            with anyio.fail_after(PROMPTLY):
                denied = await hutch.answer_permission(m.AnswerPermission(question.id, "deny", message="not now"))
            late = await tiny.hutch("approve", question.id, code=1)
            with anyio.fail_after(2 * PROMPTLY):
                await hutch.interrupt_turn(runs.id)
            alive = processes.alive(pid)
            with anyio.fail_after(DEADLINE):
                shown_full = False
                while not shown_full:
                    fill(tiny.state)  # takes the space that a checkpoint of the log may have freed
                    await refused(hutch, asks)
                    shown_full = not (await hutch.get_status()).store.ok
            free()
            await healed(hutch)
            stopped = await ran.ended(running)
            Path(asks.cwd, "end").touch()
            ended = await asked.ended(waiting)
            (kept,) = await hutch.list_permissions(m.ListPermissions(asks.id, None))

        assert shown_full
        assert denied.state == "denied"
        assert "settled before: denied" in late.err
        assert not alive
        assert (stopped.state, stopped.reason) == ("stopped", "interrupted")
        assert (kept.state, kept.message) == ("denied", "not now")
        assert ended.state == "completed"
        assert [one.state for one in asked.of("permission_settled")] == ["denied"]
        assert not Path(asks.cwd, "ran").exists()
        assert ran.of("text") == []


async def test_acknowledged_events_survive_a_kill_on_a_full_disk(tiny: Host) -> None:
    """hutchd is killed on the full disk, and started once there is space."""
    async with tiny.client() as hutch:
        lines: list[dict[str, object]] = [
            {"repeat": {"times": 1000, "line": {"text": "y" * 2000}}},
            {"wait_file": "never"},
        ]
        session = await tiny.script(hutch, lines)
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await log.until(lambda log: len(log.events) > 20)
            free = fill(tiny.state)
            await refused(hutch, session)
            promised = [named(event) for event in log.events]
            await tiny.kill()
            free()
            tiny.settings = "[executors]\nspares = 0\n[store]\nkeep_bytes = 200000000\n"
            await tiny.start()
            kept = await record(hutch, session)
            await hutch.interrupt_turn(session.id)
            end = await log.ended(turn)

        assert promised == kept[: len(promised)]
        assert end.state == "stopped"
        assert without_gaps(log.events)


async def test_a_spool_is_stored_in_pieces_on_a_nearly_full_disk(tiny: Host) -> None:
    """There is less space than the record needs for the spool, so each stored piece must free space for the next."""
    lines: list[dict[str, object]] = [
        {"wait_file": "go"},
        {"repeat": {"times": 4000, "line": {"text": "z" * 400}}},
        {"wait_file": "end"},
    ]
    async with tiny.client() as hutch:
        session = await tiny.script(hutch, lines)
        turn = await hutch.submit_prompt(session.id, "go")
        async with log_of(hutch, session) as log:
            await log.until(lambda log: log.of("turn_started"))
            await tiny.kill()
            Path(session.cwd, "go").touch()
            await wait_for(lambda: _used(tiny.state / "spool") > SPOOLED)
            free = fill(tiny.state)
            give_back(tiny.state, ROOM)
            await tiny.start()
            await log.until(lambda log: log.events[-1].seq > 4000)
            await wait_for(lambda: _used(tiny.state / "spool") < SPOOLED / 100)
            Path(session.cwd, "end").touch()
            end = await log.ended(turn)
            free()

        assert end.state == "completed"
        assert len(log.of("text")) == 4000
        assert without_gaps(log.events)


async def test_hutchd_starts_on_a_full_disk(tiny: Host) -> None:
    """After a kill there it starts, refuses prompts that it cannot store, and goes on once there is space."""
    async with tiny.client() as hutch:
        session = await tiny.script(hutch, [{"wait_file": "go"}, {"text": "x" * 2000}])
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await log.until(lambda log: log.of("turn_started"))
            free = fill(tiny.state)
            await refused(hutch, session)
            await tiny.kill()
            fill(tiny.state)
            await tiny.start()
            error = await refused(hutch, session)
            Path(session.cwd, "go").touch()
            free()
            end = await log.ended(turn)

        assert "full" in error.message
        assert end.state == "completed"
        assert without_gaps(log.events)


def _used(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
