"""A session's commands in their sandbox, and the network that they reach. No command runs without a sandbox."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from hutch_executor.sandbox.command import SessionSandbox
from hutch_executor.sandbox.enforcement import Enforced
from hutch_executor.sandbox.probe import make_and_try, was_replaced
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.executor.fake_hutchd import prepare
from tests.executor.sandboxed import output_of
from tests.executor.test_egress import server
from tests.programs import bubblewrap

Network = Literal["full", "broker-only", "allow-list"]
NETWORKS: tuple[Network, ...] = ("full", "broker-only", "allow-list")
DIAL = """
import socket, sys
family, address = eval(sys.argv[1])
with socket.socket(family) as sock:
    sock.settimeout(20)
    try:
        sock.connect(address)
        print(sock.recv(10).decode())
    except OSError as error:
        print(type(error).__name__)
"""


def say_page(client: socket.socket) -> None:
    """Answer one request."""
    client.recv(65536)
    client.sendall(b"HTTP/1.1 200 OK\r\n\r\nPAGE")


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


@contextmanager
def sandboxed(
    cwd: Path, network: Network = "full", *allow: str, program: str | None = None
) -> Iterator[SessionSandbox]:
    """Yield the sandbox of a session in `cwd`."""
    spec = m.SandboxSpec(program or bubblewrap(), network=network, allow=allow)
    with closing(SessionSandbox(prepare(cwd, sandbox=spec), spec)) as made:
        yield made


def say(sandbox: SessionSandbox, command: str, env: dict[str, str] | None = None) -> str:
    """Run a shell command inside and return its output, errors included.

    It runs again if another test added an account just when the sandbox hid the files of accounts.
    """
    said = ""
    for _ in range(4):
        said = output_of(sandbox, command, {"PATH": os.environ["PATH"], **(env or {})})
        if not (said.startswith(("bwrap: ", "hutch: ")) and was_replaced(said)):
            break
    return said


def dial(family: socket.AddressFamily, address: object) -> str:
    return shlex.join(["python3", "-c", DIAL, repr((int(family), address))])


@pytest.mark.parametrize("network", NETWORKS)
def test_loopback_of_the_host_and_its_abstract_sockets_are_reached_with_full_alone(cwd: Path, network: Network) -> None:
    """A shown socket, such as the broker's, is reached with every network."""
    name, shown = f"\0hutch-test-{os.getpid()}", str(cwd / "shown.sock")
    with (
        server(lambda client: client.sendall(b"THERE")) as port,
        server(lambda client: client.sendall(b"THERE"), name),
        server(lambda client: client.sendall(b"THERE"), shown),
        sandboxed(cwd, network) as sandbox,
    ):
        dials = [dial(socket.AF_INET, ("127.0.0.1", port)), dial(socket.AF_UNIX, name), dial(socket.AF_UNIX, shown)]
        said = say(sandbox, "; ".join(dials))

    refused = "ConnectionRefusedError"
    assert said.split() == (["THERE"] * 3 if network == "full" else [refused, refused, "THERE"])


@pytest.mark.parametrize("network", ["broker-only", "allow-list"])
def test_nothing_but_loopback_is_there(cwd: Path, network: Network) -> None:
    """There is no other interface, no route, and no variable of the host's proxy."""
    proxies = dict.fromkeys(("HTTP_PROXY", "https_proxy", "All_Proxy", "no_proxy"), "http://host:1")
    look = "cut -d: -f1 /proc/net/dev | tail -n +3; tail -n +2 /proc/net/route; env | grep -c host:1"
    with sandboxed(cwd, network) as sandbox:
        said = say(sandbox, look, proxies)

    assert said.split() == ["lo", "0"]


@pytest.mark.parametrize("client", ["curl -sS", "curl -sSp", "python3 -c"])
def test_only_hosts_on_the_allow_list_are_reached(cwd: Path, client: str) -> None:
    """Plain requests and tunnels work; a refusal names the setting that would allow the host."""
    code = (
        "import sys, urllib.error, urllib.request as r\n"
        "try: print(r.urlopen(sys.argv[1]).read().decode())\n"
        "except urllib.error.HTTPError as e: print(e.code, e.reason)"
    )
    ask = f"python3 -c {shlex.quote(code)}" if client.startswith("python3") else client
    with (
        server(say_page) as named,
        server(say_page) as other,
        sandboxed(cwd, "allow-list", f"127.0.0.1:{named}") as sandbox,
    ):
        said = say(sandbox, f"{ask} http://127.0.0.1:{named}/; echo; {ask} http://127.0.0.1:{other}/")

    assert said.splitlines()[0] == "PAGE"
    assert "PAGE" not in said.splitlines()[1:]
    assert ("response 403" if client.endswith("p") else "[sandbox] allow") in said


def test_there_is_no_way_around_the_proxy(cwd: Path) -> None:
    """A client that does not use the proxy reaches nothing."""
    with server(say_page) as named, sandboxed(cwd, "allow-list", f"127.0.0.1:{named}") as sandbox:
        said = say(sandbox, f"curl -sS --noproxy '*' http://127.0.0.1:{named}/")

    assert "curl: (7)" in said


def test_the_command_replaces_the_bridge_program(cwd: Path) -> None:
    """With the bridge, the command has its own exit code, signals and descriptors, and no other port is open inside."""
    look = (
        "ls /proc/self/fd | tr '\\n' ' '; grep SigIgn /proc/self/status; ps -o comm= -e;"
        " tail -n +2 /proc/net/tcp | wc -l; kill -TERM $$"
    )
    env = {"PATH": os.environ["PATH"]}
    with (
        sandboxed(cwd, "allow-list", "example.com") as sandbox,
        closing(sandbox.wrap(("/bin/sh", "-c", look), env)) as command,
    ):
        done = subprocess.run(
            command.argv, env=command.env, pass_fds=command.descriptors, stdout=subprocess.PIPE, text=True, check=False
        )

    assert done.returncode == 128 + signal.SIGTERM
    said = done.stdout.split()
    outside = subprocess.check_output(("grep", "SigIgn", "/proc/self/status"), text=True).split()
    assert said[:6] == ["0", "1", "2", "3", *outside]
    assert set(said[6:-1]) <= {"bwrap", "sh", "ps"}
    assert said[-1] == "1"


def test_each_command_has_a_bridge_of_its_own(cwd: Path) -> None:
    """This holds for two commands at once, and for one after another."""
    with server(say_page) as named, sandboxed(cwd, "allow-list", f"127.0.0.1:{named}") as sandbox:
        ask = f"curl -sS http://127.0.0.1:{named}/"
        inside: list[str] = []
        threads = [threading.Thread(target=lambda: inside.append(say(sandbox, ask))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        inside.append(say(sandbox, ask))

    assert inside == ["PAGE"] * 5


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("program", "why"),
    [("/nowhere/bwrap", "No such file"), ("broken", "the kernel forbids it"), ("/bin/false", "exit code 1")],
)
def test_without_a_sandbox_the_command_is_refused_with_the_reason(
    cwd: Path, network: Network, program: str, why: str
) -> None:
    """If bubblewrap is missing or ends at once, the command does not run."""
    if program == "broken":
        made = cwd.parent / "bwrap"
        made.write_text("#!/bin/sh\necho the kernel forbids it >&2\nexit 1\n")
        made.chmod(0o755)
        program = str(made)
    with sandboxed(cwd, network, program=program) as sandbox, pytest.raises(HutchError) as refused:
        sandbox.wrap(("/bin/sh", "-c", "touch ran"), {})

    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE
    assert why in refused.value.message
    assert not (cwd / "ran").exists()


@pytest.mark.parametrize(
    ("says", "fault"),
    [
        ("bwrap: Can't find /newroot/etc/shadow in mount table", ""),
        ("bwrap: Can't bind mount: Unable to mount source on destination: No such file or directory", ""),
        ("hutch: this command was not run: /etc/gshadow can be seen in the sandbox.", ""),
        ("bwrap: No permissions to create new namespace", "bwrap: No permissions to create new namespace"),
    ],
)
def test_a_file_that_is_replaced_while_it_is_hidden_is_no_fault(tmp_path: Path, says: str, fault: str) -> None:
    """An account that is added replaces /etc/shadow. The trial runs again; other faults are reported at once."""
    fails_once = f'cd {tmp_path}; [ -e tried ] || {{ touch tried; echo "$0" >&2; exit 1; }}; exec "$@"'

    made, found = make_and_try(lambda: Enforced(("/bin/sh", "-c", fails_once, says), str(tmp_path), ()))
    made.close()

    assert found == fault


@pytest.mark.parametrize("network", NETWORKS)
def test_a_bubblewrap_that_stops_isolating_after_the_trial_runs_nothing(cwd: Path, network: Network) -> None:
    """Each sandbox examines itself from inside, in front of the very command, before it becomes that command."""
    program, used = cwd.parent / "bwrap", cwd.parent / "used"
    program.write_text(
        f'#!/bin/bash\nif [ ! -e {used} ]; then touch {used}; exec {bubblewrap()} "$@"; fi\n'
        'while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n'
    )
    program.chmod(0o755)
    with sandboxed(cwd, network, program=str(program)) as sandbox:
        said = say(sandbox, "touch ran")

    assert "hutch: this command was not run: " in said
    assert not (cwd / "ran").exists()


@pytest.mark.parametrize("network", NETWORKS)
def test_a_sandbox_that_does_not_show_how_it_is_confined_runs_nothing(cwd: Path, network: Network) -> None:
    """What the look from inside cannot read counts as missing: here there is nothing in /proc."""
    program = cwd.parent / "bwrap"
    program.write_text(
        '#!/bin/bash\nwhile [ "$1" != -- ]; do given+=("$1"); shift; done\n'
        f'exec {bubblewrap()} "${{given[@]}}" --tmpfs /proc "$@"\n'
    )
    program.chmod(0o755)
    with (
        sandboxed(cwd, network, program=str(program)) as sandbox,
        pytest.raises(HutchError, match="how it is confined"),
    ):
        sandbox.wrap(("/bin/sh", "-c", "touch ran"), {})

    assert not (cwd / "ran").exists()


def test_an_invalid_allow_list_is_refused(cwd: Path) -> None:
    """An invalid entry allows nothing."""
    with (
        pytest.raises(HutchError, match="is not a host") as refused,
        sandboxed(cwd, "allow-list", "https://example.com"),
    ):
        pass

    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE


def test_the_environment_is_cleaned(cwd: Path) -> None:
    """Variables that name hidden places are removed, and git gets its settings. With `full` the host's proxy stays."""
    given = {"LANG": "C", "TMPDIR": "/var/x", "XDG_RUNTIME_DIR": "/run/user/1", "HTTPS_PROXY": "http://host:1"}
    with sandboxed(cwd) as sandbox, closing(sandbox.wrap(("true",), given)) as command:
        env = dict(command.env)

    git = {name: env.pop(name) for name in list(env) if name.startswith("GIT_CONFIG_")}
    assert env == {"LANG": "C", "HTTPS_PROXY": "http://host:1"}
    assert json.dumps(git).count("gpgSign") == 2
