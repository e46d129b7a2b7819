"""Leases in the whole system: a real hutchd, broker and executors, and requests from every kind of process.

The executors are those of `programs/leased_executor`; through them a test connects as a process of a session.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.processes import peer_credentials
from hutch_shared.rpc.stream import SocketStream, dial
from hutch_shared.unix import connect
from tests.accounts import account
from tests.broker.stage import parsed, read_all, read_until, request, upstream
from tests.rehearsal import Model, Pause, Refuse, Request, Say, Stall, Step, Steps, anything, serve
from tests.rehearsal.parts import Reply
from tests.sampling import sample
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import log_of, wait_for

pytestmark = pytest.mark.system

NO_SPARES = "[executors]\nspares = 0\n"
ELSEWHERE = """
import socket, sys
raw = sys.stdin.buffer.read()
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(60)
sock.connect(sys.argv[1])
sock.sendall(raw)
print(sock.recv(64).split()[1].decode())
"""


@dataclass(frozen=True)
class Leased:
    """A session whose executor holds a lease, and a connection to the broker from inside the session."""

    session: m.Session
    grant: m.KeyGrant

    @property
    def token(self) -> str:
        return self.grant.value

    async def dial(self) -> SocketStream:
        """Connect to the broker as a process of the session."""
        return await dial(Path(self.session.cwd, "inside.sock"))

    async def send(self, raw: bytes) -> bytes:
        """Send bytes from inside; return the whole reply."""
        return await sent(await self.dial(), raw)

    async def ask(self, token: str | None = None) -> int:
        """Make a request from inside; return the status, or 0 if the connection was closed."""
        with suppress(OSError):
            if raw := await self.send(request(token or self.token)):
                return parsed(raw)[0]
        return 0

    async def begin(self) -> SocketStream:
        """Start a stream; return once its first word has arrived."""
        stream = await self.dial()
        await stream.send(request(self.token))
        await read_until(stream, b'"text":"one"')
        return stream


async def sent(stream: SocketStream, raw: bytes) -> bytes:
    """Send raw bytes; return everything that arrives until the end of the connection."""
    try:
        with anyio.fail_after(60):
            with suppress(anyio.BrokenResourceError):
                await stream.send(raw)
            return await read_all(stream)
    finally:
        await stream.aclose()


async def from_outside(on: Host, token: str) -> int:
    """Make a request from a process outside every session."""
    return parsed(await sent(await dial(on.runtime / "broker" / "broker.sock"), request(token)))[0]


async def leased(on: Host, hutch: HutchClient, folder: str, credential: str | None = None) -> Leased:
    """Open a session and wait for its lease and for its turn, which lasts as long as `keyed`."""
    session = await on.script(hutch, [{"wait_file": str(on.root / "done")}], folder, credential=credential)
    turn = await hutch.submit_prompt(session.id, "go")
    grant = Path(session.cwd, "grant.json")
    await wait_for(grant.exists)
    with anyio.fail_after(60):
        while (await hutch.get_turn(turn.id)).state != "running":
            await anyio.sleep(0.02)
    return Leased(session, msgspec.json.decode(grant.read_bytes(), type=m.KeyGrant))


def broker_pid(on: Host) -> int:
    """Return the process that listens at the broker's end of the link."""
    with connect(on.runtime / "broker-control.sock", 10) as sock:
        return peer_credentials(sock).pid


async def brokered(hutch: HutchClient) -> None:
    """Return once hutchd knows that its broker is up."""
    with anyio.fail_after(60):
        while (state := (await hutch.get_status()).broker) is None or state.state != "up":
            print(state)
            await anyio.sleep(0.02)


async def usage_of(on: Host, session: m.Session, requests: int) -> dict[str, Any]:
    """Return the usage of a session once it counts this number of requests."""
    with anyio.fail_after(60):
        while True:
            rows = (await on.hutch("usage", "--session", session.id, "-o", "json")).json
            if rows and rows[0].get("requests", 0) >= requests:
                return dict(rows[0])


@asynccontextmanager
async def keyed(model: Model, more: str = "") -> AsyncIterator[Host]:
    """A host with a key, whose executors take leases."""
    async with host(settings_for(model, NO_SPARES + more), start=False) as made:
        made.program = (sys.executable, "-P", str(Path(__file__).with_name("programs") / "leased_hutchd.py"))
        await made.start()
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made
        (made.root / "done").touch()
        async with made.client() as hutch:
            for session in await hutch.list_sessions():
                with anyio.fail_after(60):
                    while any(turn.ended_at is None for turn in await hutch.list_turns(session.id)):
                        await anyio.sleep(0.02)


@pytest.fixture(scope="module")
async def provider() -> AsyncIterator[Model]:
    """The module's scripted model; it replies `one`."""
    async with serve(key=KEY, script=lambda _: Say("one")) as served:
        yield served


@pytest.fixture(scope="module")
async def shared(provider: Model) -> AsyncIterator[Host]:
    """The host of tests that leave it unchanged."""
    async with keyed(provider) as made:
        yield made


async def test_a_lease_is_valid_only_in_its_own_session(shared: Host, provider: Model) -> None:
    """Another session, a process outside sessions, and an invented lease get nothing, and the audit names the
    caller."""
    async with shared.client() as hutch:
        mine, other = await leased(shared, hutch, "mine"), await leased(shared, hutch, "other")
        before = len(provider.requests)
        own = await mine.ask()
        refused = [
            await other.ask(mine.token),
            await from_outside(shared, mine.token),
            await mine.ask("hutch-nonsense"),
        ]
        with anyio.fail_after(60):
            while not (lines := await refusals(shared, mine.session)):
                await anyio.sleep(0.1)

    assert own == 200
    assert refused == [403, 403, 401]
    assert [one.key for one in provider.requests[before:]] == [KEY]
    assert all("another session" in line["details"]["why"] for line in lines)
    assert sum(line["details"]["times"] for line in lines) == 2


async def refusals(on: Host, session: m.Session) -> list[dict[str, Any]]:
    """Return the audit's lines about refused requests of a session's lease."""
    told = await on.hutch("audit", "--action", "broker_request", "--session", session.id, "-o", "jsonl")
    return [json.loads(line) for line in told.out.splitlines()]


@pytest.fixture
def stranger() -> Iterator[int]:
    """The uid of an account that exists during the test."""
    with account("lease") as made:
        yield made.uid


async def test_a_lease_is_refused_to_another_account(shared: Host, stranger: int) -> None:
    """The directory's mode keeps it out; with a shared host's modes the broker refuses it."""
    folder = shared.runtime / "broker"

    def knock(token: str) -> subprocess.CompletedProcess[bytes]:
        command = ["/usr/bin/python3", "-c", ELSEWHERE, str(folder / "broker.sock")]
        return subprocess.run(
            command, input=request(token), capture_output=True, user=stranger, group=stranger, check=False, cwd="/"
        )

    async with shared.client() as hutch:
        mine = await leased(shared, hutch, "account")  # the first lease starts the broker
        modes = {path: path.stat().st_mode for path in (shared.root, shared.runtime, folder, folder / "broker.sock")}
        shut_out = await anyio.to_thread.run_sync(knock, mine.token)
        try:
            for path in modes:
                path.chmod(0o777 if path.name == "broker.sock" else 0o711)
            refused = await anyio.to_thread.run_sync(knock, mine.token)
        finally:
            for path, mode in modes.items():
                path.chmod(mode & 0o777)
        own = await mine.ask()

    assert b"PermissionError" in shut_out.stderr
    assert refused.stdout.strip() == b"403", refused.stderr
    assert own == 200


async def test_a_lease_opens_only_model_paths(shared: Host, provider: Model) -> None:
    """Other paths, a second host and a smuggled request do not reach the provider."""
    async with shared.client() as hutch:
        mine = await leased(shared, hutch, "paths")
        before = len(provider.requests)
        plain = request(mine.token)
        smuggled = plain.replace(b"Connection: close\r\n", b"Transfer-Encoding: chunked\r\n").replace(
            b"\r\n\r\n", b"\r\n\r\n0\r\n\r\n" + plain, 1
        )
        answers = [
            await mine.send(request(mine.token, path="/v1/files")),
            await mine.send(request(mine.token, path="/v1/messages/../files")),
            await mine.send(plain.replace(b"Host: ", b"Host: elsewhere.example\r\nHost: ")),
            await mine.send(smuggled),
        ]

    assert [answer.split(b" ")[1] for answer in answers] == [b"404", b"400", b"400", b"400"]
    assert all(answer.count(b"HTTP/1.") == 1 for answer in answers)
    assert provider.requests[before:] == []


async def test_the_broker_follows_no_redirect(shared: Host) -> None:
    """A provider that redirects gets the key once; the other address never gets it."""
    async with upstream(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as target:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {target.url}/v1/messages\r\nContent-Length: 0\r\n\r\n"
        async with upstream(moved.encode()) as mover, shared.client() as hutch:
            await shared.hutch("key", "add", "anthropic", "--name", "moved", "--base-url", mover.url, input=KEY)
            mine = await leased(shared, hutch, "moved", "moved")
            answer = await mine.send(request(mine.token))
            await shared.hutch("key", "rm", "anthropic", "--name", "moved")

    assert answer.startswith(b"HTTP/1.1 502")
    assert b"ocation" not in answer
    assert len(mover.got) == 1
    assert target.got == []


async def test_a_lease_ends_with_its_session(shared: Host) -> None:
    """After the session is closed, its lease is refused."""
    async with shared.client() as hutch:
        mine = await leased(shared, hutch, "closed")
        before = await from_outside(shared, mine.token)
        await hutch.close_session(mine.session.id, force=True)
        with anyio.fail_after(60):
            while (after := await from_outside(shared, mine.token)) == 403:
                await anyio.sleep(0.05)

    assert (before, after) == (403, 401)


async def test_the_command_manages_a_users_keys(shared: Host) -> None:
    """The command adds, lists, chooses, explains, rewraps and removes keys; the lease keeps working."""
    async with shared.client() as hutch:
        await shared.hutch("key", "add", "anthropic", "--name", "second", input="sk-ant-another-0123456789")
        await shared.hutch("key", "use", "anthropic", "default")
        mine = await leased(shared, hutch, "commands")
        told = await shared.hutch("key", "explain", "anthropic", "-o", "json")
        await shared.hutch("key", "rotate-master")
        listed = await shared.hutch("key", "ls", "-o", "json")
        await shared.hutch("key", "rm", "anthropic", "--name", "second")
        status = await shared.hutch("status")
        works = await mine.ask()

    assert (told.json["key"]["name"], told.json["delivery"]) == ("default", "lease")
    assert {key["name"]: key.get("chosen", False) for key in listed.json} == {"default": True, "second": False}
    assert "broker" in status.out
    assert "up: " in status.out
    assert works == 200


async def test_a_deleted_key_ends_open_streams_for_good() -> None:
    """The stream breaks, at the provider too; the lease stays invalid, whichever process is killed and restarted."""
    stalling = serve(key=KEY, script=lambda _: [Say("one"), Stall()])
    async with stalling as model, keyed(model) as made, made.client() as hutch:
        mine = await leased(made, hutch, "revoked")
        stream = await mine.begin()
        await made.hutch("key", "rm", "anthropic")
        with anyio.fail_after(60):
            rest = await read_all(stream)
            await model.until(lambda model: len(model.hangups) == 1)
        await stream.aclose()
        at_once = await mine.ask()
        await made.hutch("key", "add", "anthropic", input=KEY)
        os.kill(broker_pid(made), signal.SIGKILL)
        await made.kill()
        await made.start()
        await brokered(hutch)
        later = await mine.ask()

    assert b"message_stop" not in rest
    assert not rest.endswith(b"0\r\n\r\n")
    assert at_once == 401
    assert later in (0, 401)
    assert len(model.requests) == 1


async def test_a_stream_outlives_a_killed_hutchd_and_a_lease_its_restart() -> None:
    """The broker goes on, the next hutchd adopts it, the lease stays valid, and the usage is recorded."""
    pause = Pause()

    def script(asked: Request) -> Reply:
        return [Say("one"), pause, Say("two")] if not pause.release.is_set() else Say("three")

    async with serve(key=KEY, script=script) as model, keyed(model) as made, made.client() as hutch:
        mine = await leased(made, hutch, "outlived")
        stream = await mine.begin()
        before = broker_pid(made)
        await made.kill()
        pause.release.set()
        rest = await read_all(stream)
        await stream.aclose()
        without = await mine.ask()
        await made.start()
        await brokered(hutch)
        after = broker_pid(made)
        again = await mine.ask()
        counted = await usage_of(made, mine.session, requests=3)

    assert b'"text":"two"' in rest
    assert (without, again) == (200, 200)
    assert before == after
    assert counted["requests"] == 3


async def test_a_lease_expires_without_hutchd() -> None:
    """The lease is valid for the configured time; then its streams are cut and it is refused."""
    stalling = serve(key=KEY, script=lambda _: [Say("one"), Stall()])
    async with stalling as model, keyed(model, "[broker]\nlease = 5.0\n") as made, made.client() as hutch:
        mine = await leased(made, hutch, "expired")
        stream = await mine.begin()
        await made.kill()
        with anyio.fail_after(60):
            rest = await read_all(stream)
        await stream.aclose()
        refused = await mine.ask()
        await made.start()
        await brokered(hutch)

    assert not rest.endswith(b"0\r\n\r\n")
    assert refused == 401


@pytest.fixture(scope="module")
async def agents() -> AsyncIterator[tuple[Host, Model]]:
    """A host for the real agent, which retries once."""
    async with serve(key=KEY, script=lambda _: Say("ok")) as model, host(settings_for(model)) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made, model


@sample(1)
@pytest.mark.parametrize("status", [401, 429, 500, 529])
async def test_provider_errors_reach_the_agent_unchanged(agents: tuple[Host, Model], status: int) -> None:
    """The agent's own limit of retries holds, and the turn ends with the provider's message."""
    made, model = agents
    model.script = Steps(Step(anything, Refuse(status, message="said by the provider"), None))
    before = len(model.turns)
    async with made.client() as hutch:
        session = await made.claude(hutch, f"status-{status}")
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")

    tried = len(model.turns) - before
    assert (end.state, tried <= 2) == ("failed", True), (end, tried)
    assert tried >= 1
    told = f"{end.message} {end.result} {[bytes(event.data) for event in log.events]}"
    assert str(status) in told
    assert "hutch-broker" not in told


async def test_the_broker_and_the_agent_count_the_same_usage(agents: tuple[Host, Model]) -> None:
    """No notice reports a difference."""
    made, model = agents
    model.script = lambda _: Say("ok")
    async with made.client() as hutch:
        session = await made.claude(hutch, "counted")
        async with log_of(hutch, session) as log:
            await log.play(session, "go")
        counted = await usage_of(made, session, requests=1)
        shown = await made.hutch("usage", "--session", session.id)

    assert counted["turns"] == 1
    for tokens in ("input_tokens", "output_tokens"):
        assert counted["broker"][tokens] == counted["usage"][tokens] > 0
    assert "reports" not in shown.out


def patient(model: Model) -> str:
    """Return settings with which the agent retries until there is a new broker."""
    return settings_for(model).replace("retries = 1", "retries = 8")


async def test_a_turn_outlives_a_killed_broker() -> None:
    """The stream breaks, the agent retries, and the next broker accepts its lease."""
    pause = Pause()

    def script(asked: Request) -> Reply:
        return [Say("one"), pause, Say("two")] if not pause.reached.is_set() else Say("all of it")

    async with serve(key=KEY, script=script) as model, host(patient(model), double=True) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        async with made.client() as hutch:
            session = await made.claude(hutch, "killed")
            async with log_of(hutch, session) as log:
                turn = await hutch.submit_prompt(session.id, "go")
                await pause.reached.wait()
                before = broker_pid(made)
                os.kill(before, signal.SIGKILL)
                end = await log.ended(turn)
            after = broker_pid(made)

    assert (end.state, end.result) == ("completed", "all of it")
    assert before != after
    assert {one.key for one in model.requests} == {KEY}
