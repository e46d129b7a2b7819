"""An agent exchanges files and folders for links while other sessions open: nothing foreign gets into a prompt."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.rehearsal import Model, Say, Step, Steps, anything
from tests.swapping import swapping, write
from tests.system.host import Host
from tests.system.log import DEADLINE, log_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

IMPORTS = "@docs/a.md @docs/deep/b.md @../CLAUDE.md @~/notes/a.md"
CWD = "outer/mid/project"
FILES = (
    *("outer/.git/HEAD", "outer/CLAUDE.md", "outer/docs/a.md", "outer/mid/CLAUDE.md", "outer/mid/docs/a.md"),
    *(f"{CWD}/CLAUDE.md", f"{CWD}/docs/a.md", f"{CWD}/docs/deep/b.md", f"{CWD}/.claude/rules/r.md"),
    *(f"{CWD}/.hutch/policy.toml", f"{CWD}/AGENTS.md"),
)
COMPLETED = 4
"""Turns that must complete. On a slow machine the test goes on after its time until this number is reached."""


@pytest.mark.parametrize("seconds", [20, pytest.param(600, marks=pytest.mark.full)])
async def test_nothing_foreign_gets_into_a_prompt(
    claude_host: Host, hutch: HutchClient, model: Model, seconds: int
) -> None:
    """CLAUDE.md, imports, rules, `.git`, the working directory and each folder above are links again and again."""
    model.script = Steps(Step(anything, Say("ok"), None))
    root = claude_host.folder(f"swapped-{seconds}")
    write(root, dict.fromkeys(FILES, f"OWN-BYTES {IMPORTS}"))
    for depth in range(4):
        write(claude_host.root / "foreign", {n.split("/", depth)[-1]: f"FOREIGN-BYTES {IMPORTS}" for n in FILES})
    foreign = [claude_host.root / "foreign", *(claude_host.root / "foreign").rglob("*")]
    states: Counter[str] = Counter()
    before = len(model.requests)
    with swapping(root, FILES, foreign, 0.02), anyio.fail_after(seconds + DEADLINE):
        ends, n = anyio.current_time() + seconds, 0
        while anyio.current_time() < ends or states["completed"] < COMPLETED:
            cwd = str(root / CWD)
            opened = m.OpenSession("claude", cwd, name=f"s{seconds}-{n}", permission_mode="bypass", real_cwd=True)
            session = await hutch.open_session(opened)
            async with log_of(hutch, session) as log:
                states[(await log.play(session, "go")).state] += 1
            await hutch.close_session(session.id, force=True)
            n += 1
    asked = [request.raw for request in model.requests[before:]]
    print(f"{dict(states)}, {sum(b'OWN-BYTES' in raw for raw in asked)} of {len(asked)} prompts with own files")

    assert states["completed"] >= COMPLETED, states
    assert any(b"OWN-BYTES" in raw for raw in asked)
    assert not [raw for raw in asked if b"FOREIGN-BYTES" in raw]
