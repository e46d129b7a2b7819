"""The one connection to hutchd: dialled, authenticated, and dialled again when it is lost.

The token goes only to a server of the right uid. A hutchd whose epoch is lower than one seen before is refused. After a
temporary error (nobody listens, the token is not known yet) the link dials again, with a back-off, until the executor
has been without hutchd and without a turn for `give_up_after` seconds. A final error ends the link at once.

A lost connection is replaced at once. Only when that fails is the executor detached, and its events go to the spool. A
hutchd that cannot store events closes the connection. Then the next one waits with its events, so that interrupts and
answers still arrive, and so that many executors do not keep a hutchd with a full disk busy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import anyio
import msgspec
from anyio import to_thread

from hutch_executor.events.reporter import Reporter
from hutch_executor.process.memory import resident_bytes
from hutch_shared import __version__
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint, witness
from hutch_shared.latch import Latch
from hutch_shared.methods import EXECUTOR, TO_EXECUTOR
from hutch_shared.processes import peer_credentials
from hutch_shared.rpc.dispatch import Dispatcher, Handler
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.unix import connect

__all__ = ["GIVE_UP_AFTER", "DaemonLink", "LinkState"]

GIVE_UP_AFTER: Final = 300.0
_DIAL_DEADLINE: Final = 5.0
_HELLO_DEADLINE: Final = 10.0
_FIRST_PAUSE: Final = 0.05
_MAX_PAUSE: Final = 0.5
"""The longest pause between two dials, in seconds: executors should be back within a second of hutchd's restart."""
_STEADY: Final = 1.0
"""A connection that lasted this many seconds was good: the next failure starts with the shortest pause again."""
_UNRECEIVED: Final = (0.25, 1.0)
"""The shortest and the longest time, in seconds, for which events wait after a connection that got no receipt."""
_LIMITS: Final = PeerLimits(frame=32 << 20)
_FINAL: Final = frozenset({Reason.LEASE_LOST, Reason.TOKEN_EXPIRED, Reason.PROTOCOL_MISMATCH})

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkState:
    """The executor's own state, as reported in `hello` and in heartbeats."""

    session: str | None
    turn: str | None
    """The running turn, or the last one while its end is not acknowledged."""
    is_busy: bool
    """A turn is running."""


class DaemonLink:
    """The connection to hutchd; a lost one is replaced."""

    def __init__(
        self,
        boot: m.Boot,
        reporter: Reporter,
        state: Callable[[], LinkState],
        welcomed: Callable[[m.Welcome], None] = lambda _: None,
        abilities: tuple[str, ...] = (),
        *,
        give_up_after: float = GIVE_UP_AFTER,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Prepare to dial `boot.socket`. `welcomed` gets each answer to `hello`, which names the runner's `abilities`.

        `clock` returns seconds and stops while the machine sleeps.
        """
        self.epoch = boot.daemon_epoch
        self._boot = boot
        self._reporter = reporter
        self._state = state
        self._welcomed = welcomed
        self._abilities = abilities
        self._give_up_after = give_up_after
        self._patience = give_up_after
        """The same for the present absence of hutchd: less after `expect_absence`."""
        self._clock = clock
        self._peer: Peer[Any] | None = None
        self._changed = Latch()
        self._is_closing = False
        self._conditions = Conditions(_log)
        self._unreceived = Backoff(*_UNRECEIVED, steady=math.inf)
        self._hold = 0.0
        """Seconds for which the next connection sends no events: hutchd did not store those of the last one."""

    def __repr__(self) -> str:
        return f"<DaemonLink {'up' if self._peer else 'down'}, epoch {self.epoch}>"

    async def run(self, context: Any, handlers: Mapping[str, Handler[Any]]) -> HutchError:
        """Keep a connection up until `close` or a final error; return the error that ended the link."""
        since = self._clock()
        backoff = Backoff(_FIRST_PAUSE, _MAX_PAUSE, steady=math.inf)
        serves = Dispatcher(TO_EXECUTOR, handlers)
        while True:
            began = self._clock()
            error, was_up = await self._connect(context, serves)
            if self._is_closing or error.reason in _FINAL:
                self._reporter.detach()
                return error
            if was_up or self._state().is_busy:
                since = self._clock()
            if not was_up:
                self._reporter.detach()
            elif self._clock() - began >= _STEADY:
                backoff.reset()
            if self._clock() - since > self._patience:
                return error
            await anyio.sleep(backoff.next())

    def expect_absence(self, seconds: float) -> None:
        """Give up after `seconds` without hutchd and without a turn, until hutchd admits this executor again."""
        self._patience = min(seconds, self._give_up_after)

    async def call(self, name: str, params: msgspec.Struct) -> Any:
        """Call hutchd; after a lost connection call again on the next one. For idempotent methods.

        Raises hutchd's HutchError. Waits without limit for a connection: only a cancel ends that wait, not `close`.
        """
        while True:
            while (peer := self._peer) is None:
                await self._changed.wait()
            try:
                return await peer.call(name, params)
            except HutchError as error:
                if error.reason is not Reason.CONNECTION_LOST:
                    raise
            while self._peer is peer:
                await self._changed.wait()

    async def close(self) -> None:
        """Send the replies that are due, close the connection and dial no more. From then on events go to the spool."""
        self._is_closing = True
        if self._peer is not None:
            await self._peer.aclose()
        self._reporter.detach()

    @property
    def is_up(self) -> bool:
        """Whether hutchd has admitted this executor on the current connection."""
        return self._peer is not None

    # ------------------------------------------------------------ one connection

    async def _connect(self, context: Any, serves: Dispatcher[Any]) -> tuple[HutchError, bool]:
        """Dial and serve one connection; return the error that ended it, and whether hutchd admitted this executor."""
        was_up = False
        acked = self._reporter.outbox.acked
        try:
            stream = await self._dial()
            peer = Peer(stream, serves=serves, sends=EXECUTOR, context=context, limits=_LIMITS)
            async with peer.serving():
                self._reporter.connect(await self._say_hello(peer))
                was_up = True
                self._conditions.end("link", "connected")
                self._peer = peer
                self._changed.notify()
                try:
                    await self._attend(peer)
                finally:
                    self._peer = None
                    self._changed.notify()
            error = HutchError(Reason.CONNECTION_LOST)
        except HutchError as failure:
            error = failure
        if not was_up:
            self._conditions.begin("link", f"not connected: {error.message}")
        elif self._reporter.outbox.acked == acked and self._reporter.outbox.unacked:
            self._hold = self._unreceived.next()
        else:
            self._hold = 0.0
            self._unreceived.reset()
        return error, was_up

    async def _dial(self) -> SocketStream:
        """Return a stream to a server of the right uid."""
        try:
            sock = await to_thread.run_sync(connect, Path(self._boot.socket), _DIAL_DEADLINE)
        except OSError as error:
            raise HutchError(Reason.CONNECTION_LOST, f"hutchd cannot be reached: {error}") from error
        try:
            uid = peer_credentials(sock).uid
        except BaseException:
            sock.close()
            raise
        if uid != self._boot.server_uid:
            sock.close()
            raise HutchError(
                Reason.NOT_ALLOWED, f"The server runs as uid {uid}, not {self._boot.server_uid}: it gets no token."
            )
        return SocketStream(sock)

    async def _say_hello(self, peer: Peer[Any]) -> int:
        """Authenticate this executor; return the highest of its event numbers that hutchd has stored."""
        state = self._state()
        failpoint("executor.hello")
        welcome: m.Welcome = await peer.call(
            "hello",
            m.Hello(
                executor=self._boot.executor,
                token=self._boot.token,
                protocol=m.PROTOCOL,
                version=__version__,
                epoch_seen=self.epoch,
                session=state.session,
                turn=state.turn,
                last_n=self._reporter.outbox.last,
                abilities=self._abilities,
            ),
            _HELLO_DEADLINE,
        )
        if welcome.daemon_epoch < self.epoch:
            raise HutchError(
                Reason.NOT_ALLOWED, f"This hutchd has epoch {welcome.daemon_epoch}, but epoch {self.epoch} came before."
            )
        self.epoch = welcome.daemon_epoch
        self._patience = self._give_up_after
        witness("obeys", self._boot.executor, self.epoch)
        self._welcomed(welcome)
        return welcome.acked

    async def _attend(self, peer: Peer[Any]) -> None:
        """Send events and heartbeats until the connection ends. An OSError of the spool ends it too."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._send_events, peer)
            group.start_soon(self._send_heartbeats, peer)
            await peer.wait_closed()
            group.cancel_scope.cancel()

    async def _send_events(self, peer: Peer[Any]) -> None:
        try:
            await anyio.sleep(self._hold)
            await self._reporter.send(peer.notify_raw)
        except HutchError as error:
            peer.close(error)
        except OSError:
            _log.exception("the spool cannot be read")
            peer.close("the spool cannot be read")

    async def _send_heartbeats(self, peer: Peer[Any]) -> None:
        try:
            while True:
                beat = m.Heartbeat(
                    turn=self._state().turn,
                    unacked=self._reporter.outbox.unacked,
                    spooled_bytes=self._reporter.spooled_bytes,
                    rss_bytes=resident_bytes(),
                )
                await peer.notify("heartbeat", beat)
                await anyio.sleep(self._boot.heartbeat)
        except HutchError as error:
            peer.close(error)
