"""The proxy through which a sandbox with an allow-list reaches the network: HTTP and CONNECT, to allowed hosts only.

Theory. The proxy has a thread and an event loop of its own. An agent uses the network between turns too, when no task
of the runner lives; and what it downloads must not delay its events. Inside the sandbox there is only a listening
socket, made by `netns_bridge`; every decision is made here, outside.

Always true:

- The proxy resolves each name once and dials the address that it checked, so a later DNS answer has no effect.
- The proxy dials an address of this machine or of a private network only if an entry of the list is that address.
- A connection carries one request or one tunnel. Connections, heads and times are bounded (`CONNECTION_LIMIT`, …).
- The proxy stores nothing that passes. It logs each refused host once, and nothing else of a request.
- The proxy connects directly: it does not use a proxy of the host.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream, ByteStream
from anyio.from_thread import BlockingPortal

from hutch_executor.sandbox.http_head import (
    HEAD_LIMIT,
    BadHeadError,
    ProxyRequest,
    RequestReader,
    ResponseReader,
    response,
)
from hutch_shared.allow_list import Address, AllowList, address_of
from hutch_shared.rpc.stream import SocketStream, accept

__all__ = ["CONNECTION_LIMIT", "EgressProxy", "NetworkBridge"]

CONNECTION_LIMIT: Final = 128
"""Connections of a session at once. More wait in the listening socket's queue; beyond that the kernel drops them."""
_HEAD_DEADLINE: Final = 30.0
_RESOLVE_DEADLINE: Final = 15.0
_DIAL_DEADLINE: Final = 10.0
_ADDRESSES: Final = 6
"""Addresses of one host that are tried, each for at most `_DIAL_DEADLINE` seconds."""
_IDLE: Final = 600.0
"""Seconds without a byte after which a connection is cut."""
_CHUNK: Final = 1 << 16
_CLOSE_DEADLINE: Final = 2.0
_LOGGED: Final = 100
_ENDED: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)
"""Errors that end one connection only: the other side left, or a deadline passed."""

_log: Final = logging.getLogger(__name__)


class _RefusedError(Exception):
    """The request is refused; `response` goes to the client."""

    def __init__(self, status: int, phrase: str, text: str) -> None:
        super().__init__(text)
        self.response = response(status, text, phrase)


class NetworkBridge:
    """The bridge from one sandboxed command to the proxy.

    `netns_bridge` inherits `descriptor` and passes a listening socket.
    """

    def __init__(self, descriptor: socket.socket, serving: Future[None]) -> None:
        """Use `EgressProxy.open_bridge`."""
        self._descriptor = descriptor
        self._serving = serving

    def __repr__(self) -> str:
        return f"<NetworkBridge {self.descriptor}, {'closed' if self._serving.done() else 'open'}>"

    @property
    def descriptor(self) -> int:
        """The descriptor's number, here and in the process that inherits it."""
        return self._descriptor.fileno()

    def close(self) -> None:
        """Cut every connection and accept no more. From any thread; closing again does nothing."""
        self._serving.cancel()
        self._descriptor.close()


class EgressProxy:
    """The proxy of one session. Its methods block for a moment and may be called from any thread."""

    def __init__(self, allow: AllowList) -> None:
        """Start the thread."""
        self._allow = allow
        self._logged: set[tuple[str, int]] = set()
        self._room: anyio.Semaphore
        started: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="egress", daemon=True)
        self._thread.start()
        self._portal = started.result()

    def __repr__(self) -> str:
        return f"<EgressProxy {'running' if self._thread.is_alive() else 'closed'}>"

    def open_bridge(self) -> NetworkBridge:
        """Return the bridge for one more command."""
        ours, theirs = socket.socketpair()
        return NetworkBridge(theirs, self._portal.start_task_soon(self._serve_bridge, ours))

    def close(self) -> None:
        """Close all bridges and end the thread; a pending name look-up may delay that. Safe to call twice."""
        with suppress(RuntimeError):  # already stopped
            self._portal.call(self._portal.stop, True)
        self._thread.join(_CLOSE_DEADLINE)

    def _run(self, started: Future[BlockingPortal]) -> None:
        try:
            anyio.run(self._serve, started)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: Future[BlockingPortal]) -> None:
        self._room = anyio.Semaphore(CONNECTION_LIMIT)
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    # ------------------------------------------------------------ connections

    async def _serve_bridge(self, ours: socket.socket) -> None:
        """Wait for the listening socket that `netns_bridge` makes inside, and serve it until cancelled."""
        with ours:
            ours.setblocking(False)
            await anyio.wait_readable(ours)
            listener = _receive_listener(ours)
        if listener is None:
            return
        with listener:
            async with anyio.create_task_group() as group:
                while True:
                    await self._room.acquire()
                    try:
                        client = await accept(listener)
                    except BaseException:
                        self._room.release()
                        raise
                    group.start_soon(self._serve_client, client)

    async def _serve_client(self, client: socket.socket) -> None:
        stream = SocketStream(client)
        try:
            await self._proxy(stream)
        except* _ENDED:
            pass
        finally:
            await stream.aclose()
            self._room.release()

    async def _proxy(self, client: SocketStream) -> None:
        reader = RequestReader()
        try:
            with anyio.fail_after(_HEAD_DEADLINE):
                while (request := reader.feed(await client.receive(HEAD_LIMIT))) is None:
                    pass
            host = await self._reach(request)
        except _RefusedError as refused:
            await client.send(refused.response)
        except BadHeadError as error:
            await client.send(response(error.status, str(error)))
        else:
            async with host:
                await _relay(request, reader.rest, client, host)

    async def _reach(self, request: ProxyRequest) -> ByteStream:
        """Return a connection to the host. `_RefusedError` if the agent may not reach the host, or the proxy cannot."""
        host, port = request.host, request.port
        if not self._allow.names(host, port):
            self._log_refusal(host, port)
            text = (
                f"{host}:{port} is not among the hosts that agents may reach: Hutch's settings list them in"
                ' [sandbox] allow, since network = "allow-list".'
            )
            raise _RefusedError(403, "Not in [sandbox] allow", text)
        found = await _resolve(host, port)
        fit = [one for one in found if self._may_dial(one, port)]
        if found and not fit:
            self._log_refusal(host, port)
            text = (
                f"{host} leads to {found[0]}, which is not an address of the public internet. An agent may reach it if"
                " [sandbox] allow in Hutch's settings names that address too."
            )
            raise _RefusedError(403, "Not a public address", text)
        for one in fit[:_ADDRESSES]:
            with suppress(OSError, TimeoutError), anyio.fail_after(_DIAL_DEADLINE):
                return await anyio.connect_tcp(str(one), port)
        raise _RefusedError(502, "Bad Gateway", f"{host}:{port} cannot be reached from this machine.")

    def _may_dial(self, address: Address, port: int) -> bool:
        if (address, port) in self._allow.addresses:
            return True
        return self._allow.reaches(address, port) and not _is_own(address)

    def _log_refusal(self, host: str, port: int) -> None:
        if (host, port) not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add((host, port))
            _log.info("the agent may not reach %s:%d", host, port)


async def _relay(request: ProxyRequest, rest: bytes, client: SocketStream, host: ByteStream) -> None:
    """Relay both directions until both have ended, one side hangs up, or nothing passes for too long.

    `rest` is what the client sent after its head.
    """
    with anyio.CancelScope() as scope:

        def extend() -> None:
            scope.deadline = anyio.current_time() + _IDLE

        extend()
        async with anyio.create_task_group() as group:
            if request.head is None:
                await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                await host.send(request.head)
            group.start_soon(_pump, client, host, rest, extend, scope)
            body = await _relay_response_head(host, client) if request.head is not None else b""
            await _pump(host, client, body, extend, scope)


async def _relay_response_head(host: ByteReceiveStream, client: SocketStream) -> bytes:
    """Relay the head of the response, and any 1xx before it; return the bytes after it."""
    reader, status = ResponseReader(), 100
    while status < 200:
        try:
            heads = reader.feed(await host.receive(HEAD_LIMIT))
        except BadHeadError as error:
            await client.send(response(error.status, str(error)))
            raise anyio.BrokenResourceError from error
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            await client.send(response(502, "The host closed the connection before it answered."))
            raise
        for _, head in heads:
            await client.send(head)
        status = heads[-1][0] if heads else status
    return reader.rest


async def _pump(
    source: ByteReceiveStream, sink: ByteStream, first: bytes, extend: Callable[[], None], scope: anyio.CancelScope
) -> None:
    """Send `first`, then everything from `source`, to `sink`, and pass the end on. Cancels `scope` on a hang-up."""
    try:
        if first:
            await sink.send(first)
        while True:
            chunk = await source.receive(_CHUNK)
            extend()
            await sink.send(chunk)
    except anyio.EndOfStream:
        await sink.send_eof()
    except _ENDED:
        scope.cancel()


async def _resolve(host: str, port: int) -> list[Address]:
    """Return the addresses of a host, in the order to try. The name is passed as bytes, so that no codec changes it."""
    if (literal := address_of(host)) is not None:
        return [literal]
    look = partial(socket.getaddrinfo, host.removesuffix(".").encode(), port, type=socket.SOCK_STREAM)
    try:
        with anyio.fail_after(_RESOLVE_DEADLINE):
            found = await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
    except (OSError, TimeoutError):
        return []
    addresses = (address_of(str(one[4][0])) for one in found)
    return [one for one in dict.fromkeys(addresses) if one is not None]


def _is_own(address: Address) -> bool:
    """Whether the address is one of this machine's: a service here is not the public internet. Sends nothing."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as looking:
        looking.connect((str(address), 9))
        return address_of(looking.getsockname()[0]) == address
    return False


def _receive_listener(ours: socket.socket) -> socket.socket | None:
    """Receive the listening socket that `netns_bridge` made; None if it passed no listening socket."""
    try:
        _, descriptors, _, _ = socket.recv_fds(ours, 16, 4, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:  # the bridge died
        _log.warning("the network bridge of a sandbox broke: %s", error)
        return None
    if len(descriptors) == 1:
        with suppress(OSError):  # not a socket
            one = socket.socket(fileno=descriptors[0])
            if one.family == socket.AF_INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.setblocking(False)
                return one
            one.detach()
    for descriptor in descriptors:
        os.close(descriptor)
    _log.warning("the network bridge of a sandbox passed no listening socket")
    return None
