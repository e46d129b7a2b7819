"""hutchd with a real broker process: leases for the vault's keys, crashes of either process, recorded usage."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hutch_daemon.keys.broker import Broker
from hutch_daemon.keys.broker_boot import BrokerPaths, boot_line
from hutch_daemon.keys.credential import Refresh
from hutch_daemon.keys.key_supply import KeyReport
from hutch_daemon.keys.supervisor import link_token
from hutch_daemon.settings import (
    BrokerSettings,
    PriceSettings,
    ProviderSettings,
    SandboxSettings,
    Settings,
    SettingsInForce,
)
from hutch_daemon.store import audit, sessions, turns, usage
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import KeyRow, SessionRow, TurnRow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id
from hutch_shared.processes import peer_credentials
from hutch_shared.rpc.stream import dial
from hutch_shared.secret import Secret
from hutch_shared.times import now_ms
from hutch_shared.unix import connect
from tests.broker.stage import ASK, closed_port, parsed, read_all, read_until, request
from tests.daemon.keys.stage import HOLDER, KEY, OWNER, VaultStage, keep_session, report_nothing, session, vault_stage
from tests.rehearsal import Pause, Say, Stall, Usage, serve

pytestmark = pytest.mark.system
SAY = Say("one two", chunks=2)
EARLIER = Path(__file__).with_name("earlier_broker.py")
CUT = 0
STALLING = (Say("one"), Stall())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hk-") as name:
        yield Path(name)


async def always(executor: str, session: str) -> bool:
    return True


async def never(executor: str, session: str) -> bool:
    return False


def settings_for(url: str, **broker: Any) -> Settings:
    return Settings(providers={"anthropic": ProviderSettings(base_url=url)}, broker=BrokerSettings(**broker))


@asynccontextmanager
async def working(
    folder: Path, url: str, holds: Callable[..., Any] = always, report: KeyReport = report_nothing, **broker: Any
) -> AsyncIterator[tuple[VaultStage, Broker]]:
    settings = settings_for(url, **broker)
    pid = None
    try:
        async with vault_stage(folder) as stage:
            await stage.put()
            async with stage.broker(settings, holds, report).running() as running:
                await running.begin_turn("s-1")
                try:
                    yield stage, running
                finally:
                    pid = broker_pid(folder)
    finally:
        if pid is not None:
            end(pid)


def broker_pid(folder: Path) -> int | None:
    try:
        with connect(folder / "broker-control.sock", 5) as sock:
            return peer_credentials(sock).pid
    except OSError:
        return None


def end(pid: int) -> None:
    """End a broker that outlived its hutchd."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


async def ask(grant: m.KeyGrant, body: Any = ASK) -> tuple[int, bytes]:
    assert grant.unix_socket is not None
    stream = await dial(Path(grant.unix_socket))
    try:
        await stream.send(request(grant.value, body))
        status, _, body = parsed(await read_all(stream))
        return status, body
    finally:
        await stream.aclose()


async def booked(stage: VaultStage, count: int) -> list[Any]:
    """Return the stored usage once it counts this number of requests."""
    with anyio.fail_after(60):
        while True:
            rows = await stage.store.read(lambda conn: list(usage.USAGE.all(conn, "WHERE source = 'broker'")))
            if len(rows) >= count:
                return rows
            await anyio.sleep(0.02)


async def test_the_executor_gets_a_lease_and_the_provider_gets_the_key(folder: Path) -> None:
    """Usage and the audit record the lease, and neither holds a secret."""
    async with serve(key=KEY, script=lambda _: SAY) as model, working(folder, model.url) as (stage, broker):
        grants = stage.grants(settings_for(model.url), broker)
        grant = await grants.grant(session(), "anthropic", HOLDER)
        status, _ = await ask(grant)
        (row,) = await booked(stage, 1)
        lines, _ = await stage.store.read(audit.read)
        left = await broker.status()

        assert (grant.delivery, grant.base_url) == ("lease", "http://broker.invalid")
        assert (status, model.requests[0].key) == (200, KEY)
        assert (row.session, row.account, row.model) == ("s-1", "somebody", "claude-sonnet-4-5")
        assert row.input_tokens > 0
        assert [(line.action, line.outcome) for line in lines] == [("get_api_key", "lease"), ("use_key", "given")]
        assert left is not None
        assert left.leases[0].requests == 999
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert KEY.encode() not in content
            assert grant.value.encode() not in content


async def test_revoking_ends_the_executors_leases(folder: Path) -> None:
    """An open stream ends; the next request is refused and audited."""
    async with (
        serve(key=KEY, script=lambda _: [Say("one"), Stall()]) as model,
        working(folder, model.url) as (stage, broker),
    ):
        grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
        assert grant.unix_socket is not None
        stream = await dial(Path(grant.unix_socket))
        await stream.send(request(grant.value))
        await read_until(stream, b'"text":"one"')
        ended = await broker.revoke_executor("x-1")
        with anyio.fail_after(30):
            await read_all(stream)
        await stream.aclose()
        status, _ = await ask(grant)

        assert (ended, status) == (1, 401)


async def row_of(stage: VaultStage) -> Any:
    return (await stage.vault.choose(OWNER, "anthropic")).row


async def test_a_killed_broker_is_replaced_and_its_leases_still_work(folder: Path) -> None:
    """After kill -9 hutchd starts a new broker, which accepts the agent's lease."""
    async with serve(key=KEY, script=lambda _: SAY) as model, working(folder, model.url) as (stage, broker):
        grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
        before = kill_broker(folder)

        assert await answered(grant) == 200
        assert broker_pid(folder) != before


async def test_a_new_broker_has_the_settings_of_its_start(folder: Path) -> None:
    """Settings that were reloaded since hutchd started are in force once the broker was started again."""
    async with serve(key=KEY, script=lambda _: SAY) as model, vault_stage(folder) as stage:
        settings = SettingsInForce(settings_for(model.url))
        await stage.put()
        async with stage.broker(settings, always).running() as broker:
            await broker.begin_turn("s-1")
            grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
            before, _ = await ask(grant)
            settings.replace(settings_for(model.url, body=10))
            running, _ = await ask(grant)
            kill_broker(folder)
            after = await answered(grant)
            await broker.revoke_executor("x-1")

    assert (before, running, after) == (200, 200, 413)


def kill_broker(folder: Path) -> int:
    """Kill the broker; return its pid."""
    pid = broker_pid(folder)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


async def answered(grant: m.KeyGrant, body: Any = ASK) -> int:
    """Return the status of a request to the broker that is being started again."""
    with anyio.fail_after(60):
        while True:
            try:
                status, _ = await ask(grant, body)
            except (OSError, EOFError, IndexError, ValueError):
                await anyio.sleep(0.02)
                continue
            if status != 401:  # the new broker runs and lacks the leases
                return status


async def test_a_broker_outlives_hutchd_with_its_streams(folder: Path) -> None:
    """A new hutchd adopts the same process; an open stream goes on; its usage is recorded once."""
    pause = Pause()
    async with serve(key=KEY, script=lambda _: [Say("one"), pause, Say("two")]) as model:
        settings = settings_for(model.url)
        async with vault_stage(folder) as stage:
            await stage.put()
            await keep_session(stage.store, session())
            async with stage.broker(settings, always).running() as broker:
                grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
                assert grant.unix_socket is not None
                stream = await dial(Path(grant.unix_socket))
                await stream.send(request(grant.value))
                await read_until(stream, b'"text":"one"')
            before = broker_pid(folder)
        pause.release.set()
        rest = await read_all(stream)
        await stream.aclose()
        async with vault_stage(folder) as stage, stage.broker(settings, always).running() as broker:
            rows = await booked(stage, 1)
            status, _ = await ask(grant)
            after = broker_pid(folder)
            await broker.revoke_executor("x-1")
            refused, _ = await ask(grant)

        assert b'"text":"two"' in rest
        assert before == after
        assert before is not None
        assert (len(rows), status, refused) == (1, 200, 401)


async def test_a_lease_works_only_during_a_turn_of_its_session(folder: Path) -> None:
    """Also a lease that is granted during the turn. Other requests are refused and audited; an open stream is cut."""
    streaming = anyio.Event()
    async with (
        serve(key=KEY, script=lambda _: STALLING if streaming.is_set() else SAY) as model,
        working(folder, model.url) as (stage, broker),
    ):
        grant = await broker.lease(session("s-2"), HOLDER, "anthropic", await row_of(stage))
        before, _ = await ask(grant)
        await broker.begin_turn("s-2")
        granted_in_turn = await broker.lease(session("s-2"), HOLDER, "anthropic", await row_of(stage))
        during, _ = await ask(granted_in_turn)
        assert grant.unix_socket is not None
        streaming.set()
        stream = await dial(Path(grant.unix_socket))
        await stream.send(request(grant.value))
        await read_until(stream, b'"text":"one"')
        await broker.end_turn("s-2")
        with anyio.fail_after(30):
            await read_all(stream)
        await stream.aclose()
        after, body = await ask(granted_in_turn)
        refusals = await refusals_of(stage, 2)

    assert (before, during, after) == (403, 200, 403)
    assert b"No turn of this session is running" in body
    assert len(model.requests) == 2
    assert {(line.session, line.action, line.outcome) for line in refusals} == {("s-2", "broker_request", "refused")}


async def refusals_of(stage: VaultStage, count: int) -> list[Any]:
    """Return the audit lines of refused requests once they count this number of requests."""
    with anyio.fail_after(60):
        while True:
            lines, _ = await stage.store.read(audit.read)
            found = [line for line in lines if line.action == "broker_request"]
            if sum((line.details or {})["times"] for line in found) >= count:
                return found
            await anyio.sleep(0.02)


@pytest.mark.parametrize("restarts", ["the broker", "hutchd", "hutchd, with another record"])
async def test_after_a_restart_a_lease_works_if_its_session_has_a_turn(folder: Path, restarts: str) -> None:
    """The record decides, whatever the broker knew."""
    async with serve(key=KEY, script=lambda _: SAY) as model, vault_stage(folder) as stage:
        settings = settings_for(model.url)
        await stage.put()
        await keep_session(stage.store, session("s-1"))
        async with AsyncExitStack() as first:
            broker = await first.enter_async_context(stage.broker(settings, always).running())
            grants = [
                await broker.lease(session(name), HOLDER, "anthropic", await row_of(stage)) for name in ("s-1", "s-2")
            ]
            pid = broker_pid(folder)
            assert pid is not None
            if restarts == "the broker":
                os.kill(pid, signal.SIGKILL)
            else:
                await first.aclose()
                if restarts != "hutchd":
                    await stage.store.write(partial(swap_turns, ended="s-1", begun=session("s-2")))
                broker = await first.enter_async_context(stage.broker(settings, always).running())
            with anyio.fail_after(60):
                while (found := await broker.status()) is None or broker_pid(folder) is None:
                    await anyio.sleep(0.02)
            active = {state.lease.session: state.active for state in found.leases}
            statuses = [(await ask(grant))[0] for grant in grants]
            await broker.revoke_executor("x-1")

    other = restarts == "hutchd, with another record"
    assert active == {"s-1": not other, "s-2": other}
    assert statuses == ([403, 200] if other else [200, 403])


async def test_the_end_of_a_turn_does_not_wait_for_a_broker_that_stands_still(folder: Path) -> None:
    """It goes on after 2 s; the broker refuses requests as soon as it works again."""
    async with serve(key=KEY, script=lambda _: SAY) as model, working(folder, model.url) as (stage, broker):
        grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
        pid = broker_pid(folder)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(20):
                await broker.end_turn("s-1")
        finally:
            os.kill(pid, signal.SIGCONT)
        status, _ = await ask(grant)

    assert status == 403


def swap_turns(tx: Tx, ended: str, begun: SessionRow) -> None:
    """End the turn of one session, and store another session with a running turn."""
    turn = turns.active(tx, ended)
    assert turn is not None
    turns.move(tx, turn.id, {turn.state}, "completed", ended_at=0)
    sessions.insert(tx, begun)
    turns.insert(tx, TurnRow(id=new_id("turn"), session=begun.id, prompt="go", queued_at=0, state="running"))


@contextmanager
def earlier_broker(settings: Settings, paths: BrokerPaths, *abilities: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a broker of an earlier version with these abilities."""
    paths.socket.parent.mkdir(mode=0o700)
    line = msgspec.json.encode(boot_line(settings, paths, link_token(paths.token), {}, everyone=False)) + b"\n"
    program = [sys.executable, str(EARLIER), *abilities]
    with subprocess.Popen(program, stdin=subprocess.PIPE, env={"PATH": os.defpath}) as earlier:
        assert earlier.stdin is not None
        with earlier.stdin as stdin:
            stdin.write(line)
            stdin.flush()
            try:
                yield earlier
            finally:
                earlier.kill()  # a test that failed did not end it


async def test_a_broker_of_an_earlier_version_is_used_until_no_turn_runs(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves requests between turns, and the log says so. Once no turn runs it is replaced, and leases live on.

    A turn that begins meanwhile waits for the new one.
    """
    async with serve(key=KEY, script=lambda _: SAY) as model, vault_stage(folder) as stage:
        settings, paths = settings_for(model.url), BrokerPaths.under(folder, folder)
        await stage.put()
        await keep_session(stage.store, session("s-1"))
        with earlier_broker(settings, paths) as earlier:
            await linked_with(folder, earlier.pid)
            async with stage.broker(settings, always).running() as broker:
                grants = [
                    await broker.lease(session(name), HOLDER, "anthropic", await row_of(stage))
                    for name in ("s-1", "s-2")
                ]
                during = [(await ask(grant))[0] for grant in grants]
                await booked(stage, 2)
                await broker.end_turn("s-1")
                await broker.begin_turn("s-2")
                at_once = (await ask(grants[1]))[0]
                await broker.end_turn("s-2")
                ended = await anyio.to_thread.run_sync(earlier.wait, 60)
                between = [(await ask(grant))[0] for grant in grants]
                await broker.begin_turn("s-2")
                later = [(await ask(grant))[0] for grant in grants]
                await broker.revoke_executor("x-1")

    assert (during, at_once, between, later) == ([200, 200], 200, [403, 403], [403, 200])
    assert ended == 0
    assert sum("is of an earlier version" in record.getMessage() for record in caplog.records) == 1


async def test_a_broker_of_an_earlier_version_is_replaced_when_its_last_record_is_stored(folder: Path) -> None:
    """The last turn ends before the usage of its last request is stored: the broker waits for that, and no longer."""
    free = threading.Event()
    async with serve(key=KEY, script=lambda _: SAY) as model, vault_stage(folder) as stage:
        settings, paths = settings_for(model.url), BrokerPaths.under(folder, folder)
        await stage.put()
        await keep_session(stage.store, session("s-1"))
        with earlier_broker(settings, paths) as earlier:
            await linked_with(folder, earlier.pid)
            async with stage.broker(settings, always).running() as broker, anyio.create_task_group() as tasks:
                grant = await broker.lease(session("s-1"), HOLDER, "anthropic", await row_of(stage))
                await ask(grant)  # the broker has the key from now on
                await booked(stage, 1)
                tasks.start_soon(stage.store.write, lambda _: free.wait(60))
                try:
                    await ask(grant)
                    await broker.end_turn("s-1")
                    waits = earlier.poll() is None
                finally:
                    free.set()
                ended = await anyio.to_thread.run_sync(earlier.wait, 60)
                await booked(stage, 2)
                await broker.revoke_executor("x-1")

    assert (waits, ended) == (True, 0)


SEARCH = {**ASK, "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]}
"""The request that Claude's CLI makes when its agent searches the web."""


def limited(url: str, network: m.Network = "broker-only") -> Settings:
    return msgspec.structs.replace(settings_for(url), sandbox=SandboxSettings(network=network))


async def test_a_lease_follows_the_network_with_which_its_executor_was_prepared(folder: Path) -> None:
    """A search by the provider is refused and audited before the key is used, also by a broker that was started again.

    Then the session goes on. With the full network the provider searches.
    """
    closed, opened = replace(HOLDER, network="broker-only"), replace(HOLDER, executor="x-2", network="full")
    async with serve(key=KEY, script=lambda _: SAY) as model, working(folder, model.url) as (stage, broker):
        key = await row_of(stage)
        grants = [await broker.lease(session(), holder, "anthropic", key) for holder in (closed, opened)]
        refused, sentence = await ask(grants[0], SEARCH)
        lines, _ = await stage.store.read(audit.read)
        plain, _ = await ask(grants[0])
        searched, _ = await ask(grants[1], SEARCH)
        kill_broker(folder)
        after = [await answered(grant, SEARCH) for grant in grants]
        audited = await refusals(stage)

    assert (refused, plain, searched, after) == (403, 200, 200, [403, 200])
    assert b"web_search_20250305" in sentence
    assert b'network = \\"broker-only\\"' in sentence
    assert [line.action for line in lines if line.action == "use_key"] == []
    assert audited[0].session == "s-1"
    assert "web_search_20250305" in str(audited[0].details)


async def refusals(stage: VaultStage) -> Sequence[Any]:
    """Return the audited refusals of the broker once there is one."""
    with anyio.fail_after(60):
        while True:
            lines, _ = await stage.store.read(audit.read)
            if found := [line for line in lines if line.action == "broker_request"]:
                return found
            await anyio.sleep(0.02)


@pytest.mark.parametrize("network", ["full", "broker-only", "allow-list"])
async def test_a_lease_without_a_network_is_that_of_the_settings(folder: Path, network: m.Network) -> None:
    """So is that of an executor that an earlier hutchd prepared. It stays limited when the settings change."""
    async with serve(key=KEY, script=lambda _: SAY) as model, vault_stage(folder) as stage:
        await stage.put()
        await keep_session(stage.store, session())
        settings = SettingsInForce(limited(model.url, network))
        async with stage.broker(settings, always).running() as broker:
            grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
            settings.replace(limited(model.url, "full"))
            granted, _ = await ask(grant, SEARCH)
            kill_broker(folder)
            after = await answered(grant, SEARCH)
        async with stage.broker(settings, always).running() as broker:  # adopts the broker and its lease
            adopted = await answered(grant, SEARCH)
            await broker.revoke_executor("x-1")

    assert (granted, after, adopted) == ((200,) * 3 if network == "full" else (403,) * 3)


@pytest.mark.parametrize("network", ["full", "broker-only"])
async def test_a_broker_that_knows_no_networks_gets_no_limited_lease(folder: Path, network: m.Network) -> None:
    """Its own leases count by the settings, and go on until it is replaced, as soon as no other session has a turn.

    Until then a lease with a limited network is refused.
    """
    async with serve(key=KEY, script=lambda _: SAY) as model, vault_stage(folder) as stage:
        settings, paths = limited(model.url, network), BrokerPaths.under(folder, folder)
        await stage.put()
        for name in ("s-1", "s-2"):
            await keep_session(stage.store, session(name))
        with earlier_broker(settings, paths, "set_active") as earlier:
            await linked_with(folder, earlier.pid)
            async with stage.broker(settings_for(model.url), always).running() as former:
                old = await former.lease(session("s-1"), HOLDER, "anthropic", await row_of(stage))
            async with stage.broker(settings, always).running() as broker:
                before = await answered(old, SEARCH)
                new: m.KeyGrant | str = ""
                try:
                    new = await broker.lease(session("s-2"), HOLDER, "anthropic", await row_of(stage))
                except HutchError as error:
                    new = error.reason.word
                await booked(stage, 1)
                await broker.end_turn("s-1")
                later = await broker.lease(session("s-2"), HOLDER, "anthropic", await row_of(stage))
                await broker.begin_turn("s-1")
                after = [await answered(grant, SEARCH) for grant in (old, later)]
                replaced = earlier.poll() is not None
                await broker.revoke_executor("x-1")
                end(earlier.pid)

    assert before == 200
    assert (new == "agent_unavailable", replaced) == (network != "full", network != "full")
    assert after == ([200, 200] if network == "full" else [403, 403])


async def linked_with(folder: Path, pid: int) -> None:
    """Return once the process listens at the control socket."""
    with anyio.fail_after(60):
        while broker_pid(folder) != pid:
            await anyio.sleep(0.02)


async def test_a_new_hutchd_ends_leases_of_missing_executors(folder: Path) -> None:
    """After a restart, an executor that no longer exists has no lease."""
    async with serve(key=KEY, script=lambda _: SAY) as model:
        settings = settings_for(model.url)
        async with vault_stage(folder) as stage:
            await stage.put()
            async with stage.broker(settings, always).running() as broker:
                grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
            async with stage.broker(settings, never).running() as broker:
                with anyio.fail_after(30):
                    while (found := await broker.status()) is None:
                        await anyio.sleep(0.01)
                status, _ = await ask(grant)

        assert (found.leases, status) == ((), 401)


@pytest.mark.parametrize("restarts", [False, True], ids=["one hutchd", "a restart in between"])
async def test_a_spent_budget_refuses_requests(folder: Path, restarts: bool) -> None:
    """The request that reaches the end of the budget is the last; then every one is refused, across restarts too."""
    async with serve(key=KEY, script=lambda _: (Usage(input=30, output=0), SAY)) as model, vault_stage(folder) as stage:
        price = PriceSettings(input=1e6, output=0)  # one dollar per token
        provider = ProviderSettings(base_url=model.url, prices={"claude-sonnet-4-5": price})
        settings = Settings(
            providers={"anthropic": provider},
        )
        row = session(limits=m.Limits(max_usd=100.0))
        await keep_session(stage.store, row)
        await stage.put()
        statuses: list[int] = []

        async def spend(grant: m.KeyGrant, requests: int) -> None:
            for _ in range(requests):
                try:
                    statuses.append((await ask(grant))[0])
                except EOFError:
                    statuses.append(CUT)
                if statuses[-1] != 402:
                    await booked(stage, len(statuses))

        async with stage.broker(settings, always).running() as broker:
            grant = await broker.lease(row, HOLDER, "anthropic", await row_of(stage))
            await spend(grant, 2 if restarts else 5)
            if not restarts:
                await broker.revoke_executor("x-1")
        if restarts:
            async with stage.broker(settings, always).running() as broker:
                await spend(grant, 3)
                await broker.revoke_executor("x-1")

    assert statuses[:3] == [200, 200, 200]
    assert statuses[3] in (200, CUT)  # it may have come whole before the broker looked at its cost
    assert statuses[4:] == [402]


async def test_a_lease_is_refilled_with_what_it_used(folder: Path) -> None:
    """hutchd refills it after a tenth of its portion, so that a long session is never refused."""
    async with serve(key=KEY, script=lambda _: SAY) as model, vault_stage(folder) as stage:
        providers = {"anthropic": ProviderSettings(base_url=model.url)}
        settings = Settings(providers=providers, broker=BrokerSettings(requests=20))
        await stage.put()
        async with stage.broker(settings, always).running() as broker:
            await broker.begin_turn("s-1")
            grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
            statuses = [(await ask(grant))[0] for _ in range(2)]
            await refilled(broker, 20)
            await broker.revoke_executor("x-1")

    assert statuses == [200, 200]


async def refilled(broker: Broker, requests: int) -> None:
    """Return once hutchd has refilled the broker for all requests so far."""
    with anyio.fail_after(30):
        while (found := await broker.status()) is None or found.leases[0].requests < requests:
            await anyio.sleep(0.01)


async def test_a_replaced_key_is_used_from_the_next_request_on(folder: Path) -> None:
    """A lease names the credential, not one version of its secret."""
    async with serve(key=KEY, script=lambda _: SAY) as model, working(folder, model.url) as (stage, broker):
        grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
        await ask(grant)
        model.key = "sk-new-0123456789abcdef"
        await stage.put(secret="sk-new-0123456789abcdef")
        await broker.refresh_credential((await row_of(stage)).id)
        status, _ = await ask(grant)

        assert status == 200


async def test_a_request_waits_for_a_missing_key(folder: Path) -> None:
    """Each session that uses the key notifies its owner; the request waits for the new key."""
    told: list[tuple[str, tuple[str, ...], str]] = []
    asked = anyio.Event()

    async def report(row: KeyRow, sessions: Sequence[str], trouble: str) -> None:
        told.append((row.name, tuple(sessions), trouble))
        asked.set()

    async with (
        serve(key=KEY, script=lambda _: SAY) as model,
        working(folder, model.url, report=report) as (stage, broker),
    ):
        refresh = Refresh(Secret("refresh-1"), f"http://127.0.0.1:{closed_port()}/token", "client")
        await stage.put(secret="access-1", kind="oauth", expires_at=now_ms(), refresh=refresh)
        grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
        statuses: list[int] = []

        async def wait() -> None:
            statuses.append((await ask(grant))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            with anyio.fail_after(30):
                await asked.wait()
            kept = await stage.put()
            await broker.refresh_credential(kept.id)

    assert statuses == [200]
    (name, sessions, trouble), *_, settled = told
    assert (name, sessions) == ("default", ("s-1",))
    assert "could not be refreshed" in trouble
    assert settled == ("default", ("s-1",), "")


async def test_a_request_stops_waiting_for_a_key_at_its_deadline(folder: Path) -> None:
    """The agent then gets an error with the reason, and may retry."""
    async with (
        serve(key=KEY, script=lambda _: SAY) as model,
        working(folder, model.url, key_timeout=5.0) as (
            stage,
            broker,
        ),
    ):
        refresh = Refresh(Secret("refresh-1"), f"http://127.0.0.1:{closed_port()}/token", "client")
        await stage.put(secret="access-1", kind="oauth", expires_at=now_ms(), refresh=refresh)
        grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
        status, body = await ask(grant)

        assert status == 503
        assert b"could not be refreshed" in body
        assert model.requests == []


async def test_the_brokers_memory_is_closed_and_no_key_is_visible(folder: Path) -> None:
    """Its own account cannot read its memory or environment; neither argv nor environment holds a secret."""
    async with serve(key=KEY, script=lambda _: SAY) as model, working(folder, model.url) as (stage, broker):
        grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
        await ask(grant)
        pid = broker_pid(folder)
        proc = Path(f"/proc/{pid}")
        seen = (proc / "cmdline").read_bytes()
        if os.getuid() == 0:  # root may read it
            seen += (proc / "environ").read_bytes()
        limits = (proc / "limits").read_text()
        owner = (proc / "environ").stat().st_uid

        assert KEY.encode() not in seen
        assert b"proxy" not in seen.lower()
        assert owner == 0
        assert re.search(r"Max core file size +0 +0 ", limits)


async def test_a_broker_without_descriptors_waits_until_some_are_free(folder: Path) -> None:
    """An agent that connects meanwhile is served once descriptors are free; the log stays small."""
    async with serve(key=KEY, script=lambda _: SAY) as model, working(folder, model.url) as (stage, broker):
        grant = await broker.lease(session(), HOLDER, "anthropic", await row_of(stage))
        pid = broker_pid(folder)
        assert pid is not None
        assert grant.unix_socket is not None
        await ask(grant)
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (40, hard))
        async with AsyncExitStack() as crowd:
            for _ in range(60):
                await crowd.enter_async_context(await dial(Path(grant.unix_socket)))
            for _ in range(60):
                await broker.status()  # meanwhile it accepts the connections that it can
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
            status, _ = await ask(grant)
        log = (folder / "broker.log").read_text()

        assert status == 200
        assert "Too many open files" not in log


async def test_without_a_broker_a_lease_is_refused_with_the_reason(folder: Path) -> None:
    """hutchd never hands out the key instead."""
    async with vault_stage(folder) as stage:
        await stage.put()
        settings = settings_for("http://127.0.0.1:1")
        grants = stage.grants(settings, stage.broker(settings, always))
        with anyio.move_on_after(0.1) as waited:
            await grants.grant(session(), "anthropic", HOLDER)

        assert waited.cancelled_caught


async def test_an_unknown_provider_needs_a_dialect(folder: Path) -> None:
    """hutchd cannot guess which API such a provider speaks."""
    async with serve(key=KEY, script=lambda _: SAY) as model, working(folder, model.url) as (stage, broker):
        await stage.put(provider="somebody")
        row = (await stage.vault.choose(OWNER, "somebody")).row
        with pytest.raises(HutchError, match="dialect") as refused:
            await broker.lease(session(), HOLDER, "somebody", row)

    assert refused.value.reason is Reason.INVALID_PARAMS
