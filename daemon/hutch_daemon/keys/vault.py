"""The vault: credentials by owner, provider and name, sealed in the database. It also seals texts of other modules.

What is always true:

- The database, its log and its backups contain only envelopes. An envelope opens only in the row it was made for.
- Secrets leave the vault as `Secret`; no error, log line or reply of the vault contains one.
- A row that the ledger does not list is refused, even though it is in the database.
- The sealed bytes of a removed or replaced credential leave the database and its log; `erased` waits for that.
- A rotation of the master key may be interrupted at any point; every envelope stays readable.

Changes run one after the other, and complete even if their caller is cancelled.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio
from anyio import to_thread

from hutch_daemon.keys import envelope
from hutch_daemon.keys.credential import Credential, Refresh, check_url, pack, unpack
from hutch_daemon.keys.ledger import Ledger
from hutch_daemon.keys.master import MasterKey, MasterKeys
from hutch_daemon.store import database, meta
from hutch_daemon.store import keys as rows
from hutch_daemon.store.records import Executes, Tx
from hutch_daemon.store.rows import KeyRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint
from hutch_shared.ids import new_id
from hutch_shared.secret import Secret
from hutch_shared.times import now_ms, to_wire

__all__ = ["Chosen", "Vault", "WithKey", "session_context"]

T = TypeVar("T")
_BATCH: Final = 100
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ERASE_SECONDS: Final = 2.0
_HINTED: Final = 20
"""The shortest secret, in characters, whose last four characters are shown as a hint."""

WithKey = Callable[[Tx, KeyRow], object]
"""Writes the caller's own rows (audit lines, events) in the transaction that changes a credential."""

Opened = Callable[[str, Credential], object]
"""Called with the id and content of each credential that the vault opens, before the vault returns it."""


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Chosen:
    """The credential that a session uses, and the reason for this choice."""

    row: KeyRow
    why: str


def session_context(session: str) -> str:
    """Return the purpose that a session's settings are sealed for. A rotation of the master key uses it too."""
    return f"session/{session}"


class Vault:
    """The credentials in the database. Use `load` to create one."""

    def __init__(self, store: Store, master: MasterKeys, ledger: Ledger, opened: Opened) -> None:
        """Use `load` instead."""
        self._store = store
        self._master = master
        self._ledger = ledger
        self._opened = opened
        self._lock = anyio.Lock()

    @classmethod
    async def load(cls, store: Store, master: MasterKeys, ledger: Path, *, opened: Opened = _nothing) -> Vault:
        """Read the ledger, add the rows that a crash left out of it, and finish an interrupted rotation.

        `opened` is called with each credential that the vault opens.
        """
        stored = await store.read(rows.list_)
        highest = max((row.version for row in stored), default=0)
        read = await to_thread.run_sync(Ledger.open, ledger, master.all(), highest)
        vault = cls(store, master, read, opened)
        late = [(row.id, row.version) for row in stored if row.version > read.epoch]
        if late:
            await to_thread.run_sync(read.keep, master.current, late)
        if master.older:
            await vault.rewrap_all()
        return vault

    @property
    def master_source(self) -> str:
        """The source of the master key in words, for `hutch status` and `hutch doctor`."""
        return self._master.source

    async def notices(self) -> tuple[str, ...]:
        """Return one sentence for each problem that an administrator should see."""
        if self._ledger.trouble:
            return (self._ledger.trouble,)
        past = [row for row in await self._store.read(rows.list_) if not self._holds(row)]
        return tuple(
            f"An old or deleted key is in the database and refused: uid {row.owner}, {row.provider}, {row.name}."
            for row in past
        )

    # ------------------------------------------------------------ credentials

    async def put(
        self,
        owner: int,
        provider: str,
        name: str,
        secret: Secret,
        *,
        kind: m.CredentialKind = "api_key",
        base_url: str | None = None,
        expires_at: int | None = None,
        refresh: Refresh | None = None,
        also: WithKey = _nothing,
    ) -> m.ApiKey:
        """Store a credential, replacing one of the same name. The caller has checked `secret` with `secret_of`.

        `also` runs in the transaction. INVALID_PARAMS for a URL that a key may not be sent to; STORE_UNAVAILABLE if
        the credential is not durable.
        """
        for word in (provider, name):
            if not _NAME.fullmatch(word):
                raise HutchError(
                    Reason.INVALID_PARAMS, f"{word!r} cannot name a provider or key: use letters, digits, . _ and -."
                )
        base_url = None if base_url is None else check_url(base_url)
        if refresh is not None:
            check_url(refresh.url)
        credential = Credential(secret, kind, base_url, expires_at, refresh)
        return await self.put_credential(owner, provider, name, credential, also=also)

    async def put_credential(
        self, owner: int, provider: str, name: str, credential: Credential, *, also: WithKey = _nothing
    ) -> m.ApiKey:
        """Store a checked credential, as `put` does."""
        text = credential.secret.reveal()
        async with self._changing():
            before = await self._store.read(lambda conn: rows.get(conn, owner, provider, name))
            now = now_ms()
            row = KeyRow(
                id=new_id("key") if before is None else before.id,
                owner=owner,
                provider=provider,
                name=name,
                created_at=now if before is None else before.created_at,
                updated_at=None if before is None else now,
                sealed=b"",
                wrapped=b"",
                master=self._master.current.mark,
                kind=credential.kind,
                version=self._ledger.epoch + 1,
                hint=text[-4:] if len(text) >= _HINTED else "",
                last_used_at=None if before is None else before.last_used_at,
                uses=0 if before is None else before.uses,
            )
            sealed = envelope.seal_envelope(self._master.current.key, _purpose(row), pack(credential))
            row = replace(row, wrapped=sealed[: envelope.HEAD], sealed=sealed[envelope.HEAD :])

            def unit(tx: Tx) -> None:
                rows.put(tx, row)
                also(tx, row)

            await self._store.write(unit)
            failpoint("keys.put.stored")
            await self._in_ledger(partial(self._ledger.keep, self._master.current, [(row.id, row.version)]))
        return self._shown(row, chosen=False)

    async def reveal(self, owner: int, provider: str, name: str | None = None) -> tuple[KeyRow, Credential]:
        """Return the credential that `choose` picks. NO_KEY; KEY_UNREADABLE if its row does not open or is old."""
        row = (await self.choose(owner, provider, name)).row
        if not self._holds(row):  # perhaps replaced since the row was read: read it again
            row = (await self.choose(owner, provider, name)).row
        return row, self.open_row(row)

    async def reveal_id(self, credential: str) -> tuple[KeyRow, Credential]:
        """Return the credential with this id. Raises the errors of `reveal`."""
        row = await self._by_id(credential)
        if not self._holds(row):
            row = await self._by_id(credential)
        return row, self.open_row(row)

    async def choose(self, owner: int, provider: str, name: str | None = None) -> Chosen:
        """Return the credential for a session: the named one, the one chosen by `use`, the only one, or `default`.

        NO_KEY, with the existing names, if none of these exists.
        """
        stored = await self._store.read(lambda conn: rows.list_(conn, owner, provider))
        preferred = await self._store.read(lambda conn: meta.get(conn, _choice(owner, provider)))
        by_name = {row.name: row for row in stored}
        there = ", ".join(by_name) or "none"
        if name is not None:
            if name not in by_name:
                raise HutchError(Reason.NO_KEY, f"You have no key named {name} for {provider}; you have: {there}.")
            return Chosen(by_name[name], f"the session asks for {name}")
        if preferred in by_name:
            return Chosen(by_name[preferred], f"you chose {preferred} with `hutch key use`")
        if len(stored) == 1:
            return Chosen(stored[0], f"it is your only key for {provider}")
        if "default" in by_name:
            return Chosen(by_name["default"], "no key was chosen, and one is named default")
        if not stored:
            raise HutchError(Reason.NO_KEY, f"You have no key for {provider}; add one with `hutch key add {provider}`.")
        raise HutchError(
            Reason.NO_KEY,
            f"You have several keys for {provider} ({there}): choose one with `hutch key use {provider} NAME`.",
        )

    def open_row(self, row: KeyRow) -> Credential:
        """Open a credential's envelope; KEY_UNREADABLE."""
        if not self._holds(row):
            why = self._ledger.trouble or (
                f"The stored key {row.name} for {row.provider} was replaced or deleted later: the database "
                "seems to come from a backup. Add the key again."
            )
            raise HutchError(Reason.KEY_UNREADABLE, why)
        credential = unpack(self._open(_purpose(row), row.wrapped + row.sealed, row.master))
        self._opened(row.id, credential)
        return credential

    async def _by_id(self, credential: str) -> KeyRow:
        row = await self._store.read(lambda conn: rows.KEYS.one(conn, "WHERE id = ?", (credential,)))
        if row is None:
            raise HutchError(Reason.NO_KEY, "The key was deleted.")
        return row

    async def list_(self, owner: int) -> m.ApiKeys:
        """Return the owner's credentials without their secrets."""
        keys = []
        for row in await self._store.read(lambda conn: rows.list_(conn, owner)):
            preferred = await self._store.read(lambda conn, row=row: meta.get(conn, _choice(owner, row.provider)))  # type: ignore[misc]
            keys.append(self._shown(row, chosen=preferred == row.name))
        return m.ApiKeys(keys=tuple(keys))

    async def use(self, owner: int, provider: str, name: str, *, also: WithKey = _nothing) -> None:
        """Choose the credential for sessions that do not name one. `also` runs in the transaction. NO_KEY."""
        row = (await self.choose(owner, provider, name)).row

        def unit(tx: Tx) -> None:
            meta.put(tx, _choice(owner, provider), name)
            also(tx, row)

        await self._store.write(unit)

    async def delete(self, owner: int, provider: str, name: str, *, also: WithKey = _nothing) -> KeyRow:
        """Delete a credential for good; return its row. `also` runs in the transaction. NO_KEY.

        The credential is removed from the ledger first, so that its row is refused even if the database is restored.
        """
        async with self._changing():
            row = await self._store.read(lambda conn: rows.get(conn, owner, provider, name))
            if row is None:
                raise HutchError(Reason.NO_KEY, f"You have no key named {name} for {provider}.")
            await self._in_ledger(partial(self._ledger.strike, self._master.current, row.id))
            failpoint("keys.delete.struck")

            def unit(tx: Tx) -> None:
                rows.delete(tx, owner, provider, name)
                also(tx, row)

            await self._store.write(unit)
        return row

    async def erased(self, credential: str) -> str:
        """Wait until no sealed bytes of a removed or replaced credential are left, for up to 2 seconds.

        Return a sentence that names the files which still have them; empty if none has.
        """
        left = await self._store.erased(credential, _ERASE_SECONDS)
        log = database.wal_of(self._store.path)
        sentences = []
        if log in left:
            sentences.append(
                f"Its sealed bytes are still in {log}, because a reader (a backup, for example) uses that file;"
                " Hutch removes them when the reader ends."
            )
        if asides := ", ".join(str(path) for path in left if path != log):
            sentences.append(
                f"Its sealed bytes may still be in {asides}, which cannot be changed: delete what you do not need."
            )
        return " ".join(sentences)

    # ------------------------------------------------------------ texts of other modules

    def seal(self, context: str, plain: bytes) -> bytes:
        """Seal a text for one purpose. Only texts sealed for a `session_context` survive a master key rotation."""
        return envelope.seal_envelope(self._master.current.key, context, plain)

    def open(self, context: str, sealed: bytes) -> bytes:
        """Open a text that was sealed for this purpose; KEY_UNREADABLE."""
        return self._open(context, sealed, None)

    # ------------------------------------------------------------ the master key

    async def rotate_master(self, *, also: Callable[[Tx], object] = _nothing) -> int:
        """Replace the master key; return the number of rewrapped envelopes. The vault stays usable during it.

        Until the end of the rotation both keys open their envelopes; then the old key is destroyed. Just before that,
        `also` runs in a transaction. An interrupted rotation continues at the next `load`. MasterKeyError if Hutch
        cannot change the key.
        """
        async with self._changing():
            await to_thread.run_sync(self._master.begin_rotation)
            failpoint("keys.rotate.begun")
        return await self.rewrap_all(also)

    async def rewrap_all(self, also: Callable[[Tx], object] | None = None) -> int:
        """Wrap every envelope with the current key, then destroy the older keys that Hutch manages itself."""
        async with self._changing():
            count = 0
            while wrapped := await self._each(self._rewrap_keys) + await self._each(self._rewrap_sessions):
                count += wrapped  # again: another task may have sealed with the old key meanwhile
            failpoint("keys.rotate.wrapped")
            await self._in_ledger(partial(self._ledger.write, self._master.current))
            if also is not None:
                await self._store.write(also)
            failpoint("keys.rotate.ledger")
            await to_thread.run_sync(self._master.finish_rotation)
            failpoint("keys.rotate.finished")
        return count

    async def _each(self, step: Callable[[Executes, str], tuple[int, str | None]]) -> int:
        """Walk a table in batches, one short transaction each, so that other writes run between them."""
        count, after = 0, ""
        while True:
            done, last = await self._store.write(partial(_at, step, after))
            count += done
            failpoint("keys.rotate.batch")
            if last is None:
                return count
            after = last

    def _rewrap_keys(self, tx: Executes, after: str) -> tuple[int, str | None]:
        batch = rows.KEYS.all(tx, "WHERE id > ? ORDER BY id LIMIT ?", (after, _BATCH))
        old = [row for row in batch if row.master != self._master.current.mark]
        count = 0
        for row in old:
            wrapped = self._rewrapped(_purpose(row), row.wrapped + row.sealed)
            if wrapped is not None:
                changes = {"wrapped": wrapped[: envelope.HEAD], "master": self._master.current.mark}
                count += rows.KEYS.update(tx, changes, "WHERE id = ?", (row.id,))
        return count, batch[-1].id if batch else None

    def _rewrap_sessions(self, tx: Executes, after: str) -> tuple[int, str | None]:
        batch: list[tuple[str, bytes]] = tx.execute(
            "SELECT id, sealed FROM sessions WHERE id > ? AND sealed IS NOT NULL ORDER BY id LIMIT ?", (after, _BATCH)
        ).fetchall()
        count = 0
        for session, sealed in batch:
            wrapped = self._rewrapped(session_context(session), sealed)
            if wrapped is not None:
                tx.execute("UPDATE sessions SET sealed = ? WHERE id = ?", (wrapped, session))
                count += 1
        return count, batch[-1][0] if batch else None

    def _rewrapped(self, purpose: str, sealed: bytes) -> bytes | None:
        """Return the envelope wrapped with the current key; None if it already is, or if no key opens it."""
        for key in self._master.all():
            try:
                wrapped = envelope.rewrap(key.key, self._master.current.key, purpose, sealed)
            except envelope.SealError:
                continue
            return None if key.key == self._master.current.key else wrapped
        return None

    # ------------------------------------------------------------ inside

    def _holds(self, row: KeyRow) -> bool:
        return self._ledger.holds(row.id, row.version)

    def _open(self, purpose: str, sealed: bytes, mark: str | None) -> bytes:
        for key in _first(self._master.all(), mark):
            try:
                return envelope.open_envelope(key.key, purpose, sealed)
            except envelope.SealError:
                continue
        raise HutchError(Reason.KEY_UNREADABLE)

    def _shown(self, row: KeyRow, *, chosen: bool) -> m.ApiKey:
        try:
            base_url = self.open_row(row).base_url
            trouble = ""
        except HutchError as error:
            base_url, trouble = None, error.message
        return m.ApiKey(
            id=row.id,
            provider=row.provider,
            name=row.name,
            owner=row.owner,
            created_at=to_wire(row.created_at),
            hint=row.hint,
            last_used_at=None if row.last_used_at is None else to_wire(row.last_used_at),
            uses=row.uses,
            kind=row.kind,
            base_url=base_url,
            chosen=chosen,
            trouble=trouble,
        )

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        async with self._lock:
            with anyio.CancelScope(shield=True):
                yield

    @staticmethod
    async def _in_ledger(change: Callable[[], T]) -> T:
        try:
            return await to_thread.run_sync(change)
        except OSError as error:
            raise HutchError(
                Reason.STORE_UNAVAILABLE, f"The vault's ledger cannot be written ({error.strerror}); try again."
            ) from None


def _at(step: Callable[[Executes, str], T], after: str, tx: Executes) -> T:
    return step(tx, after)


def _purpose(row: KeyRow) -> str:
    return f"{row.owner}/{row.provider}/{row.id}/{row.version}"


def _choice(owner: int, provider: str) -> str:
    return f"key/{owner}/{provider}"


def _first(keys: Iterable[MasterKey], mark: str | None) -> list[MasterKey]:
    return sorted(keys, key=lambda key: key.mark != mark)
