"""hutchd recognises a process of a session at the client socket, however it got its connection."""

from __future__ import annotations

import json
import sys

import anyio
import pytest

from hutch_shared import messages as m
from tests.system.host import Host, host

pytestmark = pytest.mark.system

CALLER = r"""
import json, os, socket, sys, time

path, session, out, how = sys.argv[1:]


def dial():
    made = socket.socket(socket.AF_UNIX)
    made.connect(path)
    return made


def call(sock):
    with sock.makefile("rw") as lines:
        for number, method, params in (
            (1, "list_sessions", {}),
            (2, "set_permission_mode", {"session": session, "mode": "bypass"}),
        ):
            message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            lines.write(json.dumps(message) + "\n")
        lines.flush()
        answers = {}
        while len(answers) < 2:
            answer = json.loads(lines.readline())
            if "id" in answer and "method" not in answer:
                answers[answer["id"]] = answer.get("error", {}).get("data", {}).get("reason", "done")
    with open(out + ".new", "w") as file:
        json.dump([answers[1], answers[2]], file)
    os.rename(out + ".new", out)


def through_one_that_ended():
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        made = dial()
        socket.send_fds(there, [b"x"], [made.fileno()])
        os._exit(0)
    (handed,) = socket.recv_fds(here, 1, 1)[1]
    os.waitpid(child, 0)
    call(socket.socket(fileno=handed))


def as_an_orphan():
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    while os.getppid() != int(os.environ["EXECUTOR"]):
        time.sleep(0.01)
    call(dial())


def outside_its_group():
    for line in open("/proc/self/cgroup"):
        _, controllers, group = line.strip().split(":", 2)
        for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/" + controllers):
            try:
                with open(mount + os.path.dirname(group) + "/cgroup.procs", "w") as procs:
                    procs.write(str(os.getpid()))
            except OSError:
                continue
    call(dial())


{"plainly": lambda: call(dial()), "ended": through_one_that_ended, "orphan": as_an_orphan, "moved": outside_its_group}[
    how
]()
"""


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("plainly", ["done", "insider"]),
        ("orphan", ["done", "insider"]),
        ("moved", ["done", "insider"]),
        ("ended", ["not_allowed", "not_allowed"]),
    ],
)
async def test_a_process_of_a_session_changes_nothing(how: str, found: list[str]) -> None:
    """The process lacks the mark, is orphaned, left its cgroup, or has the connection of a process that has ended."""
    async with host() as one:
        answers = await _answers(one, how)

    assert answers == found


async def _answers(one: Host, how: str) -> list[str]:
    program, out = one.root / "caller.py", one.root / "answers"
    program.write_text(CALLER)
    line = f"env -i EXECUTOR=$PPID {sys.executable} {program} {one.socket} it {out} {how}"
    async with one.client() as hutch:
        session = await one.script(
            hutch,
            [{"tool": "Bash", "input": {"command": line}, "run": True}, {"wait_file": str(out)}],
            permission_mode="bypass",
            name="it",
        )
        turn = await hutch.submit_prompt(session.id, "go")
        with anyio.fail_after(60):
            while (await hutch.get_turn(turn.id)).ended_at is None:
                await anyio.sleep(0.05)
        assert (await hutch.get_turn(turn.id)).state == "completed"
        assert (await hutch.get_session(session.id)).permission_mode == "bypass"
        assert "set_permission_mode" not in await _audited(one)
    found: list[str] = json.loads(out.read_text())
    return found


async def _audited(one: Host) -> set[str]:
    async with one.client() as hutch:
        page: m.AuditPage = await hutch.call("read_audit", m.ReadAudit())
    return {entry.action for entry in page.entries}
