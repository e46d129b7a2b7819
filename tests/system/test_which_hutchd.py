"""Which hutchd a user talks to on a host that has one for everybody, whatever state that one is in."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sampling import sample
from tests.system.readme import World, block, world

pytestmark = [pytest.mark.system, sample(1)]

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
    ("daemon", "stop", "--leave"),
)
_UNUSED = 60_000
"""No other test gives an account a uid of this or the next 5,000."""
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


@pytest.fixture(scope="module")
def shared_world() -> Iterator[World]:
    """A world with Hutch installed, where alice has an account."""
    with world() as made:
        made.run(
            f"useradd --uid {_UNUSED + os.getpid() % 5_000} --create-home --shell /bin/bash alice",
            "useradd --system --home-dir /var/lib/hutch --shell /usr/sbin/nologin hutch",
            "ln -sf /opt/hutch/bin/hutch /usr/local/bin/hutch",
            "ln -sf /opt/hutch/bin/hutchd /usr/local/bin/hutchd",
            "install -d -m 755 /etc/hutch",
            """echo 'users = ["alice"]' > /etc/hutch/launcher.toml""",
        )
        yield made


@pytest.fixture
def made(shared_world: World) -> World:
    """A world where nothing of Hutch runs and nothing is left of earlier starts."""
    assert _daemons(shared_world) == {}
    shared_world.run(
        "rm -rf /var/lib/hutch /run/hutch /run/systemd /etc/systemd/system/hutch*",
        "rm -rf ~alice/.local ~alice/.config ~root/.local/state/hutch",
    )
    return shared_world


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
    """Not yet started, stopped, killed; with and without the directory of its sockets; for a user and for root.

    Its mark decides: every account finds it, and nothing else in the state directory. Uninstalling removes it, and then
    each user has a private hutchd, as on a host that never had one of its own.
    """
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
    mode = made.run("stat -c %a /var/lib/hutch").out
    open_entries = made.run("find /var/lib/hutch -mindepth 1 -perm /077 ! -name serves-this-host ! -type l").out
    listing = made.run("ls /var/lib/hutch", as_="alice", code=None)
    removed = made.run("mkdir -p /run/systemd/system", "hutch service uninstall --system").err
    without = made.run("hutch ps", as_="alice", code=3).err

    assert (mode, open_entries, listing.out) == ("711\n", "", "")
    assert "/var/lib/hutch/serves-this-host: removed" in removed
    assert without.startswith("hutch: No hutchd answers at /home/alice/.local/state/hutch/run/client.sock. Start one")
    print(f"{tries} tries to reach a host's hutchd that is down: no private one started")


def test_a_private_hutchd_is_used_on_request_and_named(made: World) -> None:
    """`ps`, `status` and `doctor` say which hutchd they talk to, and name the other one if it has sessions."""
    _start(made)
    made.run("""echo '{"text": "Hello"}' > ~/s.jsonl""", "mkdir ~/p", as_="alice")
    began = made.run("hutch --private run --script ~/s.jsonl --directory ~/p hi", as_="alice")
    listed = made.run("hutch ps", as_="alice")
    private = made.run("hutch ps --private", as_="alice")
    of_host, of_alice = (made.run(f"hutch {words} -o json", as_="alice") for words in ("status", "--private status"))
    text = made.run("hutch status", as_="alice")
    doctor = made.run("hutch doctor", as_="alice", code=None).out
    of_root = made.run("hutch ps")

    named = "your own hutchd has 1 open session; `hutch --private ps` lists them"
    assert "Started hutchd" in began.err
    assert "Hello" in began.out
    assert (len(listed.out.splitlines()), listed.err) == (1, f"! Not listed: {named}.\n")
    assert len(private.out.splitlines()) == 2
    assert private.err == "! These are the sessions of your own hutchd; `hutch ps` lists those of the host's.\n"
    assert (of_host.json["which"], of_host.json["mode"]) == ("host", "system")
    assert of_host.json["socket"] == "/run/hutch/client.sock"
    assert of_host.json["private"] == {"state": "/home/alice/.local/state/hutch", "sessions_open": 1}
    assert (of_alice.json["which"], of_alice.json["mode"], of_alice.json["private"]) == ("private", "user", None)
    assert re.search(r"^this is +the host's hutchd at /run/hutch/client.sock$", text.out, re.MULTILINE)
    assert f"! Beside it, {named}.\n" in text.err
    assert "talks to the host's hutchd at /run/hutch/client.sock\n" in doctor
    assert f"ok  {named}; its record is in /home/alice/.local/state/hutch\n" in doctor
    assert of_root.err == ""

    made.run("hutch --private daemon stop", as_="alice")
    made.run("rm /var/lib/hutch/serves-this-host", "chmod 700 /var/lib/hutch")  # as an earlier version leaves it
    earlier = [made.run("hutch status -o json", as_=who).json["which"] for who in PEOPLE]
    made.run("install -o hutch -m 644 /dev/null /var/lib/hutch/serves-this-host", "chmod 711 /var/lib/hutch")
    still_named = made.run("hutch ps", as_="alice")
    _end(made, signal.SIGTERM)
    down = made.run("hutch ps", as_="alice", code=3)
    not_running = made.run("hutch --private ps", as_="alice", code=3)

    assert earlier == ["host", "host"]
    assert still_named.err == listed.err
    assert f"Meanwhile {named}." in down.err
    assert "Start one with `hutch --private daemon start`." in not_running.err
    assert _daemons(made) == {}
