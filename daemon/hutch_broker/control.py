"""The control link to hutchd: leases come in, request records go out.

Only processes of our own uid or root may connect, and the first call must be `hello` with the token. A new link that
passes `hello` replaces the earlier link. Without a link the broker still serves requests whose key it has in memory.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from hutch_broker.dialects import DIALECTS
from hutch_broker.leases import LeaseTable
from hutch_broker.prices import PriceTable, Unpriced
from hutch_broker.request_cost import how_to_price
from hutch_broker.request_log import RequestLog
from hutch_broker.usage import TokenCount
from hutch_shared import __version__
from hutch_shared import broker_link as link
from hutch_shared.errors import HutchError, Reason
from hutch_shared.messages import Nothing
from hutch_shared.processes import peer_credentials
from hutch_shared.rpc.dispatch import Dispatcher
from hutch_shared.rpc.heartbeat import Timeouts
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.watched_listener import WatchedListener

__all__ = ["Control"]

_TIMEOUTS: Final = Timeouts(first_frame=5.0, quiet=30.0)
_LIMITS: Final = PeerLimits(frame=64 << 20)


@dataclass(slots=True, eq=False)
class _LinkState:
    """The state of one connection."""

    trusted: bool = False
    """True once `hello` carried the right token."""
    agreed: bool = False
    """True once hutchd sent its list of leases. From then on hutchd can tell which lease a record belongs to."""


class Control:
    """The broker's end of the control link."""

    def __init__(
        self,
        boot: link.BrokerBoot,
        leases: LeaseTable,
        request_log: RequestLog,
        prices: PriceTable,
        run: str,
        *,
        shut_down: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        """`run` is an id of this broker process. `shut_down` ends the broker.

        `changed` is called after each change of the leases or of the link.
        """
        self._boot = boot
        self._leases = leases
        self._request_log = request_log
        self._prices = prices
        self._run = run
        self._shut_down = shut_down
        self._peer: Peer[_LinkState] | None = None
        self._linked = anyio.Event()
        self._changed = changed
        self.left = False
        """True if the last hutchd ended on purpose: none comes back for the streams that still run."""
        self.port: int | None = None
        self.agreed = anyio.Event()
        """Set once hutchd sent its list of leases. Before that, a lease that the broker does not know may be valid."""

    @property
    def linked(self) -> bool:
        """True while hutchd is linked."""
        return self._peer is not None

    async def ask(self, need: link.NeedKey) -> link.Key:
        """Ask hutchd for a key, waiting for a link first. Raises hutchd's error, or `connection_lost`."""
        while self._peer is None:
            await self._linked.wait()
        key: link.Key = await self._peer.call("need_key", need)
        return key

    async def serve(self, listener: WatchedListener) -> None:
        """Accept links until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                sock = await listener.accept()
                try:
                    allowed = peer_credentials(sock).uid in (0, os.geteuid())
                except HutchError:
                    allowed = False
                if not allowed:
                    sock.close()
                    continue
                tasks.start_soon(self._talk, SocketStream(sock), tasks)

    async def _talk(self, stream: SocketStream, tasks: TaskGroup) -> None:
        state = _LinkState()
        peer: Peer[_LinkState] = Peer(
            stream,
            serves=Dispatcher(
                link.TO_BROKER,
                {
                    "hello": lambda one, params: self._hello(one, params, peer),
                    "keep_leases": lambda one, params: self._keep(one, params, peer, tasks),
                    "ack_records": self._acknowledged,
                    "leave": lambda one, _: self._left(one),
                    **{name: self._trusted(method) for name, method in self._methods().items()},
                },
            ),
            sends=link.FROM_BROKER,
            context=state,
            limits=_LIMITS,
            timeouts=_TIMEOUTS,
        )
        try:
            await peer.run()
        finally:
            if self._peer is peer:
                self._peer = None
                self._linked = anyio.Event()
                self._changed()

    def _methods(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "put_lease": self._leases.put,
            "refill": self._leases.refill,
            "set_active": lambda params: self._leases.set_active(params.lease, active=params.active),
            "find_price": self._find_price,
            "set_prices": lambda params: self._prices.replace_own(params.prices),
            "end_leases": lambda params: self._leases.end(params.leases),
            "drop_keys": lambda params: self._leases.drop_keys(params.credential),
            "get_status": lambda _: link.BrokerStatus(
                leases=self._leases.states(),
                requests=self._request_log.requests,
                refused=self._request_log.refused,
                unacknowledged=self._request_log.unacknowledged,
            ),
            "shutdown": lambda _: self._shut_down(),
        }

    def _trusted(self, method: Callable[[Any], Any]) -> Callable[[_LinkState, Any], Any]:
        def handler(state: _LinkState, params: Any) -> Any:
            if not state.trusted:
                raise HutchError(Reason.HELLO_FIRST)
            result = method(params)
            self._changed()
            return Nothing() if result is None else result

        return handler

    def _acknowledged(self, state: _LinkState, params: link.AckRecords) -> None:
        if state.trusted:
            self._request_log.acknowledge(params.n)

    def _find_price(self, asked: link.FindPrice) -> link.PriceFound:
        if not self._prices.loaded.is_set():
            return link.PriceFound()  # the first request will tell
        found = self._prices.rates(DIALECTS[asked.dialect].prices, TokenCount(known=True, model=asked.model))
        if not isinstance(found, Unpriced):
            return link.PriceFound()
        return link.PriceFound(found.why + how_to_price(asked.provider, found))

    def _left(self, state: _LinkState) -> None:
        if state.trusted:
            self.left = True
            self._changed()

    def _keep(self, state: _LinkState, params: link.LeaseIds, peer: Peer[_LinkState], tasks: TaskGroup) -> link.Ended:
        if not state.trusted:
            raise HutchError(Reason.HELLO_FIRST)
        ended = self._leases.keep(params.leases)
        self._changed()
        if not state.agreed:
            state.agreed = True
            self.agreed.set()
            tasks.start_soon(self._report, peer)
        return ended

    def _hello(self, state: _LinkState, hello: link.BrokerHello, peer: Peer[_LinkState]) -> link.BrokerWelcome:
        if not hmac.compare_digest(hello.token.encode(), self._boot.token.encode()):
            raise HutchError(Reason.TOKEN_UNKNOWN)
        if hello.protocol != link.PROTOCOL:
            raise HutchError(Reason.PROTOCOL_MISMATCH)
        if not state.trusted:
            state.trusted = True
            self.left = False
            if self._peer is not None:
                self._peer.close("another hutchd took over")
            self._peer = peer
            self._linked.set()
            self._changed()
        return link.BrokerWelcome(
            run=self._run,
            version=__version__,
            pid=os.getpid(),
            leases=self._leases.states(),
            told=self._request_log.last,
            port=self.port,
            abilities=("set_active", "set_prices", "find_price", "leave", "network"),
        )

    async def _report(self, peer: Peer[_LinkState]) -> None:
        """Report records in order while this is the current link."""
        sent = 0
        try:
            while self._peer is peer:
                pause = self._request_log.close_windows()
                if batch := self._request_log.after(sent):
                    await peer.notify("report_records", link.Records(run=self._run, records=batch))
                    sent = batch[-1].n
                    continue
                with anyio.move_on_after(pause):
                    await self._request_log.wait()
        except HutchError:
            return  # the link is lost; the next one gets every record that was not acknowledged

    def __repr__(self) -> str:
        return f"<Control {'linked' if self.linked else 'alone'}>"
