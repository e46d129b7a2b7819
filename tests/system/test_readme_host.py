"""The README's setup of a shared host, followed word by word, without its steps that need a network or systemd."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from hutch_client.install.units import DAEMON, LAUNCHER, render_systemd
from tests.programs import systemd_analyze, visudo
from tests.rehearsal import Model, Say, serve
from tests.sampling import sample
from tests.system.host import KEY, settings_for
from tests.system.readme import World, block, world

pytestmark = pytest.mark.system

SHUT_IN = Path(__file__).with_name("programs") / "shut_in.py"
GROUP = f"hutch-unit-{os.getpid()}"
"""A cgroup like the one that systemd delegates to a unit."""
ENTER = f"""
for tree in /sys/fs/cgroup/*/; do
  mkdir -p $tree/{GROUP}
  cat $tree/cpuset.cpus > $tree/{GROUP}/cpuset.cpus 2> /dev/null || true
  cat $tree/cpuset.mems > $tree/{GROUP}/cpuset.mems 2> /dev/null || true
  echo $BASHPID > $tree/{GROUP}/cgroup.procs
done
"""
PEOPLE = ("alice", "bob")


@pytest.fixture
def made() -> Iterator[World]:
    """A world where alice and bob have accounts with unused uids, and alice has a project."""
    with world() as made:
        for at, name in enumerate(PEOPLE):
            made.run(f"useradd --uid {40_000 + os.getpid() % 9_000 * 2 + at} --create-home --shell /bin/bash {name}")
        made.run("mkdir ~/project && cd ~/project && git init -q && echo hello > till.py", as_="alice")
        pip, *rest = block("install")
        assert pip == "python3 -m venv /opt/hutch && /opt/hutch/bin/pip install ."  # already installed in this world
        made.run(*rest)
        yield made
    for group in sorted(Path("/sys/fs/cgroup").glob(f"*/{GROUP}/**/"), reverse=True):
        group.rmdir()


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    """A model on this machine."""
    async with serve(key=KEY, script=lambda _: Say("They pass.")) as model:
        yield model


@sample(1)
@pytest.mark.parametrize("way", ["by hand", "sudo"])
async def test_from_nothing_to_the_first_turn(made: World, model: Model, way: str) -> None:
    """alice's agent runs under her own account, and doctor finds nothing missing for either user."""
    *folders, launcher, hutchd = block("by hand")
    made.run(*folders)
    if way == "sudo":
        visudo()
        made.run(*block("sudo"))
    made.run(f"cat >> /etc/hutch/hutch.toml << 'end'\n{settings_for(model)}\nend")
    made.begin(*([launcher] if way == "by hand" else []), hutchd)
    made.wait_for("-S /run/hutch/client.sock")
    doctor = made.run(*block("doctor"))
    add, *rest = block("person")
    made.run(add, as_="alice", input=KEY)
    run = await anyio.to_thread.run_sync(lambda: made.run(*rest, as_="alice"))
    sessions = json.loads(made.run("hutch ps --all -o json", as_="alice").out)
    others = json.loads(made.run("hutch ps --all -o json", as_="bob").out)
    (session,) = sessions if isinstance(sessions, list) else sessions["sessions"]
    print(doctor.out)
    print(run.out)

    assert "They pass." in run.out
    assert session["account"] == "alice"
    assert session["isolation"]["level"] in ("account", "strict")
    assert (others if isinstance(others, list) else others["sessions"]) == []
    lines = doctor.out.splitlines()
    assert {f"ok  account {name}" for name in PEOPLE} <= {*lines}
    dialled = "sudo -n -- /opt/hutch/bin/hutch-launcher" if way == "sudo" else "/run/hutch-launcher/launcher.sock"
    assert f"ok  launcher: {dialled}" in lines
    assert [line for line in lines if line.startswith("ok  sandbox by bubblewrap: ")]
    assert [line for line in lines if line.startswith("!!")] == []


async def test_the_setup_works_under_the_restrictions_of_its_units(made: World, model: Model) -> None:
    """hutchd is restricted like its unit, and the launcher has no more rights than its unit grants."""
    texts = render_systemd(["/opt/hutch/bin/hutchd"], {}, system=True, launcher=["/opt/hutch/bin/hutch-launcher"])
    (capabilities,) = re.findall(r"^CapabilityBoundingSet=(.*)$", texts[LAUNCHER], re.MULTILINE)
    bounded = "".join(f",+{name.removeprefix('CAP_').lower()}" for name in capabilities.split())
    *folders, launcher, hutchd = block("by hand")
    made.run(f"cat > /etc/hutch/hutch.toml << 'end'\n{settings_for(model)}\nend")
    made.run(f"cat > /run/{DAEMON} << 'end'\n{texts[DAEMON]}\nend")
    made.run(f"cat > /run/shut_in.py << 'end'\n{SHUT_IN.read_text()}\nend")
    made.begin(
        *folders,
        "mount --bind /var/lib/hutch /var/lib/hutch",
        f"({ENTER} exec setpriv --bounding-set=-all{bounded} --no-new-privs -- {launcher.removesuffix('&')}) &",
        hutchd.replace("runuser -u hutch --", f"/usr/bin/python3 /run/shut_in.py /run/{DAEMON} hutch"),
    )
    made.wait_for("-S /run/hutch/client.sock")
    add, *rest = block("person")
    made.run(add, as_="alice", input=KEY)
    run = await anyio.to_thread.run_sync(lambda: made.run(*rest, as_="alice"))
    status = json.loads(made.run("hutch status -o json", as_="alice").out)
    print(run.out, run.err, status["isolation"])

    assert "They pass." in run.out
    assert status["isolation"]["level"] == "strict"


def test_hutchd_starts_the_launcher_by_one_sudo_rule(made: World) -> None:
    """doctor accepts exactly this rule and reports any wider one."""
    visudo()
    made.run("install -d -o hutch -g hutch -m 700 /var/lib/hutch", *block("sudo"))
    doctor = made.run("hutch doctor --system", code=None).out
    made.run("echo 'hutch ALL=(root) NOPASSWD: /opt/hutch/bin/*' >> /etc/sudoers.d/hutch")
    wider = made.run("hutch doctor --system", code=None).out

    assert "ok  sudo rule: /opt/hutch/bin/hutch-launcher" in doctor
    assert "ok  sudo's rules for hutch: exactly the needed rule" in doctor
    assert "ok  launcher: sudo -n -- /opt/hutch/bin/hutch-launcher" in doctor
    assert "with wildcards, which match more than they seem to: (root) NOPASSWD: /opt/hutch/bin/*" in wider


def test_the_units_run_the_installed_program(made: World) -> None:
    """The account must be able to run it, and only root to change it. Otherwise the closed directory is named."""
    systemd_analyze()
    made.run("mkdir -p /run/systemd/system")  # pretend that systemd has booted; nothing is started
    made.run("chmod 700 /opt/hutch")
    closed = made.run("hutch service install --system", code=1).err
    made.run("chmod 777 /opt/hutch")
    loose = made.run("hutch service install --system", code=None).err
    made.run("chmod 755 /opt/hutch", "ls /etc/systemd/system > /tmp/before")
    told = made.run("hutch service install --system").err
    verified = made.run("cd /etc/systemd/system; systemd-analyze verify hutch*.service hutch*.socket")
    files = made.run("ls /etc/systemd/system | grep hutch", "stat -c %a:%U /etc/hutch/*.toml").out.split()

    assert "/opt/hutch is closed to it (drwx------ root root)" in closed
    assert "Others may write to /opt/hutch" in loose
    assert "/etc/hutch/launcher.toml: yours, unchanged" in told
    assert "/etc/hutch/hutch.toml: written, for you to fill in" in told
    assert (verified.out, verified.err) == ("", "")
    assert files == [
        "hutch-launcher.service",
        "hutch-launcher.socket",
        "hutchd-executor.socket",
        "hutchd.service",
        "hutchd.socket",
        "644:root",
        "644:root",
    ]


def test_the_service_keeps_the_account_that_it_runs_as(made: World) -> None:
    """Units, sudo's rule and doctor take the account of the installed unit or its drop-in, not the usual name."""
    made.run(
        "useradd --system --home-dir /var/lib/hutch --shell /usr/sbin/nologin --gid users coder",
        "mkdir -p /run/systemd/system",
        "hutch service install --system",
        "mkdir /etc/systemd/system/hutchd.service.d",
        "printf '[Service]\nUser=coder\n' > /etc/systemd/system/hutchd.service.d/mine.conf",
    )
    doctor = made.run("hutch doctor", code=1).out
    rule = made.run("hutch doctor --sudo", code=None).out
    made.run("""sed -i '1i serve = "coder"' /etc/hutch/launcher.toml""")
    again = made.run("hutch doctor", code=1).out
    told = made.run("hutch service install --system").err
    units = made.run("cd /etc/systemd/system; cat hutchd.service hutch-launcher.socket").out.splitlines()

    assert "!!  account of hutchd: coder\n    → The launcher serves hutch, so no agent starts" in doctor
    assert "ok  account of hutchd: coder\n" in again
    assert "\ncoder ALL=(root) NOPASSWD: /opt/hutch/bin/hutch-launcher" in rule
    assert "hutchd and its broker, as the account coder, hardened" in told
    assert [line for line in units if "User=" in line or line.startswith("Group=")] == [
        "User=coder",
        "Group=users",
        "SocketUser=coder",
    ]


def test_doctor_names_each_obstacle_of_an_account(made: World) -> None:
    """Doctor names a closed directory, an expired account and a home that another account owns."""
    made.run(
        """echo 'users = ["alice", "bob", "carol", "nobody-at-all"]' > /etc/hutch/launcher.toml""",
        "useradd --create-home --expiredate 2001-01-01 carol",
        f"useradd --uid {58_000 + os.getpid() % 2_000} --create-home dan",
        "chown hutch ~bob",
    )
    as_bob = made.run("hutch doctor --system", as_="bob", code=1).out
    first = made.run("hutch doctor --system", code=1).out
    as_dan = made.run("hutch doctor --system", as_="dan", code=1).out
    of_dan = made.run("hutch doctor --system --account dan", code=1).out
    made.run("printf '[accounts.map]\\ndan = \"carol\"\\n' > /etc/hutch/hutch.toml")
    mapped = made.run("hutch doctor --system", as_="dan", code=1).out
    of_nobody = made.run("hutch doctor --system --account no-such-person", code=1).out
    private = made.run("hutch doctor --account dan", as_="dan", code=2).err
    made.run("chmod 750 /opt/hutch/lib", "chmod 666 /etc/hutch/launcher.toml")
    second = made.run("hutch doctor --system", code=1).out

    assert "ok  account alice\n" in first
    assert "!!  account bob\n    → Its home /home/bob belongs to another account: chown bob /home/bob" in first
    assert "!!  account carol\n    → It has expired" in first
    assert "!!  account nobody-at-all\n    → The launcher's list names it, but there is no such account." in first
    assert "!!  launcher: /run/hutch-launcher/launcher.sock\n    → hutch-launcher cannot be reached" in first
    assert "!!  account alice\n    → It cannot load the executor" in second
    assert "/opt/hutch/lib is closed to it (drwxr-x--- root root)" in second
    assert "chmod go-w /etc/hutch/launcher.toml" in second
    unlisted = (
        "!!  account dan\n    → The launcher's list does not name it, so no agent runs as it. Add it to `users`, or"
    )
    assert unlisted in as_dan
    assert unlisted in of_dan
    assert unlisted not in mapped
    assert "account carol" in mapped
    assert "account dan" not in first
    assert "!!  account no-such-person\n    → There is no such account." in of_nobody
    assert "--account is for a host's hutchd" in private
    assert "ok  database, keys, launcher: not examined; only root and hutch may\n" in as_bob
    assert "ok  account alice\n" in as_bob
    assert "!!  launcher's socket: /run/hutch-launcher/launcher.sock\n    → It does not exist." in as_bob


def test_the_world_changes_nothing_on_the_machine(made: World) -> None:
    """The accounts and files of the world are not visible outside."""
    made.run("touch /etc/hutch/x /opt/x /var/lib/x /run/x /home/x")

    assert not any(Path(path).exists() for path in ("/etc/hutch/x", "/opt/x", "/var/lib/x", "/run/x", "/home/x"))
    assert not any(line.startswith("alice:") for line in Path("/etc/passwd").read_text().splitlines())
