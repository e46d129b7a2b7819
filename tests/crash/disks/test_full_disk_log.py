"""What a full disk writes into the logs, and how soon work goes on when there is space."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.crash.disks.disk import fill, healed, tmpfs
from tests.system import processes
from tests.system.host import host
from tests.system.log import DEADLINE, log_of, without_gaps

pytestmark = pytest.mark.system

MOST_LINES = 40
RECOVERED = 5.0
"""Seconds after space became free within which every session's next event is stored."""
AFTER = {"repeat": {"times": 80, "line": {"text": "after " * 1700}}}
"""Events of an executor that do not fit into the space that the record's log has already taken."""
_FEW = (3, 12.0, 12)
"""Executors, seconds and lines of the short form: the store's begin and end, and some to spare."""


async def _begun(hutch: HutchClient, session: m.Session) -> m.Turn:
    """Begin a turn, and return it once its first event is stored."""
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        await log.until(lambda log: log.of("text"))
    return turn


def _lines(log: Path, state: Path) -> int:
    """Return the number of lines in the logs of hutchd, the broker and all executors."""
    logs = [log, state / "broker.log", *(state / "executors").glob("*")]
    return sum(one.read_bytes().count(b"\n") for one in logs if one.is_file())


@pytest.mark.parametrize(
    ("executors", "seconds", "lines"),
    [pytest.param(16, 300.0, MOST_LINES, marks=[pytest.mark.full, pytest.mark.timeout(900)]), _FEW],
    ids=["five minutes", "some seconds"],
)
async def test_a_full_disk_is_logged_as_one_condition(executors: int, seconds: float, lines: int) -> None:
    """However many executors try to store their events; when there is space, all go on within seconds."""
    settings = f"[executors]\nmaximum = {executors + 4}\n"
    async with host(settings, start=False) as made:
        logs = made.state / "executors"
        with tmpfs(made.state, f"{24 + 5 * executors}m"):
            logs.mkdir()
            with tmpfs(logs, "8m"):  # so that the executors' lines are counted, and not lost on the full disk
                await made.start()
                try:
                    async with made.client() as hutch:
                        sessions = [
                            await made.script(hutch, [{"text": "before"}, {"wait_file": "go"}, AFTER])
                            for _ in range(executors)
                        ]
                        follows = [await _begun(hutch, session) for session in sessions]
                        free = fill(made.state)
                        before = _lines(made.log, made.state)
                        for session in sessions:
                            Path(session.cwd, "go").touch()
                        with anyio.move_on_after(seconds):
                            await anyio.sleep_forever()
                        assert not (await hutch.get_status()).store.ok
                        free()
                        begin = monotonic()
                        await healed(hutch)
                        stores = monotonic() - begin
                        with anyio.fail_after(DEADLINE):
                            for session, turn in zip(sessions, follows, strict=True):
                                async with log_of(hutch, session) as log:
                                    end = await log.ended(turn)
                                    assert end.state == "completed"
                                    assert without_gaps(log.events)
                        passed = monotonic() - begin
                        written = _lines(made.log, made.state) - before
                finally:
                    with anyio.CancelScope(shield=True):
                        await made.kill()
                        processes.kill(processes.marked(made.mark))
                        await processes.gone(made.mark)

    print(
        f"{executors} executors, {seconds:g} s: {written} lines, storing in {stores:.1f} s, recovered in {passed:.1f} s"
    )
    assert written <= lines
    assert passed < RECOVERED
