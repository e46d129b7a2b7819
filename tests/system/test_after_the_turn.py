"""Nothing runs without a turn: what a command left behind cannot make the model work, with the real CLI and broker."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import anyio
import pytest

from tests.programs import bubblewrap
from tests.rehearsal import Say, Steps, Use, serve
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import log_of, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROGRAMS = Path(__file__).with_name("programs")


@pytest.mark.parametrize("tries", [10, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("sandboxed", [False, True], ids=["bare", "in a sandbox"])
async def test_what_a_command_left_behind_reaches_no_model_after_the_turn(tries: int, sandboxed: bool) -> None:
    """It has the lease out of the CLI's memory and the broker's socket. Every request is refused and audited.

    During the next turn the session works as before.
    """
    more = "" if sandboxed else '[sandbox]\nmode = "off"\n'
    if sandboxed:
        bubblewrap()
    async with (
        serve(key=KEY, script=Steps(("", Say("again")))) as model,
        host(settings_for(model, more)) as made,
        made.client() as hutch,
    ):
        await made.hutch("key", "add", "anthropic", input=KEY)
        folder = made.folder("left")
        for name in ("search.py", "left_behind.py"):
            shutil.copy(PROGRAMS / name, folder / name)
        places = " ".join(map(str, (made.runtime, made.state / "spool")))
        leave = f"nohup /usr/bin/python3 left_behind.py {folder} {tries} {places} >/dev/null 2>&1 &"
        collected = f"while [ ! -e {folder}/collected.json ]; do sleep 0.02; done"
        model.script = Steps(("go", Use("Bash", {"command": f"{leave} {collected}"})), ("", Say("done")))
        session = await made.claude(hutch, "left")
        async with log_of(hutch, session) as log:
            first = await log.play(session, "go")
            before = len(model.requests)
            (folder / "go").touch()
            await wait_for((folder / "tries.json").exists)
            after = len(model.requests)
            found = json.loads((folder / "tries.json").read_text())
            refused = await refusals(made, session.id, tries)
            model.script = Steps(("", Say("again")))
            second = await log.play(session, "again")

    outcomes = Counter(tuple(one) for one in found["outcomes"])
    print(f"{tries} tries, {'sandbox' if sandboxed else 'bare'}: {found['leases']} leases, {dict(outcomes)}")
    assert (first.state, second.state, second.result) == ("completed", "completed", "again")
    assert found["leases"] > 0
    assert outcomes["ask", "broker.sock", "403"] >= tries
    assert {how for _, _, how in outcomes} <= {"403", "401"}  # some of the leases are only parts of one
    assert after == before
    assert refused >= tries


async def refusals(made: Host, session: str, count: int) -> int:
    """Return how many requests of the session were refused, by the audit, once they are at least `count`."""
    with anyio.fail_after(60):
        while True:
            shown = await made.hutch("audit", "--action", "broker_request", "--session", session, "-o", "jsonl")
            lines = [json.loads(line)["details"] for line in shown.out.splitlines()]
            refused: int = sum(line["times"] for line in lines if "No turn" in line["why"])
            if refused >= count:
                return refused
