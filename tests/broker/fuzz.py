"""Malformed requests at the broker: `python -m tests.broker.fuzz --requests 200000 --seed 1`.

Requests are made from well-formed ones by cutting, doubling, swapping and inserting, some with a lease that holds and
some without. The provider behind the broker reads heads and ignores bodies. What must hold: the broker lives and
answers a good request afterwards; the provider got no request without the key, with the lease, or with a path outside
the model APIs; no client got the key.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from time import monotonic

import anyio
import anyio.abc

from tests.broker.stage import KEY, Stage, staged

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{}"
_PATHS = re.compile(rb"(POST /v1/messages(/count_tokens)?|GET /v1/models(/[A-Za-z0-9._:@~-]+)?)(\?[^ ]*)? HTTP/1\.1")
_PIECES = [
    b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b"Host: b\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"0\r\n\r\n",
    b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n", b"Expect: 100-continue\r\n", b"X-Api-Key: x\r\n",
    b"Authorization: Bearer x\r\n", b"HTTP/1.0", b"HTTP/2.0", b"CONNECT ", b"/../", b"%2e%2e", b"http://127.0.0.1/",
    b"?key=x", b"\xff\xfe", b"#", b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", b"ffffffffffffffff\r\n", b";x=y",
    b"Content-Encoding: gzip\r\n", b"TE: trailers\r\n", b" folded\r\n", b"Proxy-Authorization: x\r\n",
]  # fmt: skip
_SILENCE = 0.1


class Sink:
    """A provider that answers every request head and records forbidden ones."""

    def __init__(self) -> None:
        self.heads = 0
        self.wrong: list[bytes] = []
        self.secrets: list[bytes] = []

    async def talk(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            got = bytearray()
            try:
                while b"\r\n\r\n" not in got:
                    got += await stream.receive()
                head = bytes(got).partition(b"\r\n\r\n")[0]
                self.heads += 1
                keyed = head.lower().count(b"\r\nx-api-key: " + KEY.encode()) == 1
                hosts = head.lower().count(b"\r\nhost:")
                first = head.partition(b"\r\n")[0]
                leaked = any(secret in head for secret in self.secrets)
                if not keyed or hosts != 1 or leaked or not _PATHS.fullmatch(first):
                    self.wrong.append(head)
                await stream.send(_ANSWER)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return


def good(chance: random.Random, token: str) -> bytes:
    """Return a well-formed request."""
    shown = token if chance.random() < 0.8 else f"hutch-l-{chance.randbytes(8).hex()}-x"
    header = chance.choice([f"X-Api-Key: {shown}", f"Authorization: Bearer {shown}"])
    body = chance.randbytes(chance.choice([0, 1, 10, 300]))
    match chance.randrange(4):
        case 0:
            return f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{header}\r\n\r\n".encode()
        case 1:
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:]) if part)
            head = f"POST /v1/messages HTTP/1.1\r\nHost: a\r\n{header}\r\nTransfer-Encoding: chunked\r\n\r\n"
            return head.encode() + chunks + b"0\r\n\r\n"
        case _:
            head = f"POST /v1/messages?beta=true HTTP/1.1\r\nHost: a\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n"
            return head.encode() + body


def broken(chance: random.Random, token: str) -> tuple[bytes, bool]:
    """Return a request with up to three random changes, and whether it was left unchanged."""
    raw = good(chance, token)
    things = chance.randrange(4)
    for _ in range(things):
        place = chance.randrange(len(raw) + 1) if raw else 0
        end = min(len(raw), place + chance.randrange(20))
        match chance.randrange(6):
            case 0:
                raw = raw[:place]
            case 1:
                raw = raw[:place] + raw[end:]
            case 2:
                raw = raw[:place] + raw[place:end] * 2 + raw[end:]
            case 3:
                raw = raw[:place] + chance.randbytes(chance.randint(1, 4)) + raw[place:]
            case 4:
                raw = raw[:place] + chance.choice(_PIECES) + raw[place:]
            case 5:
                line = raw.find(b"\r\n", place)
                raw = raw[: line + 2] + chance.choice(_PIECES) + raw[line + 2 :] if line >= 0 else raw
    return raw, not things


async def knock(stage: Stage, raw: bytes, whole: bool) -> bytes:
    """Send a request; return the answer or, if the request is incomplete, the bytes until the broker is silent."""
    stream = await stage.dial()
    got = bytearray()
    try:
        await stream.send(raw)
        with anyio.move_on_after(math.inf if whole else _SILENCE):
            while not got.endswith(b"}"):
                got += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        pass
    finally:
        await stream.aclose()
    return bytes(got)


async def fuzz(requests: int, seed: int, at_once: int = 32) -> Sink:
    """Run the requests. AssertionError if an invariant is violated."""
    sink = Sink()
    async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0) as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, sink.talk)
            async with staged(f"http://127.0.0.1:{port}", header_timeout=1.0) as stage:
                _, token = await stage.lease(requests=10 * requests)
                sink.secrets = [token.encode()]

                async def some(part: int) -> None:
                    chance = random.Random(f"{seed}/{part}")  # so that timing does not change the requests
                    for _ in range(requests // at_once):
                        raw, whole = broken(chance, token)
                        with anyio.fail_after(60):
                            answer = await knock(stage, raw, whole)
                        assert KEY.encode() not in answer, raw

                async with anyio.create_task_group() as knocking:
                    for part in range(at_once):
                        knocking.start_soon(some, part)
                status, _, _ = await stage.ask(token, None, method="GET", path="/v1/models")
            tasks.cancel_scope.cancel()
    assert status == 200
    assert not sink.wrong, sink.wrong[:3]
    return sink


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--requests", type=int, default=200_000)
    arguments.add_argument("--seed", type=int, default=1)
    chosen = arguments.parse_args()
    began = monotonic()
    sink = anyio.run(fuzz, chosen.requests, chosen.seed)
    print(f"{chosen.requests} requests, {sink.heads} reached the provider, {monotonic() - began:.0f} s: all well")


if __name__ == "__main__":
    main()
