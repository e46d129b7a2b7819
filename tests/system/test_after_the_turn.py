"""Nothing runs without a turn: what a command left behind cannot make the model work, with the real CLI and broker."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import anyio
import pytest

from hutch_executor.runners.claude.launch import bundled_cli
from tests.programs import bubblewrap
from tests.rehearsal import Say, Steps, Use, serve
from tests.sampling import sample
from tests.system.claude_stage import stage
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import log_of, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROGRAMS = Path(__file__).with_name("programs")


@sample(1)
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
            outcomes = Counter(tuple(one) for one in found["outcomes"])
            print(f"{tries} tries, {'sandbox' if sandboxed else 'bare'}: {found['leases']} leases, {dict(outcomes)}")
            assert (first.state, found["leases"] > 0, after - before) == ("completed", True, 0)
            refused = await refusals(made, session.id, tries)
            model.script = Steps(("", Say("again")))
            second = await log.play(session, "again")

    assert outcomes["ask", "broker.sock", "403"] >= tries
    assert {how for what, _, how in outcomes if what == "ask"} <= {"403", "401"}  # some leases are only parts of one
    assert not [outcome for outcome in outcomes if outcome[0] == "say" and outcome[2] == "sent"]
    assert refused >= tries
    assert (second.state, second.result) == ("completed", "again")


async def refusals(made: Host, session: str, count: int) -> int:
    """Return how many requests of the session were refused, by the audit, once they are at least `count`."""
    with anyio.fail_after(60):
        while True:
            shown = await made.hutch("audit", "--action", "broker_request", "--session", session, "-o", "jsonl")
            lines = [json.loads(line)["details"] for line in shown.out.splitlines()]
            refused: int = sum(line["times"] for line in lines if "No turn" in line["why"])
            if refused >= count:
                return refused


@sample(1)
@pytest.mark.parametrize("says", ["names it", "is silent about it"])
async def test_an_agent_that_takes_messages_from_other_programs_runs_no_command(tmp_path: Path, says: str) -> None:
    """The turn fails and says why, and so does the next one. The CLI's own word or the kernel's report is enough."""
    program = tmp_path / "claude"
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    if says == "names it":
        program.write_text(f'#!/bin/sh\nXDG_RUNTIME_DIR={runtime} exec {bundled_cli()} "$@"\n')
    else:
        program.write_text(f"#!/usr/bin/python3\n{LISTENING.format(path=runtime / 'own.sock', cli=bundled_cli())}")
    program.chmod(0o755)
    async with stage(tmp_path, lambda _: Use("Bash", {"command": "touch ran"}), cli=str(program)) as s:
        ends = [await s.turn(), await s.turn()]
        notices = [notice for notice in s.daemon.of("notice") if notice.word == "message_socket"]

    assert [(end.state, end.reason) for end in ends] == [("failed", "message_socket")] * 2
    assert [str(runtime) in notice.message for notice in notices] == [True, True]
    assert all(notice.details["socket"].startswith(str(runtime)) for notice in notices)
    assert s.daemon.of("tool_result") == []
    assert not (s.cwd / "ran").exists()


LISTENING = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.bind("{path}")
sock.listen()
sock.set_inheritable(True)
os.unlink("{path}")
os.execv("{cli}", ["{cli}", *sys.argv[1:]])
"""
