"""The broker's cost for agents and hutchd, against a direct connection; how fast it cuts streams."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
from anyio import to_thread
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.processes import peer_credentials
from hutch_shared.unix import connect
from scripts.benching.measure import Effort, Say, cpu_of, median, percentile
from scripts.benching.stage import KEY, TOP, Program, program
from scripts.benching.wire import Line
from tests.system.host import Host, host

__all__ = ["bench"]

_STREAMS: Final = 20
_RATE: Final = 200
"""Events per second of each paced stream."""
_REQUESTS: Final = 1500
_TAIL: Final = 1000
"""The fewest requests for a p99; a quick run makes them too."""
_GAP: Final = 0.02
"""Seconds between two requests, so that the broker has recorded one before the next is timed."""
_EVENTS: Final = 3000
_WAYS: Final = ("direct", "brokered")
_HOP: Final = "hop"
_PATIENCE: Final = 120.0
_ADDED_MS: Final = ("<=", 2.0)
_PING: Final = ("<=", 1.3)
_ENDED_MS: Final = ("<=", 50.0)
_LEASED: Final = TOP / "tests" / "system" / "programs" / "leased_hutchd.py"


@dataclass(frozen=True)
class Agent:
    """A program in a session that makes requests when ordered; see `programs/streams.py`."""

    pid: int
    line: SocketStream
    answers: BufferedByteReceiveStream

    async def does(self, **order: Any) -> Any:
        """Send an order; return the answer."""
        await self.line.send(json.dumps(order).encode() + b"\n")
        return await self.says()

    async def says(self) -> Any:
        """Return the next answer."""
        with anyio.fail_after(_PATIENCE):
            return json.loads(await self.answers.receive_until(b"\n", 1 << 24))


async def bench(effort: Effort, say: Say) -> None:
    """Measure the first byte, CPU, hutchd's pings beside streams, and how fast streams end."""
    async with program("provider") as provider:
        url = (await provider.line()).strip()
        settings = f'[providers.anthropic]\nbase_url = "{url}"\n[executors]\nspares = 0\n'
        async with host(settings, start=False) as made:
            made.program = (sys.executable, "-P", str(_LEASED))
            await made.start()
            async with made.client() as hutch:
                await _store_key(hutch)
                async with _agent(made, hutch, url, "load") as agent:
                    await _first_byte(effort, say, agent, _broker(made), made.folder("load") / "hop.sock", url)
                    await _cpu(effort, say, agent, (provider.pid, _broker(made)))
                    await _ping(effort, say, agent, made)
                    await _hang_up(effort, say, agent, provider)
                await _revoke(effort, say, made, hutch, url)


async def _first_byte(effort: Effort, say: Say, agent: Agent, broker: int, path: Path, url: str) -> None:
    """Time requests in turn: direct, through the broker, and through a process that only forwards."""
    count = effort.of(_REQUESTS, _TAIL if effort.rounds > 1 else 10)
    async with program("hop", path, url.rpartition(":")[2]) as hop:
        await hop.line()
        ways = (*_WAYS, _HOP)
        await agent.does(ways=ways, times=20, gap=0, events=1, pace=0)
        before = cpu_of(broker), cpu_of(hop.pid)
        firsts = await agent.does(ways=ways, times=count, gap=_GAP, events=1, pace=0)
        cpu, hop_cpu = (1e6 * (cpu_of(pid) - at) / count for pid, at in zip((broker, hop.pid), before, strict=True))
    for name, share, aim in (("p50", 0.5, None), ("p99", 0.99, _ADDED_MS)):
        us = {way: 1e6 * percentile(firsts[way], share) for way in ways}
        say("broker", f"first event: milliseconds added, {name}", max(0.0, us["brokered"] - us["direct"]) / 1e3, aim,
            us=us["brokered"], direct_us=us["direct"], hop_us=us[_HOP], samples=count)  # fmt: skip
    say("broker", "a request: CPU of the broker, of a bare hop", cpu / hop_cpu, us=cpu, hop_us=hop_cpu)


async def _cpu(effort: Effort, say: Say, agent: Agent, others: tuple[int, int]) -> None:
    provider, broker = others
    events = effort.of(_EVENTS, 50)
    each: dict[str, list[float]] = {way: [] for way in _WAYS}
    rates: dict[str, list[float]] = {way: [] for way in _WAYS}
    alone: list[float] = []
    for _ in range(effort.rounds):
        for way in _WAYS:
            before = [cpu_of(pid) for pid in (agent.pid, provider, broker)]
            done = await agent.does(way=way, streams=_STREAMS, times=1, events=events, pace=0)
            used = [1e6 * (cpu_of(pid) - at) for pid, at in zip((agent.pid, provider, broker), before, strict=True)]
            each[way].append(sum(used) / done["events"])
            rates[way].append(done["events"] / done["seconds"])
            if way == "brokered":
                alone.append(used[2] / done["events"])
    ratio = median([there / past for there, past in zip(each["brokered"], each["direct"], strict=True)])
    say("broker", f"{_STREAMS} streams at once: CPU of all for an event", ratio, None,
        us=median(each["brokered"]), direct_us=median(each["direct"]), broker_us=median(alone),
        per_second=median(rates["brokered"]), direct_per_second=median(rates["direct"]))  # fmt: skip


async def _ping(effort: Effort, say: Say, agent: Agent, made: Host) -> None:
    seconds, broker = min(effort.seconds, 5.0), _broker(made)
    p99: dict[str, list[float]] = {way: [] for way in _WAYS}
    cpu: list[float] = []
    rates: dict[str, float] = {}
    for _ in range(effort.rounds):
        for way in _WAYS:
            events = int(seconds * _RATE)
            async with anyio.create_task_group() as tasks:
                stop = [False]

                async def load(way: str = way, events: int = events, stop: list[bool] = stop) -> None:
                    before = cpu_of(broker)
                    done = await agent.does(way=way, streams=_STREAMS, times=1, events=events, pace=1 / _RATE)
                    rates[way] = done["events"] / done["seconds"] / _STREAMS
                    if way == "brokered":
                        cpu.append(1e6 * (cpu_of(broker) - before) / done["events"])
                    stop[0] = True

                tasks.start_soon(load)
                p99[way].append(percentile(await to_thread.run_sync(partial(_pings, made.socket, stop)), 0.99))
    ratio = median([there / past for there, past in zip(p99["brokered"], p99["direct"], strict=True)])
    say("broker", f"ping beside {_STREAMS} streams of {_RATE} events/s: p99", ratio, _PING,
        us=1e6 * median(p99["brokered"]), past_us=1e6 * median(p99["direct"]), rate=rates["brokered"],
        past_rate=rates["direct"], broker_us_an_event=median(cpu))  # fmt: skip


def _pings(socket: Path, stop: list[bool]) -> list[float]:
    """Ping hutchd a few hundred times per second until `stop` is set; return the seconds of each ping."""
    taken = []
    with Line(socket) as line:
        while not stop[0]:
            taken.append(line.ask("ping"))
            time.sleep(0.002)
    return taken


async def _hang_up(effort: Effort, say: Say, agent: Agent, provider: Program) -> None:
    """Measure the time from an agent's closing of stalled streams until the last one ends at the provider."""
    taken = []
    for _ in range(effort.rounds):
        await agent.does(way="brokered", streams=_STREAMS, events=1, pace=0, stall=True, leave=True)
        left = float(await agent.does())
        taken += [1e3 * (float(await provider.line()) - left) for _ in range(_STREAMS)]
    say("broker", "hang-up: milliseconds to the provider, the slowest", max(0.0, max(taken)), _ENDED_MS,
        p50=median(taken), streams=len(taken))  # fmt: skip


async def _revoke(effort: Effort, say: Say, made: Host, hutch: HutchClient, url: str) -> None:
    """Measure the time from the call that deletes a key until the last stream that uses it is cut."""
    taken = []
    for number in range(effort.rounds):
        await _store_key(hutch)
        async with _agent(made, hutch, url, f"revoked-{number}") as agent:
            await agent.does(way="brokered", streams=_STREAMS, events=1, pace=0, stall=True)
            began = time.monotonic()
            with Line(made.socket) as line:
                line.ask("get_version", {"protocol": m.PROTOCOL, "client": "bench"})
                began = time.monotonic()
                await to_thread.run_sync(partial(line.ask, "delete_api_key", {"provider": "anthropic"}))
            taken.append(1e3 * (float(await agent.says()) - began))
    say("broker", f"revoke: milliseconds to the cut of {_STREAMS} streams, the slowest", max(taken), _ENDED_MS,
        p50=median(taken))  # fmt: skip


async def _store_key(hutch: HutchClient) -> None:
    await hutch.call("put_api_key", m.PutApiKey("anthropic", KEY))


def _broker(made: Host) -> int:
    with connect(made.runtime / "broker-control.sock", 10) as sock:
        return peer_credentials(sock).pid


@asynccontextmanager
async def _agent(made: Host, hutch: HutchClient, url: str, name: str) -> AsyncIterator[Agent]:
    """Run the agent as a command of a session, so that the session's lease admits it."""
    folder = made.folder(name)
    argv = [sys.executable, "-P", str(TOP / "scripts/benching/programs/streams.py"), str(folder), url]
    script = [{"tool": "Bash", "input": {"command": f"exec {shlex.join(argv)}"}, "run": True}]
    session = await made.script(hutch, script, name, permission_mode="bypass")
    await hutch.submit_prompt(session.id, "go")
    path = folder / "streams.sock"
    with anyio.fail_after(_PATIENCE):
        while not path.exists():  # noqa: ASYNC110 another process makes it
            await anyio.sleep(0.02)
    async with await anyio.connect_unix(path) as line:
        sock = line.extra(anyio.abc.SocketAttribute.raw_socket)
        yield Agent(peer_credentials(sock).pid, line, BufferedByteReceiveStream(line))
    await hutch.close_session(session.id, force=True)
