"""Connections to the provider: TLS is verified, and a configured proxy is never bypassed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.broker import certificates
from tests.broker.stage import KEY, staged

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{}"
HOST = "model.example"


@asynccontextmanager
async def provider(folder: Path, host: str) -> AsyncIterator[tuple[int, Path, list[bytes]]]:
    """Yield a TLS provider with the name `host`: its port, the certificate to trust, and the received data."""
    trusted, context = certificates.make(folder, host)
    got: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            got.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(ANSWER)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1], trusted, got


@asynccontextmanager
async def tunnel(port: int) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Yield an HTTP proxy that connects every CONNECT to `port`: its URL, and the received heads."""
    heads: list[bytes] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        there, onward = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
        await asyncio.gather(copy(reader, onward), copy(there, writer))

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


async def test_a_certificate_of_our_own_authority_is_trusted(tmp_path: Path) -> None:
    """With `ca_file` a provider with a private certificate is reachable."""
    async with provider(tmp_path, "localhost") as (port, trusted, got), AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(f"https://localhost:{port}", ca_file=str(trusted)))
        _, token = await stage.lease()
        status, _, _ = await stage.ask(token, None, method="GET", path="/v1/models")

    assert status == 200
    assert KEY.encode() in got[0]


async def test_a_certificate_that_nobody_vouches_for_gets_no_key(tmp_path: Path) -> None:
    """Without `ca_file` the same provider is refused before any byte of the request is sent."""
    async with provider(tmp_path, "localhost") as (port, _, got), staged(f"https://localhost:{port}") as stage:
        _, token = await stage.lease()
        status, _, _ = await stage.ask(token, None, method="GET", path="/v1/models")

    assert status == 502
    assert got == []


async def test_a_configured_proxy_is_used(tmp_path: Path) -> None:
    """The request is tunnelled with CONNECT: the proxy sees the host but neither key nor lease."""
    async with AsyncExitStack() as stack:
        port, trusted, got = await stack.enter_async_context(provider(tmp_path, HOST))
        url, heads = await stack.enter_async_context(tunnel(port))
        boot: dict[str, Any] = {"ca_file": str(trusted), "proxies": {"https": url}}
        stage = await stack.enter_async_context(staged(f"https://{HOST}", **boot))
        _, token = await stage.lease()
        status, _, _ = await stage.ask(token, None, method="GET", path="/v1/models")

    assert status == 200
    assert heads[0].startswith(f"CONNECT {HOST}:443 ".encode())
    assert KEY.encode() not in heads[0]
    assert KEY.encode() in got[0]


async def test_an_exception_from_the_proxy_goes_straight(tmp_path: Path) -> None:
    """Hosts in NO_PROXY are connected directly."""
    async with provider(tmp_path, "localhost") as (port, trusted, got), tunnel(port) as (url, heads):
        proxies = {"https": url, "no": "localhost"}
        async with staged(f"https://localhost:{port}", ca_file=str(trusted), proxies=proxies) as stage:
            _, token = await stage.lease()
            status, _, _ = await stage.ask(token, None, method="GET", path="/v1/models")

    assert (status, heads, len(got)) == (200, [], 1)


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "https://127.0.0.1:1"])
async def test_a_proxy_that_is_down_is_not_gone_around(tmp_path: Path, proxy: str) -> None:
    """If the proxy is down, the request fails instead of going directly."""
    async with provider(tmp_path, "localhost") as (port, trusted, got):
        base_url = f"https://localhost:{port}"
        async with staged(base_url, ca_file=str(trusted), proxies={"https": proxy}) as stage:
            _, token = await stage.lease()
            status, _, _ = await stage.ask(token, None, method="GET", path="/v1/models")

    assert status == 502
    assert got == []
