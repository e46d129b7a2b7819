"""A process of a session cannot change anything through the client socket."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.methods import CLIENT
from tests.golden.examples import example
from tests.system.host import Host
from tests.system.log import allow, log_of
from tests.system.policing import SPARELESS, audit_of, bash, deny, policed, step

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

ATTACK = """
import json, os, socket, sys
where, answers, requests = sys.argv[1:]
line = socket.socket(socket.AF_UNIX)
line.connect(where)
heard, said = line.makefile("r"), []
for request in open(requests):
    line.sendall(request.encode())
    answer = json.loads(heard.readline())
    said.append([answer["id"], answer.get("error", {}).get("data", {}).get("reason", "done")])
with open(answers + ".part", "w") as file:
    json.dump(said, file)
os.rename(answers + ".part", answers)
"""
"""A program that makes each request of a file and writes down its result."""
LOOKS = ("get_status", "list_sessions", "list_permissions", "show_policy")


@pytest.fixture(scope="module")
async def guarded() -> AsyncIterator[Host]:
    """A host for these tests."""
    async with policed(None, SPARELESS) as made:
        (made.root / "attack.py").write_text(ATTACK)
        yield made


@pytest.fixture
async def hutch(guarded: Host) -> AsyncIterator[HutchClient]:
    """A client of the host."""
    async with guarded.client() as client:
        yield client


def _requests(permission: str) -> list[dict[str, Any]]:
    """Return a well-formed request for each method that changes state, and for some that only read."""
    params: dict[str, msgspec.Struct] = {name: CLIENT[name].params() for name in LOOKS}
    params |= {name: example(method.params) for name, method in CLIENT.items() if method.changes}
    params["answer_permission"] = m.AnswerPermission(permission, "allow")
    return [
        {"jsonrpc": "2.0", "id": name, "method": name, "params": msgspec.to_builtins(given)}
        for name, given in params.items()
    ]


async def test_every_method_that_changes_state_is_refused(guarded: Host, hutch: HutchClient) -> None:
    """This holds even if the process forked twice, leads its own session and has no environment. Reading is allowed."""
    asking = await guarded.script(hutch, [step(bash("touch made"))])
    requests, answers = guarded.root / "requests", guarded.root / "answers"
    attack = f"{sys.executable} -S -E {guarded.root}/attack.py {guarded.socket} {answers} {requests}"
    line = f"env -i setsid sh -c '({attack} < /dev/null > /dev/null 2>&1 &)'"
    insider = await guarded.script(hutch, [step(bash(line)), {"wait_file": str(answers)}])
    async with log_of(hutch, asking) as log, log_of(hutch, insider) as watched:
        turn = await hutch.submit_prompt(asking.id, "go")
        asked = await log.asked()
        requests.write_text("".join(json.dumps(one) + "\n" for one in _requests(asked.id)))
        await watched.play(insider, "go", allow)
        said = dict(json.loads(answers.read_text()))
        waiting = await hutch.list_permissions(m.ListPermissions(asking.id))
        await hutch.answer_permission(deny(asked))
        await log.ended(turn)

    changing = {name for name, method in CLIENT.items() if method.changes}
    assert len(changing) > 15
    assert said == dict.fromkeys(changing, "insider") | dict.fromkeys(LOOKS, "done")
    assert [one.id for one in waiting] == [asked.id]
    assert not Path(asking.cwd, "made").exists()
    assert [one.outcome for one in await audit_of(hutch, asking, action="permission")] == ["denied"]


async def test_inspect_says_which_processes_would_not_be_recognised(guarded: Host, hutch: HutchClient) -> None:
    """Unless a sandbox hides the socket, hutchd cannot recognise every process of a session."""
    session = await guarded.script(hutch, [])
    shown = await guarded.hutch("inspect", session.id)

    (line,) = (line for line in shown.out.splitlines() if line.startswith("who may answer"))
    assert "by descent" in line
    assert "can escape" in line
    assert "sandbox that hides the client socket" in line
