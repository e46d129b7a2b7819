"""A disk that fails under a real hutchd: errors of writes and syncs, a file system that turns read-only."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.crash.disks.disk import PROMPTLY, ext4, healed, named, record, refused
from tests.crash.shims import compiled
from tests.sampling import sample
from tests.system import processes
from tests.system.host import Host, host
from tests.system.log import DEADLINE, log_of, wait_for, without_gaps

pytestmark = pytest.mark.system

SETTINGS = "[executors]\nspares = 0\n"


@dataclass(frozen=True, slots=True)
class Faults:
    """Switches the faults of the disk of a host's state directory."""

    control: Path

    def set(self, fault: str) -> None:
        """Make these operations fail from now on; with an empty text, none."""
        draft = self.control.with_suffix(".new")
        draft.write_text(fault)
        draft.replace(self.control)

    @property
    def hits(self) -> int:
        """The number of operations that have failed."""
        path = self.control.with_name(self.control.name + ".hits")
        return path.stat().st_size if path.exists() else 0


@asynccontextmanager
async def failing_host(folder: Path) -> AsyncIterator[tuple[Host, Faults]]:
    """Yield a host whose hutchd runs on a disk that can be made to fail."""
    library = compiled(Path(__file__).with_name("faults.c"), folder)
    async with host(SETTINGS, start=False) as made:
        faults = Faults(folder / "faults")
        shim = {
            "LD_PRELOAD": str(library),
            "FAULTS_UNDER": str(made.state / "hutch.db"),
            "FAULTS_FILE": str(faults.control),
        }
        await made.start(env=shim)
        yield made, faults


@sample(1)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (f"write {errno.EIO}", "reports errors"),
        (f"sync {errno.EIO} lose", "reports errors"),
        (f"write {errno.ENOSPC}", "full"),
    ],
    ids=["EIO of writes", "EIO of syncs", "ENOSPC of writes"],
)
async def test_a_prompt_that_a_failing_disk_did_not_store_is_not_acknowledged(
    tmp_path: Path, fault: str, says: str
) -> None:
    """The refusal has the reason, and the status works. hutchd recovers by itself; running turns lose nothing."""
    async with failing_host(tmp_path) as (made, faults), made.client() as hutch:
        session = await made.script(
            hutch, [{"text": "before"}, {"wait_file": "go"}, {"repeat": {"times": 20, "line": {"text": "z" * 2000}}}]
        )
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await log.until(lambda log: log.of("text"))
            faults.set(fault)
            error = await refused(hutch, session)
            hit = faults.hits
            Path(session.cwd, "go").touch()
            status = await hutch.get_status()
            await wait_for(lambda: faults.hits > hit)
            promised = [named(event) for event in log.events]
            during = await record(hutch, session)
            faults.set("")
            await healed(hutch)
            end = await log.ended(turn)
            after = await record(hutch, session)
        submitted = [turn.state for turn in await hutch.list_turns(session.id)]

        assert says in error.message
        assert (status.store.ok, status.pid) == (False, made.pid)
        assert during == promised
        assert end.state == "completed"
        assert without_gaps(log.events)
        assert [named(event) for event in log.events] == after
        assert submitted == ["completed"]


async def test_a_failed_sync_is_not_simply_repeated(tmp_path: Path) -> None:
    """A sync fails once and loses its data. A second sync would succeed without storing it."""
    async with failing_host(tmp_path) as (made, faults), made.client() as hutch:
        session = await made.script(hutch, [{"text": "done"}])
        kept = m.SubmitPrompt(session.id, "kept", idempotency_key="kept")
        lost = m.SubmitPrompt(session.id, "lost", idempotency_key="lost")
        first: m.Turn = await hutch.call("submit_prompt", kept)
        async with log_of(hutch, session) as log:
            await log.ended(first)
        faults.set(f"sync {errno.EIO} lose")
        with pytest.raises(HutchError) as caught:
            await hutch.call("submit_prompt", lost)
        faults.set("")
        await healed(hutch)
        between = [turn.prompt for turn in await hutch.list_turns(session.id)]
        second: m.Turn = await hutch.call("submit_prompt", lost)
        async with log_of(hutch, session) as log:
            await log.ended(second)
        await made.kill()
        await made.start()
        turns = await hutch.list_turns(session.id)
        repeated: m.Turn = await hutch.call("submit_prompt", lost)

        assert caught.value.reason is Reason.STORE_UNAVAILABLE
        assert between == ["kept"]
        assert [(turn.id, turn.state) for turn in turns] == [(first.id, "completed"), (second.id, "completed")]
        assert repeated.id == second.id
        assert "store_available" in made.log_text()


async def test_a_file_system_that_turns_read_only_loses_nothing(tmp_path: Path) -> None:
    """ext4 does so after an error. Prompts are refused; after a new mount every acknowledged event is there."""
    image = tmp_path / "image"
    async with host(SETTINGS, start=False) as made:
        with ext4(made.state, image, "24m"):
            try:
                await made.start()
                async with made.client() as hutch:
                    session = await made.script(hutch, [{"text": "said"}])
                    async with log_of(hutch, session) as log:
                        await log.play(session, "go")
                        promised = [named(event) for event in log.events]
                    subprocess.run(["mount", "-o", "remount,abort", str(made.state)], check=True)
                    await refused(hutch, session)
                    with anyio.fail_after(PROMPTLY):
                        status = await hutch.get_status()
                    during = await _still_read(hutch, session)
                await made.kill()
            finally:
                processes.kill(processes.marked(made.mark))
                await processes.gone(made.mark)
        with ext4(made.state, image, "24m"):
            await made.start()
            async with made.client() as hutch:
                after = await record(hutch, session)
                again = await made.script(hutch, [{"text": "again"}])
                async with log_of(hutch, again) as log:
                    end = await log.play(again, "go")
            await made.stop()

        assert not status.store.ok
        assert during == promised
        assert after[: len(promised)] == promised
        assert end.state == "completed"


async def _still_read(hutch: HutchClient, session: m.Session) -> list[tuple[int, str]]:
    """Read history. Retry while the store opens its files again, since it refuses reads meanwhile."""
    with anyio.fail_after(DEADLINE):
        while True:
            try:
                return await record(hutch, session)
            except HutchError as error:
                if error.reason is not Reason.STORE_UNAVAILABLE:
                    raise
                await anyio.sleep(0.05)
