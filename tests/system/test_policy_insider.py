"""A process of a session cannot change anything through the client socket, however it hides."""

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
from tests.system.log import log_of, wait_for
from tests.system.policing import SPARELESS, audit_of, bash, deny, policed, step

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

ATTACK = """
import json, os, socket, sys
where, answers, requests, how = sys.argv[1:5]
line = socket.socket(socket.AF_UNIX)
line.connect(where)
if how == "handed on" and os.fork():
    os._exit(0)  # who connected is gone: what is left holds the connection of nobody
if how == "handed on":
    os.setsid()
    while os.getppid() != 1 and open(f"/proc/{os.getppid()}/cmdline").read().count(sys.argv[0]):
        pass
heard, said = line.makefile("r"), []
for request in open(requests):
    line.sendall(request.encode())
    answer = json.loads(heard.readline())
    said.append([answer["id"], answer.get("error", {}).get("data", {}).get("reason", "done")])
with open(answers + ".part", "w") as file:
    json.dump(said, file)
os.rename(answers + ".part", answers)
"""
"""Makes each request of a file, and writes down what became of it."""

WAYS = {
    "plainly": "{attack}",
    "without an environment": "env -i {attack}",
    "in a session of its own, forked twice": "env -i setsid sh -c '({attack} < /dev/null > /dev/null 2>&1 &)'",
    "on a connection that was handed on": "env -i setsid {attack}",
}


@pytest.fixture(scope="module")
async def guarded() -> AsyncIterator[Host]:
    """A host for it."""
    async with policed(None, SPARELESS) as made:
        (made.root / "attack.py").write_text(ATTACK)
        yield made


@pytest.fixture
async def hutch(guarded: Host) -> AsyncIterator[HutchClient]:
    """A client of it."""
    async with guarded.client() as client:
        yield client


def _requests(changes: bool, permission: str) -> list[dict[str, Any]]:
    """A well-formed request for each method that changes something, or for some that only look."""
    found = []
    for name, method in CLIENT.items():
        if method.changes is changes and (changes or name in ("get_status", "list_sessions", "show_policy")):
            params = example(method.params) if changes else method.params()
            if isinstance(params, m.AnswerPermission):
                params = m.AnswerPermission(permission, "allow")
            found.append({"jsonrpc": "2.0", "id": name, "method": name, "params": msgspec.to_builtins(params)})
    return found


@pytest.mark.parametrize("way", WAYS)
async def test_every_method_that_changes_something_is_refused(guarded: Host, hutch: HutchClient, way: str) -> None:
    """Looking is allowed to those who are known for what they are; a connection of nobody gets nothing at all."""
    asking = await guarded.script(hutch, [step(bash("touch made"))])
    number = list(WAYS).index(way)
    requests, answers = guarded.root / f"requests-{number}", guarded.root / f"answers-{number}"
    handed_on = "handed on" in way
    attack = f"{sys.executable} -S -E {guarded.root}/attack.py {guarded.socket} {answers} {requests} "
    line = WAYS[way].format(attack=attack + ('"handed on"' if handed_on else "plain"))
    wait = f"{line}; while [ ! -e {answers} ]; do sleep 0.05; done"
    insider = await guarded.script(
        hutch, [step(bash(wait))], permission_mode="bypass", rules=m.Rules(allow=(f"Bash({wait})",))
    )
    async with log_of(hutch, asking) as log, log_of(hutch, insider) as watched:
        turn = await hutch.submit_prompt(asking.id, "go")
        asked = await log.asked()
        lines = [*_requests(True, asked.id), *_requests(False, asked.id)]
        requests.write_text("".join(json.dumps(one) + "\n" for one in lines))
        await watched.play(insider, "go", lambda one: m.AnswerPermission(one.id, "allow"))
        said = dict(json.loads(await wait_for(lambda: answers.read_text() if answers.exists() else None)))
        waiting = await hutch.list_permissions(m.ListPermissions(asking.id))
        await hutch.answer_permission(deny(asked))
        await log.ended(turn)

    changing = {name for name, method in CLIENT.items() if method.changes}
    assert len(changing) > 15
    assert {said[name] for name in changing} == {"not_allowed" if handed_on else "insider"}
    assert {said[name] for name in said.keys() - changing} == {"not_allowed" if handed_on else "done"}
    assert [one.id for one in waiting] == [asked.id]
    assert not Path(asking.cwd, "made").exists()
    assert {line.outcome for line in await audit_of(hutch, asking, action="permission")} == {"denied"}


async def test_inspect_says_what_would_escape(guarded: Host, hutch: HutchClient) -> None:
    """Without a sandbox that hides the socket the look at processes is not complete."""
    session = await guarded.script(hutch, [])
    shown = await guarded.hutch("inspect", session.id)

    (line,) = (line for line in shown.out.splitlines() if line.startswith("who may answer"))
    assert "by descent" in line
    assert "can escape" in line
    assert "sandbox that hides the client socket" in line
