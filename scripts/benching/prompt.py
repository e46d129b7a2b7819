"""From a prompt to its answer, through Hutch and through the bare SDK, with the same CLI and model server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import anyio

from scripts.benching.claude import Pair, pair
from scripts.benching.measure import Effort, Say, median
from scripts.benching.stage import TOP
from tests.system.host import HUTCH

__all__ = ["bench"]

_PROMPT: Final = "say 20 words"
_CONNECTED: Final = 15.0
"""Seconds in which the session's CLI has connected and the next spare has started; no event says so."""


async def bench(effort: Effort, say: Say) -> None:
    """Measure a session's first prompt, a further one, and the whole command."""
    async with pair() as both:
        first: list[tuple[float, float]] = []
        further: list[tuple[float, float]] = []
        command: list[tuple[float, float]] = []
        for _ in range(effort.rounds):
            session = await both.open()
            await anyio.sleep(_CONNECTED if effort.rounds > 1 else 0.0)
            first.append(((await both.ours(session, _PROMPT)).first, (await both.bare("cold", _PROMPT)).first))
            further.append(((await both.ours(session, _PROMPT)).whole, (await both.bare("warm", _PROMPT)).whole))
            await both.hutch.close_session(session.id)
            command.append(await _commands(both))
        for case, pairs, aim, other in (
            ("new session, prompt to first delta", first, 0.5, "query"),
            ("a further prompt, whole", further, 1.5, "warm_client"),
            ("hutch run, whole command", command, 1.2, "script"),
        ):
            ratio = median([ours / bare for ours, bare in pairs])
            ms, other_ms = (1e3 * median(times) for times in zip(*pairs, strict=True))
            say("prompt", case, ratio, ("<=", aim), **{"ms": ms, f"{other}_ms": other_ms})


async def _commands(both: Pair) -> tuple[float, float]:
    """Return the seconds of the whole command and of the whole script."""
    folder = both.host.folder("commands")
    ours = await _timed([*HUTCH, "run", "--mode", "bypass", _PROMPT], both.host.env, folder)
    bare = await _timed([sys.executable, "-m", "scripts.benching.programs.sdk_host", _PROMPT], both.sdk_env, TOP)
    return ours, bare


async def _timed(argv: list[str], env: Mapping[str, str], cwd: Path) -> float:
    began = time.perf_counter()
    done = await anyio.run_process(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, check=False)
    taken = time.perf_counter() - began
    assert done.returncode == 0, done.stderr.decode()
    assert b"word word" in done.stdout, done
    return taken
