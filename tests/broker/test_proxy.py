"""Requests through the broker to a model server."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from typing import Any

import anyio
import pytest

from hutch_shared import broker_link as link
from tests.broker.stage import ASK, KEY, closed_port, parsed, read_all, read_until, request, staged, upstream
from tests.rehearsal import Drop, Pause, Refuse, Say, Stall, Usage, serve

SAY = Say("one two three", chunks=3)


def saying(*parts: Any) -> Any:
    return lambda _: list(parts)


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_the_real_key_goes_out_and_the_lease_stays() -> None:
    """The provider gets the key in its own header and no part of the lease; the agent gets the answer unchanged."""
    async with serve(key=KEY, script=saying(SAY)) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        status, headers, body = await stage.ask(token, headers={"anthropic-version": "2023-06-01", "Cookie": "a=b"})
        seen = model.requests[0].headers

        assert (status, headers["content-type"]) == (200, "text/event-stream")
        assert b'"text":"one "' in body
        assert seen["x-api-key"] == KEY
        assert seen["anthropic-version"] == "2023-06-01"
        assert token not in json.dumps(seen)
        assert "cookie" not in seen
        assert seen["accept-encoding"] == "identity"
        assert json.loads(model.requests[0].raw) == ASK
        assert len(stage.asked) == 1


@pytest.mark.parametrize(
    ("kind", "header", "shown"),
    [("gateway", "authorization", f"Bearer {KEY}"), ("oauth", "authorization", f"Bearer {KEY}")],
)
async def test_a_token_goes_out_as_bearer(kind: str, header: str, shown: str) -> None:
    """Gateway and OAuth tokens are sent as bearer tokens; an OAuth token also needs a header of its own."""
    async with serve(key=KEY, script=saying(SAY)) as model, staged(model.url) as stage:
        stage.kind = kind
        _, token = await stage.lease()
        status, _, _ = await stage.ask(token, headers={"anthropic-beta": "one"})

        assert status == 200
        assert model.requests[0].headers["authorization"] == f"Bearer {KEY}"
        assert "x-api-key" not in model.requests[0].headers
        beta = "one,oauth-2025-04-20" if kind == "oauth" else "one"
        assert model.requests[0].headers["anthropic-beta"] == beta


async def test_bytes_pass_as_they_come() -> None:
    """The agent gets the first event before the model has sent the second."""
    pause = Pause()
    async with serve(key=KEY, script=saying(Say("one"), pause, Say("two"))) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token))
        early = await read_until(stream, b'"text":"one"')
        pause.release.set()
        late = await read_all(stream)
        await stream.aclose()

        assert b'"text":"two"' not in early
        assert b'"text":"two"' in late


async def test_a_head_does_not_wait_for_its_body() -> None:
    """The agent gets the response head although the provider has not sent the body yet."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9\r\n\r\n"
    async with upstream(head, hold=True) as provider, staged(provider.url) as stage:
        _, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token))
        early = await read_until(stream, b"\r\n\r\n")
        await stream.aclose()

        assert early.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("size", [0, 1, 9, 70_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_in_one_piece_ends_as_it_came(size: int, chunked: bool) -> None:
    """Head, body and end may arrive together, with a known length or in chunks: nothing is lost or added."""
    body = os.urandom(size)
    raw = answer(body)
    if chunked:
        pieces = b"%x\r\n%b\r\n" % (size, body) if size else b""
        raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
    async with upstream(raw) as provider, staged(provider.url) as stage:
        _, token = await stage.lease()
        status, _, got = await stage.ask(token)

        assert (status, got) == (200, body)


async def test_usage_is_counted_and_priced_on_the_way() -> None:
    """The record contains the provider's counts, the price, the path and the model."""
    script = saying(Usage(input=1000, output=200, cache_read=5000, cache_write=300), SAY)
    own = {"claude-sonnet-4-5": link.Price(input=3, output=15, cache_read=0.3, cache_write=3.75)}
    async with serve(key=KEY, script=script) as model, staged(model.url, prices=own) as stage:
        lease, token = await stage.lease()
        await stage.ask(token)
        await stage.ask(token, {**ASK, "stream": False})
        first, second = await stage.recorded(2)

        assert (first.input, first.output, first.cache_read, first.cache_write) == (1000, 200, 5000, 300)
        assert first.usd == pytest.approx((3000 + 3000 + 1500 + 1125) / 1e6)
        assert (second.input, second.output, second.usd) == (first.input, first.output, first.usd)
        assert (first.lease, first.session, first.pid, first.status) == (lease, "s-1", os.getpid(), 200)


@pytest.mark.parametrize("status", [400, 401, 403, 429, 500, 529])
async def test_an_error_of_the_provider_is_passed_on(status: int) -> None:
    """The agent gets the provider's status, body and headers."""
    async with serve(key=KEY, script=saying(Refuse(status, retry_after=7))) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        got, headers, body = await stage.ask(token)

        assert got == status
        assert headers["retry-after"] == "7"
        assert b"refused by the script" in body
        assert (await stage.recorded(1))[0].usd == 0.0


async def test_a_rejected_key_is_requested_again() -> None:
    """After a 401 the broker asks hutchd for the key again before the next request."""
    async with serve(key="another", script=saying(SAY)) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        first, _, _ = await stage.ask(token)
        stage.secret = "another"
        second, _, _ = await stage.ask(token)

        assert (first, second) == (401, 200)
        assert [need.rejected for need in stage.asked] == [False, True]


async def test_a_stream_that_the_provider_breaks_breaks() -> None:
    """If the provider's connection is reset, the agent's response does not look complete."""
    async with serve(key=KEY, script=saying(Say("one two", chunks=2), Drop())) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        raw = await stage.send(request(token))

        assert b'"text":"one' in raw
        with pytest.raises(EOFError):
            parsed(raw)


async def test_a_provider_that_drops_the_request_gives_an_error_that_may_be_tried_again() -> None:
    """Without any answer the agent gets a 502 that asks for a retry."""
    async with serve(key=KEY, script=saying(Drop(0))) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        status, headers, _ = await stage.ask(token)

        assert (status, headers["x-should-retry"]) == (502, "true")


async def test_a_provider_that_is_not_there_gives_an_error() -> None:
    """A refused connection is a 502 that does not contain the key."""
    async with staged(f"http://127.0.0.1:{closed_port()}") as stage:
        _, token = await stage.lease()
        status, _, body = await stage.ask(token)

        assert status == 502
        assert KEY.encode() not in body


async def test_a_stalled_provider_runs_into_the_deadline() -> None:
    """Without a first byte in time the agent gets a 504; a stalled stream is cut."""
    async with serve(key=KEY, script=saying(Stall())) as model, staged(model.url, first_byte_timeout=0.2) as stage:
        _, token = await stage.lease()
        status, _, _ = await stage.ask(token)

        assert status == 504
    async with (
        serve(key=KEY, script=saying(Say("one"), Stall())) as model,
        staged(model.url, chunk_timeout=0.2) as stage,
    ):
        _, token = await stage.lease()
        raw = await stage.send(request(token))

        assert b'"text":"one"' in raw
        with pytest.raises(EOFError):
            parsed(raw)


@pytest.mark.parametrize("before", [True, False], ids=["before the first byte", "in mid-stream"])
async def test_a_hang_up_reaches_the_provider(before: bool) -> None:
    """When an agent hangs up, the request to the provider is aborted, also while no data flows."""
    script = saying(Stall()) if before else saying(Say("one"), Stall())
    async with serve(key=KEY, script=script) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token))
        await model.until(lambda m: len(m.requests) == 1)
        if not before:
            await read_until(stream, b'"text":"one"')
        await stream.aclose()
        with anyio.fail_after(30):
            await model.until(lambda m: len(m.hangups) == 1)

        assert (await stage.recorded(1))[0].status == (0 if before else 200)


async def test_a_redirect_is_not_followed() -> None:
    """The key is sent only to the configured host: the agent gets an error without the location."""
    async with upstream(answer(b"")) as elsewhere:
        moved = answer(b"", f"Location: {elsewhere.url}/v1/messages", status="302 Found")
        async with upstream(moved) as provider, staged(provider.url) as stage:
            _, token = await stage.lease()
            status, headers, _ = await stage.ask(token)

        assert status == 502
        assert "location" not in headers
        assert len(provider.got) == 1
        assert elsewhere.got == []


async def test_a_provider_that_repeats_the_key_does_not_give_it_away() -> None:
    """If an answer contains the key, in a header or the body, it is replaced with stars."""
    body = b'{"error": "no such key: ' + KEY.encode() + b'"}'
    async with upstream(answer(body, f"X-Echo: {KEY}", "Set-Cookie: a=b", status="401 No")) as provider:
        async with staged(provider.url) as stage:
            _, token = await stage.lease()
            raw = await stage.send(request(token))

        assert KEY.encode() not in raw
        assert raw.count(b"*" * len(KEY)) == 2
        assert b"a=b" not in raw


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "bare deflate"])
async def test_a_compressed_answer_passes_and_is_counted(coding: str) -> None:
    """It is decompressed, since it must be searched for the key, and the usage is counted."""
    message = json.dumps({"model": "m", "usage": {"input_tokens": 7, "output_tokens": 5}}).encode()
    bare = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    packed = {
        "deflate": zlib.compress(message),
        "bare deflate": bare.compress(message) + bare.flush(),
    }.get(coding, gzip.compress(message))
    raw = answer(packed, "Content-Type: application/json", f"Content-Encoding: {coding.split()[-1]}")
    async with upstream(raw) as provider, staged(provider.url) as stage:
        _, token = await stage.lease()
        _, headers, body = await stage.ask(token)
        record = (await stage.recorded(1))[0]

        assert "content-encoding" not in headers
        assert body == message
        assert (record.input, record.output) == (7, 5)


async def test_a_chunked_body_passes_and_has_a_limit() -> None:
    """A body of unknown length is forwarded in chunks; beyond the limit the request fails."""
    small = b"5\r\nhello\r\n0\r\n\r\n"
    async with upstream(answer(b"{}")) as provider, staged(provider.url, body=1024) as stage:
        _, token = await stage.lease()
        head = request(token, None).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        status, _, _ = parsed(await stage.send(head + small))
        large = b"".join(b"200\r\n" + b"a" * 512 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n"
        refused, _, _ = parsed(await stage.send(head + large))
        declared, _, _ = await stage.ask(token, b"a" * 2000)

        assert (status, refused, declared) == (200, 413, 413)
        assert len(provider.got) == 1
        assert b"hello" in provider.got[0]


async def test_expect_100_continue_is_answered() -> None:
    """The broker sends `100 Continue` after it has accepted the request."""
    async with serve(key=KEY, script=saying(SAY)) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        raw = request(token, headers={"Expect": "100-continue"})
        head, _, body = raw.partition(b"\r\n\r\n")
        stream = await stage.dial()
        await stream.send(head + b"\r\n\r\n")
        await read_until(stream, b"100 Continue\r\n\r\n")
        await stream.send(body)
        status, _, _ = parsed(await read_all(stream))
        await stream.aclose()

        assert status == 200
        assert "expect" not in model.requests[0].headers


async def test_a_hundred_streams_run_at_once() -> None:
    """No limit of the HTTP client delays the hundredth stream."""
    pause = Pause()
    async with serve(key=KEY, script=saying(pause, SAY)) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        statuses: list[int] = []

        async def one() -> None:
            statuses.append((await stage.ask(token))[0])

        async with anyio.create_task_group() as tasks:
            for _ in range(105):
                tasks.start_soon(one)
            with anyio.fail_after(60):
                await model.until(lambda m: len(m.requests) == 105)
            pause.release.set()

        assert statuses == [200] * 105


async def test_a_connection_carries_many_requests() -> None:
    """Each request on a kept-alive connection is checked."""
    async with serve(key=KEY, script=saying(SAY)) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        first = request(token).replace(b"Connection: close\r\n", b"")
        stream = await stage.dial()
        await stream.send(first)
        await read_until(stream, b"0\r\n\r\n")
        await stream.send(request("hutch-nonsense"))
        status, _, _ = parsed(await read_all(stream))
        await stream.aclose()

        assert status == 401
        assert len(model.requests) == 1


async def test_a_half_head_is_cut_off() -> None:
    """An agent that sends half a head is disconnected; one that waits for its answer is not."""
    pause = Pause()
    async with serve(key=KEY, script=saying(pause, SAY)) as model, staged(model.url, header_timeout=0.2) as stage:
        _, token = await stage.lease()
        waiting = await stage.dial()
        await waiting.send(request(token))
        await model.until(lambda m: len(m.requests) == 1)
        cut = await stage.send(b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nx-")
        pause.release.set()
        answered = await read_all(waiting)
        await waiting.aclose()

        assert cut == b""
        assert parsed(answered)[0] == 200


async def test_a_second_half_head_is_cut_off() -> None:
    """A connection that stays open has a deadline for each head, which runs from its first byte."""
    async with (
        serve(key=KEY, script=saying(SAY)) as model,
        staged(model.url, header_timeout=0.2, idle_timeout=600.0) as stage,
    ):
        _, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token).replace(b"Connection: close\r\n", b""))
        await read_until(stream, b"0\r\n\r\n")
        await stream.send(b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nx-")
        with anyio.fail_after(30):
            rest = await read_all(stream)
        await stream.aclose()

        assert rest == b""


async def test_a_lease_over_tcp_is_checked_by_uid() -> None:
    """The broker has a loopback port for agents that cannot dial a Unix socket.

    Only leases made for the port work there.
    """
    async with serve(key=KEY, script=saying(SAY)) as model, staged(model.url, tcp=True) as stage:
        assert stage.welcome is not None
        assert stage.welcome.port is not None
        statuses = []
        for tcp in (True, False):
            _, token = await stage.lease(tcp=tcp)
            stream = await anyio.connect_tcp("127.0.0.1", stage.welcome.port)
            await stream.send(request(token))
            raw = bytearray()
            async for chunk in stream:
                raw += chunk
            await stream.aclose()
            statuses.append(parsed(bytes(raw))[0])

        assert statuses == [200, 403]
