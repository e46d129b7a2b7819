"""Sockets whose files are removed while hutchd, the broker and executors run: all find each other again."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest

from hutch_client import exits
from tests.rehearsal import Say, Step, Steps, anything, serve
from tests.system.host import KEY, host, settings_for
from tests.system.log import DEADLINE, wait_for

pytestmark = pytest.mark.system

REACHABLE = 3.0
"""Seconds within which hutchd is reachable again."""


@pytest.mark.parametrize("made_again", [True, False], ids=["logged in again", "logged out"])
async def test_a_removed_runtime_directory_does_not_cut_anybody_off(made_again: bool) -> None:
    """A logout removes it, and perhaps a login makes it again: sessions, `run`, `stop` and `start` go on working."""
    async with (
        serve(key=KEY, script=Steps(Step(anything, Say("ok"), None))) as model,
        host(settings_for(model), double=True) as made,
    ):
        await made.hutch("key", "add", "anthropic", input=KEY)
        first = await made.hutch("run", "hi")
        shutil.rmtree(made.runtime)
        if made_again:
            made.runtime.mkdir(0o700)
        with anyio.fail_after(DEADLINE):
            while (shown := await made.hutch("ps", code=None)).code == exits.NO_DAEMON:
                await anyio.sleep(0.05)
        again = await made.hutch("run", "hi")
        modes = [one.stat().st_mode & 0o777 for one in (made.runtime, made.runtime / "broker")]
        await made.hutch("daemon", "stop")
        assert await made.exited() == 0
        await made.start()
        last = await made.hutch("ps")

        assert (first.out, again.out) == ("ok\n", "ok\n")
        assert shown.code == 0
        assert modes == [0o700, 0o700]
        assert last.code == 0


async def test_a_removed_broker_socket_is_bound_again() -> None:
    """Until then the status says that it is gone; then new sessions work."""
    async with (
        serve(key=KEY, script=Steps(Step(anything, Say("ok"), None))) as model,
        host(settings_for(model), double=True) as made,
    ):
        await made.hutch("key", "add", "anthropic", input=KEY)
        await made.hutch("run", "hi")
        socket = made.runtime / "broker" / "broker.sock"
        socket.unlink()
        status = await made.hutch("status")
        await wait_for(socket.exists)
        after = await made.hutch("status")
        again = await made.hutch("run", "hi")

        assert f"DOWN: {socket} is gone" in status.out or "broker      up" in status.out
        assert "broker      up" in after.out
        assert again.out == "ok\n"


async def test_a_foreign_socket_in_its_place_is_replaced() -> None:
    """Clients would talk to it, so hutchd takes its place back and logs that."""
    async with host() as made:
        made.socket.unlink()
        async with await anyio.create_unix_listener(made.socket):
            inode = Path(made.socket).stat().st_ino
            await wait_for(lambda: made.socket.exists() and made.socket.stat().st_ino != inode)
        status = await made.hutch("status")

        assert status.code == 0
        assert "was replaced by another file" in made.log_text()
