"""The one connection to hutchd: dialled, proved, and dialled again when it is lost.

A token is only sent to a server of the right uid; a daemon of a lower epoch than was seen is refused. What may pass
(nobody listens, the token is not known yet) is tried again with a growing, jittered pause, until the executor has been
without hutchd and without a turn for `patience` seconds. What cannot pass ends it at once.
"""

from __future__ import annotations

import logging
import random
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
from hutch_executor.signals import Change
from hutch_shared import __version__, unix
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint, witness
from hutch_shared.methods import EXECUTOR, TO_EXECUTOR
from hutch_shared.rpc.dispatch import Handler
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream

__all__ = ["PATIENCE", "Link", "Standing"]

PATIENCE: Final = 300.0
_DIAL_DEADLINE: Final = 5.0
_HELLO_DEADLINE: Final = 10.0
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 0.5
"""Short, since a hutchd that comes back should have its executors within a second."""
_STEADY: Final = 1.0
"""A connection that lasted so long ended for a reason of its own: the next is dialled at once."""
_LIMITS: Final = PeerLimits(frame=32 << 20)
_FINAL: Final = frozenset({Reason.LEASE_LOST, Reason.TOKEN_EXPIRED, Reason.PROTOCOL_MISMATCH})

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """What the executor says of itself: its session, the turn whose end is not acknowledged, whether one runs now."""

    session: str | None
    turn: str | None
    is_busy: bool


class Link:
    """The connection, whichever it is at the moment."""

    def __init__(
        self,
        boot: m.Boot,
        reporter: Reporter,
        standing: Callable[[], Standing],
        welcomed: Callable[[m.Welcome], None] = lambda _: None,
        *,
        patience: float = PATIENCE,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Be ready to dial `boot.socket`; `welcomed` is told each answer to a hello. `clock` counts awake seconds."""
        self.epoch = boot.daemon_epoch
        self._boot = boot
        self._reporter = reporter
        self._standing = standing
        self._welcomed = welcomed
        self._patience = patience
        self._clock = clock
        self._peer: Peer[Any] | None = None
        self._changed = Change()
        self._is_closing = False
        self._told = ""

    def __repr__(self) -> str:
        return f"<Link {'up' if self._peer else 'down'}, epoch {self.epoch}>"

    async def run(self, context: Any, handlers: Mapping[str, Handler[Any]]) -> HutchError:
        """Keep a connection until it is closed here, or that is hopeless; return why it is."""
        since = self._clock()
        pause = _FIRST_PAUSE
        while True:
            began = self._clock()
            error, was_up = await self._connect(context, handlers)
            if self._is_closing or error.reason in _FINAL:
                return error
            if was_up or self._standing().is_busy:
                since = self._clock()
            if was_up and self._clock() - began >= _STEADY:
                pause = _FIRST_PAUSE
            if self._clock() - since > self._patience:
                return error
            await anyio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311  # spreads executors, guards nothing
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def call(self, name: str, params: msgspec.Struct) -> Any:
        """Ask hutchd, as often as connections are lost meanwhile; raises its HutchError. For idempotent methods."""
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
        """Close the present connection in order, so that answers that are due get out, and dial no more."""
        self._is_closing = True
        if self._peer is not None:
            await self._peer.aclose()

    @property
    def is_up(self) -> bool:
        """Tell whether hutchd has admitted this executor on the present connection."""
        return self._peer is not None

    # ------------------------------------------------------------ one connection

    async def _connect(self, context: Any, handlers: Mapping[str, Handler[Any]]) -> tuple[HutchError, bool]:
        """Dial, serve until it ends; return why it ended and whether it was up."""
        was_up = False
        try:
            stream = await self._reach()
            peer = Peer(stream, takes=TO_EXECUTOR, sends=EXECUTOR, context=context, handlers=handlers, limits=_LIMITS)
            async with peer.serving():
                self._reporter.connect(await self._say_hello(peer))
                was_up = True
                self._peer = peer
                self._changed.happen()
                try:
                    await self._attend(peer)
                finally:
                    self._peer = None
                    self._reporter.detach()
                    self._changed.happen()
            error = HutchError(Reason.CONNECTION_LOST)
        except HutchError as failure:
            error = failure
        if was_up or error.message != self._told:
            _log.info("not connected: %s", error.message)
        self._told = error.message
        return error, was_up

    async def _reach(self) -> SocketStream:
        """Return a stream to a server of the right uid."""
        try:
            sock = await to_thread.run_sync(unix.connect, Path(self._boot.socket), _DIAL_DEADLINE)
        except OSError as error:
            raise HutchError(Reason.CONNECTION_LOST, f"hutchd cannot be reached: {error}") from error
        try:
            uid = unix.peer_credentials(sock).uid
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
        """Prove this executor; return the highest of its events that hutchd has."""
        standing = self._standing()
        failpoint("executor.hello")
        welcome: m.Welcome = await peer.call(
            "hello",
            m.Hello(
                executor=self._boot.executor,
                token=self._boot.token,
                protocol=m.PROTOCOL,
                version=__version__,
                epoch_seen=self.epoch,
                session=standing.session,
                turn=standing.turn,
                last_n=self._reporter.outbox.last,
            ),
            _HELLO_DEADLINE,
        )
        if welcome.daemon_epoch < self.epoch:
            raise HutchError(
                Reason.NOT_ALLOWED, f"This hutchd is of epoch {welcome.daemon_epoch}; {self.epoch} was seen already."
            )
        self.epoch = welcome.daemon_epoch
        witness("obeys", self._boot.executor, self.epoch)
        self._welcomed(welcome)
        return welcome.acked

    async def _attend(self, peer: Peer[Any]) -> None:
        """Send events and heartbeats until the connection ends. OSError of the spool ends it too."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._send_events, peer)
            group.start_soon(self._beat, peer)
            await peer.wait_closed()
            group.cancel_scope.cancel()

    async def _send_events(self, peer: Peer[Any]) -> None:
        try:
            await self._reporter.send(peer.notify_raw)
        except HutchError as error:
            peer.close(error)
        except OSError:
            _log.exception("the spool cannot be read")
            peer.close("the spool cannot be read")

    async def _beat(self, peer: Peer[Any]) -> None:
        try:
            while True:
                beat = m.Heartbeat(
                    turn=self._standing().turn,
                    unacked=self._reporter.outbox.unacked,
                    spooled_bytes=self._reporter.spooled_bytes,
                    rss_bytes=resident_bytes(),
                )
                await peer.notify("heartbeat", beat)
                await anyio.sleep(self._boot.heartbeat)
        except HutchError as error:
            peer.close(error)
