"""Keys stay home: an agent that looks everywhere does not find the key that reaches its model."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.accounts import need_root
from tests.programs import bubblewrap
from tests.rehearsal import Model, Say, Steps, Use
from tests.system import processes
from tests.system.attack_stage import bare_path, closed_namespaces
from tests.system.host import Host, host, settings_for
from tests.system.log import log_of, wait_for

pytestmark = pytest.mark.system

KEY = "sk-ant-api03-Canary-Xq9Zr7Lm2Tb5Vn8Kd4Hs6Jw1Pf3Gy0Cu"
SEARCH = Path(__file__).with_name("programs") / "search.py"


@pytest.fixture
async def keyed(model: Model) -> AsyncIterator[Host]:
    """A host with the key that `model` accepts."""
    bubblewrap()
    model.key = KEY
    async with host(settings_for(model)) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made


def command(on: Host, cwd: Path, session: m.Session) -> str:
    """Copy `search.py` into the working directory; return the command that runs it."""
    shutil.copy(SEARCH, cwd / "search.py")
    needle = bytes(byte ^ 90 for byte in KEY.encode()).hex()
    sockets = [
        on.socket,
        on.runtime / "executor.sock",
        on.runtime / "broker-control.sock",
        on.runtime / "broker" / "broker.sock",
    ]
    places = [
        on.state,
        on.state / "spool",
        on.state / "spool" / "agents",
        on.state / "spool" / "agents" / session.id,
        on.config.parent,
        on.runtime,
        on.home,
        Path("/tmp"),
        Path("/run"),
        Path("/dev/shm"),
        Path("/var"),
    ]
    return (
        f"/usr/bin/python3 search.py found.json {needle} {' '.join(map(str, sockets))} -- {' '.join(map(str, places))}"
        ' . "$HOME" "${TMPDIR:-/tmp}"'
    )


async def search(on: Host, hutch: HutchClient, model: Model) -> tuple[m.Session, dict[str, Any], bytes]:
    """Run the search in an agent; return its session, the findings, and all events."""
    cwd = on.folder("searched")
    session = await on.claude(hutch, "searched")
    look = command(on, cwd, session)
    model.script = Steps(("look", Use("Bash", {"command": look, "timeout": 300_000})), ("", Say("looked")))
    async with log_of(hutch, session) as log:
        end = await log.play(session, "look everywhere")
    said = json.dumps([[str(event.kind), bytes(event.data).decode()] for event in log.events]).encode()
    assert end.state == "completed", end
    return await hutch.get_session(session.id), json.loads((cwd / "found.json").read_text()), said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lacks", ["nothing", "bubblewrap", "namespaces"])
async def test_an_agent_that_looks_everywhere_finds_no_key(keyed: Host, model: Model, lacks: str) -> None:
    """It searches the processes that it can open, all files, and the broker. The model gets the key at every request.

    Of Hutch it reaches only the broker's socket, and sees no state but the session's own directory. On a host without
    bubblewrap, or without the namespaces for it, the sandbox is Landlock: it reaches no socket there, so that the lease
    in the CLI's memory is of no use.
    """
    if lacks != "nothing":
        await keyed.stop()
        if lacks == "bubblewrap":
            keyed.extra_env["PATH"] = bare_path(keyed.root)
        else:
            need_root()
            keyed.program = (*closed_namespaces(), str(os.getuid()), str(os.getgid()), *keyed.program)
        await keyed.start()
    async with keyed.client() as hutch:
        session, found, said = await search(keyed, hutch, model)

    assert session.keys == "brokered", session.isolation.keys_why
    assert session.isolation.sandbox == ("bubblewrap" if lacks == "nothing" else "landlock")
    assert found["hits"] == []
    assert {"environ", "cmdline", "files"} <= found["read"].keys()
    assert (found["leases"] > 0, found["core"]) == (True, 0)
    reached = {name for name, how in found["sockets"].items() if how == "reached"}
    (own,) = (keyed.state / "spool" / "agents").glob(session.id)
    assert found["seen"].pop(str(own))
    state = {
        path: names
        for path, names in found["seen"].items()
        if path.startswith(str(keyed.state)) and not path.startswith(str(own))
    }
    if lacks == "nothing":
        assert found["read"]["mem"] > 50e6
        assert "broker" in found["read"]
        assert reached == {"broker.sock"}
        assert [*state.values()] == [["spool"], ["agents"], [session.id]]
        assert not [line for line in found["commands"] if "-m hutch_" in line]
    else:
        assert (reached, state, found["used"]) == (set(), {}, [])
        assert found["read"]["files"] > 5e3
    assert KEY.encode() not in said
    asked = [request for request in model.requests if request.path.startswith("/v1/messages")]
    assert asked
    assert {request.key for request in asked} == {KEY}
    assert all(KEY.encode() not in request.raw for request in asked)


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_the_search_finds_a_key_that_is_handed_out(keyed: Host, model: Model) -> None:
    """With direct delivery the same search finds the key in the CLI's memory, and the session says exposed."""
    keyed.settings = settings_for(model).replace("\n[turns]", '\ndelivery = "direct"\n[turns]')
    await keyed.stop()
    await keyed.start()
    async with keyed.client() as hutch:
        session, found, _ = await search(keyed, hutch, model)

    assert session.keys == "exposed"
    assert "handed to the agent" in session.isolation.keys_why
    assert any(where.endswith("/mem") for where in found["hits"])


async def test_without_a_sandbox_a_session_says_that_its_key_is_exposed(keyed: Host, model: Model) -> None:
    """`run`, `ps`, `inspect`, `status` and `doctor` say so with the reason; the agent can indeed read the master
    key."""
    keyed.settings = settings_for(model, '[sandbox]\nmode = "off"\n')
    await keyed.stop()
    await keyed.start()
    model.script = Steps(("go", Use("Bash", {"command": f"wc -c < {keyed.state}/master.key"})), ("", Say("done")))
    cwd = str(keyed.folder("open"))
    ran = await keyed.hutch("run", "-C", cwd, "--name", "open", "--mode", "bypass", "go")
    listed = await keyed.hutch("ps", "-o", "json")
    inspected = await keyed.hutch("inspect", "open")
    status = await keyed.hutch("status")
    doctor = await keyed.hutch("doctor", code=None)
    logged = await keyed.hutch("logs", "open", "-o", "jsonl")

    assert "keys: exposed" in ran.err
    assert '[sandbox] mode = "off"' in ran.err
    assert [one["keys"] for one in listed.json] == ["exposed"]
    for shown in (inspected, status, doctor):
        assert "exposed" in shown.out
        assert '[sandbox] mode = "off"' in shown.out
    results = [json.loads(line) for line in logged.out.splitlines() if '"tool_result"' in line]
    assert int(results[0]["data"]["text"]) > 16


async def open_on(on: Host, hutch: HutchClient) -> None:
    """Open sessions until one is refused."""
    while True:
        await hutch.close_session((await on.claude(hutch, "open")).id, force=True)


async def test_exposed_sessions_are_refused_if_the_settings_say_so(keyed: Host, model: Model) -> None:
    """The refusal has the reason; sessions with a protected key are still opened."""
    refusing = "[keys]\nrefuse_exposed = true\n"
    keyed.settings = settings_for(model, refusing)
    await keyed.stop()
    await keyed.start()
    async with keyed.client() as hutch:
        kept = await keyed.claude(hutch, "kept")
        keyed.settings = settings_for(model, f'{refusing}[sandbox]\nmode = "off"\n')
        keyed.write_settings()
        keyed.signal(signal.SIGHUP)
        with pytest.raises(HutchError) as refused:
            await open_on(keyed, hutch)

    assert kept.keys == "brokered"
    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE
    assert "refuse_exposed" in str(refused.value)


async def test_a_killed_executor_takes_the_sandbox_with_it(keyed: Host, model: Model) -> None:
    """Background processes in their own session end too."""
    leave = "(setsid sleep 613.5 < /dev/null > /dev/null 2>&1 &) ; sleep 614.5"
    model.script = Steps(("go", Use("Bash", {"command": leave})), ("", Say("done")))
    async with keyed.client() as hutch:
        session = await keyed.claude(hutch, "killed")
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await wait_for(lambda: processes.running("sleep 613.5") and processes.running("sleep 614.5"))
            status = await hutch.get_status()
            executor = next(one for one in status.executors if one.session == session.id)
            os.kill(executor.pid, signal.SIGKILL)
            end = await log.ended(turn)
        left = [*processes.running("sleep 613.5"), *processes.running("sleep 614.5")]

    assert (end.state, end.reason) == ("failed", "executor_lost")
    assert left == []
