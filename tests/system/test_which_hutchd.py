"""Which hutchd a user talks to on a host that has one for everybody, whatever state that one is in."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.readme import World, block, world

pytestmark = pytest.mark.system

PEOPLE = ("alice", "")
"""An ordinary user, and root."""
DOWN = "The host's hutchd is not running: nothing answers at /run/hutch/client.sock."
HUTCHD = "runuser -u hutch -- /opt/hutch/bin/hutchd --system &"
COMMANDS = (
    ("run", "hi"),
    ("run", "--session", "s-1", "hi"),
    ("ps",),
    ("status",),
    ("key", "ls"),
    ("daemon", "start"),
    ("daemon", "stop"),
)
TRY = """
import asyncio, contextlib, io, json, sys
from hutch_client.__main__ import main
from hutch_client.client import HutchClient
from hutch_shared.errors import HutchError

async def connect():
    async with HutchClient.connect():
        pass

answers = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    answers.append((" ".join(words), code, err.getvalue()))
try:
    asyncio.run(connect())
except HutchError as error:
    answers.append(("HutchClient.connect", 3, error.message))
print(json.dumps(answers))
"""


@pytest.fixture
def made() -> Iterator[World]:
    """A world with Hutch installed, where alice has an account, and nothing of Hutch runs or is set up."""
    with world() as made:
        made.run(
            "useradd --create-home --shell /bin/bash alice",
            "useradd --system --home-dir /var/lib/hutch --shell /usr/sbin/nologin hutch",
            "ln -sf /opt/hutch/bin/hutch /usr/local/bin/hutch",
            "ln -sf /opt/hutch/bin/hutchd /usr/local/bin/hutchd",
            "install -d -m 755 /etc/hutch",
            """echo 'users = ["alice"]' > /etc/hutch/launcher.toml""",
        )
        yield made


def _start(made: World) -> None:
    """Start the host's hutchd by hand, as the README says, and wait until it answers."""
    folders = [line for line in block("by hand") if line.startswith("install ")]
    made.begin(*folders, HUTCHD)
    made.wait_for("-f /var/lib/hutch/serves-this-host -a -S /run/hutch/client.sock")


def _end(made: World, number: signal.Signals) -> None:
    """Signal the hutchd of this world, and wait for its end and that of its broker."""
    pids = _daemons(made)
    for pid in pids:
        os.kill(pid, number)
    made.wait_for(" -a ".join(f"! -e /proc/{pid}" for pid in pids))


def _daemons(made: World) -> dict[int, str]:
    """Return the command line of each hutchd of this world."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in made.processes()}
    return {pid: line for pid, line in lines.items() if "bin/hutchd" in line or "hutch_daemon" in line}


def _assert_none_starts(made: World, state: str) -> int:
    """Try every way to reach hutchd as each user; return the number of tries."""
    tries = 0
    for who in PEOPLE:
        words = f"/opt/hutch/bin/python -I - '{json.dumps(COMMANDS)}'"
        answers = json.loads(made.run(f"cd /; {words}", as_=who, input=TRY).out)
        for command, code, said in answers:
            assert (code, DOWN in said) == (3, True), f"{state}, {who or 'root'}: {command}: {code}, {said}"
            whom = "Ask the host's administrator, root, to start it" if who else "Start it"
            assert f"{whom}: `" in said
        assert len(answers) == len(COMMANDS) + 1
        tries += len(answers)
    assert _daemons(made) == {}, state
    made.run("test ! -e ~alice/.local/state/hutch", "test ! -e ~root/.local/state/hutch")
    return tries


def test_no_private_hutchd_starts_while_the_hosts_is_down(made: World) -> None:
    """Not yet started, stopped, killed; with and without the directory of its sockets; for a user and for root."""
    made.run("mkdir -p /run/systemd/system")  # pretend that systemd has booted; nothing is started
    made.run("hutch service install --system")
    tries = _assert_none_starts(made, "installed and not yet started")
    made.run("install -d -o hutch -g hutch -m 755 /run/hutch")
    tries += _assert_none_starts(made, "not yet started, with its runtime directory")
    made.run("rm -r /run/hutch /etc/systemd/system/hutch*", "rmdir /run/systemd/system")
    for number in (signal.SIGTERM, signal.SIGKILL):
        _start(made)
        _end(made, number)
        tries += _assert_none_starts(made, f"ended by {number.name}")
        made.run("rm -r /run/hutch")
        tries += _assert_none_starts(made, f"ended by {number.name}, without its runtime directory")
    print(f"{tries} tries to reach a host's hutchd that is down: no private one started")
