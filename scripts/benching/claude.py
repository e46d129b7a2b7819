"""Claude through hutchd and through the bare SDK, with the same CLI and model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from scripts.benching.measure import children_of, cpu_of
from scripts.benching.stage import KEY, TOP, Program, leased, program
from tests.system.host import Host, host

__all__ = ["Pair", "Timed", "pair"]

_SPARE: Final = 60.0
_LIKE_OURS: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "ENABLE_TOOL_SEARCH": "0",
    "IS_SANDBOX": "1",  # without it the CLI refuses to bypass permissions for root
}
"""The variables that hutchd sets for its CLI, so that both CLIs do the same."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A turn: the seconds from the prompt to its first and last delta and to its end, and the number of deltas."""

    first: float
    last: float
    whole: float
    deltas: int
    cpu: float
    """CPU seconds outside the CLI and the model."""
    shares: tuple[float, ...] = ()
    """The parts of `cpu`: hutchd, client, executor."""

    @property
    def rate(self) -> float:
        """Deltas per second, from the first to the last."""
        return (self.deltas - 1) / (self.last - self.first)


@dataclass(slots=True)
class Pair:
    """Both ways to Claude, ready for prompts."""

    host: Host
    hutch: HutchClient
    sdk: Program
    sdk_env: Mapping[str, str]
    _folders: int = 0

    async def open(self) -> m.Session:
        """Open a session and return it once it has an executor."""
        self._folders += 1
        session = await self.host.claude(self.hutch, f"bench-{self._folders}")
        return await leased(self.hutch, session)

    async def ours(self, session: m.Session, prompt: str) -> Timed:
        """Play a turn of a session, and follow it in this process."""
        executor = self.executor_of(session)
        before = self._cpu(executor)
        times: list[float] = []
        async with self.hutch.follow(m.FollowEvents(session.id, after=-1)) as follow:
            began = time.perf_counter()
            await self.hutch.submit_prompt(session.id, prompt)
            async for event in follow:
                if event.kind == "text_delta":
                    times.append(time.perf_counter() - began)
                elif event.kind == "turn_ended":
                    assert b'"completed"' in bytes(event.data), bytes(event.data)
                    break
            whole = time.perf_counter() - began
        shares = tuple(now - then for now, then in zip(self._cpu(executor), before, strict=True))
        return Timed(times[0], times[-1], whole, len(times), sum(shares), shares)

    def _cpu(self, executor: int | None) -> tuple[float, ...]:
        return cpu_of(self.host.pid), time.process_time(), *([cpu_of(executor)] if executor else [])

    async def bare(self, how: str, prompt: str) -> Timed:
        """Play a turn with the SDK: `cold` with a new CLI, `warm` with a running one."""
        return Timed(**await self.sdk.answer({how: prompt}))

    def executor_of(self, session: m.Session) -> int | None:
        """Return the pid of the session's executor: the child whose environment names it."""
        for child in children_of(self.host.pid):
            try:
                environ = Path(f"/proc/{child}/environ").read_bytes()
            except OSError:
                continue
            if session.executor and session.executor.encode() in environ:
                return child
        return None


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    """Start the model, a hutchd with a warm executor, and a host of the SDK."""
    async with program("model", KEY) as model:
        url = (await model.line()).strip()
        settings = f'[providers.anthropic]\nbase_url = "{url}"\n'
        async with host(settings) as made:
            await made.hutch("key", "add", "anthropic", input=KEY)
            env = {
                **made.env, **_LIKE_OURS, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": KEY, "PYTHONPATH": str(TOP),
            }  # fmt: skip
            async with program("sdk_host", env=env) as sdk, made.client() as hutch:
                await sdk.answer()
                await _spare(hutch)
                yield Pair(made, hutch, sdk, env)


async def _spare(hutch: HutchClient) -> None:
    """Wait until a spare executor is ready."""
    with anyio.fail_after(_SPARE):
        while not any(one.state == "ready" for one in (await hutch.get_status()).executors):  # noqa: ASYNC110 nobody tells
            await anyio.sleep(0.05)
