"""The limits of a lease (processes, paths, time, allowance), in a real broker with real processes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import msgspec
import pytest

from hutch_broker.leases import HeldLease, LeaseTable, lease_id_in
from hutch_broker.processes import BrokerPeer, belongs
from hutch_shared import broker_link as link
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_token
from hutch_shared.processes import start_time
from tests.broker.stage import KEY, Stage, parsed, read_all, read_until, request, staged
from tests.programs import bubblewrap
from tests.rehearsal import Pause, Say, Stall, serve

SAY = Say("one")
CLIENT = """
import socket, sys
request = sys.stdin.buffer.read()
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(request)
print(sock.recv(64).split()[1].decode())
"""


async def status_from_child(stage: Stage, token: str) -> int:
    """Make a request from a child process; return the status."""
    done = await anyio.run_process([sys.executable, "-c", CLIENT, stage.boot.socket], input=request(token))
    return int(done.stdout)


async def test_a_lease_works_for_the_executor_and_what_it_started() -> None:
    """A child of the lease's process may use the lease."""
    async with serve(key=KEY, script=lambda _: SAY) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        status = await status_from_child(stage, token)

        assert status == 200


async def test_a_lease_works_from_inside_a_sandbox() -> None:
    """A child in its own pid namespace, which sees only the socket's directory, may use the lease."""
    async with serve(key=KEY, script=lambda _: SAY) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        folder = os.path.dirname(stage.boot.socket)
        walls = ["--ro-bind", "/", "/", "--ro-bind", folder, folder, "--unshare-pid", "--proc", "/proc"]
        command = [bubblewrap(), *walls, "--die-with-parent", sys.executable, "-c", CLIENT, stage.boot.socket]
        done = await anyio.run_process(command, input=request(token), check=False)

        assert done.stdout.strip() == b"200", done.stderr.decode()


async def test_a_lease_is_refused_to_other_processes() -> None:
    """A process that does not descend from the executor is refused, also if the executor's pid was reused."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        async with staged("http://127.0.0.1:1") as stage:
            _, strange = await stage.lease(pid=other.pid, start_time=start_time(other.pid))
            _, reused = await stage.lease(start_time=1)
            _, another_uid = await stage.lease(uid=os.getuid() + 1)
            statuses = [(await stage.ask(token))[0] for token in (strange, reused, another_uid)]
            records = await stage.recorded(3)

        assert statuses == [403, 403, 403]
        assert stage.asked == []
        assert {record.pid for record in records} == {os.getpid()}
        other.communicate(b"\n")


def test_a_process_in_the_executors_cgroup_may_use_its_lease() -> None:
    """A process in the executor's cgroup may use the lease, whatever its ancestors are."""
    facts = {"id": "l", "token_hash": "", "session": "s", "executor": "x", "owner": 0, "account": "a"}
    facts |= {"provider": "anthropic", "dialect": "anthropic", "credential": "k", "uid": os.getuid()}
    lease = link.Lease(**facts, pid=1, start_time=1, cgroup="hutch-x")  # type: ignore[arg-type]
    stranger = link.Lease(**facts, pid=1, start_time=1, cgroup="hutch-x-other")  # type: ignore[arg-type]
    here = BrokerPeer(os.getuid(), os.getpid())

    def groups(pid: int) -> frozenset[str]:
        return frozenset({"user.slice", "hutch-x"} if pid == os.getpid() else ())

    assert belongs(here, lease, groups)
    assert not belongs(here, stranger, groups)
    assert not belongs(BrokerPeer(os.getuid(), None), lease, groups)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/messages", 200),
        ("POST", "/v1/messages/count_tokens?beta=true", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/v1/messages", 404),
        ("POST", "/v1/files", 404),
        ("GET", "/v1/organizations/api_keys", 404),
        ("POST", "/v1/messages/batches", 404),
        ("POST", "/v1/x/../messages", 400),
        ("POST", "/v1/%2e%2e/messages", 400),
        ("POST", "//v1/messages", 400),
        ("POST", "/v1/messages#x", 400),
        ("POST", "http://127.0.0.1/v1/messages", 400),
        ("POST", "/v1/messages?key=abc", 400),
        ("DELETE", "/v1/models/m", 405),
        ("OPTIONS", "*", 405),
    ],
)
async def test_only_requests_of_a_model_api_are_answered(method: str, path: str, status: int) -> None:
    """Requests with other paths or methods do not reach the provider."""
    async with serve(key=KEY, script=lambda _: SAY) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        got, _, _ = await stage.ask(token, method=method, path=path)

        assert got == status
        assert len(model.requests) == (status == 200)


async def test_a_revoke_cuts_open_streams_before_its_answer() -> None:
    """A running stream and a request that waits for its key end; the token is unknown from then on."""
    async with serve(key=KEY, script=lambda _: [Say("one"), Stall()]) as model, staged(model.url) as stage:
        lease, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token))
        await read_until(stream, b'"text":"one"')
        ended = await stage.peer.call("end_leases", link.LeaseIds(leases=(lease, "l-other")), 30)
        with anyio.fail_after(30):
            await read_all(stream)
        await stream.aclose()
        with anyio.fail_after(30):
            await model.until(lambda m: len(m.hangups) == 1)
        status, _, _ = await stage.ask(token)

        assert ended == link.Ended(leases=1, streams=1)
        assert status == 401


async def test_only_an_active_lease_reaches_the_model() -> None:
    """The refusal is recorded. Making a lease inactive cuts its streams, and requests that wait for their key."""
    async with serve(key=KEY, script=lambda _: [Say("one"), Stall()]) as model, staged(model.url) as stage:
        lease, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token))
        await read_until(stream, b'"text":"one"')
        cut = await stage.peer.call("set_active", link.LeaseActive(lease=lease, active=False), 30)
        with anyio.fail_after(30):
            await read_all(stream)
        await stream.aclose()
        refused, _, body = await stage.ask(token)
        records = await stage.recorded(2)

        assert cut.streams == 1
        assert refused == 403
        assert json.loads(body)["error"]["type"] == "permission_error"
        assert len(model.requests) == 1
        assert [(one.session, one.status, one.refused is None) for one in records] == [
            ("s-1", 200, True), ("s-1", 403, False)
        ]  # fmt: skip


async def test_a_request_without_a_turn_asks_for_no_key() -> None:
    """A lease that begins inactive is refused before anything else happens; it works once it is active."""
    async with serve(key=KEY, script=lambda _: Say("one")) as model, staged(model.url) as stage:
        state, token = stage.made()
        await stage.peer.call("put_lease", msgspec.structs.replace(state, active=False), 30)
        before, _, _ = await stage.ask(token)
        asked = list(stage.asked)
        await stage.peer.call("set_active", link.LeaseActive(lease=state.lease.id, active=True), 30)
        then, _, _ = await stage.ask(token)

        assert (before, asked, then) == (403, [], 200)


async def test_a_request_that_waits_for_its_key_does_not_outlive_the_turn() -> None:
    """The key arrives after the lease became inactive: nothing is sent."""
    async with serve(key=KEY, script=lambda _: Say("one")) as model, staged(model.url) as stage:
        stage.may_answer = anyio.Event()
        lease, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token))
        with anyio.fail_after(30):
            while not stage.asked:
                await anyio.sleep(0.01)
        cut = await stage.peer.call("set_active", link.LeaseActive(lease=lease, active=False), 30)
        stage.may_answer.set()
        with anyio.fail_after(30):
            answer = await read_all(stream)
        await stream.aclose()
        refused, _, _ = await stage.ask(token)

        assert (cut.streams, answer, refused) == (1, b"", 403)
        assert model.requests == []


async def test_a_lease_ends_at_its_time_with_its_streams() -> None:
    """When a lease expires, the broker cuts its open stream."""
    async with serve(key=KEY, script=lambda _: [Say("one"), Stall()]) as model, staged(model.url) as stage:
        lease, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token))
        await read_until(stream, b'"text":"one"')
        await stage.peer.call("refill", link.Refill(lease=lease, requests=0, expires_in=0.05), 30)
        with anyio.fail_after(30):
            await read_all(stream)
        await stream.aclose()
        status, _, _ = await stage.ask(token)

        assert status == 401


def test_an_expired_lease_is_not_found_before_it_is_ended() -> None:
    """After its expiry a lease is not found or listed, even before `end_expired` cuts its streams."""
    now = [0.0]
    leases = LeaseTable(lambda: now[0])
    token = "hutch-l-0123456789abcdef-secret"
    lease = msgspec.structs.replace(
        held().lease, id=lease_id_in(token), token_hash=hashlib.sha256(token.encode()).hexdigest()
    )
    leases.put(link.LeaseState(lease=lease, expires_in=1, requests=1))
    before = leases.of_token(token)
    now[0] = 1.0

    assert before is not None
    assert leases.of_token(token) is None
    assert leases.states() == ()
    assert len(leases) == 1


async def test_an_allowance_is_used_up_and_refilled() -> None:
    """A request beyond the allowance is refused until hutchd refills it."""
    async with serve(key=KEY, script=lambda _: SAY) as model, staged(model.url) as stage:
        lease, token = await stage.lease(requests=1)
        before = [(await stage.ask(token))[0] for _ in range(2)]
        await stage.peer.call("refill", link.Refill(lease=lease, requests=1), 30)
        after, _, _ = await stage.ask(token)

        assert before == [200, 429]
        assert after == 200


def held() -> HeldLease:
    lease = link.Lease(
        id="l-1", token_hash="", session="s", executor="x", owner=0, account="a", provider="anthropic",
        dialect="anthropic", credential="k", uid=0, pid=1, start_time=1,
    )  # fmt: skip
    return HeldLease(lease, 1e9, 100)


async def test_hutchd_is_asked_once_for_all_requests_that_wait_for_a_key() -> None:
    """hutchd is asked once for all waiting requests; a request that is cancelled does not affect the others."""
    async with serve(key=KEY, script=lambda _: SAY) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        stage.may_answer = anyio.Event()
        impatient = await stage.dial()
        await impatient.send(request(token))
        statuses: list[int] = []

        async def one() -> None:
            statuses.append((await stage.ask(token))[0])

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(one)
            with anyio.fail_after(30):
                while not stage.asked:
                    await anyio.lowlevel.checkpoint()
            await impatient.aclose()
            stage.may_answer.set()

        assert statuses == [200] * 5
        assert len(stage.asked) == 1


async def test_a_key_that_does_not_come_is_an_error_that_may_be_tried_again() -> None:
    """After the timeout the agent gets an error with hutchd's reason."""
    async with staged("http://127.0.0.1:1", key_timeout=0.1) as stage:
        _, token = await stage.lease()
        stage.secret = ""
        refused, _, body = await stage.ask(token)
        stage.may_answer = anyio.Event()
        late, headers, _ = await stage.ask(token)

        assert (refused, late, headers["x-should-retry"]) == (503, 503, "true")
        assert b"There is no key." in body


async def test_a_dropped_key_is_requested_again() -> None:
    """After the owner replaced a credential, no request is forwarded with the old key."""
    async with serve(key=KEY, script=lambda _: SAY) as model, staged(model.url) as stage:
        _, token = await stage.lease()
        await stage.ask(token)
        model.key = stage.secret = "sk-new"
        await stage.peer.call("drop_keys", link.DropKeys(credential="k-1"), 30)
        status, _, _ = await stage.ask(token)

        assert status == 200
        assert model.requests[-1].headers["x-api-key"] == "sk-new"


async def test_a_new_hutchd_keeps_the_leases_that_it_lists() -> None:
    """Streams continue during a restart of hutchd; leases that the new hutchd does not list end with their streams."""
    pause = Pause()
    async with serve(key=KEY, script=lambda _: [Say("one"), pause]) as model, staged(model.url) as stage:
        first, token = await stage.lease()
        second, other = await stage.lease()
        streams = []
        for one in (token, other):
            stream = await stage.dial()
            await stream.send(request(one))
            await read_until(stream, b'"text":"one"')
            streams.append(stream)
        await stage.peer.aclose()
        async with stage.linked(agree=False):
            assert stage.welcome is not None
            found = {state.lease.id: state.streams for state in stage.welcome.leases}
            ended = await stage.keep(first)
            pause.release.set()
            kept = await read_until(streams[0], b"0\r\n\r\n")
            again, _, _ = await stage.ask(token)
            dead, _, _ = await stage.ask(other)
        for stream in streams:
            await stream.aclose()

        assert found == {first: 1, second: 1}
        assert ended == link.Ended(leases=1, streams=1)
        assert b"message_stop" in kept
        assert (again, dead) == (200, 401)


async def test_a_broker_that_was_just_started_waits_for_the_leases() -> None:
    """After a restart an agent's request waits, and is answered once hutchd has sent the live leases."""
    async with serve(key=KEY, script=lambda _: SAY) as model, staged(model.url, agree=False) as stage:
        state, token = stage.made()
        stream = await stage.dial()
        await stream.send(request(token))
        unclear = await stage.send(b"GET /v1/models HTTP/1.1\r\n\r\n")  # its answer shows: the first was read
        await stage.peer.call("put_lease", state, 30)
        await stage.keep(state.lease.id)
        status = parsed(await read_all(stream))[0]
        await stream.aclose()

    assert b" 400 " in unclear
    assert status == 200


async def test_records_are_reported_until_they_are_acknowledged() -> None:
    """Unacknowledged records are reported again after a reconnect, with the same numbers."""
    async with serve(key=KEY, script=lambda _: SAY) as model, staged(model.url) as stage:
        stage.acknowledges = False
        _, token = await stage.lease()
        await stage.ask(token)
        await stage.ask("hutch-nothing")
        first = [record.n for record in await stage.recorded(2)]
        await stage.peer.aclose()
        stage.records.clear()
        stage.acknowledges = True
        async with stage.linked() as peer:
            again = [record.n for record in await stage.recorded(2)]
            with anyio.fail_after(30):
                while (await peer.call("get_status", None, 30)).unacknowledged:
                    await anyio.lowlevel.checkpoint()

        assert first == again == [1, 2]


async def test_without_room_for_records_nothing_is_forwarded() -> None:
    """A request that cannot be recorded is refused."""
    async with serve(key=KEY, script=lambda _: SAY) as model, staged(model.url, records=1) as stage:
        stage.acknowledges = False
        _, token = await stage.lease()
        first, _, _ = await stage.ask(token)
        await stage.recorded(1)
        second, _, _ = await stage.ask(token)

        assert (first, second) == (200, 503)


async def test_the_link_refuses_calls_before_hello() -> None:
    """A process of the same account connects to the control socket without the token and is refused."""
    async with staged("http://127.0.0.1:1") as stage:
        right = stage.boot.token
        stage.boot = msgspec.structs.replace(stage.boot, token="wrong")
        with pytest.raises(HutchError) as refused:
            async with stage.linked():
                pass
        stage.boot = msgspec.structs.replace(stage.boot, token=right)

    assert refused.value.reason is Reason.TOKEN_UNKNOWN


async def test_an_unused_broker_ends() -> None:
    """It ends after some time without a lease and without hutchd."""
    from hutch_broker.broker import serving

    async with staged("http://127.0.0.1:1") as stage:
        boot = msgspec.structs.replace(
            stage.boot, control=stage.boot.control + "2", socket=stage.boot.socket + "2", linger=0.05
        )
        async with serving(boot) as ended:
            with anyio.fail_after(30):
                await ended.wait()


async def test_without_hutchd_a_broker_ends_with_the_last_executor() -> None:
    """It serves the executors that hutchd left, and ends soon after the last one, though no lease has expired."""
    from hutch_broker.broker import serving

    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        Path(folder, "b").mkdir(0o700)
        boot = link.BrokerBoot(token=new_token(), control=f"{folder}/control.sock", socket=f"{folder}/b/broker.sock")
        stage = Stage(boot, "http://127.0.0.1:1")
        async with serving(boot) as ended, await anyio.open_process(["cat"]) as executor:
            async with stage.linked() as peer:
                await stage.lease(pid=executor.pid, start_time=start_time(executor.pid))
                await peer.notify("leave", m.Nothing())
                await peer.call("get_status", m.Nothing(), 30)
            with anyio.move_on_after(2.5):
                await ended.wait()
            while_it_lived = ended.is_set()
            executor.kill()
            with anyio.fail_after(30):
                await ended.wait()

    assert not while_it_lived


def test_a_lease_that_ended_has_no_key() -> None:
    """Ending a lease drops its key and cuts each of its streams once."""
    leases = LeaseTable(lambda: 0.0)
    one = held()
    leases.put(link.LeaseState(lease=one.lease, expires_in=1, requests=1))
    kept = leases.get("l-1")
    assert kept is not None
    kept.key = link.Key(secret="s", kind="api_key")
    cuts: list[int] = []
    kept.begin(lambda: cuts.append(1))

    ended = [leases.end(["l-1"]), leases.end(["l-1"])]

    assert ended == [link.Ended(leases=1, streams=1), link.Ended(leases=0, streams=0)]
    assert cuts == [1]
    assert kept.key is None
