"""Serves one request: checks the request, its lease and its process; forwards it with the key; records its usage.

What is always true:

- A key is sent only to the base URL that hutchd gave with it: no redirect is followed, no cookie is kept.
- Only path, query, body and allowed headers of a request reach the provider.
- With a limited network, a body is read whole before the key is used, and goes on only without tools of the provider.
- Bytes of the response are forwarded as they arrive, after they were searched for the key (`mask`). If the provider
  breaks off, or its answer must be withheld, the agent's connection is aborted, so that a cut response never looks
  complete.
- When the agent hangs up or the lease ends, the request to the provider is aborted at once.
- No exception of a client or server library is logged or shown: its text may contain headers.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from traceback import extract_tb
from typing import Final
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # not in typeshed

import aiohttp
import anyio
import msgspec
from aiohttp import web
from anyio import to_thread
from multidict import CIMultiDict
from yarl import URL

from hutch_broker.bill import Bill
from hutch_broker.budgets import HeldBudget
from hutch_broker.dialects import DIALECTS, credential_headers, is_path_of, upstream_url
from hutch_broker.judge import Refusal, RequestHead, allowed, forwarded, judge
from hutch_broker.key_cache import KeyCache
from hutch_broker.leases import HeldLease, LeaseTable, lease_id_in
from hutch_broker.mask import WITHHELD, AnswerMask, WithheldError, checked_status, clean_headers
from hutch_broker.metering import meter_for
from hutch_broker.prices import PriceTable, Unpriced
from hutch_broker.processes import BrokerPeer, admit
from hutch_broker.provider_tools import check_network
from hutch_broker.request_cost import how_to_price, most, read_request
from hutch_broker.request_log import RequestLog
from hutch_shared.broker_link import BrokerBoot, Lease, Record
from hutch_shared.errors import HutchError
from hutch_shared.secret_forms import SecretForms
from hutch_shared.times import now_ms

__all__ = ["Proxy", "upstream_session"]

_log: Final = logging.getLogger(__name__)
_STARTING: Final = 30.0
"""Seconds that a request waits, after the broker started, for hutchd to send the leases."""
_UPSTREAM_IDLE: Final = 4.0
"""Seconds after which an idle connection to a provider is closed. Providers close theirs later, so no POST is lost."""
_LARGE: Final = 256 * 1024
"""Bytes of a body from which on it is decoded outside the event loop, which would stand still meanwhile."""

_NO_TURN: Final = Refusal(
    403, "permission_error", "No turn of this session is running, so no request of its processes reaches the model."
)


def upstream_session(boot: BrokerBoot) -> aiohttp.ClientSession:
    """Return the HTTP client for providers. It verifies TLS, keeps no cookies and ignores the environment."""
    trusted = ssl.create_default_context()
    if boot.ca_file is not None:
        trusted.load_verify_locations(boot.ca_file)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=trusted, keepalive_timeout=_UPSTREAM_IDLE),
        timeout=aiohttp.ClientTimeout(
            total=None,
            connect=boot.connect_timeout,
            sock_connect=boot.connect_timeout,
            sock_read=boot.first_byte_timeout,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=65536,
        max_field_size=65536,
    )


@dataclass(slots=True)
class _Body:
    """The request's body while it is forwarded. A body above the allowed size makes the request fail."""

    request: web.BaseRequest
    first: bytes
    left: int
    fault: Refusal | None = None

    def whole(self, length: int | None) -> bytes | None:
        """Return the whole body if it arrived together with the head; None if it must be streamed."""
        return self.first if len(self.first) == length else None

    async def read_whole(self) -> Refusal | None:
        """Read the rest, so that `first` is the whole body; return the reason if that fails."""
        try:
            self.first = b"".join([piece async for piece in self.pieces()])
        except (web.RequestPayloadError, aiohttp.ClientPayloadError, ValueError):
            return self.fault
        self.left += len(self.first)  # `pieces` counts it again
        return None

    async def pieces(self) -> AsyncIterator[bytes]:
        piece = self.first
        try:
            while piece:
                self.left -= len(piece)
                if self.left < 0:
                    self.fault = Refusal(413, "request_too_large", "The request is larger than the broker accepts.")
                    raise ValueError(self.fault.why)
                yield piece
                piece = await self.request.content.readany()
        except (web.RequestPayloadError, aiohttp.ClientPayloadError):
            self.fault = Refusal(400, "invalid_request_error", "The body of the request broke off.")
            raise


class _Streamed(web.StreamResponse):
    """A response whose head is sent together with the first chunk of its body."""

    _send_headers_immediately = False


@dataclass(slots=True)
class _Exchange:
    """The state of a request, for its record."""

    request: web.BaseRequest
    peer: BrokerPeer
    path: str
    began: float
    at: int
    held: HeldLease | None = None
    status: int = 0

    def cut(self) -> None:
        """Abort the agent's connection. That cancels the handler, and the handler aborts the provider's request."""
        if (transport := self.request.transport) is not None:
            transport.abort()


class Proxy:
    """Answers the requests of agents."""

    def __init__(
        self,
        boot: BrokerBoot,
        leases: LeaseTable,
        keys: KeyCache,
        prices: PriceTable,
        request_log: RequestLog,
        session: aiohttp.ClientSession,
        agreed: anyio.Event,
    ) -> None:
        """`agreed` is set once hutchd sent the leases. After a restart of the broker, agents may dial before that."""
        self._boot = boot
        self._leases = leases
        self._keys = keys
        self._prices = prices
        self._request_log = request_log
        self._session = session
        self._agreed = agreed

    async def handle(self, request: web.BaseRequest, peer: BrokerPeer) -> web.StreamResponse:
        """Answer one request. Raises nothing but cancellation."""
        exchange = _Exchange(request, peer, request.raw_path.partition("?")[0][:200], monotonic(), now_ms())
        try:
            return await self._handle(exchange)
        except Exception as error:  # noqa: BLE001  # a bug; its text may contain a header, so log only the code lines
            where = ", ".join(f"{Path(at.filename).name}:{at.lineno}" for at in extract_tb(error.__traceback__))
            _log.error("%s at %s", type(error).__name__, where)
            exchange.cut()
            return _answer(Refusal(500, "api_error", "The broker failed; its log has the place."))

    async def _handle(self, exchange: _Exchange) -> web.StreamResponse:
        request = exchange.request
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers]
        head = judge(request.method, request.raw_path, headers, self._boot.body)
        if isinstance(head, Refusal):
            return self._refused(exchange, head)
        if not self._agreed.is_set():
            with anyio.move_on_after(_STARTING):
                await self._agreed.wait()
        held = self._admit(exchange, head)
        if isinstance(held, Refusal):
            return self._refused(exchange, held, lease_id_in(head.token))
        if (refusal := held.begin(exchange.cut)) is not None:
            return self._refused(exchange, refusal, held.lease.id)
        exchange.held = held
        free = request.method == "GET" or _is_counting(exchange.path)
        bill = Bill(self._prices.as_now(), DIALECTS[held.lease.dialect].prices, free)
        try:
            return await self._serve(exchange, held, bill, head, headers)
        finally:
            self._settle(exchange, held, bill)

    def _admit(self, exchange: _Exchange, head: RequestHead) -> HeldLease | Refusal:
        """Return the lease, or the reason why this process may not use it for this request."""
        held = self._leases.of_token(head.token)
        if held is None and not self._agreed.is_set():
            return Refusal(503, "api_error", "The broker has just started; try again.")
        if held is None:
            return Refusal(401, "authentication_error", "The lease is unknown, or has ended.")
        if not admit(exchange.peer, held.lease):
            return Refusal(
                403,
                "permission_error",
                "The lease belongs to another session than this process.",
            )
        if not is_path_of(held.lease.dialect, exchange.request.method, head.path):
            return Refusal(404, "not_found_error", f"{held.lease.provider} has no model API at this path.")
        if not held.active:
            return _NO_TURN
        if self._request_log.full:
            return Refusal(503, "api_error", "Usage cannot be recorded at the moment; try again.")
        return held

    async def _reserve(
        self, held: HeldLease, bill: Bill, budget: HeldBudget, head: RequestHead, body: _Body
    ) -> Refusal | None:
        """Reserve what the request can cost, perhaps after other requests of the session; return why it cannot.

        `body` was read whole.
        """
        lease = held.lease
        if DIALECTS[lease.dialect].usage is None:
            return Refusal(
                402, "billing_error", f"The session has a budget, and Hutch cannot count what {lease.provider} charges."
            )
        bill.ask = read_request(lease.dialect, head.path, body.first)
        if bill.ask is None:
            return Refusal(
                400, "invalid_request_error", "The session has a budget, and the request is not readable JSON."
            )
        highest = most(bill.prices, bill.provider, bill.ask)
        if isinstance(highest, Unpriced):
            return Refusal(
                402, "billing_error", f"The session has a budget. {highest.why}{how_to_price(lease.provider, highest)}"
            )
        reservation = await budget.reserve(highest, self._boot.budget_wait)
        if isinstance(reservation, Refusal):
            return reservation
        bill.reserve(budget, reservation)
        return None

    async def _serve(
        self, exchange: _Exchange, held: HeldLease, bill: Bill, head: RequestHead, headers: list[tuple[str, str]]
    ) -> web.StreamResponse:
        if not self._prices.loaded.is_set():
            await self._prices.loaded.wait()
        body = None
        limited, budget = held.lease.network != "full", None if bill.free else held.budget
        if exchange.request.method == "POST" and (limited or budget is not None):
            body = await self._begun_body(exchange.request, head)
            if (fault := await body.read_whole()) is not None:
                return self._refused(exchange, fault)
        if limited and body is not None and (refusal := await _look_for_provider_tools(held.lease, body.first)):
            return self._refused(exchange, refusal)
        if budget is not None and body is not None and (refusal := await self._reserve(held, bill, budget, head, body)):
            return self._refused(exchange, refusal)
        try:
            key = await self._keys.of(held)
        except HutchError as error:
            return self._refused(exchange, Refusal(503, "api_error", f"The key is not available: {error}"))
        lease = held.lease
        if self._leases.get(lease.id) is not held:
            return self._refused(exchange, Refusal(401, "authentication_error", "The lease has ended."))
        if not held.active:
            return self._refused(exchange, _NO_TURN)
        url = upstream_url(lease.dialect, key.base_url, exchange.request.raw_path)
        if url is None:
            return self._refused(exchange, Refusal(400, "invalid_request_error", "The key needs a base URL."))
        if body is None and head.length != 0:
            body = await self._begun_body(exchange.request, head)
        going: CIMultiDict[str] = CIMultiDict(allowed(lease.dialect, headers))
        going["Accept-Encoding"] = "identity"
        if head.length is not None and body is not None:
            going["Content-Length"] = str(head.length)
        for name, value in credential_headers(lease.dialect, key, going.get("anthropic-beta")):
            going[name] = value
        bill.sent = True
        try:
            upstream = await self._session.request(
                exchange.request.method,
                URL(url, encoded=True),
                headers=going,
                data=None if body is None else body.whole(head.length) or body.pieces(),
                allow_redirects=False,
                proxy=self._proxy_for(url),
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if body is not None and body.fault is not None:
                return self._refused(exchange, body.fault)
            bill.sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            _log.debug("%s: no answer from the provider (%s)", lease.id, type(error).__name__)
            late = isinstance(error, TimeoutError)
            return _answer(
                Refusal(504, "timeout_error", "The provider did not answer in time.")
                if late
                else Refusal(502, "api_error", "The provider cannot be reached, or broke off before it answered.")
            )
        try:
            return await self._pass_on(exchange, held, bill, upstream, held.forms_of(key))
        finally:
            upstream.close()

    async def _begun_body(self, request: web.BaseRequest, head: RequestHead) -> _Body:
        """Return the body with its first bytes. Let the agent send it if it waits for that."""
        if head.expects and (transport := request.transport) is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return _Body(request, await request.content.readany(), self._boot.body)

    async def _pass_on(
        self, exchange: _Exchange, held: HeldLease, bill: Bill, upstream: aiohttp.ClientResponse, forms: SecretForms
    ) -> web.StreamResponse:
        """Stream the provider's response to the agent, without the key."""
        exchange.status = upstream.status
        if 300 <= upstream.status < 400 and upstream.status != 304:
            return _answer(Refusal(502, "api_error", "The provider answered with a redirect, which is not followed."))
        if upstream.status == 401:
            held.forget_key(rejected=True)
        named = upstream.headers
        content_type, encoding = named.get("Content-Type", ""), ", ".join(named.getall("Content-Encoding", ()))
        meter = bill.meter = meter_for(DIALECTS[held.lease.dialect].usage, content_type)
        writer = None
        try:
            mask = AnswerMask(forms, content_type, encoding, named.get("Transfer-Encoding", ""))
            response = _Streamed(
                status=checked_status(upstream.status),
                headers=CIMultiDict(clean_headers(forms, forwarded(named.items()))),
            )
            if "Content-Length" in named and "Transfer-Encoding" not in named and not mask.decompresses:
                response.content_length = upstream.content_length
            if (connection := upstream.connection) is not None and connection.protocol is not None:
                connection.protocol.read_timeout = self._boot.chunk_timeout
                connection.protocol.start_timeout()
            content = upstream.content
            chunk = content.read_nowait()
            while not content.at_eof():
                meter.feed(chunk := mask.inflate(chunk))
                harmless = mask.feed(chunk)
                if writer is None and (harmless or not mask.is_document):
                    writer = await response.prepare(exchange.request)
                if writer is not None:
                    await writer.write(harmless)  # the first write sends the head too, even with an empty chunk
                if bill.exceeds():
                    exchange.cut()
                    return response
                chunk = await content.readany()
            meter.feed(chunk := mask.inflate(chunk))
            bill.complete = True
            harmless = mask.feed(chunk) + mask.end()
            if writer is None:
                await response.prepare(exchange.request)
            await response.write_eof(harmless)
        except WithheldError as withheld:
            refusal = Refusal(502, withheld.kind, withheld.why)
            self._record_refusal(exchange, refusal, held)
            if writer is None:
                return _answer(refusal)
            exchange.cut()
        except (aiohttp.ClientError, TimeoutError, OSError):
            exchange.cut()  # a broken stream must not look complete
        return response

    def _proxy_for(self, url: str) -> str | None:
        """Return the HTTP proxy for `url`, or None. Plain HTTP is allowed only to this machine and uses no proxy."""
        parts = URL(url, encoded=True)
        proxies = self._boot.proxies
        if parts.scheme != "https" or parts.host is None or proxy_bypass_environment(parts.host, proxies):
            return None
        return proxies.get("https")

    def _refused(self, exchange: _Exchange, refusal: Refusal, lease: str = "") -> web.StreamResponse:
        """Record the refusal, and return it as a response."""
        self._record_refusal(exchange, refusal, exchange.held or self._leases.get(lease))
        exchange.status = -1
        return _answer(refusal)

    def _record_refusal(self, exchange: _Exchange, refusal: Refusal, held: HeldLease | None) -> None:
        self._request_log.refuse(
            Record(
                n=0,
                at=exchange.at,
                lease=held.lease.id if held else "",
                session=held.lease.session if held else "",
                path=exchange.path,
                status=refusal.status,
                refused=refusal.why,
                uid=exchange.peer.uid,
                pid=exchange.peer.pid,
            )
        )

    def _settle(self, exchange: _Exchange, held: HeldLease, bill: Bill) -> None:
        """Settle and record a finished request. Awaits nothing, so that a hang-up cannot interrupt it."""
        cost = bill.settle(max(0, exchange.status))
        tokens = cost.tokens
        held.end(exchange.cut)
        if exchange.status < 0:
            return
        self._request_log.forwarded(
            Record(
                n=0,
                at=exchange.at,
                lease=held.lease.id,
                session=held.lease.session,
                path=exchange.path,
                status=exchange.status,
                model=tokens.model,
                input=tokens.input,
                output=tokens.output,
                cache_read=tokens.cache_read,
                cache_write=tokens.cache_write,
                cache_write_1h=tokens.cache_write_1h,
                searches=tokens.searches,
                usd=cost.usd,
                why_unknown=cost.why_unknown,
                seconds=round(monotonic() - exchange.began, 6),
                uid=exchange.peer.uid,
                pid=exchange.peer.pid,
            )
        )


async def _look_for_provider_tools(lease: Lease, body: bytes) -> Refusal | None:
    """Return why a whole body does not fit the limited network of its session. A large one is read in a thread."""
    if len(body) < _LARGE:
        return check_network(lease.dialect, lease.network, body)
    return await to_thread.run_sync(check_network, lease.dialect, lease.network, body)


def _is_counting(path: str) -> bool:
    return path.endswith(("count_tokens", "count-tokens", "countTokens"))


def _answer(refusal: Refusal) -> web.Response:
    """Return the refusal in a form that every provider's client understands. Temporary refusals ask for a retry."""
    again = refusal.status in (429, 502, 503, 504) and refusal.kind not in WITHHELD
    body = {
        "type": "error",
        "error": {"type": refusal.kind, "code": refusal.kind, "message": f"hutch-broker: {refusal.why}"},
    }
    response = web.Response(
        status=refusal.status,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers={"x-should-retry": "true" if again else "false"},
    )
    if refusal.status in (400, 405, 413, 417):
        response.force_close()
    return response
