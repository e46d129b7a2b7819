"""The policy's time for a typical command line, against the round trip of a permission request."""

from __future__ import annotations

import json
import time
from typing import Final

import anyio

from hutch_client.client import HutchClient
from hutch_daemon.permissions.layers import Layer, compile_policy
from hutch_daemon.permissions.policy import judge, paths_to_resolve
from hutch_shared import messages as m
from hutch_shared.vocabulary import to_call
from scripts.benching.measure import Effort, Say, median
from scripts.benching.relay import loaded_host
from scripts.benching.stage import leased

__all__ = ["bench"]

_LINE: Final = "git status --short && ls -la src | head -5"
_ALLOW: Final = ("Bash(git status:*)", "Bash(ls:*)", "Bash(head:*)", "Bash(npm run test:*)", "Edit(src/**)")
_ASK: Final = ("Bash(git push:*)",)
_DENY: Final = ("Read(.env)", "Bash(rm:*)")
_AIM: Final = 200e-6
_ASKS: Final = 500
_LOOKS: Final = 2000
_PATIENCE: Final = 120.0


async def bench(effort: Effort, say: Say) -> None:
    """Judge the line, and let an executor of a hutchd with the same rules request permission, in turn."""
    judged: list[float] = []
    asked: list[float] = []
    async with loaded_host() as made, made.client() as hutch:
        rules = m.Rules(_ALLOW, _ASK, _DENY)
        folder = str(made.folder("judge"))
        session = await hutch.open_session(m.OpenSession("script", folder, permission_mode="ask", rules=rules))
        await leased(hutch, session)
        for _ in range(effort.rounds):
            judged += _judge(effort.of(_LOOKS, 20))
            asked += await _ask(hutch, session, effort.of(_ASKS, 10))
    share = median(judged) / median(asked)
    say("judge", "policy.judge of a typical line: seconds", median(judged), ("<=", _AIM), line=_LINE)
    say("judge", "policy.judge against a request_permission round trip", share, None, round_trip_us=1e6 * median(asked))


def _judge(count: int) -> list[float]:
    """Judge the line `count` times, each with another text; return the seconds of each."""
    layer = Layer("account", allow=_ALLOW, ask=_ASK, deny=_DENY, base="/w")
    policy = compile_policy([layer], home="/home/u")
    real = {path: path for path in paths_to_resolve(to_call("Bash", {"command": _LINE}, "c", "/w"), "/w", "/home/u")}
    taken = []
    for number in range(count):
        call = to_call("Bash", {"command": f"{_LINE} # {number}"}, "c", "/w")
        began = time.perf_counter()
        verdict = judge(policy, call, mode="ask", cwd="/w", real=real, home="/home/u", workspace="/w")
        taken.append(time.perf_counter() - began)
        assert verdict.decision == "allow", verdict
    return taken


async def _ask(hutch: HutchClient, session: m.Session, count: int) -> list[float]:
    """Make the executor request permission `count` times; return the seconds of each, as it measured them."""
    order = json.dumps({"asks": count, "command": _LINE})
    turn = await hutch.submit_prompt(session.id, order)
    with anyio.fail_after(_PATIENCE):
        while (now := await hutch.get_turn(turn.id)).result is None:
            assert now.state in {"queued", "dispatching", "running"}, now
            await anyio.sleep(0.02)
    taken: list[float] = json.loads(now.result)
    return taken
