"""OAuth tokens are refreshed once, by one task, and stored before they are used."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs

import anyio
import anyio.abc
import pytest

from hutch_daemon.keys.credential import Refresh
from hutch_daemon.keys.oauth import FreshKeys
from hutch_daemon.settings import Settings, SettingsInForce
from hutch_daemon.store.rows import KeyRow
from hutch_shared.errors import HutchError, Reason
from hutch_shared.secret import Secret
from hutch_shared.times import now_ms
from tests.daemon.keys.stage import OWNER, VaultStage, vault_stage

pytestmark = pytest.mark.usefixtures("no_authorities")


@asynccontextmanager
async def token_server(answer: Callable[[dict[str, list[str]]], tuple[int, object]]) -> AsyncIterator[str]:
    """Yield a provider's token endpoint: `answer` maps the form to a status and a JSON value."""

    async def talk(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            got = bytearray()
            while b"\r\n\r\n" not in got:
                got += await stream.receive()
            head, _, body = bytes(got).partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            while len(body) < length:
                body += await stream.receive()
            status, value = answer(parse_qs(body.decode()))
            text = json.dumps(value).encode()
            await stream.send(
                b"HTTP/1.1 %d X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
                % (status, len(text), text)
            )

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, talk)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}/token"
        tasks.cancel_scope.cancel()


async def put(stage: VaultStage, url: str, lives_ms: int) -> KeyRow:
    refresh = Refresh(Secret("refresh-1"), url, "client")
    await stage.put(secret="access-1", kind="oauth", expires_at=now_ms() + lives_ms, refresh=refresh)
    return (await stage.vault.choose(OWNER, "anthropic")).row


async def test_concurrent_requests_share_one_token_exchange(tmp_path: Path) -> None:
    """The new tokens are stored, with the new refresh token."""
    forms: list[dict[str, list[str]]] = []

    def answer(form: dict[str, list[str]]) -> tuple[int, object]:
        forms.append(form)
        return 200, {"access_token": "access-2", "refresh_token": "refresh-2", "expires_in": 3600}

    async with token_server(answer) as url, vault_stage(tmp_path) as stage:
        row = await put(stage, url, 1000)
        fresh = FreshKeys(stage.vault, SettingsInForce(Settings()))
        got: list[str] = []

        async def one() -> None:
            got.append((await fresh(row.id, False)).secret)

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(one)
        _, kept = await stage.vault.reveal(OWNER, "anthropic")

    assert got == ["access-2"] * 10
    assert forms == [{"grant_type": ["refresh_token"], "refresh_token": ["refresh-1"], "client_id": ["client"]}]
    assert kept.secret.reveal() == "access-2"
    assert kept.refresh is not None
    assert kept.refresh.token.reveal() == "refresh-2"


async def test_a_rejected_token_is_exchanged_once(tmp_path: Path) -> None:
    """If several leases report the same rejection, later reports get the result of the first exchange."""
    count = 0

    def answer(_: dict[str, list[str]]) -> tuple[int, object]:
        nonlocal count
        count += 1
        return 200, {"access_token": f"access-{count + 1}", "expires_in": 3600}

    async with token_server(answer) as url, vault_stage(tmp_path) as stage:
        row = await put(stage, url, 3_600_000)
        fresh = FreshKeys(stage.vault, SettingsInForce(Settings()))
        before = (await fresh(row.id, False)).secret
        after = [(await fresh(row.id, True)).secret for _ in range(2)]

    assert before == "access-1"
    assert after == ["access-2", "access-2"]


async def test_a_cancelled_caller_loses_no_token(tmp_path: Path) -> None:
    """An exchange that has begun is completed and stored."""
    asked = anyio.Event()

    def answer(_: dict[str, list[str]]) -> tuple[int, object]:
        asked.set()
        return 200, {"access_token": "access-2", "expires_in": 3600}

    async with token_server(answer) as url, vault_stage(tmp_path) as stage:
        row = await put(stage, url, 1000)
        fresh = FreshKeys(stage.vault, SettingsInForce(Settings()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fresh, row.id, False)
            await asked.wait()
            tasks.cancel_scope.cancel()
        _, kept = await stage.vault.reveal(OWNER, "anthropic")

    assert kept.secret.reveal() == "access-2"


@pytest.mark.parametrize(
    ("status", "value"),
    [
        (400, {"error": "invalid_grant"}),
        (302, {}),
        (200, {}),
        (200, []),
        (200, {"access_token": "a b"}),
        (200, {"access_token": "access-2", "expires_in": float("inf")}),
    ],
)
async def test_a_failed_exchange_tells_the_owner_how_to_log_in_again(
    tmp_path: Path, status: int, value: object
) -> None:
    """The message holds no secret; the stored token is unchanged."""
    async with token_server(lambda _: (status, value)) as url, vault_stage(tmp_path) as stage:
        row = await put(stage, url, 1000)
        fresh = FreshKeys(stage.vault, SettingsInForce(Settings()))
        with pytest.raises(HutchError) as refused:
            await fresh(row.id, False)
        _, kept = await stage.vault.reveal(OWNER, "anthropic")

    assert refused.value.reason is Reason.KEY_UNREADABLE
    assert "hutch key add anthropic --name default --oauth" in str(refused.value)
    assert "refresh-1" not in str(refused.value)
    assert kept.secret.reveal() == "access-1"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-x\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"access_token": "acc',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + 100_000 * b"[",
        b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"access_token": "\xff"}',
    ],
    ids=["nothing", "not HTTP", "half a body", "a broken chunk", "too deeply nested", "not UTF-8"],
)
async def test_an_unreadable_token_reply_changes_nothing(tmp_path: Path, answer: bytes) -> None:
    """The next request tries again."""

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(answer)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    async with listener, anyio.create_task_group() as tasks, vault_stage(tmp_path) as stage:
        tasks.start_soon(listener.serve, serve)
        row = await put(stage, f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}/token", 1000)
        with pytest.raises(HutchError, match="its answer is not usable") as refused:
            await FreshKeys(stage.vault, SettingsInForce(Settings()))(row.id, False)
        _, kept = await stage.vault.reveal(OWNER, "anthropic")
        tasks.cancel_scope.cancel()

    assert refused.value.reason is Reason.KEY_UNREADABLE
    assert kept.secret.reveal() == "access-1"
