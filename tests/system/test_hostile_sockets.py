"""An attacker at every socket: all methods, a foreign lease, a foreign token, the attacker's own requests."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.methods import CLIENT, EXECUTOR
from tests.accounts import Account
from tests.broker.stage import request
from tests.golden.examples import example
from tests.rehearsal import Model, Say, serve
from tests.system.host import settings_for
from tests.system.hostile import (
    ALICES_KEY,
    LEASE,
    MALLORYS_KEY,
    bash,
    claude,
    find_in_memory,
    lend,
    open_script,
    run_claude,
    run_script,
    whole,
)
from tests.system.log import executor_of, log_of, wait_for
from tests.system.shared_host import SharedHost, shared_host

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

TOKEN = re.compile(rb'(?<="token":")[\w-]{43}(?=")')
OF_ADMINS = {"stop_daemon", "backup_store", "rotate_master_key"}
NEEDS_AN_ID = {
    *("submit_prompt", "get_session", "list_turns", "get_turn", "follow_events", "read_events", "answer_permission"),
    *("interrupt_turn", "cancel_turn", "close_session", "delete_session", "fork_session", "set_permission_mode"),
}

Answers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """A host on which Alice has a Claude session and a script session with a pending permission request."""

    host: SharedHost
    mallorys: Model
    hutch: HutchClient
    lives: m.Session
    asks: m.Session
    turn: m.Turn
    question: m.Permission

    @property
    def alice(self) -> Account:
        return self.host.people["alice"]

    @property
    def mallory(self) -> Account:
        return self.host.people["mallory"]


@pytest.fixture(scope="module")
async def stage() -> AsyncIterator[Stage]:
    """Create it."""
    async with (
        serve(key=ALICES_KEY, script=lambda _: Say("hello")) as hers,
        serve(key=MALLORYS_KEY, script=lambda _: Say("hello")) as mallorys,
        shared_host("alice", "mallory", settings=settings_for(hers, "[executors]\nspares = 0\n")) as host,
    ):
        alice, mallory = host.people["alice"], host.people["mallory"]
        await host.hutch(alice, "key", "add", "anthropic", input=ALICES_KEY)
        await host.hutch(mallory, "key", "add", "anthropic", "--base-url", mallorys.url, input=MALLORYS_KEY)
        async with host.client(alice) as hutch:
            lives = await claude(host, hutch, alice, "claude")
            asks = await open_script(host, hutch, alice, [bash("touch made")], "asks", "ask", name="alices-own")
            async with log_of(hutch, lives) as log, log_of(hutch, asks) as asking:
                end = await log.play(lives, "go")
                assert end.state == "completed", end.message
                turn = await hutch.submit_prompt(asks.id, "go")
                yield Stage(host, mallorys, hutch, lives, asks, turn, await asking.asked())
                await hutch.interrupt_turn(asks.id)
                assert (await log.play(lives, "again")).state == "completed"
                assert (await asking.ended(turn)).state == "stopped"
        await whole(host)


def requests_of(stage: Stage) -> list[dict[str, Any]]:
    """Return one request for each method, each about Alice's records."""
    about: Mapping[str, Any] = {
        "session": stage.asks.id,
        "turn": stage.turn.id,
        "permission": stage.question.id,
        "cwd": stage.asks.cwd,
        "decision": "allow",
        "journal": stage.asks.journal,
        "after": 0,
        "force": True,
        "agent": "script",
        "account": stage.alice.name,
        "owner": stage.alice.uid,
        "all_owners": True,
        "resume": None,
        "limit": 100,
        "environment": None,
        "state": None,
        "credential": None,
        "options": {},
        "updated_input": None,
    }
    found = []
    for name, method in CLIENT.items():
        params = msgspec.to_builtins(example(method.params))
        for field, value in about.items():
            if field in params:
                params[field] = value
        params = {field: value for field, value in params.items() if value is not None}
        found.append({"jsonrpc": "2.0", "id": name, "method": name, "params": params})
    return found


def ask(folder: Path, who: Account, program: Path, socket: Path, lines: list[dict[str, Any]], python: Path) -> str:
    """Write the requests to a file; return the command that sends them."""
    made = folder / "requests"
    made.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made.chmod(0o644)
    (folder / "answers").unlink(missing_ok=True)
    return f"{python} -I {program} {socket} {made} {folder}/answers"


async def answers_to(stage: Stage, way: str, socket: Path, lines: list[dict[str, Any]]) -> Answers:
    """Send requests as Mallory: from a shell, a script agent, and Claude's Bash."""
    host, mallory = stage.host, stage.mallory
    folder = host.folder(mallory, f"calls-{way}") if way != "claude" else mallory.home
    command = ask(folder, mallory, lend(mallory, "caller.py", folder), socket, lines, host.code.python)
    if way == "person":
        mallory.run(*command.split(), timeout=100)
    elif way == "script":
        end, said = await run_script(host, mallory, command, folder.name)
        assert end.state == "completed", (end, said)
    else:
        _, end, said = await run_claude(host, stage.mallorys, mallory, command, ".")
        assert end.state == "completed", (end, said)
    found: Answers = json.loads((folder / "answers").read_text())
    return found


def reason(answer: Any) -> str:
    """Return the refusal's reason, or `done`."""
    if answer is None:
        return "hung up"
    return str(answer["error"].get("data", {}).get("reason", "")) if "error" in answer else "done"


@pytest.mark.parametrize("way", ["person", "script", "claude"])
async def test_client_methods_refuse_foreign_records(stage: Stage, way: str) -> None:
    """Alice's records look missing, operating hutchd is not allowed, and an agent changes nothing."""
    said = await answers_to(stage, way, stage.host.runtime / "client.sock", requests_of(stage))
    reasons = {name: reason(answer) for name, answer in said.items()}
    now = await stage.hutch.get_session(stage.asks.id)
    (waits,) = await stage.hutch.list_permissions(m.ListPermissions(stage.asks.id))

    assert reasons.keys() == CLIENT.keys()
    changing = {name for name, method in CLIENT.items() if method.changes}
    if way == "person":
        assert {reasons[name] for name in OF_ADMINS} == {"not_allowed"}, reasons
        assert {name: reasons[name] for name in NEEDS_AN_ID} == dict.fromkeys(NEEDS_AN_ID, "not_found")
        assert reasons["open_session"] != "done"
    else:
        assert {name: reasons[name] for name in changing} == dict.fromkeys(changing, "insider")
        looks = NEEDS_AN_ID - changing
        assert {name: reasons[name] for name in looks} == dict.fromkeys(looks, "not_found")
    told = json.dumps([answer.get("result") for answer in said.values() if answer])
    for hers in (stage.asks.id, stage.turn.id, stage.question.id, "alices-own", stage.asks.cwd, ALICES_KEY):
        assert hers not in told
    assert (now.state, now.permission_mode, now.active_turn) == ("open", "ask", stage.turn.id)
    assert (waits.id, waits.state) == (stage.question.id, "pending")
    assert not Path(stage.asks.cwd, "made").exists()


@pytest.mark.parametrize("way", ["person", "script", "claude"])
async def test_executor_methods_refuse_a_foreign_token(stage: Stage, way: str) -> None:
    """Before hello every method is refused; a token is valid only in its own process."""
    executor = await executor_of(stage.hutch, stage.asks)
    token = find_in_memory(executor, TOKEN).decode()
    its = next(one.id for one in (await stage.hutch.get_status()).executors if one.pid == executor)
    hello = {"executor": its, "token": token, "protocol": m.PROTOCOL, "version": "0", "epoch_seen": 0}
    lines = [
        {"jsonrpc": "2.0", "id": name, "method": name, "params": msgspec.to_builtins(example(method.params))}
        for name, method in EXECUTOR.items()
        if name != "hello" and method.kind == "request"
    ]
    lines += [
        {"jsonrpc": "2.0", "id": "stolen", "method": "hello", "params": hello},
        {"jsonrpc": "2.0", "id": "guessed", "method": "hello", "params": {**hello, "token": "x" * 43}},
    ]
    said = await answers_to(stage, way, stage.host.runtime / "executor.sock", lines)
    reasons = {name: reason(answer) for name, answer in said.items()}
    status = await stage.hutch.get_status()

    assert "done" not in {name: why for name, why in reasons.items() if name != "ping"}.values(), reasons
    assert len(reasons) >= 5
    assert [one.pid for one in status.executors if one.session == stage.asks.id] == [executor]
    assert (await stage.hutch.get_session(stage.asks.id)).executor == its


@pytest.mark.parametrize("way", ["person", "script", "claude"])
async def test_a_foreign_lease_is_refused(stage: Stage, way: str) -> None:
    """Another account's agent or shell gets no answer for it, and no request reaches the model."""
    host, mallory = stage.host, stage.mallory
    lease = find_in_memory(await executor_of(stage.hutch, stage.lives), LEASE).decode()
    folder = host.folder(mallory, f"lease-{way}") if way != "claude" else mallory.home
    program = lend(mallory, "caller.py", folder)
    (folder / "lease.http").write_bytes(request(lease))
    (folder / "lease.http").chmod(0o644)
    (folder / "status").unlink(missing_ok=True)
    broker = host.runtime / "broker" / "broker.sock"
    command = f"{host.code.python} -I {program} {broker} {folder}/lease.http {folder}/status"
    if way == "person":
        mallory.run(*command.split())
    elif way == "script":
        await run_script(host, mallory, command, folder.name)
    else:
        await run_claude(host, stage.mallorys, mallory, command, ".")

    assert json.loads((folder / "status").read_text()) == {"status": 403}


async def test_an_agent_cannot_decide_its_own_request(stage: Stage) -> None:
    """Its orphaned background process without a mark cannot either; only the user's decision counts."""
    host, mallory = stage.host, stage.mallory
    folder = host.folder(mallory, "own")
    program = lend(mallory, "caller.py", folder)
    call = f"{host.code.python} -I {program} {host.runtime}/client.sock {folder}/requests {folder}/answers"
    lines = [
        bash(f"env -i setsid -f sh -c '{call} </dev/null >/dev/null 2>&1 &'; echo begun"),
        {"ask": [{"question": "Which?", "header": "Which", "options": [{"label": "this"}, {"label": "that"}]}]},
    ]
    async with host.client(mallory) as mallorys:
        session = await open_script(host, mallorys, mallory, lines, "own")
        async with log_of(mallorys, session) as log:
            turn = await mallorys.submit_prompt(session.id, "go")
            asked = await log.asked()
            tries = [
                {"permission": asked.id, "decision": "answer", "answers": {"Which?": "that"}},
                {"permission": asked.id, "decision": "allow"},
                {"permission": asked.id, "decision": "deny"},
            ]
            made = folder / "requests.part"
            made.write_text(
                "".join(
                    json.dumps({"jsonrpc": "2.0", "id": str(at), "method": "answer_permission", "params": one}) + "\n"
                    for at, one in enumerate(tries)
                )
            )
            made.chmod(0o644)
            made.rename(folder / "requests")
            await wait_for((folder / "answers").exists)
            said = json.loads((folder / "answers").read_text())
            (waits,) = await mallorys.list_permissions(m.ListPermissions(session.id))
            await mallorys.answer_permission(m.AnswerPermission(asked.id, "answer", answers={"Which?": "this"}))
            end = await log.ended(turn)
            results = [one.text for one in log.of("tool_result")]
        await mallorys.close_session(session.id, force=True)

    assert {reason(answer) for answer in said.values()} == {"insider"}
    assert len(said) == 3
    assert waits.state == "pending"
    assert end.state == "completed"
    assert json.loads(results[-1]) == {"Which?": "this"}
