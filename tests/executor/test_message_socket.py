"""Looking for a message socket: what the kernel reports about the sockets of processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from hutch_executor.runners.claude.message_socket import find_listening, notice_of

pytestmark = pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="needs Linux's /proc")

PROGRAM = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
how, path = sys.argv[1:]
if how in ("listens", "is bound"):
    sock.bind(path)
if how == "listens":
    sock.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def process(how: str, path: str, env: Mapping[str, str]) -> Iterator[int]:
    """Run a process with one Unix socket; yield its pid."""
    argv = [sys.executable, "-I", "-c", PROGRAM, how, path]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": os.defpath, **env}
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        try:
            yield started.pid
        finally:
            started.kill()


@pytest.mark.parametrize(
    ("how", "env", "found"),
    [
        ("listens", {}, True),
        ("is bound", {}, False),
        ("has one", {}, False),
        ("listens", {"AI_AGENT": "claude-code_1_harness"}, False),  # an MCP server
    ],
)
def test_a_cli_that_listens_is_found(tmp_path: Path, how: str, env: dict[str, str], found: bool) -> None:
    """Programs that it started may listen, and so may everything that is not among the given processes."""
    path = tmp_path / "one two.sock"
    with process(how, str(path), env) as pid:
        assert find_listening([pid, 2**22 + 1], os.getpid()) == (str(path) if found else None)
        assert find_listening([], os.getpid()) is None


def test_the_proxy_of_the_clis_own_sandbox_takes_no_messages(tmp_path: Path) -> None:
    """Settings of the user may switch that sandbox on."""
    with process("listens", str(tmp_path / "srt-mux-2-0.sock"), {}) as pid:
        assert find_listening([], pid) is None


def test_an_abstract_socket_is_found_too() -> None:
    """It needs no file."""
    name = f"hutch-test-{os.getpid()}"
    program = PROGRAM.replace("sock.bind(path)", f"sock.bind('\\0{name}')")
    with subprocess.Popen(
        [sys.executable, "-I", "-c", program, "listens", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()

        assert find_listening([], started.pid) == f"@{name}"
        started.kill()


def test_a_cli_whose_sockets_are_not_shown_counts_as_listening() -> None:
    """Here no file of /proc can be opened, as for a process that its account may not inspect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        found = find_listening([], os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert found == "unknown"
    assert "may take messages" in notice_of(found).message


def test_a_look_that_meets_no_cli_finds_nothing_out(tmp_path: Path) -> None:
    """If all processes look like programs that the CLI started, the CLI itself was not examined."""
    with process("has one", str(tmp_path / "sock"), {"AI_AGENT": "claude-code_1_agent"}) as pid:
        assert find_listening([], pid) is not None
        assert find_listening([pid], os.getpid()) is None
    assert find_listening([], pid) is None
