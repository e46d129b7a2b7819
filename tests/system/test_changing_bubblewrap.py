"""A bubblewrap that is replaced, broken, removed and installed while hutchd runs.

Each next session has what holds at that time, and says so; one that requires more is refused.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded
from tests.programs import bubblewrap, landlock_holds, link_programs, required_program
from tests.rehearsal import Model, Say
from tests.sampling import sample
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import DEADLINE, log_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

FAILING = "#!/bin/sh\nexit 1\n"
ISOLATING_NOTHING = """#!/bin/bash
while [ "$1" != -- ]; do shift; done; shift; exec "$@"
"""
WRAPPER = '#!/bin/sh\nexec "%s" "$@"\n'


class Stage:
    """A host with a bubblewrap of the test's own, the only one on its PATH."""

    def __init__(self, on: Host, hutch: HutchClient, model: Model, programs: Path) -> None:
        self.on = on
        self.hutch = hutch
        self.model = model
        self.program = programs / "bwrap"
        self._opened = 0

    def install(self) -> None:
        """Put a copy of the real one in its place."""
        shutil.copy2(bubblewrap(), self.program.with_name("fresh"))
        self.program.with_name("fresh").rename(self.program)

    def replace(self, text: str) -> None:
        """Put a script in its place."""
        fresh = self.program.with_name("fresh")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.rename(self.program)

    def remove(self) -> None:
        """Remove it."""
        self.program.unlink()

    async def open(self) -> m.Session:
        """Open a session."""
        self._opened += 1
        return await self.on.claude(self.hutch, f"folder-{self._opened}")

    async def play(self, session: m.Session) -> tuple[TurnEnded, m.Session]:
        """Run a turn; return its end, and the session as it is then."""
        async with log_of(self.hutch, session) as log:
            end = await log.play(session, "go")
        return end, await self.hutch.get_session(session.id)

    async def opened(self) -> m.Session:
        """Open a session and run a turn of it; return it as it is then."""
        end, session = await self.play(await self.open())
        assert end.state == "completed", end
        return session

    async def end_executor(self, session: m.Session) -> None:
        """Kill the session's executor, and wait until hutchd has seen that."""

        async def pids() -> list[int]:
            return [one.pid for one in (await self.hutch.get_status()).executors if one.session == session.id]

        for pid in filter(None, await pids()):
            os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(DEADLINE):
            while await pids():
                await anyio.sleep(0.02)


@asynccontextmanager
async def staged(
    model: Model, folder: Path, sandbox: str = "", *, within: tuple[str, ...] = ()
) -> AsyncIterator[Stage]:
    """Start a host with a working bubblewrap. `within` is a command that runs hutchd."""
    program = bubblewrap()
    model.key, model.script = KEY, lambda _: Say("done")
    link_programs(folder)
    shutil.copy2(program, folder / "bwrap")
    settings = settings_for(model, f"[executors]\nspares = 0\n[sandbox]\n{sandbox}")
    async with host(settings, env={"PATH": str(folder)}, double=True, start=False) as on:
        on.program = (*within, *on.program)
        await on.start()
        await on.hutch("key", "add", "anthropic", input=KEY)
        async with on.client() as hutch:
            yield Stage(on, hutch, model, folder)


CHANGES: list[tuple[str, Callable[[Stage], None]]] = [
    ("removed", Stage.remove),
    ("broken", lambda stage: stage.replace(FAILING)),
    ("isolating nothing", lambda stage: stage.replace(ISOLATING_NOTHING)),
    ("not executable", lambda stage: stage.program.chmod(0o600)),
]


def weaker(session: m.Session) -> tuple[object, ...]:
    """Return what a session has that is not in bubblewrap."""
    kind = session.isolation.sandbox
    return kind, session.keys, kind or "There is no sandbox around the agent" in session.isolation.why


async def test_each_next_session_has_what_holds_then(model: Model, tmp_path: Path) -> None:
    """New sessions, and a session whose executor ended. `inspect` shows it, and a notice in the session."""
    expected = ("landlock", "brokered", "landlock") if landlock_holds() else (None, "exposed", True)
    async with staged(model, tmp_path) as stage:
        old = await stage.opened()
        for _, change in CHANGES:
            change(stage)
            new = await stage.opened()
            await stage.end_executor(old)
            end, later = await stage.play(old)
            assert end.state == "completed", end
            assert (weaker(new), weaker(later)) == (expected, expected)

            stage.install()
            again = await stage.opened()
            await stage.end_executor(old)
            _, old = await stage.play(old)
            assert (again.isolation.sandbox, old.isolation.sandbox) == ("bubblewrap", "bubblewrap")
            assert (again.keys, old.keys) == ("brokered", "brokered")
        shown = await stage.on.hutch("inspect", old.id)
        async with log_of(stage.hutch, old) as log:
            notices = await log.until(lambda log: [one for one in log.of("notice") if one.word == "isolation"])

    assert "sandbox " in shown.out
    assert "remains open" in shown.out
    assert notices[0].details["sandbox"] == expected[0]


@sample(2)
@pytest.mark.parametrize("change", [change for _, change in CHANGES], ids=[name for name, _ in CHANGES])
@pytest.mark.parametrize("settings", ['mode = "require"', 'kind = "bubblewrap"\nmode = "require"'])
async def test_a_session_that_requires_bubblewrap_is_refused(
    model: Model, tmp_path: Path, change: Callable[[Stage], None], settings: str
) -> None:
    """`mode = "require"` alone means bubblewrap, as it did before there was Landlock."""
    async with staged(model, tmp_path, settings) as stage:
        old = await stage.opened()
        change(stage)
        requests = len(model.requests)
        await stage.end_executor(old)
        end, _ = await stage.play(old)
        with pytest.raises(HutchError) as refused:
            await stage.open()
        stage.install()
        back, later = await stage.play(old)

    assert (end.state, end.reason) == ("failed", "isolation_unavailable")
    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE
    assert len(model.requests) > requests
    assert (back.state, later.isolation.sandbox) == ("completed", "bubblewrap"), back


async def test_a_change_that_no_look_shows_is_noticed_by_the_executor(model: Model, tmp_path: Path) -> None:
    """bubblewrap is a script that runs another program, which breaks. The prompt goes through, if Landlock holds.

    Without Landlock it is refused: nothing that hutchd can see explains that the sandbox does not hold any more.
    """
    real = tmp_path / "real"
    shutil.copy2(bubblewrap(), real)
    async with staged(model, tmp_path) as stage:
        stage.replace(WRAPPER % real)
        old = await stage.opened()
        real.chmod(0o600)
        await stage.end_executor(old)
        end, later = await stage.play(old)
        real.chmod(0o755)

    assert old.isolation.sandbox == "bubblewrap"
    if landlock_holds():
        assert (end.state, later.isolation.sandbox, later.keys) == ("completed", "landlock", "brokered")
    else:
        assert (end.state, end.reason) == ("failed", "isolation_unavailable")


async def test_user_namespaces_that_are_closed_count_for_the_next_session(model: Model, tmp_path: Path) -> None:
    """hutchd runs in a user namespace of its own, whose setting the test changes: the host's stays as it is."""
    unshare, nsenter = required_program("unshare"), required_program("nsenter")
    async with staged(model, tmp_path, within=(unshare, "--user", "--map-root-user")) as stage:

        def allow(number: int) -> None:
            words = ("--user", "--preserve-credentials", "--target", str(stage.on.pid))
            change = f"echo {number} > /proc/sys/user/max_user_namespaces"
            subprocess.run([nsenter, *words, "sh", "-c", change], check=True)

        old = await stage.opened()
        allow(0)
        closed = await stage.opened()
        await stage.end_executor(old)
        end, later = await stage.play(old)
        allow(10_000)
        reopened = await stage.opened()

    assert (old.isolation.sandbox, reopened.isolation.sandbox, end.state) == ("bubblewrap", "bubblewrap", "completed")
    if landlock_holds():
        assert [(one.isolation.sandbox, one.keys) for one in (closed, later)] == [("landlock", "brokered")] * 2
        assert "sysctl -w user.max_user_namespaces=" in closed.isolation.missing
    else:
        assert [(one.isolation.sandbox, one.keys) for one in (closed, later)] == [(None, "exposed")] * 2
