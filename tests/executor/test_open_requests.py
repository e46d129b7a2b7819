"""Permission requests: each ends in a decision, and only a decision about its own input allows it."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked

from hutch_executor.link.open_requests import OpenRequests
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.rpc.envelope import text_fault
from tests.executor.fake_hutchd import allow, decision

CALL = m.ToolCall("c-1", "run_command", "Bash", {"command": "ls"}, command="ls")
REQUEST = m.RequestPermission("a-1", "s-1", "t-1", "tool", CALL, "/w")


def asks(send: object) -> OpenRequests:
    """Return the requests of a running turn."""
    made = OpenRequests(send)  # type: ignore[arg-type]
    made.begin_turn()
    return made


async def test_a_decision_is_handed_on() -> None:
    """The runner gets hutchd's decision."""
    assert await asks(allow).decide(REQUEST) == decision(CALL, "allow")


async def test_an_allowed_input_that_the_decision_is_not_bound_to_is_denied() -> None:
    """An input with another digest never runs."""

    async def answer(request: m.RequestPermission) -> m.PermissionDecision:
        return m.PermissionDecision("allow", "allowed", {"command": "rm -rf /"}, decision(CALL, "allow").digest)

    found = await asks(answer).decide(REQUEST)

    assert found.decision == "deny"


@pytest.mark.parametrize("reason", [Reason.OVERLOADED, Reason.STORE_UNAVAILABLE, Reason.TIMED_OUT])
async def test_after_a_temporary_error_the_request_is_sent_again(reason: Reason) -> None:
    """If hutchd is busy or cannot write, the same request is sent again."""
    seen: list[str] = []

    async def answer(request: m.RequestPermission) -> m.PermissionDecision:
        seen.append(request.ask)
        if len(seen) == 1:
            raise HutchError(reason)
        return decision(CALL, "allow")

    found = await asks(answer).decide(REQUEST)

    assert found.decision == "allow"
    assert seen == ["a-1", "a-1"]


@pytest.mark.parametrize("reason", [Reason.NOT_ALLOWED, Reason.INTERNAL, Reason.WRONG_STATE, Reason.LEASE_LOST])
async def test_any_other_refusal_is_a_denial(reason: Reason) -> None:
    """A request that hutchd refuses is denied."""

    async def answer(request: m.RequestPermission) -> m.PermissionDecision:
        raise HutchError(reason)

    found = await asks(answer).decide(REQUEST)

    assert (found.decision, found.message) == ("deny", reason.sentence)
    assert found.interrupt is (reason is Reason.LEASE_LOST)


async def test_an_interrupt_denies_waiting_and_later_requests() -> None:
    """From the interrupt until the next turn every request is denied at once."""
    found: list[m.PermissionDecision] = []

    async def answer(request: m.RequestPermission) -> m.PermissionDecision:
        await anyio.sleep_forever()
        raise AssertionError

    questions = asks(answer)

    async def ask() -> None:
        found.append(await questions.decide(REQUEST))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        group.start_soon(ask)
        await wait_all_tasks_blocked()
        assert repr(questions) == "<OpenRequests open, 2 waiting>"
        questions.stop()
    await ask()

    assert [(one.decision, one.interrupt) for one in found] == [("deny", True)] * 3


@pytest.mark.parametrize("depth", [80, 100_000])
async def test_a_call_that_cannot_be_encoded_is_denied(depth: int) -> None:
    """An input nested too deeply is not judged, so it does not run."""
    nested: Any = "x"
    for _ in range(depth):
        nested = [nested]
    call = m.ToolCall("c-1", "other", "Frobnicate", {"a": nested})

    async def answer(request: m.RequestPermission) -> m.PermissionDecision:
        if text_fault(msgspec.json.encode(request)) is not None:
            raise HutchError(Reason.INVALID_REQUEST)
        raise AssertionError

    found = await asks(answer).decide(m.RequestPermission("a-1", "s-1", "t-1", "tool", call, "/w"))

    assert found.decision == "deny"
