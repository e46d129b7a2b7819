"""A program that uses the bare SDK, as one would write it without Hutch.

With a prompt as argument it is a whole command: it runs `query()`, prints the text as it arrives, and exits. Without
one it reads orders as lines of JSON, and answers each with its seconds and CPU seconds: `{"cold": PROMPT}` runs a new
CLI, `{"warm": PROMPT}` uses the running one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from resource import RUSAGE_SELF, getrusage
from typing import Any

import anyio
from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage, StreamEvent, query

OPTIONS = ClaudeAgentOptions(include_partial_messages=True, setting_sources=[], permission_mode="bypassPermissions")


def delta_of(message: Any) -> str | None:
    """Return the text of a text delta."""
    if not isinstance(message, StreamEvent):
        return None
    delta = message.event.get("delta") or {}
    return delta.get("text") if delta.get("type") == "text_delta" else None


async def timed(messages: AsyncIterator[Any], began: float) -> dict[str, float]:
    """Read a turn to its end; return the seconds to its first and last delta and its end, and the number of deltas."""
    times: list[float] = []
    async for message in messages:
        if delta_of(message) is not None:
            times.append(time.perf_counter() - began)
        if isinstance(message, ResultMessage):
            assert not message.is_error, message
    return {"first": times[0], "last": times[-1], "whole": time.perf_counter() - began, "deltas": len(times)}


async def warm(client: ClaudeSDKClient, prompt: str) -> dict[str, float]:
    """Send a prompt to the running CLI."""
    began = time.perf_counter()
    await client.query(prompt)
    return await timed(client.receive_response(), began)


async def serve() -> None:
    """Carry out orders."""
    async with ClaudeSDKClient(OPTIONS) as client:
        await warm(client, "say 2 words")
        sys.stdout.write('"ready"\n')
        sys.stdout.flush()
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            order = json.loads(line)
            before = _cpu()
            if "cold" in order:
                seen = await timed(query(prompt=order["cold"], options=OPTIONS), time.perf_counter())
            else:
                seen = await warm(client, order["warm"])
            sys.stdout.write(json.dumps({**seen, "cpu": _cpu() - before}) + "\n")
            sys.stdout.flush()


def _cpu() -> float:
    usage = getrusage(RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def once(prompt: str) -> None:
    """Run one prompt as a whole command."""
    async for message in query(prompt=prompt, options=OPTIONS):
        if text := delta_of(message):
            sys.stdout.write(text)
            sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run(once, sys.argv[1])
    else:
        anyio.run(serve)
