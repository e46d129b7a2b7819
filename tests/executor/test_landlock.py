"""A sandbox that Landlock enforces, with each ABI that this kernel has: real processes, real files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hutch_executor.sandbox.command import SessionSandbox
from hutch_executor.sandbox.confine import landlock_abi
from hutch_executor.sandbox.enforcement import abi_of, enforce
from hutch_executor.sandbox.landlock import NEWEST, rules_for
from hutch_executor.sandbox.places import Access
from hutch_executor.sandbox.plan import plan_sandbox
from hutch_executor.sandbox.probe import make_and_try, probe_networks, probe_sandbox
from hutch_executor.sandbox.programs import PROGRAMS
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.executor.fake_hutchd import prepare
from tests.executor.sandboxed import output_of

ATTEMPTS = Path(__file__).with_name("landlock_attempts.py")
REFUSED = {
    **dict.fromkeys(("read", "list", "write", "append", "remove", "environ", "truncate", "move out"), "EACCES"),
    **dict.fromkeys(("chmod", "chmod shown", "signal", "abstract", "unix"), "EPERM"),
    "tcp": "EAFNOSUPPORT",
    "link": "EXDEV",
}
"""What is outside, with the newest ABI. A link is refused as across file systems."""
WORKS = dict.fromkeys(("look", "work", "chmod own", "truncate own", "move", "move between"), "done")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder with a secret, a shown folder, a working directory and a home."""
    for name in ("shown", "work", "home"):
        (tmp_path / name).mkdir()
    for name in ("secret", "shown/file"):
        (tmp_path / name).write_text("content")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "secret.sock"))
        listener.listen()
        yield tmp_path


def needs_landlock(abi: int = 1) -> None:
    """Skip the test if the kernel has not this ABI."""
    if landlock_abi() < abi:
        pytest.skip(f"kernel: it has no Landlock of ABI {abi}")


def spec_of(place: Path, **given: object) -> m.SandboxSpec:
    return msgspec.convert({"program": "", "kind": "landlock", "show": [str(place / "shown")], **given}, m.SandboxSpec)


def attempt(place: Path, abi: int, *, network: str = "broker-only", sockets: bool = False) -> dict[str, str]:
    """Attempt everything in a sandbox of this ABI, against this process; return the outcomes."""
    spec = spec_of(place, network=network)
    shown = [str(place / "secret.sock")] if sockets else []
    programs = (*PROGRAMS, str(ATTEMPTS))
    plan = plan_sandbox(spec, str(place / "work"), str(place / "home"), show=programs, sockets=shown)
    enforced, fault = make_and_try(lambda: enforce(plan, sockets=sockets, abi=abi))
    with (
        closing(enforced),
        socket.socket(socket.AF_UNIX) as abstract,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        assert fault == ""
        abstract.bind(f"\0hutch-test-{os.getpid()}")
        abstract.listen()
        enforced.ready()
        port = str(server.getsockname()[1])
        done = subprocess.run(
            [*enforced.argv, os.path.realpath(sys.executable), str(ATTEMPTS), str(place), str(os.getpid()), port],
            cwd=place / "work",
            pass_fds=enforced.descriptors,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("abi", range(1, NEWEST + 1))
def test_each_abi_holds_what_it_has_and_the_filter_the_rest(place: Path, abi: int) -> None:
    """Without a way to the broker a command has no socket at all; before ABI 3 the supervisor refuses to truncate.

    Open before ABI 6: signals. Before ABI 2 nothing can be moved between folders, not even inside.
    """
    needs_landlock(abi)
    found = attempt(place, abi)

    expected = REFUSED | WORKS
    if abi < 6:
        expected["signal"] = "done"
    if abi < 3:
        expected["truncate"] = "EPERM"
    if abi < 2:
        expected["move between"] = "EXDEV"
    assert found == expected
    assert (place / "shown" / "file").read_text() == "content"


@pytest.mark.parametrize("abi", range(1, NEWEST + 1))
def test_an_agent_with_a_broker_opens_unix_sockets(place: Path, abi: int) -> None:
    """It reaches named ones; from ABI 6 no abstract one. TCP stays refused."""
    needs_landlock(abi)
    found = attempt(place, abi, sockets=True)

    assert (found["unix"], found["abstract"]) == ("done", "EPERM" if abi >= 6 else "done")
    assert found["tcp"] == "EAFNOSUPPORT"


def test_with_the_hosts_network_tcp_works(place: Path) -> None:
    """`full` means the host's network, loopback included."""
    needs_landlock()

    assert attempt(place, abi_of(), network="full")["tcp"] == "done"


def test_the_trial_reports_the_abi_and_the_missing_network(place: Path) -> None:
    """Landlock cannot limit the network to an allow-list, and says so."""
    needs_landlock()
    result = msgspec.json.decode(
        probe_networks(spec_of(place, hide=[str(place / "home")]), str(place)), type=m.SandboxTrial
    )

    assert (result.abi, set(result.faults)) == (abi_of(), {"allow-list"})
    assert "broker-only" in result.faults["allow-list"]


def test_a_hidden_place_that_can_be_seen_is_a_fault(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial looks for what must be hidden, whatever the kernel promised."""
    needs_landlock()
    monkeypatch.setattr("hutch_executor.sandbox.landlock.rules_for", lambda _: {"/": (1 << 13) - 1})

    assert "can be seen" in probe_sandbox(spec_of(place, hide=[str(place / "secret")]), str(place / "home"))


def test_without_landlock_nothing_runs(place: Path) -> None:
    """ABI 0 means that the kernel has none."""
    plan = plan_sandbox(spec_of(place), str(place / "work"), str(place / "home"))
    with pytest.raises(HutchError, match="kernel has no Landlock") as refused:
        enforce(plan, sockets=False, abi=0)

    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE


def test_a_shown_folder_with_a_hidden_place_is_given_by_its_entries(place: Path) -> None:
    """Landlock takes no right away below a rule. A folder that hides a folder is not listed either."""
    deep = place / "shown" / "a" / "b"
    for name in ("kept", "hidden", "private"):
        (deep / name).mkdir(parents=True)
    shown, a = place / "shown", place / "shown" / "a"
    rules = rules_for({str(shown): "read", str(deep / "hidden"): "hidden", str(deep / "private"): "private"})
    one_file = rules_for({str(shown): "read", str(shown / "file"): "hidden"})

    assert set(rules) == {str(shown / "file"), str(deep / "kept")}
    assert set(one_file) == {str(shown), str(a)}
    assert one_file[str(shown)] == 1 << 3  # to list it, and nothing else


def test_devices_are_given_one_by_one_in_a_shown_folder_too(place: Path) -> None:
    """`show = ["/"]` would otherwise show memory and terminals of the account's other processes."""
    devices = place / "shown" / "dev"
    for name in ("null", "shm"):
        (devices / name).mkdir(parents=True)
    rules = rules_for({str(place / "shown"): "read", str(devices): "devices"})

    assert str(devices / "shm") not in rules
    assert {str(place / "shown" / "file"), str(devices / "null")} <= set(rules)
    assert not {str(place / "shown"), str(devices)} & set(rules)


def test_a_protected_place_in_a_writable_one_is_refused(place: Path) -> None:
    """Landlock cannot protect it, and the sentence names what can."""
    protected: tuple[Access, ...] = ("read", "hidden", "private")
    for access in protected:
        with pytest.raises(HutchError, match="bubblewrap can") as refused:
            rules_for({str(place): "write", str(place / "shown"): access})

        assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE


def session_in(place: Path, spec: m.SandboxSpec) -> m.PrepareSession:
    session = prepare(place / "work", sandbox=spec)
    return msgspec.structs.replace(session, home=str(place / "home"), agent_dir=str(place / "agents" / "s-1"))


def test_home_and_temporary_files_are_the_sessions_own(place: Path) -> None:
    """Tools find what they may see of the home at its usual places; what they write there ends with the session."""
    needs_landlock()
    home, spec = place / "home", spec_of(place)
    for folder in (".cargo/bin", ".ssh", "dots"):
        (home / folder).mkdir(parents=True)
    for name in (".cargo/credentials", ".cargo/bin/tool", ".ssh/id", "dots/gitconfig"):
        (home / name).write_text(f"# {name}")
    (home / ".gitconfig").symlink_to("dots/gitconfig")
    (place / "agents").mkdir(mode=0o700)
    look = (
        'cat ~/.cargo/bin/tool ~/.gitconfig; cat ~/.cargo/credentials ~/.ssh/id 2>&1 | grep -c "No such"; mkdir ~/.npm'
        ' && echo kept > ~/.cargo/registry && cat ~/.cargo/registry; echo temporary > "$TMPDIR/x" && cat "$TMPDIR/x";'
        f" ls {home} 2>&1 | grep -c denied; echo x > {home}/x"
    )
    with closing(SessionSandbox(session_in(place, spec), spec)) as sandbox:
        first = output_of(sandbox, look, {"PATH": os.environ["PATH"], "HOME": str(home), "LC_ALL": "C"})
        second = output_of(sandbox, "cat ~/.cargo/registry", {"PATH": os.environ["PATH"]})

    assert first.splitlines()[:-1] == ["# .cargo/bin/tool# dots/gitconfig2", "kept", "temporary", "1"]
    assert "ermission denied" in first.splitlines()[-1]
    assert second == "kept"
    assert sorted(one.name for one in home.iterdir()) == [".cargo", ".gitconfig", ".ssh", "dots"]
    assert list((place / "agents" / "s-1").iterdir()) == []


@pytest.mark.parametrize("replaced", ["", "/home", "/tmp", "/home/.cargo"])
def test_a_link_in_the_place_of_the_home_leads_nowhere(place: Path, replaced: str) -> None:
    """The executor fills the home again before each start, outside the sandbox; it follows nothing that an agent made.

    A missing folder it makes again.
    """
    needs_landlock()
    home, victim, spec = place / "home", place / "victim", spec_of(place)
    for folder in (home / ".cargo/bin", victim, place / "agents"):
        folder.mkdir(parents=True, mode=0o700)
    (home / ".cargo/credentials").write_text("# hidden, so that .cargo is a folder of the agent's home")
    (home / ".gitconfig").write_text("# ours")
    target = f"{place}/agents/s-1/hutch-scratch{replaced}"
    env = {"PATH": os.environ["PATH"], "HOME": str(home)}
    ways = {"write": [str(place / "agents" / "s-1")]}
    with closing(SessionSandbox(session_in(place, spec), spec)) as sandbox:
        output_of(sandbox, f"rm -r {target} && ln -s {victim} {target}", env, **ways)
        with suppress(HutchError):
            output_of(sandbox, ":", env, **ways)
        left = list(victim.iterdir())
        os.unlink(target)
        again = output_of(sandbox, "ls -d ~ && echo x > $TMPDIR/x && cat ~/.gitconfig", env, **ways)

    assert left == []
    assert again.endswith("# ours")


def test_xdg_variables_name_the_agents_home(place: Path) -> None:
    """Tools find their settings through them, and can write caches, also where the account keeps those elsewhere."""
    needs_landlock()
    home, spec = place / "home", spec_of(place)
    for folder in (home / "conf" / "git", place / "agents", place / "cache"):
        folder.mkdir(parents=True, mode=0o700)
    (home / "conf" / "git" / "config").write_text("[x]\ny = settings\n")
    env = {
        "PATH": os.environ["PATH"],
        "XDG_CONFIG_HOME": str(home / "conf"),
        "XDG_DATA_HOME": f"{home}/data/",
        "XDG_CACHE_HOME": str(place / "cache"),
        "XDG_CONFIG_DIRS": "/etc/xdg",
    }
    command = (
        'git config x.y; mkdir -p "$XDG_CACHE_HOME/x" "$XDG_DATA_HOME/x" "$XDG_CONFIG_HOME/x" && ls -A ~'
        ' && echo "$XDG_CONFIG_DIRS"'
    )
    with closing(SessionSandbox(session_in(place, spec), spec)) as sandbox, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(home / "conf"))  # the executor's own, by which it finds what to show
        said = output_of(sandbox, command, env)

    assert said.splitlines() == ["settings", ".cache", "conf", "data", "/etc/xdg"]


def test_folders_that_are_not_shown_leave_the_path(place: Path) -> None:
    """A shell would find a program there and fail to start it, in place of another one that works."""
    needs_landlock()
    (place / "home" / "odd").mkdir()
    (place / "home" / "odd" / "echo").write_text("#!/bin/sh\n")
    (place / "home" / "odd" / "echo").chmod(0o755)
    (place / "agents").mkdir(mode=0o700)
    with closing(SessionSandbox(session_in(place, spec_of(place)), spec_of(place))) as sandbox:
        said = output_of(sandbox, "env echo found", {"PATH": f"{place}/home/odd:/usr/bin:/bin"})

    assert said == "found"


def test_what_an_agent_starts_opens_no_unix_socket(place: Path) -> None:
    """Whatever starts it: a program that git starts for the agent, as a file says that a command wrote, is not it."""
    needs_landlock()
    (place / "agents").mkdir(mode=0o700)
    agent = f"""
import os, socket, subprocess, sys, threading

def dial():
    try:
        socket.socket(socket.AF_UNIX).connect({str(place / "secret.sock")!r})
        return "there"
    except OSError as error:
        return error.strerror

if len(sys.argv) == 1:
    found = []
    thread = threading.Thread(target=lambda: found.append(dial()))
    thread.start()
    thread.join()
    child = subprocess.run([sys.executable, __file__, "child"], stdout=subprocess.PIPE, text=True).stdout.strip()
    print(dial(), found[0], child, sep=", ", flush=True)
    if os.fork() == 0:
        print(dial(), flush=True)
else:
    print(dial())
"""
    (place / "work" / "agent.py").write_text(agent)
    with closing(SessionSandbox(session_in(place, spec_of(place)), spec_of(place))) as sandbox:
        said = output_of(sandbox, "exec python3 agent.py", {"PATH": "/usr/bin:/bin"}, sockets=[str(place)])

    assert said.splitlines() == ["there, there, Operation not permitted", "Operation not permitted"]


def test_no_program_inherits_the_listener_of_an_agents_calls(place: Path) -> None:
    """A program with it could answer the agent's calls."""
    needs_landlock()
    (place / "agents").mkdir(mode=0o700)
    command = ("/bin/sh", "-c", ": > file && chmod 600 file && echo changed && read line")
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        closing(SessionSandbox(session_in(place, spec_of(place)), spec_of(place))) as sandbox,
        closing(sandbox.wrap(command, {"PATH": "/usr/bin:/bin"})) as inside,
        subprocess.Popen(inside.argv, env=inside.env, cwd=place / "work", pass_fds=inside.descriptors, **streams) as it,
    ):
        assert it.stdout is not None
        said = it.stdout.readline()
        links = {int(one.name): os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
        listeners = [one for one, link in links.items() if "seccomp" in link]
        inherited = [one for one in listeners if os.get_inheritable(one)]
        it.communicate(timeout=60)

    assert said == b"changed\n"
    assert listeners  # perhaps also that of the trial, which ends by itself
    assert inherited == []


async def test_a_cancelled_command_leaves_no_supervisor(place: Path) -> None:
    """Its sandbox is closed in a thread, so that the event loop never waits for a supervisor."""
    needs_landlock()
    (place / "agents").mkdir(mode=0o700)
    with closing(SessionSandbox(session_in(place, spec_of(place)), spec_of(place))) as sandbox:
        with anyio.CancelScope() as scope:
            inside = sandbox.wrap(("/bin/true",), {"PATH": "/usr/bin:/bin"})
            before = [thread.name for thread in threading.enumerate()]
            scope.cancel()
            await inside.aclose()
        after = [thread.name for thread in threading.enumerate()]

    assert before.count("hutch-supervisor") == 1
    assert after.count("hutch-supervisor") == 0
