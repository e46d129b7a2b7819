"""A broker in this process, with a stand-in for hutchd at its link and a raw client for its agents' socket."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from hutch_broker.broker import serving
from hutch_shared import broker_link as link
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id, new_token
from hutch_shared.processes import start_time
from hutch_shared.rpc.dispatch import Dispatcher
from hutch_shared.rpc.peer import Peer
from hutch_shared.rpc.stream import SocketStream, dial

KEY = "sk-rehearsal-0123456789"
ASK = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 64,
    "stream": True,
    "messages": [{"role": "user", "content": "hello"}],
}


@dataclass
class Stage:
    """A broker, a link to it, and the messages that arrived on the link."""

    boot: link.BrokerBoot
    base_url: str
    secret: str = KEY
    kind: Any = "api_key"
    asked: list[link.NeedKey] = field(default_factory=list)
    records: list[link.Record] = field(default_factory=list)
    may_answer: anyio.Event = field(default_factory=anyio.Event)
    acknowledges: bool = True
    welcome: link.BrokerWelcome | None = None
    peer: Peer[Any] = None  # type: ignore[assignment]
    _told: anyio.Event = field(default_factory=anyio.Event)

    async def need_key(self, _: Any, need: link.NeedKey) -> link.Key:
        self.asked.append(need)
        await self.may_answer.wait()
        if self.secret == "":
            raise HutchError(Reason.NO_KEY, "There is no key.")
        return link.Key(secret=self.secret, kind=self.kind, base_url=self.base_url)

    async def report_records(self, _: Any, told: link.Records) -> None:
        self.records += told.records
        self._told.set()
        self._told = anyio.Event()
        if self.acknowledges:
            await self.peer.notify("ack_records", link.AckRecords(n=told.records[-1].n))

    async def recorded(self, count: int) -> list[link.Record]:
        """Wait until there are `count` records; return them."""
        with anyio.fail_after(30):
            while len(self.records) < count:
                await self._told.wait()
        return self.records

    @asynccontextmanager
    async def linked(self, *, agree: bool = True) -> AsyncIterator[Peer[Any]]:
        """Connect to the control socket as hutchd does, and keep all leases."""
        stream = await dial(Path(self.boot.control))
        peer: Peer[Any] = Peer(
            stream,
            sends=link.TO_BROKER,
            context=None,
            serves=Dispatcher(link.FROM_BROKER, {"need_key": self.need_key, "report_records": self.report_records}),
        )
        self.peer = peer
        async with peer.serving():
            welcome: link.BrokerWelcome = await peer.call("hello", link.BrokerHello(token=self.boot.token), 30)
            self.welcome = welcome
            if agree:
                await self.keep(*(one.lease.id for one in welcome.leases))
            yield peer

    async def keep(self, *leases: str) -> link.Ended:
        """Send the list of leases to keep."""
        ended: link.Ended = await self.peer.call("keep_leases", link.LeaseIds(leases=leases), 30)
        return ended

    async def lease(
        self, *, requests: int = 1000, usd: float | None = None, expires_in: float = 600.0, **more: Any
    ) -> tuple[str, str]:
        """Send the broker a lease for this process; return its id and token."""
        state, token = self.made(requests=requests, usd=usd, expires_in=expires_in, **more)
        await self.peer.call("put_lease", state, 30)
        return state.lease.id, token

    def made(
        self, *, requests: int = 1000, usd: float | None = None, expires_in: float = 600.0, **more: Any
    ) -> tuple[link.LeaseState, str]:
        """Return a lease for this process, and its token."""
        lease, secret = new_id("lease"), new_token()
        token = f"hutch-{lease}-{secret}"
        facts: dict[str, Any] = {
            "id": lease,
            "token_hash": hashlib.sha256(token.encode()).hexdigest(),
            "session": "s-1",
            "executor": "x-1",
            "owner": os.getuid(),
            "account": "somebody",
            "provider": "anthropic",
            "dialect": "anthropic",
            "credential": "k-1",
            "uid": os.getuid(),
            "pid": os.getpid(),
            "start_time": start_time(os.getpid()),
            "network": "full",
            **more,
        }
        return link.LeaseState(link.Lease(**facts), expires_in, requests, usd), token

    async def dial(self) -> SocketStream:
        """Connect to the agents' socket."""
        return await dial(Path(self.boot.socket))

    async def send(self, raw: bytes) -> bytes:
        """Send raw bytes on a new connection; return all bytes that arrive until it ends."""
        stream = await self.dial()
        try:
            with anyio.fail_after(30):
                with suppress(anyio.BrokenResourceError):
                    await stream.send(raw)
                return await read_all(stream)
        finally:
            await stream.aclose()

    async def ask(self, token: str, body: Any = ASK, **more: Any) -> tuple[int, dict[str, str], bytes]:
        """Make one request; return status, headers and body."""
        return parsed(await self.send(request(token, body, **more)))


async def read_all(stream: SocketStream) -> bytes:
    got = bytearray()
    while True:
        try:
            got += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return bytes(got)


async def read_until(stream: SocketStream, mark: bytes) -> bytes:
    got = bytearray()
    with anyio.fail_after(30):
        while mark not in got:
            got += await stream.receive()
    return bytes(got)


def request(
    token: str,
    body: Any = ASK,
    *,
    path: str = "/v1/messages?beta=true",
    method: str = "POST",
    header: str = "x-api-key",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Return a request's bytes; the connection ends after the answer."""
    raw = body if isinstance(body, bytes) else b"" if body is None or method != "POST" else json.dumps(body).encode()
    shown = f"Bearer {token}" if header == "authorization" else token
    lines = [f"{method} {path} HTTP/1.1", "Host: broker.invalid", f"{header}: {shown}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if method == "POST":
        lines.append(f"Content-Length: {len(raw)}")
    return "\r\n".join([*lines, "", ""]).encode() + raw


def parsed(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Parse an answer and join its chunks. An answer that breaks off raises."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        whole = bytearray()
        while True:
            size, found, body = body.partition(b"\r\n")
            if not found:
                raise EOFError("the stream broke off")
            length = int(size, 16)
            if length == 0:
                break
            whole += body[:length]
            body = body[length + 2 :]
        body = bytes(whole)
    elif len(body) < int(headers.get("content-length", 0)):
        raise EOFError("the body broke off")
    return int(first.split()[1]), headers, body


@asynccontextmanager
async def staged(base_url: str, *, agree: bool = True, **boot: Any) -> AsyncIterator[Stage]:
    """Run a broker that is linked and gets a key for `base_url` whenever it asks."""
    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        agents = Path(folder) / "b"
        agents.mkdir(mode=0o700)
        settings = link.BrokerBoot(
            token=new_token(), control=f"{folder}/control.sock", socket=f"{agents}/broker.sock", **boot
        )
        stage = Stage(settings, base_url)
        stage.may_answer.set()
        failure = None
        async with serving(settings):
            try:
                async with stage.linked(agree=agree):
                    yield stage
            except Exception as error:  # noqa: BLE001 - raised below, outside the groups that would wrap it
                failure = error
        if failure is not None:
            raise failure


class Upstream:
    """A provider that answers with the test's bytes and records the requests.

    With `hold` it does not close the connection after its answer, but waits until the other side does.
    """

    def __init__(self, answer: bytes, hold: bool) -> None:
        self.answer = answer
        self.hold = hold
        self.got: list[bytes] = []
        self.heads = 0
        self.gone = anyio.Event()
        self.url = ""
        self.later = b""
        """The rest of the answer, sent once `go` is set."""
        self.go = anyio.Event()

    async def talk(self, stream: anyio.abc.SocketStream) -> None:
        got = bytearray()
        try:
            while b"\r\n\r\n" not in got:
                got += await stream.receive()
            head, _, body = bytes(got).partition(b"\r\n\r\n")
            lower = head.lower()
            if b"content-length:" in lower:
                length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
                while len(body) < length:
                    body += await stream.receive()
            elif b"transfer-encoding: chunked" in lower:
                while not body.endswith(b"0\r\n\r\n"):
                    body += await stream.receive()
            self.got.append(head + b"\r\n\r\n" + body)
            await stream.send(self.answer)
            if self.later:
                await self.go.wait()
                await stream.send(self.later)
            if self.hold:
                await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            self.gone.set()
        finally:
            await stream.aclose()


@asynccontextmanager
async def upstream(answer: bytes, *, hold: bool = False) -> AsyncIterator[Upstream]:
    """Yield a provider on loopback."""
    server = Upstream(answer, hold)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0) as listener:
        server.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, server.talk)
            yield server
            tasks.cancel_scope.cancel()


def closed_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
