"""Probes a sandbox: runs commands inside and reports why it fails. `python -m hutch_executor.sandbox`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Final

import msgspec

from hutch_executor.sandbox.enforcement import Enforced, abi_of, enforce
from hutch_executor.sandbox.plan import plan_sandbox
from hutch_executor.sandbox.programs import INTERPRETER, PROGRAMS, bridge_argv
from hutch_executor.sandbox.workspace import remove_abandoned, workspace
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.hardening import forbid_new_privileges

__all__ = ["find_fault", "main", "make_and_try", "probe_networks", "probe_sandbox", "was_replaced"]

_SCRIPT: Final = """
: > "$PWD/tried" || { echo "the working directory cannot be written"; exit 1; }
for path; do
  if [ -d "$path" ]; then seen=$(ls -A "$path" 2>/dev/null); else seen=$(head -c 1 "$path" 2>/dev/null); fi
  [ -z "$seen" ] || { echo "$path can be seen"; exit 1; }
done
"""
_NO_NETWORK: Final = """
import socket
try:
    socket.socket()
except OSError:
    raise SystemExit
raise SystemExit("it shares the network with the host")
"""
_REFUSED: Final = "hutch: this command was not run: "
_DEADLINE: Final = 20.0
_REPLACED: Final = (
    "Unable to mount source on destination: No such file or directory",
    "realpath(destination): No such file or directory",
    "in mount table",
    "with correct flags: Invalid argument",
    "can be seen in the sandbox",
)
"""What bubblewrap or the look from inside says when a file was replaced while it was being hidden: before it was
mounted over, or after. A mount ends when its file is replaced outside."""
_TRIES: Final = 4
_PAUSE: Final = 0.05


def make_and_try(
    make: Callable[[], Enforced], command: Sequence[str] = ("/bin/sh", "-c", ":"), *, with_bridge: bool = False
) -> tuple[Enforced, str]:
    """Make a sandbox and run a small command in it; return it, and why that failed or "". Blocks for a moment.

    `with_bridge` tries the network bridge too. A file that is replaced while it is being hidden (/etc/shadow, when an
    account is added just then) is not a fault: another sandbox is made. The caller closes the one that it gets.
    HutchError of `make`.
    """
    for left in reversed(range(_TRIES)):
        enforced = make()
        try:
            fault = find_fault(enforced, command, with_bridge=with_bridge)
        except BaseException:
            enforced.close()
            raise
        if not left or not was_replaced(fault):
            break
        enforced.close()
        time.sleep(_PAUSE)
    return enforced, fault


def was_replaced(fault: str) -> bool:
    """Return whether a sandbox failed since a file was replaced while it was being hidden: another try may hold."""
    return any(words in fault for words in _REPLACED)


def find_fault(enforced: Enforced, command: Sequence[str], *, with_bridge: bool = False) -> str:
    """Run a small command in the sandbox and return why that failed; empty if it did not. Blocks for a moment."""
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            enforced.ready()
            done = subprocess.run(
                [*enforced.argv, *(bridge_argv(theirs.fileno()) if with_bridge else ()), *command],
                cwd=enforced.cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_DEADLINE,
                check=False,
                pass_fds=(*enforced.descriptors, *((theirs.fileno(),) if with_bridge else ())),
            )
            passed = _take(ours)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip().splitlines()
        last = output[-1] if output else f"it ended with exit code {done.returncode}"
        return last.removeprefix(_REFUSED).rstrip(".") if last.startswith(_REFUSED) else last
    return "the network bridge passed no socket" if with_bridge and not passed else ""


def _take(ours: socket.socket) -> int:
    """Close the descriptors that were passed, and return their number."""
    ours.setblocking(False)
    with suppress(BlockingIOError):
        _, passed, _, _ = socket.recv_fds(ours, 16, 4)
        for descriptor in passed:
            os.close(descriptor)
        return len(passed)
    return 0


def probe_sandbox(spec: m.SandboxSpec, home: str) -> str:
    """Check from inside that a sandbox holds; return why it does not, or an empty text. Blocks for a moment."""
    try:
        with workspace() as folder:
            plan = plan_sandbox(spec, folder, home, show=PROGRAMS)
            command = ("/bin/sh", "-c", _SCRIPT, "probe", *spec.hide)
            with_bridge = spec.network == "allow-list"
            enforced, fault = make_and_try(lambda: enforce(plan, sockets=False), command, with_bridge=with_bridge)
            with closing(enforced):
                if not fault and not os.path.exists(os.path.join(folder, "tried")):
                    return "a file written inside does not appear outside"
                if not fault and spec.kind == "landlock" and spec.network != "full":
                    return find_fault(enforced, (*INTERPRETER, "-c", _NO_NETWORK))
    except HutchError as error:
        return error.message
    except OSError as error:
        return str(error)
    return fault


def probe_networks(spec: m.SandboxSpec, home: str) -> bytes:
    """Probe the sandbox with each network; return a `SandboxTrial` as JSON. Blocks for a moment.

    What killed probes left is removed first.
    """
    remove_abandoned()
    found = {"full": probe_sandbox(msgspec.structs.replace(spec, network="full"), home)}
    if not found["full"]:
        for network in ("broker-only", "allow-list"):
            found[network] = probe_sandbox(msgspec.structs.replace(spec, network=network), home)
    faults = {name: fault for name, fault in found.items() if fault}
    return msgspec.json.encode(m.SandboxTrial(faults, abi_of() if spec.kind == "landlock" else 0))


def main() -> int:
    """Probe the sandbox specified on standard input; print a `SandboxTrial` as JSON.

    With `--no-new-privileges` probe it as it is in an executor that hutch-launcher started. Exit codes: 0 a sandbox
    with the host's network holds, 1 it does not, 2 the specification cannot be read.
    """
    if "--no-new-privileges" in sys.argv[1:]:
        forbid_new_privileges()
    try:
        spec = msgspec.json.decode(sys.stdin.buffer.read(), type=m.SandboxSpec)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        sys.stderr.write(f"The sandbox's specification cannot be read: {error}\n")
        return 2
    found = probe_networks(spec, os.path.expanduser("~"))
    print(found.decode())  # noqa: T201
    return 1 if b'"full"' in found else 0
