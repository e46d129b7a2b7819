"""The vault on a real store: the stored data, the credentials that open, and a copy of the database."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from hutch_daemon.keys.credential import Refresh, secret_of
from hutch_daemon.keys.vault import Vault, session_context
from hutch_daemon.store import keys as rows
from hutch_daemon.store import sessions
from hutch_daemon.store.rows import KeyRow
from hutch_shared.errors import HutchError, Reason
from hutch_shared.secret import Secret
from tests.daemon.keys.stage import KEY, OWNER, VaultStage, keep_session, session, vault_stage


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[VaultStage]:
    async with vault_stage(tmp_path) as made:
        yield made


async def secret(vault: Vault, name: str | None = None, provider: str = "anthropic") -> str:
    return (await vault.reveal(OWNER, provider, name))[1].secret.reveal()


async def test_a_stored_key_shows_only_its_last_characters(stage: VaultStage) -> None:
    """The vault returns a description; on disk the secret is sealed."""
    shown = await stage.put()
    found = await secret(stage.vault)

    assert (shown.name, shown.hint, shown.kind) == ("default", "6789", "api_key")
    assert found == KEY
    for path in stage.folder.iterdir():
        assert KEY.encode() not in path.read_bytes()


async def test_a_keys_destination_is_sealed_with_it(stage: VaultStage) -> None:
    """Kind, base URL and refresh token come back unchanged, and none is stored in clear."""
    refresh = Refresh(Secret("refresh-0123456789"), "https://id.example/token", "client")
    await stage.put(kind="oauth", base_url="https://gateway.example/v1/", expires_at=5, refresh=refresh)
    _, credential = await stage.vault.reveal(OWNER, "anthropic")

    assert (credential.kind, credential.base_url, credential.expires_at) == ("oauth", "https://gateway.example/v1", 5)
    assert credential.refresh == refresh
    with closing(sqlite3.connect(stage.folder / "hutch.db")) as database:
        assert "gateway.example" not in "".join(database.iterdump())


@pytest.mark.parametrize("text", ["", "\n", "a b", "a\nb", "schlüssel", "a\x7f", "x" * 20_000])
def test_a_key_that_does_not_fit_a_header_is_refused(text: str) -> None:
    """A key is one line of printable ASCII; the error does not repeat the input."""
    with pytest.raises(HutchError) as refused:
        secret_of(text)

    assert refused.value.reason is Reason.INVALID_PARAMS
    assert not text.strip() or text not in refused.value.message


def test_one_trailing_newline_is_removed_from_a_key() -> None:
    """Keys come from files and pipes."""
    assert secret_of("sk-1\n").reveal() == "sk-1"
    assert secret_of("sk-1\r\n").reveal() == "sk-1"


@pytest.mark.parametrize(
    "url",
    ["http://example.com", "ftp://example.com", "https://u:p@example.com", "https://e.com/?a=b", "https:///x", "x"],
)
async def test_a_key_for_an_unsafe_url_is_refused(stage: VaultStage, url: str) -> None:
    """A base URL is https, or http to this machine, and contains nothing that disguises its host."""
    with pytest.raises(HutchError) as refused:
        await stage.put(base_url=url)

    assert refused.value.reason is Reason.INVALID_PARAMS


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "x" * 65])
async def test_a_name_is_a_plain_word(stage: VaultStage, name: str) -> None:
    """Names are used in envelopes and on command lines."""
    with pytest.raises(HutchError):
        await stage.put(name)


async def test_the_chosen_key_comes_with_the_reason(stage: VaultStage) -> None:
    """The session names it, its owner chose it, it is the only one, or it is the default; otherwise NO_KEY."""
    why = []
    await stage.put("work", "sk-work")
    why.append((await stage.vault.choose(OWNER, "anthropic")).why)
    await stage.put("home", "sk-home")
    with pytest.raises(HutchError, match="home, work") as several:
        await stage.vault.choose(OWNER, "anthropic")
    await stage.put("default", "sk-default")
    why.append((await stage.vault.choose(OWNER, "anthropic")).why)
    await stage.vault.use(OWNER, "anthropic", "home")
    why.append((await stage.vault.choose(OWNER, "anthropic")).why)
    why.append((await stage.vault.choose(OWNER, "anthropic", "work")).why)
    chosen = [key.name for key in (await stage.vault.list_(OWNER)).keys if key.chosen]

    assert several.value.reason is Reason.NO_KEY
    assert [words.split(",")[0] for words in why] == [
        "it is your only key for anthropic",
        "no key was chosen",
        "you chose home with `hutch key use`",
        "the session asks for work",
    ]
    assert chosen == ["home"]


async def test_another_owners_keys_look_missing(stage: VaultStage) -> None:
    """They are neither listed nor used."""
    await stage.put()
    with pytest.raises(HutchError) as refused:
        await stage.vault.reveal(OWNER + 1, "anthropic")

    assert refused.value.reason is Reason.NO_KEY
    assert (await stage.vault.list_(OWNER + 1)).keys == ()


async def test_a_replaced_key_keeps_its_id_and_a_deleted_one_is_gone(stage: VaultStage) -> None:
    """A lease names the id: it follows a replacement and ends with a deletion."""
    first = await stage.put()
    second = await stage.put(secret="sk-2")
    now = await secret(stage.vault)
    await stage.vault.delete(OWNER, "anthropic", "default")
    with pytest.raises(HutchError) as gone:
        await stage.vault.reveal(OWNER, "anthropic")

    assert (first.id, now) == (second.id, "sk-2")
    assert gone.value.reason is Reason.NO_KEY


async def test_an_old_database_revives_no_deleted_key(tmp_path: Path) -> None:
    """A deleted key and an old version of a replaced one are refused and reported; new keys work."""
    backup = tmp_path / "yesterday.db"
    async with vault_stage(tmp_path) as stage:
        await stage.put("gone", "sk-gone-0123456789abcd")
        await stage.put("changed", "sk-old-0123456789abcdef")
        await stage.put("same", "sk-same-0123456789abcd")
        await stage.store.backup(backup)
        await stage.vault.delete(OWNER, "anthropic", "gone")
        await stage.put("changed", "sk-new-0123456789abcdef")
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / f"hutch.db{suffix}").unlink(missing_ok=True)
    shutil.copy(backup, tmp_path / "hutch.db")
    async with vault_stage(tmp_path) as stage:
        refused = []
        for name in ("gone", "changed"):
            with pytest.raises(HutchError) as error:
                await stage.vault.reveal(OWNER, "anthropic", name)
            refused.append(error.value.reason)
        notices = await stage.vault.notices()
        troubled = {key.name for key in (await stage.vault.list_(OWNER)).keys if key.trouble}
        same = await secret(stage.vault, "same")
        await stage.put("changed", "sk-newest")
        newest = await secret(stage.vault, "changed")

    assert refused == [Reason.KEY_UNREADABLE] * 2
    assert (len(notices), troubled) == (2, {"gone", "changed"})
    assert (same, newest) == ("sk-same-0123456789abcd", "sk-newest")


@pytest.mark.parametrize("damage", ["missing", "changed"])
async def test_without_its_ledger_the_vault_refuses_every_key(tmp_path: Path, damage: str) -> None:
    """A missing or edited ledger makes every stored key outdated; the error says what to do."""
    async with vault_stage(tmp_path) as stage:
        await stage.put()
    ledger = tmp_path / "vault.ledger"
    if damage == "missing":
        ledger.unlink()
    else:
        ledger.write_bytes(ledger.read_bytes().replace(b'"epoch":1', b'"epoch":0'))
    async with vault_stage(tmp_path) as stage:
        with pytest.raises(HutchError, match="add the keys again"):
            await secret(stage.vault)
        notices = await stage.vault.notices()
        await stage.put(secret="sk-anew")
        anew = await secret(stage.vault)
    async with vault_stage(tmp_path) as stage:
        later = await secret(stage.vault)

    assert len(notices) == 1
    assert (anew, later) == ("sk-anew", "sk-anew")


async def test_a_moved_or_changed_row_does_not_open(stage: VaultStage) -> None:
    """The envelope binds owner, provider, id and version: an edit of the database gains nothing."""
    await stage.put()
    await stage.put(provider="openai", secret="sk-other")
    for change in ("owner = owner + 1", "provider = 'gemini'", "version = version + 1000", "id = 'k-x'"):
        before = await stage.store.read(lambda conn: rows.list_(conn, provider="anthropic"))
        await stage.store.write(
            lambda tx, change=change: tx.execute(f"UPDATE keys SET {change} WHERE provider = 'anthropic'")  # type: ignore[misc]
        )
        (row,) = [one for one in await stage.store.read(rows.list_) if one.sealed == before[0].sealed]
        with pytest.raises(HutchError) as refused:
            stage.vault.open_row(row)
        await stage.store.write(lambda tx, row=before[0]: restore(tx, row))  # type: ignore[misc]

        assert refused.value.reason is Reason.KEY_UNREADABLE


def restore(tx: object, row: KeyRow) -> None:
    rows.KEYS.delete(tx, "WHERE sealed = ?", (row.sealed,))  # type: ignore[arg-type]
    rows.KEYS.insert(tx, row)  # type: ignore[arg-type]


async def test_the_master_key_is_rotated_while_work_goes_on(stage: VaultStage) -> None:
    """Every credential and every session's sealed settings open with the new key only."""
    for name in ("a", "b", "c"):
        await stage.put(name, f"sk-{name}")
    await keep_session(stage.store, session(sealed=stage.vault.seal(session_context("s-1"), b"settings")))
    before = stage.master.current
    count = await stage.vault.rotate_master()
    vault = await stage.again()
    kept = await stage.store.read(lambda conn: sessions.get(conn, "s-1"))
    assert kept is not None
    assert kept.sealed is not None

    assert count == 4
    assert before.key not in {key.key for key in stage.master.all()}
    assert [await secret(vault, name) for name in ("a", "b", "c")] == ["sk-a", "sk-b", "sk-c"]
    assert vault.open(session_context("s-1"), kept.sealed) == b"settings"


STEPS = [
    *(f"keys.rotate.{step}" for step in ("begun", "wrapped", "ledger", "finished")),
    *(f"keys.rotate.batch:{number}" for number in (1, 2, 3, 5)),
    *(f"keys.file.written:{number}" for number in (1, 2)),
    "keys.master.renamed",
]
WORK = """
import anyio, sys
from pathlib import Path
from hutch_shared.secret import Secret
from tests.daemon.keys.stage import OWNER, vault_stage

async def work():
    async with vault_stage(Path(sys.argv[1])) as stage:
        match sys.argv[2]:
            case "rotate":
                await stage.vault.rotate_master()
            case "put":
                await stage.put("new", "sk-new")
            case "delete":
                await stage.vault.delete(OWNER, "anthropic", "a")

anyio.run(work)
"""


def killed_at(folder: Path, act: str, step: str) -> int:
    """Run a child process that dies at `step`; return its exit status."""
    root = Path(__file__).parents[3]
    environ = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "HUTCH_FAILPOINT": step}
    command = [sys.executable, "-c", WORK, str(folder), act]
    return subprocess.run(command, env=environ, cwd=root, timeout=100, capture_output=True).returncode


@pytest.mark.system
@pytest.mark.parametrize("step", STEPS)
async def test_a_rotation_killed_anywhere_loses_nothing(tmp_path: Path, step: str) -> None:
    """After kill -9 at any step, every credential opens at the next start, under one master key, and none is in
    clear."""
    async with vault_stage(tmp_path) as stage:
        for name in ("a", "b", "c"):
            await stage.put(name, f"sk-{name}-0123456789abcdef")
        await keep_session(stage.store, session(sealed=stage.vault.seal(session_context("s-1"), b"settings")))
    code = killed_at(tmp_path, "rotate", step)
    async with vault_stage(tmp_path) as stage:
        found = [await secret(stage.vault, name) for name in ("a", "b", "c")]
        kept = await stage.store.read(lambda conn: sessions.get(conn, "s-1"))
        assert kept is not None
        assert kept.sealed is not None
        plain = stage.vault.open(session_context("s-1"), kept.sealed)
        keys = stage.master.all()

    assert code == -9
    assert found == [f"sk-{name}-0123456789abcdef" for name in ("a", "b", "c")]
    assert plain == b"settings"
    assert len(keys) == 1
    assert not (tmp_path / "master.key.next").exists()
    for path in tmp_path.iterdir():
        assert b"-0123456789abcdef" not in path.read_bytes()


@pytest.mark.system
async def test_a_killed_change_is_complete_or_undone(tmp_path: Path) -> None:
    """A key in the database stays; a key that was removed from the ledger does not come back."""
    async with vault_stage(tmp_path) as stage:
        await stage.put("a", "sk-a")
    codes = [killed_at(tmp_path, "put", "keys.put.stored"), killed_at(tmp_path, "delete", "keys.delete.struck")]
    async with vault_stage(tmp_path) as stage:
        new = await secret(stage.vault, "new")
        with pytest.raises(HutchError) as refused:
            await secret(stage.vault, "a")

    assert codes == [-9, -9]
    assert new == "sk-new"
    assert refused.value.reason is Reason.KEY_UNREADABLE


async def test_a_change_and_the_callers_part_are_one_transaction(stage: VaultStage) -> None:
    """If the caller's part fails, the vault's part is not stored either."""

    def refuse(*_: object) -> None:
        raise HutchError(Reason.WRONG_STATE)

    await stage.put("work", "sk-work")
    await stage.put("home", "sk-home")
    for change in (
        lambda: stage.put("new", "sk-new", also=refuse),
        lambda: stage.vault.use(OWNER, "anthropic", "work", also=refuse),
    ):
        with pytest.raises(HutchError):
            await change()

    listed = (await stage.vault.list_(OWNER)).keys
    assert [(key.name, key.chosen) for key in listed] == [("home", False), ("work", False)]


async def test_a_rotation_is_recorded_after_all_envelopes_are_under_the_new_key(stage: VaultStage) -> None:
    """The caller's part runs once, when no envelope remains under the old master key."""
    kept = await stage.put()
    marks: list[str] = []

    def record(tx: Any) -> None:
        marks.extend(row.master for row in rows.KEYS.all(tx))

    await stage.vault.rotate_master(also=record)

    (row,) = await stage.store.read(lambda conn: rows.KEYS.all(conn, "WHERE id = ?", (kept.id,)))
    assert marks == [row.master] == [stage.master.current.mark]


async def test_a_reader_delays_the_removal_and_the_reply_says_so(stage: VaultStage) -> None:
    """While a backup reads, the log keeps the sealed bytes; they are removed when it ends, without another request."""
    kept = await stage.put()
    (row,) = await stage.store.read(rows.KEYS.all)
    log = stage.folder / "hutch.db-wal"
    with closing(
        sqlite3.connect(f"file:{stage.folder / 'hutch.db'}?mode=ro", uri=True, isolation_level=None)
    ) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM keys").fetchone()
        await stage.vault.delete(OWNER, "anthropic", "default")
        said = await stage.vault.erased(kept.id)
        held = log.read_bytes()
    with anyio.fail_after(30):
        while (later := await stage.vault.erased(kept.id)) != "":
            pass

    assert str(log) in said
    assert row.sealed in held
    assert later == ""
    assert log.read_bytes() == b""
    assert row.sealed not in (stage.folder / "hutch.db").read_bytes()


async def test_a_database_that_a_restore_moved_aside_loses_the_key_too(stage: VaultStage) -> None:
    """Its other keys stay; a file that is not a database is named in the reply."""
    kept = await stage.put()
    await stage.put("other")
    (row,) = await stage.store.read(lambda conn: rows.KEYS.all(conn, "WHERE name = 'default'"))
    aside = stage.folder / "hutch.db.before-restore-0123abcd"
    broken = stage.folder / "hutch.db.before-restore-ffffffff"
    await stage.store.backup(aside)
    broken.write_bytes(b"not a database" * 100)
    before = row.sealed in aside.read_bytes()
    await stage.vault.delete(OWNER, "anthropic", "default")
    said = await stage.vault.erased(kept.id)
    with closing(sqlite3.connect(aside)) as database:
        left = database.execute("SELECT name FROM keys").fetchall()

    assert before
    assert row.sealed not in aside.read_bytes()
    assert left == [("other",)]
    assert str(broken) in said
    assert str(aside) not in said


async def test_a_database_that_was_moved_aside_is_named_while_a_reader_keeps_the_key_in_it(stage: VaultStage) -> None:
    """The next removal finds it again."""
    kept = await stage.put()
    (row,) = await stage.store.read(rows.KEYS.all)
    aside = stage.folder / "hutch.db.before-restore-0123abcd"
    await stage.store.backup(aside)
    with closing(sqlite3.connect(aside, isolation_level=None)) as reader:
        reader.execute("PRAGMA journal_mode = WAL")
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM keys").fetchone()
        await stage.vault.delete(OWNER, "anthropic", "default")
        said = await stage.vault.erased(kept.id)
        held = row.sealed in aside.read_bytes()
    later = await stage.vault.erased(kept.id)

    assert held
    assert str(aside) in said
    assert later == ""
    assert row.sealed not in aside.read_bytes()
