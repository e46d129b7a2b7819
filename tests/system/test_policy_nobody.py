"""Permission requests while no user is present: expiry, notification, and a restart of hutchd."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from hutch_client.client import HutchClient
from hutch_shared.errors import HutchError, Reason
from tests.system.host import Host
from tests.system.log import DEADLINE, allow, log_of, wait_for
from tests.system.policing import SPARELESS, audit_of, bash, deny, pending_of, policed, step

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

NOTIFY = """#!/bin/sh
read -r question
printf '%s\\n' "$question" > "$HOME/told.part"
env > "$HOME/environment"
mv "$HOME/told.part" "$HOME/told"
[ ! -e "$HOME/nobody" ]
"""


@pytest.fixture(scope="module")
async def notifying() -> AsyncIterator[Host]:
    """A host that runs a command for each request."""
    command = "/bin/sh"
    async with policed(
        None,
        SPARELESS,
        permissions=f'return_grace = 0.2\nnotify = ["{command}", "-c", """{NOTIFY}"""]\nnotify_env = ["ROOM"]\n',
        env={"ROOM": "kitchen", "OTHER": "secret"},
    ) as made:
        yield made


@pytest.fixture
async def hutch(notifying: Host) -> AsyncIterator[HutchClient]:
    """A client of the host."""
    async with notifying.client() as client:
        yield client


async def test_the_notify_command_gets_the_request(notifying: Host, hutch: HutchClient) -> None:
    """It gets the request on standard input, with allowed variables only; a notified user counts as present."""
    session = await notifying.script(hutch, [step(bash("touch made"))], when_nobody="deny")
    async with log_of(hutch, session, answers=False) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        asked = await log.asked()
        told = await wait_for(lambda: _text(notifying.home / "told"))
        await notifying.hutch("approve", asked.id)
        end = await log.ended(turn)

    names = {line.partition("=")[0] for line in (notifying.home / "environment").read_text().splitlines()}
    assert json.loads(told)["id"] == asked.id
    assert json.loads(told)["call"]["command"] == "touch made"
    assert end.state == "completed"
    assert Path(session.cwd, "made").exists()
    assert {"ROOM", "HOME", "PATH"} <= names
    assert not {name for name in names if name.startswith("HUTCH")} | ({"OTHER"} & names)


async def test_after_a_failed_notification_when_nobody_applies(notifying: Host, hutch: HutchClient) -> None:
    """The command failed, so no user was notified."""
    (notifying.home / "nobody").touch()
    try:
        session = await notifying.script(hutch, [step(bash("touch made"))], when_nobody="deny")
        async with log_of(hutch, session, answers=False) as log:
            end = await log.ended(await hutch.submit_prompt(session.id, "go"))
    finally:
        (notifying.home / "nobody").unlink()

    (line,) = await audit_of(hutch, session, action="permission")
    assert end.state == "completed"
    assert (line.actor, line.outcome) == ("nobody", "denied")


async def test_pending_watch_prints_each_request(notifying: Host, hutch: HutchClient) -> None:
    """It prints those already pending, then new ones; the watching user counts as present."""
    before = await notifying.script(hutch, [step(bash("touch before"))])
    after = await notifying.script(hutch, [step(bash("touch after"))])
    first = await hutch.submit_prompt(before.id, "go")
    await pending_of(hutch, before, 1)
    async with notifying.hutch_beside("pending", "--watch", "-o", "jsonl") as watching:
        assert watching.stdout is not None
        lines = BufferedByteReceiveStream(watching.stdout)
        with anyio.fail_after(DEADLINE):
            shown = [json.loads(await lines.receive_until(b"\n", 1 << 20))]
            second = await hutch.submit_prompt(after.id, "go")
            shown.append(json.loads(await lines.receive_until(b"\n", 1 << 20)))
    for asked, session, turn in zip(shown, (before, after), (first, second), strict=True):
        await notifying.hutch("deny", asked["id"])
        async with log_of(hutch, session) as log:
            await log.ended(turn)

    assert [one["call"]["command"] for one in shown] == ["touch before", "touch after"]


async def test_a_pending_request_expires_at_its_deadline() -> None:
    """The state is `expired`, the turn goes on, and a late decision gets the settled request."""
    async with policed(None, SPARELESS, permissions="expiry = 1.0\n") as host, host.client() as hutch:
        session = await host.script(hutch, [step(bash("touch made")), {"text": "went on"}])
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            asked = await log.asked()
            end = await log.ended(turn)
            with pytest.raises(HutchError) as late:
                await hutch.answer_permission(allow(asked))
            told = await host.hutch("approve", asked.id, code=1)

            assert end.state == "completed"
            assert [one.text for one in log.of("text")] == ["went on"]
            assert [(one.state, one.by) for one in log.of("permission_settled")] == [("expired", "expiry")]
            assert late.value.reason is Reason.ALREADY_SETTLED
            assert "expired" in told.err
            assert not Path(session.cwd, "made").exists()


async def test_when_nobody_applies_after_a_restart() -> None:
    """Clients get time to reconnect; then the session's `when_nobody` applies."""
    async with policed(None, SPARELESS, permissions="return_grace = 0.2\n") as host:
        async with host.client() as hutch:
            session = await host.script(hutch, [step(bash("touch made"))], when_nobody="deny")
            waits = await host.script(hutch, [step(bash("touch made"))], when_nobody="wait")
            async with log_of(hutch, session) as log, log_of(hutch, waits) as other:
                turn = await hutch.submit_prompt(session.id, "go")
                waiting = await hutch.submit_prompt(waits.id, "go")
                await log.asked()
                asked = await other.asked()
        await host.kill()
        await host.start()
        async with host.client() as hutch, log_of(hutch, session, answers=False) as log:
            end = await log.ended(turn)
            left = await hutch.list_permissions()
            await hutch.answer_permission(deny(asked))
            async with log_of(hutch, waits, answers=False) as other:
                await other.ended(waiting)

        assert end.state == "completed"
        assert [one.by for one in log.of("permission_settled")] == ["nobody"]
        assert [one.id for one in left] == [asked.id]


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
