"""A database that is damaged, newer, or restored from a backup: reports of hutchd, `hutch doctor` and followers."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.crash.disks.disk import named, record
from tests.sampling import sample
from tests.system.host import KEY, Host, host
from tests.system.log import log_of, wait_for

pytestmark = pytest.mark.system

Harm = Callable[[Path], None]
SETTINGS = "[executors]\nspares = 0\n"


def overwrite(path: Path) -> None:
    """Overwrite everything after the header with random bytes."""
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))


def cut(path: Path) -> None:
    """Truncate the file to half its size."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Truncate the file to nothing."""
    os.truncate(path, 0)


def beyond(path: Path) -> None:
    """Mark the file as written by a later version of Hutch."""
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("PRAGMA user_version = 9999")


@pytest.fixture(scope="module")
async def stopped() -> AsyncIterator[Host]:
    """A host with a stored turn, whose hutchd has stopped."""
    async with host(SETTINGS) as made:
        async with made.client() as hutch:
            session = await made.script(hutch, [{"repeat": {"times": 50, "line": {"text": "w" * 1000}}}], name="kept")
            async with log_of(hutch, session) as log:
                await log.play(session, "go")
        await made.stop()
        yield made


@sample(2)
@pytest.mark.parametrize(
    ("harm", "says", "advises"),
    [
        (overwrite, "damaged", "hutch daemon restore"),
        (cut, "damaged", "hutch daemon restore"),
        (empty, "damaged", "hutch daemon restore"),
        (beyond, "newer Hutch", "update Hutch"),
    ],
    ids=["overwritten", "truncated", "empty", "newer"],
)
async def test_an_unusable_database_is_named_and_not_changed(
    stopped: Host, tmp_path: Path, harm: Harm, says: str, advises: str
) -> None:
    """hutchd does not start, and names the file. `hutch doctor` says how to recover."""
    copy = replace(stopped, root=tmp_path)
    for folder in (copy.home, copy.work, copy.runtime):
        folder.mkdir()
    shutil.copytree(stopped.state, copy.state)
    database = copy.state / "hutch.db"
    copy.write_settings()
    harm(database)
    before = database.read_bytes()
    refused = await copy.hutchd()
    doctor = await copy.hutch("doctor", code=1)

    assert refused.code == 1
    assert says in refused.err
    assert "Traceback" not in refused.err
    assert str(database) in refused.err or harm is beyond
    finding = doctor.out[doctor.out.index(f"!!  database: {database}") :]
    assert advises in finding.splitlines()[1]
    assert database.read_bytes() == before


async def test_random_bytes_after_the_last_commit_of_the_log_are_ignored(tmp_path: Path) -> None:
    """A kill during a write leaves such bytes. hutchd starts and has every acknowledged event."""
    async with host(SETTINGS) as made:
        async with made.client() as hutch:
            session = await made.script(hutch, [{"text": "said"}])
            async with log_of(hutch, session) as log:
                await log.play(session, "go")
                promised = [named(event) for event in log.events]
        await made.kill()
        log_file = made.state / "hutch.db-wal"
        with log_file.open("ab") as file:
            file.write(os.urandom(20_000))
        await made.start()
        async with made.client() as hutch:
            after = await record(hutch, session)

        assert after[: len(promised)] == promised


async def test_a_restored_backup_is_another_journal(tmp_path: Path) -> None:
    """The backup is made during a turn.

    Old cursors are refused, old keys are reported, and the damaged file is kept.
    """
    backup = tmp_path / "backup.db"
    async with host(SETTINGS) as made:
        async with made.client() as hutch:
            await made.hutch("key", "add", "anthropic", "--name", "old", input=KEY)
            session = await made.script(
                hutch, [{"text": "before"}, {"wait_file": "go"}, {"text": "after"}, {"turn": True}, {"text": "again"}]
            )
            turn = await hutch.submit_prompt(session.id, "go")
            async with log_of(hutch, session) as log:
                await log.until(lambda log: log.of("text"))
                await made.hutch("daemon", "backup", str(backup))
                Path(session.cwd, "go").touch()
                await log.ended(turn)
                cursor = log.follow.after
            await made.hutch("key", "rm", "anthropic", "--name", "old")
            twice = await made.hutch("daemon", "backup", str(backup), code=1)
            running = await made.hutch("daemon", "restore", str(backup), code=1)
        await made.stop()
        overwrite(made.state / "hutch.db")
        damaged = (made.state / "hutch.db").read_bytes()
        missing = await made.hutch("daemon", "restore", str(tmp_path / "nothing"), code=1)
        restored = await made.hutch("daemon", "restore", str(backup))
        (kept,) = made.state.glob("hutch.db.before-restore-*")
        await made.start()
        async with made.client() as hutch:
            with pytest.raises(HutchError) as refused:
                async with hutch.follow(m.FollowEvents(session.id, cursor, journal=session.journal)):
                    pass
            history = [kind for _, kind in await record(hutch, session)]
            (then,) = await hutch.list_turns(session.id)
            async with log_of(hutch, session) as log:
                later = await log.play(session, "and on")
            doctor = await made.hutch("doctor", code=None)
            status = await hutch.get_status()

        assert "exists" in twice.err
        assert "stop it first" in running.err
        assert "no file" in missing.err
        assert str(kept) in restored.err
        assert kept.read_bytes() == damaged
        assert refused.value.reason is Reason.JOURNAL_REPLACED
        assert history == ["turn_started", "text"]
        assert (then.state, then.reason) == ("failed", "outcome_unknown")
        assert later.state == "completed"
        assert f"kept from earlier restores: {kept}" in doctor.out
        assert any("An old or deleted key is in the database" in notice for notice in status.notices)


async def test_doctor_names_wrong_settings_directories_and_keys(stopped: Host, tmp_path: Path) -> None:
    """Each has a line with advice. The command needs no hutchd and changes nothing."""
    copy = replace(stopped, root=tmp_path, settings="[turns]\ntimeuot = 3\n")
    for folder in (copy.home, copy.work):
        folder.mkdir()
    copy.runtime.mkdir(mode=0o777)
    copy.runtime.chmod(0o777)
    shutil.copytree(stopped.state, copy.state)
    copy.write_settings()
    with_key = copy.state / "hutch.db"
    with closing(sqlite3.connect(with_key)) as conn, conn:
        columns = [record[1] for record in conn.execute("PRAGMA table_info(keys)")]
        values = ["k" if name in {"id", "provider", "name", "kind", "master", "hint"} else 1 for name in columns]
        marks = ", ".join("?" for _ in columns)
        conn.execute(f"INSERT INTO keys ({', '.join(columns)}) VALUES ({marks})", values)
    (copy.state / "master.key").unlink()
    (copy.state / "hutch.db.lock").chmod(0o644)
    done = await copy.hutch("doctor", "-o", "json", code=1)
    advice = {one["subject"].split(":")[0]: one["advice"] for one in done.json if not one["ok"]}

    assert "did you mean turns.timeout?" in advice["settings"]
    assert "hutch.db.lock" in advice["state"]
    assert "chmod go-w" in advice["sockets"]
    assert "restore it" in advice["master key"]
    assert "hutch daemon start" in next(text for text in advice.values() if "Start it" in text)
    assert not (copy.state / "master.key").exists()


async def test_a_running_hutchd_that_finds_damage_stops_accepting(tmp_path: Path) -> None:
    """hutchd reports the damage, still answers for its status, and does not write to the file."""
    async with host(SETTINGS) as made:
        async with made.client() as hutch:
            session = await made.script(hutch, [{"repeat": {"times": 400, "line": {"text": "v" * 4000}}}])
            async with log_of(hutch, session) as log:
                await log.play(session, "go")
        await made.stop()
        await made.start()
        async with made.client(redial_for=0) as hutch:
            overwrite(made.state / "hutch.db")
            with pytest.raises(HutchError) as unreadable:
                await record(hutch, session)
            ran = await made.hutch("run", "--agent", "script", "hello", code=None)
            doctor = await wait_for_damage(made)
        damaged = (made.state / "hutch.db").read_bytes()
        await made.kill()

        assert unreadable.value.reason in (Reason.STORE_UNAVAILABLE, Reason.CONNECTION_LOST)
        assert ran.code != 0
        assert "hutch daemon restore" in doctor
        assert (made.state / "hutch.db").read_bytes() == damaged


async def wait_for_damage(made: Host) -> str:
    """Return the output of `hutch doctor` once a running hutchd has found damage."""
    await wait_for(lambda: "store_unavailable" in made.log_text())
    return (await made.hutch("doctor", code=1)).out
