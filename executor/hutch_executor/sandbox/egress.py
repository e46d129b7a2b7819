"""The way out of walls that have a network of their own: an HTTP proxy that lets an agent reach the hosts it may.

Theory. It has a thread and an event loop of its own, since an agent uses the network between turns too and no task of
the runner lives that long, and since what an agent downloads must not hold up its events. Inside the walls is nothing
but a listening socket that `doorway` made there; all that is decided is decided here, outside.

What is always true:

- The name is resolved here, once, and what was judged is what is dialled: an answer that changes helps nobody.
- An address of this machine or of a private network is dialled only where an entry of the list is that address.
- A connection is for one request or one tunnel; connections, heads and times are bounded (`AT_ONCE`, …).
- Nothing of what passes is kept; of what is refused the host is logged, once, and nothing else.
- It dials itself: a proxy that the host may have is not used.
"""

from __future__ import annotations

import logging
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
from anyio.streams.buffered import BufferedByteReceiveStream

from hutch_executor.sandbox.http_head import END, Asked, answer, read_answer, read_request
from hutch_shared.allow_list import Address, AllowList, address_of
from hutch_shared.rpc.stream import SocketStream, accept

__all__ = ["AT_ONCE", "Door", "Egress"]

AT_ONCE: Final = 128
"""Connections of a session at once; more wait in the queue of the listening socket, and the kernel drops what is more
than that."""
HEAD_LIMIT: Final = 64 * 1024
"""Bytes."""
_HEAD_DEADLINE: Final = 30.0
_RESOLVE_DEADLINE: Final = 15.0
_DIAL_DEADLINE: Final = 10.0
_ADDRESSES: Final = 6
"""How many addresses of a host are tried, each for that long."""
_IDLE: Final = 600.0
"""Seconds in which nothing passed, after which a connection is cut."""
_CHUNK: Final = 1 << 16
_CLOSE_DEADLINE: Final = 2.0
_LOGGED: Final = 100
_CUT: Final = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    anyio.IncompleteRead,
    OSError,
)

_log: Final = logging.getLogger(__name__)


class _RefusedError(Exception):
    """What the proxy answers in place of the host."""

    def __init__(self, status: int, phrase: str, text: str) -> None:
        super().__init__(text)
        self.answer = answer(status, phrase, text)


class Door:
    """One agent process's door: `descriptor` is for `doorway` to inherit, whose listening socket is served here."""

    def __init__(self, descriptor: socket.socket, serving: Future[None]) -> None:
        """Made by `Egress.open_door`."""
        self._descriptor = descriptor
        self._serving = serving

    @property
    def descriptor(self) -> int:
        """Its number, also in what inherits it."""
        return self._descriptor.fileno()

    def close(self) -> None:
        """Cut every connection that came through it and take no more. From any thread; again it does nothing."""
        self._serving.cancel()
        self._descriptor.close()


class Egress:
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

    def open_door(self) -> Door:
        """Return the door for one more agent process."""
        ours, theirs = socket.socketpair()
        return Door(theirs, self._portal.start_task_soon(self._serve_door, ours))

    def close(self) -> None:
        """Close all doors and end the thread; a name that is being looked up may keep it for a while. Safe twice."""
        with suppress(RuntimeError):  # it has stopped
            self._portal.call(self._portal.stop, True)
        self._thread.join(_CLOSE_DEADLINE)

    def _run(self, started: Future[BlockingPortal]) -> None:
        try:
            anyio.run(self._live, started)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _live(self, started: Future[BlockingPortal]) -> None:
        self._room = anyio.Semaphore(AT_ONCE)
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    # ---------------------------------------------------------------- connections

    async def _serve_door(self, ours: socket.socket) -> None:
        """Wait for the listening socket that was made inside, and serve it until cancelled."""
        with ours:
            ours.setblocking(False)
            await anyio.wait_readable(ours)
            listener = _handed(ours)
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
                    group.start_soon(self._serve, client)

    async def _serve(self, client: socket.socket) -> None:
        stream = SocketStream(client)
        try:
            await self._proxy(stream)
        except* _CUT:
            pass
        finally:
            await stream.aclose()
            self._room.release()

    async def _proxy(self, client: SocketStream) -> None:
        said = BufferedByteReceiveStream(client)
        try:
            with anyio.fail_after(_HEAD_DEADLINE):
                asked = read_request(await said.receive_until(END, HEAD_LIMIT))
            host = await self._reach(asked)
        except _RefusedError as refused:
            await client.send(refused.answer)
        except (ValueError, anyio.DelimiterNotFound) as error:
            await client.send(answer(400, "Bad Request", str(error)))
        else:
            async with host:
                await _pass_on(asked, said, client, host)

    async def _reach(self, asked: Asked) -> ByteStream:
        """Return a connection to the host; `_RefusedError` when it may not be reached, or cannot be."""
        host, port = asked.host, asked.port
        if not self._allow.names(host, port):
            self._note(host, port)
            text = (
                f"{host}:{port} is not among the hosts that agents may reach: they stand in the settings of Hutch,"
                ' [sandbox] allow, since network = "allow-list".'
            )
            raise _RefusedError(403, "Not in [sandbox] allow", text)
        found = await _resolve(host, port)
        fit = [one for one in found if self._may_dial(one, port)]
        if found and not fit:
            self._note(host, port)
            text = (
                f"{host} leads to {found[0]}, which is no address of the public internet. An agent reaches it when"
                " [sandbox] allow in the settings of Hutch names that address too."
            )
            raise _RefusedError(403, "Not a public address", text)
        for one in fit[:_ADDRESSES]:
            with suppress(OSError, TimeoutError), anyio.fail_after(_DIAL_DEADLINE):
                return await anyio.connect_tcp(str(one), port)
        raise _RefusedError(502, "Bad Gateway", f"{host}:{port} cannot be reached from this machine.")

    def _may_dial(self, address: Address, port: int) -> bool:
        if (address, port) in self._allow.addresses:
            return True
        return self._allow.reaches(address, port) and not _is_ours(address)

    def _note(self, host: str, port: int) -> None:
        if (host, port) not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add((host, port))
            _log.info("the agent may not reach %s:%d", host, port)


async def _pass_on(asked: Asked, said: ByteReceiveStream, client: SocketStream, host: ByteStream) -> None:
    """Pass on what both sides send until both have ended, one hangs up, or nothing passes any more."""
    with anyio.CancelScope() as scope:

        def keep() -> None:
            scope.deadline = anyio.current_time() + _IDLE

        keep()
        heard = BufferedByteReceiveStream(host)
        async with anyio.create_task_group() as group:
            if asked.head is None:
                await client.send(b"HTTP/1.1 200 Connection established" + END)
            else:
                await host.send(asked.head)
            group.start_soon(_pump, said, host, keep, scope)
            if asked.head is not None:
                await _pass_answer(heard, client)
            await _pump(heard, client, keep, scope)


async def _pass_answer(heard: BufferedByteReceiveStream, client: SocketStream) -> None:
    """Pass the head of the answer on, and what comes before it (100 Continue)."""
    status = 100
    while status < 200:
        try:
            status, head = read_answer(await heard.receive_until(END, HEAD_LIMIT))
        except (ValueError, anyio.DelimiterNotFound) as error:
            await client.send(answer(502, "Bad Gateway", str(error)))
            raise anyio.BrokenResourceError from error
        except (anyio.IncompleteRead, anyio.BrokenResourceError):
            await client.send(answer(502, "Bad Gateway", "The host closed the connection before it answered."))
            raise
        await client.send(head)


async def _pump(
    source: ByteReceiveStream, sink: ByteStream, keep: Callable[[], None], scope: anyio.CancelScope
) -> None:
    try:
        while True:
            chunk = await source.receive(_CHUNK)
            keep()
            await sink.send(chunk)
    except anyio.EndOfStream:
        await sink.send_eof()
    except _CUT:
        scope.cancel()


async def _resolve(host: str, port: int) -> list[Address]:
    """Return the addresses of a host, in the order in which they are to be tried. Bytes: no codec, no other reading."""
    if (written := address_of(host)) is not None:
        return [written]
    look = partial(socket.getaddrinfo, host.removesuffix(".").encode(), port, type=socket.SOCK_STREAM)
    try:
        with anyio.fail_after(_RESOLVE_DEADLINE):
            found = await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
    except (OSError, TimeoutError):
        return []
    addresses = (address_of(str(one[4][0])) for one in found)
    return [one for one in dict.fromkeys(addresses) if one is not None]


def _is_ours(address: Address) -> bool:
    """Tell whether this machine has the address itself: what listens here is not the internet's. Sends nothing."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as looking:
        looking.connect((str(address), 9))
        return address_of(looking.getsockname()[0]) == address
    return False


def _handed(ours: socket.socket) -> socket.socket | None:
    """Take the listening socket that `doorway` made; None when it ended without, or it is none."""
    _, descriptors, _, _ = socket.recv_fds(ours, 16, 4, socket.MSG_CMSG_CLOEXEC)
    sockets = [socket.socket(fileno=one) for one in descriptors]
    for one in sockets:
        if (
            len(sockets) == 1
            and one.family == socket.AF_INET
            and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            one.setblocking(False)
            return one
        one.close()
    _log.warning("no way out of the sandbox could be opened")
    return None
