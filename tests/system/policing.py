"""Hosts with a policy file of their own, and agents whose calls the prompt lists."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.rehearsal import Model, Reply, Request, Say, Use
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import DEADLINE, Log

SPARELESS = "[executors]\nspares = 0\n"
PLAN_FILE = "(the plan's file)"
"""In a call's input, this stands for the path that the CLI gave for its plan."""

Call = tuple[str, Mapping[str, Any]]


def bash(command: str) -> Call:
    """Return a Bash call."""
    return "Bash", {"command": command}


def step(call: Call, **more: Any) -> dict[str, Any]:
    """Return the call as a script line; a command runs if it is allowed."""
    return {"tool": call[0], "input": call[1], "run": True, **more}


def told(*rounds: Sequence[Call]) -> str:
    """Return the prompt that makes `obey` send these calls; calls of one round are parallel."""
    return json.dumps(rounds)


def obey(request: Request) -> Reply:
    """Make the calls of the prompt (see `told`), and repeat the last result: a model for one prompt per session."""
    made = len(request.calls)
    for calls in json.loads(request.prompt):
        if made == 0:
            return [Use(tool, _with_plan_file(given, request)) for tool, given in calls]
        made -= len(calls)
    return Say(request.results[-1].text[:1000] or "(nothing)")


def _with_plan_file(given: dict[str, Any], request: Request) -> dict[str, Any]:
    if PLAN_FILE not in given.values():
        return given
    found = re.search(r"/[\w./-]+/plans/[\w.-]+\.md", request.raw.decode())
    assert found, "in plan mode the agent's program says where the plan is to stand"
    return {name: found[0] if value == PLAN_FILE else value for name, value in given.items()}


@asynccontextmanager
async def policed(
    policy: str | None = None,
    settings: str = "",
    *,
    permissions: str = "",
    env: Mapping[str, str] | None = None,
    double: bool = False,
) -> AsyncIterator[Host]:
    """A host whose only policy is `policy`; `permissions` is added to that settings section. `double`: see `host`."""
    async with host(start=False, env=env, double=double) as made:
        file = made.root / "host-policy.toml"
        if policy is not None:
            file.write_text(policy)
        made.settings = f'{settings}\n[permissions]\nhost_policy = "{file}"\n{permissions}'
        await made.start()
        yield made


@asynccontextmanager
async def policed_claude(model: Model, policy: str | None = None, *, double: bool = False) -> AsyncIterator[Host]:
    """The same with a key, whose Claude uses `model`, which obeys."""
    model.script = obey
    async with policed(policy, settings_for(model), double=double) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made


def what(asked: m.Permission | m.ToolCall) -> str:
    """Return a short text for a call: its command, or its tool and file name."""
    call = asked.call if isinstance(asked, m.Permission) else asked
    return call.command or " ".join([call.agent_tool, *(path.rpartition("/")[2] for path in call.paths)])


def asked_of(log: Log) -> list[str]:
    """Return the permission requests in order."""
    return [what(msgspec.convert(one.permission, m.Permission)) for one in log.of("permission_asked")]


def results_of(log: Log) -> dict[str, bool]:
    """Return for each finished call whether it succeeded."""
    calls = {seen.call["call_id"]: what(msgspec.convert(seen.call, m.ToolCall)) for seen in log.of("tool_call")}
    return {calls[result.call_id]: not result.is_error for result in log.of("tool_result")}


def deny(asked: m.Permission) -> m.AnswerPermission:
    """Deny the request."""
    return m.AnswerPermission(asked.id, "deny", message="no")


async def audit_of(hutch: HutchClient, session: m.Session | None = None, **filters: Any) -> tuple[m.AuditEntry, ...]:
    """Return the audit's lines."""
    ref = session.id if session is not None else None
    page: m.AuditPage = await hutch.call("read_audit", m.ReadAudit(ref, limit=10_000, **filters))
    return page.entries


def files_in(session: m.Session) -> set[str]:
    """Return the files that the session's calls created."""
    return {path.name for path in Path(session.cwd).iterdir()}


async def pending_of(hutch: HutchClient, session: m.Session, count: int) -> tuple[m.Permission, ...]:
    """Wait until `count` permission requests of a session are pending."""
    with anyio.fail_after(DEADLINE):
        while len(found := await hutch.list_permissions(m.ListPermissions(session.id))) < count:
            await anyio.sleep(0.02)
    return found
