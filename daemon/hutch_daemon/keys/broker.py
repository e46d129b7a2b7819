"""hutchd's side of the broker: grants and ends leases, and keeps a broker process linked.

What is always true:

- The broker knows every granted lease. Changes made while no broker is linked are kept in the lease book and sent to
  the next broker. A lease that hutchd ended is never sent to a broker again.
- hutchd keeps the hash of a lease's token, not the token, so that it can give the lease to a restarted broker.
- A record of the broker is stored exactly once, and acknowledged after it is durable.
- A lease is active only while its session has a turn; the broker refuses every other request. hutchd makes it active
  before the agent gets the prompt, and inactive before the turn's end is stored.
- A session's budget belongs to the broker. hutchd tells it what the session's record leaves, with each lease; a broker
  that has the budget already keeps its own figure, which includes what is not recorded yet.
- A lease carries the network of its session's agent. The broker refuses the provider's own tools where that is limited.
- A broker of an earlier version, which cannot do all that, is replaced as soon as no turn runs. It gets no new lease
  with a limited network.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from msgspec.structs import replace

from hutch_daemon.keys.broker_boot import BrokerPaths, own_prices
from hutch_daemon.keys.control_link import CALL_TIMEOUT, ControlLink
from hutch_daemon.keys.key_supply import FreshKey, KeyReport, KeySupply
from hutch_daemon.keys.lease_book import GrantedLease, LeaseBook, LeaseHolder
from hutch_daemon.keys.request_records import store_records
from hutch_daemon.keys.supervisor import Link
from hutch_daemon.settings import Settings, SettingsInForce
from hutch_daemon.store import sessions, turns, usage
from hutch_daemon.store.rows import KeyRow, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import broker_link as link
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id, new_token

__all__ = ["Broker", "dialect_of"]

_log: Final = logging.getLogger(__name__)
_STORE_PAUSES: Final = (0.25, 2.0)
"""The shortest and the longest pause before usage is stored again, in seconds."""
_HOST: Final = "http://broker.invalid"
_END_TIMEOUT: Final = 2.0
"""Seconds that the end of a turn waits for the broker. A slower broker carries the call out when it can."""
_NEEDED: Final = frozenset(("set_active", "network"))
"""The abilities without which a broker is of an earlier version and is replaced."""
_BROKER_BACK: Final = 15.0
"""Seconds for which a turn waits for a broker that is being started again."""

Holds = Callable[[str, str], Awaitable[bool]]
"""Takes the ids of an executor and a session; returns whether the executor still serves the session."""


def dialect_of(settings: Settings, provider: str) -> link.DialectName:
    """Return the API that a provider speaks; INVALID_PARAMS if neither Hutch nor the settings know it."""
    chosen = settings.provider(provider).dialect
    if chosen is not None:
        return chosen
    match provider:
        case "anthropic" | "openai" | "gemini" | "bedrock" | "vertex":
            return provider
        case _:
            raise HutchError(
                Reason.INVALID_PARAMS, f"[providers.{provider}] needs `dialect = …`: the API that {provider} speaks."
            )


class Broker:
    """The leases of all executors. Use it only inside its `running` block."""

    def __init__(
        self,
        store: Store,
        settings: SettingsInForce,
        paths: BrokerPaths,
        holds: Holds,
        *,
        fresh: FreshKey,
        report: KeyReport,
        everyone: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`holds` decides which leases are renewed. `everyone`: agents of other accounts may dial the socket."""
        self._store = store
        self._settings = settings
        self._socket = paths.socket
        self._holds = holds
        self._book = LeaseBook(settings)
        self._supply = KeySupply(store, self._book, settings, fresh, report)
        self._link = ControlLink(
            settings,
            paths,
            {"need_key": self._supply.need_key, "report_records": self._store_records},
            self._agree,
            everyone=everyone,
            environ=environ,
        )
        self._tasks: TaskGroup | None = None
        self._unstored: deque[tuple[link.Records, Link]] = deque()
        """Records that wait for the store. The broker keeps no more than `BrokerBoot.records` unacknowledged."""
        self._conditions = Conditions(_log)

    # ------------------------------------------------------------ life

    def request_start(self) -> None:
        """Start the broker if none runs. Only code that has a key calls this, so a host without keys runs no broker."""
        self._link.request_start()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Broker]:
        """While the block runs, keep a broker linked once its start was requested.

        At the end of the block, end the broker if no lease is live; otherwise leave it running without hutchd. Then it
        ends with the last executor that has a lease.
        """
        failure = None
        self._book.in_turn = await self._store.read(turns.sessions_in_turn)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._link.run)
            tasks.start_soon(self._renew)
            try:
                yield self
            except Exception as error:  # noqa: BLE001  # raised again below: here the task group would wrap it
                failure = error
            with anyio.move_on_after(5, shield=True):
                await self._end_unheld()
                await self._link.end(leave=bool(self._book.live))
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _agree(self, peer: Link, welcome: link.BrokerWelcome) -> None:
        """Bring hutchd's and the broker's leases to the same state.

        Adopt the leases that only the broker has, if they still hold. Send the leases that it lacks.
        """
        call = partial(peer.call, timeout=CALL_TIMEOUT)
        active: dict[str, bool] = {}
        if "set_prices" in welcome.abilities:  # a broker that was running has those of an earlier boot line
            await call("set_prices", self._prices())
        theirs = {state.lease.id: state for state in welcome.leases}
        for lease, state in theirs.items():
            if lease in self._book.live or lease in self._book.ended:
                continue
            if await self._holds(state.lease.executor, state.lease.session):
                self._book.add(await self._adopted(state, welcome.told))
        for lease, granted in list(self._book.live.items()):
            known = theirs.get(lease)
            if known is not None and self._refuses_between_turns and known.lease.network is not None:
                active[lease] = known.active
                await call("refill", self._book.top_up(granted, known))
            else:
                state = self._book.fresh(granted, await self._left(granted))
                active[lease] = state.active
                await call("put_lease", state)
        if self._is_of_earlier_version:
            passed = "" if self._refuses_between_turns else "requests between turns, and "
            _log.warning(
                "the running broker (pid %d) is of an earlier version of Hutch: %srequests for the provider's own tools"
                " reach the model until it is replaced, as soon as no turn is running",
                welcome.pid,
                passed,
            )
        # The broker answers agents from this call on, if it did not before.
        await call("keep_leases", link.LeaseIds(leases=tuple(self._book.live)))
        while ended := tuple(self._book.ended):  # those that ended during the calls above
            await call("end_leases", link.LeaseIds(leases=ended))
            self._book.ended.difference_update(ended)
        await self._set_active(call, active)  # comes last: turns may have begun or ended during the calls above

    async def _set_active(self, call: Callable[..., Awaitable[object]], active: dict[str, bool]) -> None:
        """Make each lease of the broker active or not, until none differs. `active` has what the broker has."""
        while self._refuses_between_turns:
            live = self._book.live
            wanted = {lease: self._book.is_active(live[lease].lease) for lease in active if lease in live}
            if not (differing := [lease for lease in wanted if wanted[lease] != active[lease]]):
                return
            for lease in differing:
                await call("set_active", link.LeaseActive(lease=lease, active=wanted[lease]))
                active[lease] = wanted[lease]

    async def _adopted(self, state: link.LeaseState, newest: int) -> GrantedLease:
        """Return a lease granted by an earlier hutchd. Its portion already paid for requests up to record `newest`."""
        session = await self._store.read(lambda conn: sessions.get(conn, state.lease.session))
        max_usd = session.limits.max_usd if session is not None else None
        if max_usd is None and state.usd is not None:
            max_usd = 0.0  # a budget of a session that is gone
        lease = replace(state.lease, network=self._book.network(state.lease.network))
        return GrantedLease(lease, max_usd, newest)

    async def _renew(self) -> None:
        """Three times per lease lifetime, end the leases that no longer hold and renew the others."""
        while True:
            await anyio.sleep(self._settings.current.broker.lease / 3)
            await self._end_unheld()
            for lease in list(self._book.live):
                await self._link.send("refill", self._book.renewal(lease))
            await self._replace_old()

    async def _end_unheld(self) -> None:
        """End the leases whose executor no longer serves their session. Keep a lease if the store cannot be read."""
        for lease, granted in list(self._book.live.items()):
            try:
                holds = await self._holds(granted.lease.executor, granted.lease.session)
            except HutchError as error:
                _log.warning("cannot tell whether the lease %s holds: %s", lease, error)
                continue
            if not holds:
                await self._end([lease])

    # ------------------------------------------------------------ leases

    async def lease(self, session: SessionRow, holder: LeaseHolder, provider: str, key: KeyRow) -> m.KeyGrant:
        """Grant the processes of `holder` a lease of `key`. Return when the broker has the lease.

        AGENT_UNAVAILABLE if no broker is linked within half a minute, or if the network is limited and the broker is of
        an earlier version that does not know of it.
        """
        dialect = dialect_of(self._settings.current, provider)
        lease, secret = new_id("lease"), new_token()
        token = f"hutch-{lease}-{secret}"
        granted = GrantedLease(
            link.Lease(
                id=lease,
                token_hash=hashlib.sha256(token.encode()).hexdigest(),
                session=session.id,
                executor=holder.executor,
                owner=session.owner,
                account=session.account,
                provider=provider,
                dialect=dialect,
                credential=key.id,
                uid=holder.uid,
                pid=holder.pid,
                start_time=holder.start_time,
                cgroup=holder.cgroup,
                tcp=holder.tcp,
                network=self._book.network(holder.network),
            ),
            session.limits.max_usd,
        )
        self.request_start()
        await self._wait_for_broker(session.id, limited=granted.lease.network != "full")
        self._book.add(granted)
        try:
            await self._link.call("put_lease", self._book.fresh(granted, await self._left(granted)))
        except BaseException:
            self._book.end([lease])
            raise
        base = f"http://127.0.0.1:{self._link.port}" if holder.tcp else _HOST
        return m.KeyGrant(
            delivery="lease",
            value=token,
            base_url=base + ("/v1" if dialect == "openai" else ""),
            auth="api_key" if dialect in ("anthropic", "gemini") else "bearer",
            expires_in=self._settings.current.broker.lease,
            unix_socket=None if holder.tcp else str(self._socket),
        )

    async def _wait_for_broker(self, session: str, *, limited: bool) -> None:
        """Wait until a broker can take a lease of this session. Otherwise AGENT_UNAVAILABLE."""
        if limited and self._link.up and "network" not in self._link.abilities:
            await self._replace_old(besides=session)
        if not await self._link.wait_up():
            raise HutchError(Reason.AGENT_UNAVAILABLE, f"No broker can take the lease: {self._link.trouble}.")
        if limited and "network" not in self._link.abilities:
            raise HutchError(
                Reason.AGENT_UNAVAILABLE,
                "The running broker is of an earlier version of Hutch, which would let the provider's own tools use the"
                " network for a session whose network is limited. It is replaced as soon as no turn is running; try"
                " again then.",
            )

    async def begin_turn(self, session: str) -> None:
        """Make the session's leases active, also those that it gets during the turn. Return when the broker knows it.

        Idempotent. If the session has leases and no broker is linked, wait for the next one for some seconds; it
        gets the leases as they are then.
        """
        if session not in self._book.in_turn:
            self._book.in_turn.add(session)
            if self._book.select(lambda lease: lease.session == session):
                with anyio.move_on_after(_BROKER_BACK):
                    await self._link.wait_up()
            await self._send_active(session, CALL_TIMEOUT)

    async def end_turn(self, session: str) -> None:
        """Make the session's leases inactive and cut their open streams. Return when that is done, or after 2 s.

        Idempotent.
        """
        if session in self._book.in_turn:
            self._book.in_turn.discard(session)
            await self._send_active(session, _END_TIMEOUT)
            await self._replace_old()

    async def _send_active(self, session: str, timeout: float) -> None:
        for lease in self._book.select(lambda lease: lease.session == session):
            if self._refuses_between_turns and lease in self._book.live:
                state = link.LeaseActive(lease=lease, active=session in self._book.in_turn)
                await self._link.send("set_active", state, timeout)

    @property
    def _refuses_between_turns(self) -> bool:
        """True unless the linked broker is of an earlier version, which serves requests between turns too."""
        return "set_active" in self._link.abilities

    @property
    def _is_of_earlier_version(self) -> bool:
        """True if the linked broker is to be replaced."""
        return not self._link.abilities >= _NEEDED

    async def _replace_old(self, besides: str = "") -> None:
        """End a broker of an earlier version once no turn runs and all its records are stored. A new one is started.

        A turn of the session `besides` does not count.
        """
        if not self._is_of_earlier_version or not self._link.up or self._book.in_turn - {besides}:
            return
        status = await self.status()
        if status is None or status.unacknowledged or self._book.in_turn - {besides}:
            return
        _log.info("the broker of an earlier version is replaced: no turn is running")
        assert self._tasks is not None, "it runs"
        self._link.replace(self._tasks)

    async def revoke_executor(self, executor: str) -> int:
        """End an executor's leases, cut their open streams, and return the number of leases."""
        return await self._end(self._book.select(lambda lease: lease.executor == executor))

    async def revoke_credential(self, credential: str) -> int:
        """End the leases of a deleted credential, as `revoke_executor` does."""
        return await self._end(self._book.select(lambda lease: lease.credential == credential))

    async def refresh_credential(self, credential: str) -> None:
        """Make the broker ask again for a replaced credential, and retry the requests that wait for it."""
        self._supply.replaced(credential)
        await self._link.send("drop_keys", link.DropKeys(credential=credential))

    async def refresh_prices(self) -> None:
        """Give the broker the prices of the settings. Call it when the settings have changed."""
        await self._link.send("set_prices", self._prices())

    async def price_trouble(self, provider: str, model: str) -> str:
        """Return why a session with a budget cannot use a model, and how to price it; "" if it can.

        Also "" if no broker is linked that can tell: then the broker refuses the first request.
        """
        if "find_price" not in self._link.abilities or not self._link.up:
            return ""
        asked = link.FindPrice(provider=provider, dialect=dialect_of(self._settings.current, provider), model=model)
        try:
            found = await self._link.call("find_price", asked, _END_TIMEOUT)
        except HutchError:
            return ""
        assert isinstance(found, link.PriceFound)
        return found.trouble

    def _prices(self) -> link.Prices:
        return link.Prices(own_prices(self._settings.current))

    async def _end(self, leases: list[str]) -> int:
        self._book.end(leases)
        if leases:
            await self._link.send("end_leases", link.LeaseIds(leases=tuple(leases)))
        return len(leases)

    async def _left(self, granted: GrantedLease) -> float | None:
        """Return what the record leaves of a session's budget; None if its spending is not limited."""
        if granted.max_usd is None:
            return None
        spent = await self._store.read(lambda conn: usage.spent(conn, granted.lease.session))
        return 0.0 if spent is None else max(0.0, granted.max_usd - spent)

    # ------------------------------------------------------------ state

    async def status(self) -> link.BrokerStatus | None:
        """Return the broker's leases and counters; None if no broker is linked."""
        try:
            status = await self._link.call("get_status", m.Nothing(), 5)
        except HutchError:
            return None
        assert isinstance(status, link.BrokerStatus)
        return status

    def pid(self) -> int:
        """Return the pid of the linked broker; 0 if none is linked."""
        return self._link.pid

    async def state(self) -> m.BrokerState:
        """Return the broker's state for `hutch status`."""
        status = await self.status()
        if status is None:
            return m.BrokerState("down", self._link.trouble) if self._link.start_requested else m.BrokerState("idle")
        streams = sum(state.streams for state in status.leases)
        missing = not await to_thread.run_sync(self._socket.is_socket)
        return m.BrokerState(
            "down" if missing else "up",
            f"{self._socket} is gone; the broker binds it again" if missing else "",
            len(status.leases),
            streams,
            status.requests,
            status.refused,
            self._link.pid,
        )

    # ------------------------------------------------------------ records

    async def _store_records(self, _: None, reported: link.Records) -> None:
        """Store records, acknowledge them, and refill the leases that used a good part of their portion.

        What cannot be stored now waits here, in order, and is stored later: the link stays, so that agents get keys.
        """
        peer = self._link.reporting
        assert peer is not None
        assert self._tasks is not None
        if self._unstored or not await self._try_to_store(reported, peer):
            self._unstored.append((reported, peer))
            if len(self._unstored) == 1:
                self._tasks.start_soon(self._store_later)

    async def _store_later(self) -> None:
        backoff = Backoff(*_STORE_PAUSES)
        while self._unstored:
            await anyio.sleep(backoff.next())
            while self._unstored and await self._try_to_store(*self._unstored[0]):
                self._unstored.popleft()

    async def _try_to_store(self, reported: link.Records, peer: Link) -> bool:
        """Store records and acknowledge them; return False if the store refuses them."""
        leases = {lease: granted.lease for lease, granted in self._book.live.items()}
        try:
            await self._store.write(lambda tx: store_records(tx, reported, leases))
        except HutchError as error:
            self._conditions.failed("usage is not stored", error)
            return False
        self._conditions.end("usage is not stored", "usage is stored again")
        with suppress(HutchError):  # another link reports them again, and they are recognised
            await peer.notify("ack_records", link.AckRecords(n=reported.records[-1].n))
        assert self._tasks is not None
        # In a task, because the link reads the replies to these calls only after this handler has returned.
        self._tasks.start_soon(self._follow_up, reported.records)
        return True

    async def _follow_up(self, records: tuple[link.Record, ...]) -> None:
        """Refill the leases that used these records, and replace a broker that waited for them to be stored."""
        for refill in self._book.count(records):
            await self._link.send("refill", refill)
        await self._replace_old()

    def __repr__(self) -> str:
        return f"<Broker {self._link!r}, {len(self._book.live)} leases>"
