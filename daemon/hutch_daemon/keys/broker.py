"""hutchd's side of the broker: makes leases, ends them, gives keys just in time, books what was used.

What is always true:

- A lease that was granted is known to the broker, or will be as soon as there is one: while the broker is away, changes
  are kept here and told to the next one. A lease that was ended here is never told to a broker again.
- hutchd holds no lease's token: only its hash, so that a broker that was restarted can be given it again.
- A record of the broker is booked once, and acknowledged after it is durable.
- What a session with a budget may still spend is in advance with the broker, in small portions.
- A key that cannot be had is a question to its owner: the requests wait for another one as long as the broker does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup

from hutch_daemon.keys.supervisor import BrokerProcess, Link, link_token
from hutch_daemon.keys.vault import Vault
from hutch_daemon.settings import Settings
from hutch_daemon.store import audit, keys, meta, sessions, usage
from hutch_daemon.store.rows import AuditRow, KeyRow, SessionRow, UsageRow
from hutch_daemon.store.store import Store, Tx
from hutch_shared import broker_link as link
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id, new_token
from hutch_shared.times import now_ms

__all__ = ["Broker", "BrokerPaths", "KeyReport", "LeaseHolder", "dialect_of"]

_log: Final = logging.getLogger(__name__)
_HOST: Final = "http://broker.invalid"
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 30.0
_CALL: Final = 30.0
_BOOKED: Final = "broker_booked"
_SHARE: Final = 0.1
"""Of its portion, what a lease uses before that is given back: doing so at each request doubles the broker's work."""
_PATIENCE: Final = 0.9
"""Share of the time that the broker waits for a key in which its owner can bring another one."""

Holds = Callable[[str, str], Awaitable[bool]]
"""Tells whether an executor (first) still serves a session (second)."""

KeyReport = Callable[[KeyRow, Sequence[str], str], Awaitable[None]]
"""Told of a credential, the sessions that use it, and why it cannot be had, a sentence for its owner; "": it can."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """The processes that may use a lease: the executor and what it starts."""

    executor: str
    uid: int
    pid: int
    start_time: int
    cgroup: str | None = None
    """A path component of its processes in /proc/PID/cgroup (`hutch-<executor>`), where there are such groups."""
    tcp: bool = False
    """The agent cannot dial a Unix socket."""


@dataclass(frozen=True, slots=True)
class BrokerPaths:
    """Where things are: `socket` alone in a directory of its own, the others where only hutchd gets."""

    socket: Path
    control: Path
    token: Path
    log: Path

    @classmethod
    def under(cls, runtime: Path, state: Path) -> BrokerPaths:
        """Return the usual places."""
        return cls(
            socket=runtime / "broker" / "broker.sock",
            control=runtime / "broker-control.sock",
            token=state / "broker.token",
            log=state / "broker.log",
        )


@dataclass(slots=True)
class Budget:
    """What a session's budget has left beyond the portions that were given out; all its leases share it."""

    usd: float

    def take(self, usd: float) -> float:
        """Take as much of it as there is."""
        taken = min(self.usd, usd)
        self.usd -= taken
        return taken


@dataclass(slots=True)
class GrantedLease:
    """A lease that holds, as hutchd knows it."""

    lease: link.Lease
    budget: Budget | None
    taken: int = 0
    """Records up to this one give nothing back: they were made before this hutchd knew the lease."""
    requests: int = 0
    usd: float = 0.0
    """What it used, and was not given back yet."""


def dialect_of(settings: Settings, provider: str) -> link.DialectName:
    """Return whose API a provider speaks; INVALID_PARAMS when the settings do not tell."""
    chosen = settings.provider(provider).dialect
    if chosen is not None:
        return chosen
    match provider:
        case "anthropic" | "openai" | "gemini" | "bedrock" | "vertex":
            return provider
        case _:
            raise HutchError(
                Reason.INVALID_PARAMS, f"[providers.{provider}] has to say `dialect = …`: whose API {provider} speaks."
            )


class Broker:
    """The leases of all executors. Works while its `running` block runs."""

    def __init__(
        self,
        store: Store,
        vault: Vault,
        settings: Callable[[], Settings],
        paths: BrokerPaths,
        holds: Holds,
        *,
        everyone: bool = False,
        environ: Mapping[str, str] = os.environ,
        fresh: Callable[[str, bool], Awaitable[link.Key]],
    ) -> None:
        """`holds` decides which leases go on, `fresh` gives a key (True: the last one was rejected).

        `everyone`: agents of other accounts dial the socket.
        """
        self._store = store
        self._vault = vault
        self._settings = settings
        self._paths = paths
        self._holds = holds
        self._everyone = everyone
        self._environ = environ
        self._fresh = fresh
        self._granted: dict[str, GrantedLease] = {}
        self._ended: set[str] = set()
        self._speaking: Link | None = None
        """The link that records come by; `_link` is the same once both sides agree on the leases."""
        self._link: Link | None = None
        self._tasks: TaskGroup | None = None
        self._up = anyio.Event()
        self._wanted = anyio.Event()
        self._port: int | None = None
        self._trouble = "it is starting"
        self._replaced: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)
        self.on_key: KeyReport = _nobody
        """Told when a key that is needed cannot be had, and each time that one was."""

    # ------------------------------------------------------------ life

    def want(self) -> None:
        """Have the broker's process there: a host without keys needs none. The first lease wants it as well."""
        self._wanted.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Broker]:
        """Keep a broker, once one is wanted, while the block runs.

        After it the broker is ended when no lease is left, else it goes on.
        """
        failure = None
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._keep)
            tasks.start_soon(self._renew)
            try:
                yield self
            except Exception as error:  # noqa: BLE001  # raised again below, outside the group that would wrap it
                failure = error
            with anyio.move_on_after(5, shield=True):
                await self._end_unheld()
                if self._link is not None and not self._granted:
                    await self._tell("shutdown", m.Nothing())
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _keep(self) -> None:
        """Be linked to a broker, again and again; a pause that doubles lies between failures."""
        self._paths.socket.parent.mkdir(parents=True, exist_ok=True)
        self._paths.socket.parent.chmod(0o755 if self._everyone else 0o700)
        if not self._paths.control.exists():  # else one of an earlier hutchd may live, and is met
            await self._wanted.wait()
        process = BrokerProcess(
            self._boot(),
            {"need_key": self._need_key, "report_records": self._book},
            log_path=self._paths.log,
            environ=self._environ,
        )
        try:
            await self._keep_linked(process)
        finally:
            process.let_go()

    async def _keep_linked(self, process: BrokerProcess) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                async with process.linked() as (peer, welcome):
                    self._speaking = peer
                    await self._meet(peer, welcome)
                    pause = _FIRST_PAUSE
                    await peer.wait_closed()
                    _log.warning("the broker is gone (%s)", peer.why)
                    self._trouble = "it went away and is started again"
            except HutchError as error:
                self._trouble = error.message
                _log.warning("no broker: %s", error)
            finally:
                self._link = None
                if self._up.is_set():  # else somebody may wait for it
                    self._up = anyio.Event()
                process.reap()
            await anyio.sleep(pause * (0.5 + random.random()))  # noqa: S311  # jitter, no secret
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _meet(self, peer: Link, welcome: link.BrokerWelcome) -> None:
        """Agree on the leases: those that it has and that hold go on, ours that it has not are given to it."""
        there = {state.lease.id: state for state in welcome.leases}
        for lease, state in there.items():
            if lease in self._granted or lease in self._ended:
                continue
            if await self._holds(state.lease.executor, state.lease.session):
                self._granted[lease] = await self._found(state, welcome.told)
        for lease, granted in list(self._granted.items()):
            granted.requests = 0  # it is full again, either way
            if lease not in there:
                granted.usd = 0.0
                await peer.call("put_lease", self._state(granted), _CALL)
            else:
                more = max(0, self._settings().broker.requests - there[lease].requests)
                await peer.call("refill", self._refill(lease, requests=more), _CALL)
        await peer.call("keep_leases", link.LeaseIds(leases=tuple(self._granted)), _CALL)  # then it answers
        self._port = welcome.port
        self._link = peer
        if self._ended:  # meanwhile
            await peer.call("end_leases", link.LeaseIds(leases=tuple(self._ended)), _CALL)
            self._ended.clear()
        self._trouble = ""
        self._up.set()

    async def _found(self, state: link.LeaseState, told: int) -> GrantedLease:
        """Take on a lease of an earlier hutchd. Its portion has already paid for the requests up to record `told`."""
        if state.usd is None:
            return GrantedLease(state.lease, None, told)
        session = await self._store.read(lambda conn: sessions.get(conn, state.lease.session))
        budget = (await self._budget_of(session) if session is not None else None) or Budget(0.0)
        budget.take(max(0.0, state.usd))
        return GrantedLease(state.lease, budget, told)

    async def _renew(self) -> None:
        """Move the ends of the leases that hold, and end the others, three times in a lease's life."""
        while True:
            await anyio.sleep(self._settings().broker.lease / 3)
            await self._end_unheld()
            for lease in list(self._granted):
                await self._tell("refill", self._refill(lease))

    async def _end_unheld(self) -> None:
        """End the leases whose executors serve their sessions no more; while the store cannot tell, they go on."""
        for lease, granted in list(self._granted.items()):
            try:
                holds = await self._holds(granted.lease.executor, granted.lease.session)
            except HutchError as error:
                _log.warning("whether the lease %s holds is not known: %s", lease, error)
                continue
            if not holds:
                await self._end([lease])

    def _boot(self) -> link.BrokerBoot:
        chosen = self._settings().broker
        proxies = {
            name[:-6].lower(): value
            for name, value in self._environ.items()
            if name.lower().endswith("_proxy") and value
        }
        if chosen.proxy is not None:
            proxies = {**proxies, "https": chosen.proxy}
        return link.BrokerBoot(
            token=link_token(self._paths.token),
            control=str(self._paths.control),
            socket=str(self._paths.socket),
            everyone=self._everyone,
            tcp=chosen.tcp,
            ca_file=chosen.ca_file,
            proxies=proxies,
            prices={
                model: link.Price(price.input, price.output, price.cache_read, price.cache_write)
                for provider in self._settings().providers.values()
                for model, price in provider.prices.items()
            },
            connect_timeout=chosen.connect_timeout,
            first_byte_timeout=chosen.first_byte_timeout,
            chunk_timeout=chosen.chunk_timeout,
            key_timeout=chosen.key_timeout,
            body=chosen.body,
        )

    # ------------------------------------------------------------ leases

    async def lease(self, session: SessionRow, holder: LeaseHolder, provider: str, key: KeyRow) -> m.KeyGrant:
        """Make a lease of `key` for the processes of `holder`, and wait until the broker has it.

        AGENT_UNAVAILABLE when there is no broker within half a minute.
        """
        dialect = dialect_of(self._settings(), provider)
        lease, secret = new_id("lease"), new_token()
        token = f"hutch-{lease}-{secret}"
        budget = await self._budget_of(session)
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
            ),
            budget,
        )
        self.want()
        with anyio.move_on_after(_CALL):
            await self._up.wait()
        if self._link is None:
            raise HutchError(Reason.AGENT_UNAVAILABLE, f"There is no broker to give a lease for: {self._trouble}.")
        self._granted[lease] = granted
        try:
            await self._link.call("put_lease", self._state(granted), _CALL)
        except BaseException:
            self._granted.pop(lease, None)
            self._ended.add(lease)
            raise
        base = f"http://127.0.0.1:{self._port}" if holder.tcp else _HOST
        return m.KeyGrant(
            delivery="lease",
            value=token,
            base_url=base + ("/v1" if dialect == "openai" else ""),
            auth="api_key" if dialect in ("anthropic", "gemini") else "bearer",
            expires_in=self._settings().broker.lease,
            unix_socket=None if holder.tcp else str(self._paths.socket),
        )

    async def revoke_executor(self, executor: str) -> int:
        """End an executor's leases; their open streams are cut when this returns. Returns how many they were."""
        return await self._end([one for one, granted in self._granted.items() if granted.lease.executor == executor])

    async def revoke_session(self, session: str) -> int:
        """End a session's leases."""
        return await self._end([one for one, granted in self._granted.items() if granted.lease.session == session])

    async def revoke_credential(self, credential: str) -> int:
        """End the leases of a credential that was deleted."""
        return await self._end(
            [one for one, granted in self._granted.items() if granted.lease.credential == credential]
        )

    async def refresh_credential(self, credential: str) -> None:
        """Let the broker ask anew for a credential that was replaced, and what waits for it go on."""
        if (replaced := self._replaced.pop(credential, None)) is not None:
            replaced.set()
        await self._tell("drop_keys", link.DropKeys(credential=credential))

    async def _end(self, leases: list[str]) -> int:
        for lease in leases:
            self._granted.pop(lease, None)
            self._ended.add(lease)
        if leases:
            await self._tell("end_leases", link.LeaseIds(leases=tuple(leases)))
        return len(leases)

    async def status(self) -> link.BrokerStatus | None:
        """Return what the broker holds and did; None when there is none now."""
        if self._link is None:
            return None
        try:
            found: link.BrokerStatus = await self._link.call("get_status", m.Nothing(), 5)
        except HutchError:
            return None
        return found

    async def state(self) -> m.BrokerState:
        """Return how the broker is, for people."""
        found = await self.status()
        if found is None:
            return m.BrokerState("down", self._trouble) if self._wanted.is_set() else m.BrokerState("idle")
        streams = sum(state.streams for state in found.leases)
        return m.BrokerState("up", "", len(found.leases), streams, found.requests, found.refused)

    async def _tell(self, name: str, params: m.Wire) -> None:
        """Say it to the broker, if there is one: what it misses `_meet` makes good."""
        if self._link is not None:
            try:
                await self._link.call(name, params, _CALL)
            except HutchError as error:
                _log.warning("the broker did not take %s: %s", name, error)

    # ------------------------------------------------------------ allowances

    async def _budget_of(self, session: SessionRow) -> Budget | None:
        """Return what a session may still spend; None when it has no budget."""
        if session.limits.max_usd is None:
            return None
        for granted in self._granted.values():
            if granted.lease.session == session.id and granted.budget is not None:
                return granted.budget
        lines = await self._store.read(lambda conn: usage.table(conn, "session", session=session.id, source="broker"))
        return Budget(max(0.0, session.limits.max_usd - sum(line.usage.usd or 0.0 for line in lines)))

    def _state(self, granted: GrantedLease) -> link.LeaseState:
        return link.LeaseState(
            lease=granted.lease,
            expires_in=self._settings().broker.lease,
            requests=self._settings().broker.requests,
            usd=None if granted.budget is None else granted.budget.take(self._settings().broker.usd),
        )

    def _refill(self, lease: str, *, requests: int = 0, usd: float | None = None) -> link.Refill:
        return link.Refill(lease=lease, requests=requests, usd=usd, expires_in=self._settings().broker.lease)

    # ------------------------------------------------------------ what the broker asks and tells

    async def _need_key(self, _: None, need: link.NeedKey) -> link.Key:
        granted = self._granted.get(need.lease)
        if granted is None:
            raise HutchError(Reason.LEASE_LOST, "The lease has ended.")
        lease = granted.lease
        outcome = "given"
        try:
            key = await self._key_of(lease, rejected=need.rejected)
        except HutchError as error:
            outcome = error.reason.word
            raise
        finally:
            line = AuditRow(
                at=now_ms(),
                owner=lease.owner,
                actor="broker",
                action="use_key",
                outcome=outcome,
                session=lease.session,
                subject=lease.credential,
                details={"lease": lease.id, "executor": lease.executor, "provider": lease.provider},
            )
            await self._store.write(lambda tx: audit.write(tx, line))
        await self._vault.touch(lease.credential)
        return key

    async def _key_of(self, lease: link.Lease, *, rejected: bool) -> link.Key:
        """Return a lease's key. Where it cannot be had its owner is told, and another one is waited for."""
        until = anyio.current_time() + _PATIENCE * self._settings().broker.key_timeout
        while True:
            replaced = self._replaced[lease.credential]
            try:
                key = await self._fresh(lease.credential, rejected)
            except HutchError as error:
                if error.reason is not Reason.KEY_UNREADABLE:
                    raise
                await self._tell_owner(lease.credential, error.message)
                with anyio.move_on_at(until):
                    await replaced.wait()
                if not replaced.is_set() or lease.id not in self._granted:
                    raise
                rejected = False
            else:
                await self._tell_owner(lease.credential, "")
                return key

    async def _tell_owner(self, credential: str, trouble: str) -> None:
        row = await self._store.read(lambda conn: keys.KEYS.one(conn, "WHERE id = ?", (credential,)))
        if row is not None:
            leases = (granted.lease for granted in self._granted.values() if granted.lease.credential == credential)
            await self.on_key(row, tuple({lease.session for lease in leases}), trouble)

    async def _book(self, _: None, told: link.Records) -> None:
        """Write records down, acknowledge them, and give back what the requests took."""
        leases = {record.lease: self._granted.get(record.lease) for record in told.records}

        def unit(tx: Tx) -> None:
            run, _, last = (meta.get(tx, _BOOKED) or "").rpartition(" ")
            for record in told.records:
                if run == told.run and record.n <= int(last):
                    continue
                granted = leases[record.lease]
                of = sessions.get(tx, record.session) if granted is None else granted.lease
                owner = of.owner if of is not None else 0
                if record.refused is not None:
                    audit.write(tx, _refusal(record, owner))
                else:
                    usage.add(tx, _usage(record, told.run, owner, of.account if of is not None else ""))
            meta.put(tx, _BOOKED, f"{told.run} {told.records[-1].n}")

        peer = self._speaking
        assert peer is not None
        try:
            await self._store.write(unit)
        except HutchError as error:
            _log.warning("usage is not written down yet: %s", error)
            peer.close(error)  # the next link is told again
            return
        await peer.notify("ack_records", link.AckRecords(n=told.records[-1].n))
        assert self._tasks is not None
        self._tasks.start_soon(self._give_back, told.records)  # not from here: the answer is read after this returns

    async def _give_back(self, records: tuple[link.Record, ...]) -> None:
        """Refill the leases that used a share of their portion, as far as the budget goes."""
        for record in records:
            granted = self._granted.get(record.lease)
            if granted is not None and record.refused is None and record.n > granted.taken:
                granted.requests += 1
                granted.usd += record.usd or 0.0
        portion = self._settings().broker
        for lease in {record.lease for record in records}:
            granted = self._granted.get(lease)
            if granted is None or (granted.requests < _SHARE * portion.requests and granted.usd < _SHARE * portion.usd):
                continue
            count, spent, granted.requests, granted.usd = granted.requests, granted.usd, 0, 0.0
            more = None if granted.budget is None else granted.budget.take(spent)
            await self._tell("refill", self._refill(lease, requests=count, usd=more))

    def __repr__(self) -> str:
        return f"<Broker {'up' if self._link else self._trouble}, {len(self._granted)} leases>"


async def _nobody(_: KeyRow, __: Sequence[str], ___: str) -> None:
    """Tell nobody."""


def _usage(record: link.Record, run: str, owner: int, account: str) -> UsageRow:
    return UsageRow(
        at=record.at,
        owner=owner,
        account=account,
        session=record.session,
        turn=None,
        model=record.model,
        source="broker",
        request=f"{run}-{record.n}",
        input_tokens=record.input,
        output_tokens=record.output,
        cache_read_tokens=record.cache_read,
        cache_write_tokens=record.cache_write,
        usd=record.usd,
    )


def _refusal(record: link.Record, owner: int) -> AuditRow:
    return AuditRow(
        at=record.at,
        owner=owner,
        actor=f"uid {record.uid}" if record.uid is not None else "nobody known",
        action="broker_request",
        outcome="refused",
        session=record.session or None,
        subject=record.lease or None,
        details={"why": record.refused, "path": record.path, "pid": record.pid, "times": record.times},
    )
