"""The sandbox of an executor that hutch-launcher started: no new privileges, a uid other than root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

import anyio
import msgspec
import pytest
from anyio.abc import Process

from hutch_shared import messages as m
from tests.accounts import Account, account, installed, need_root
from tests.executor.fake_hutchd import WAIT, FakeHutchd, boot, prepare, prompt
from tests.programs import bubblewrap, required_program
from tests.sampling import sample

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

Network = Literal["full", "broker-only", "allow-list"]
NETWORKS: tuple[Network, ...] = ("full", "broker-only", "allow-list")
UNPRIVILEGED = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--")
ENTER = """
import json, os, subprocess, sys
from hutch_executor.sandbox.command import SessionSandbox
from hutch_shared import messages as m

program, network, cwd, command = sys.argv[1:]
spec = m.SandboxSpec(program, network=network, allow=("192.0.2.1",))
options, limits, home = m.AgentOptions(), m.Limits(), os.environ["HOME"]
session = m.PrepareSession("s-1", "script", cwd, "ask", options, limits, cwd, home, sandbox=spec)
sandbox = SessionSandbox(session, spec)
inside = sandbox.wrap(("/bin/sh", "-c", command), dict(os.environ))
done = subprocess.run(inside.argv, env=inside.env, pass_fds=inside.descriptors)
inside.close()
sandbox.close()
sys.exit(done.returncode)
"""


@pytest.fixture(scope="module")
def ada() -> Iterator[Account]:
    """The account that runs agents."""
    need_root()
    bubblewrap()
    with account("ada") as made:
        yield made


@pytest.fixture(scope="module")
def bob() -> Iterator[Account]:
    """Another account."""
    with account("bob") as made:
        yield made


def folder(of: Account, name: str) -> Path:
    """Create a directory of the account in its home."""
    made = of.home / name
    made.mkdir(mode=0o700)
    os.chown(made, of.uid, of.gid)
    return made


@sample(1)
@pytest.mark.parametrize("network", NETWORKS)
def test_an_agent_can_start_its_own_sandbox_inside(ada: Account, network: Network) -> None:
    """Its sandbox may use process and network namespaces; the outer sandbox still holds."""
    program = bubblewrap()
    nested = (
        f"{program} --unshare-user --unshare-pid --unshare-net --ro-bind / / --dev /dev --proc /proc"
        " sh -c 'ls -d /proc/[0-9]* | wc -l; cut -d: -f1 /proc/net/dev | tail -n +3; echo x > inner || echo kept;"
        " id -u'"
    )
    cwd = folder(ada, f"nested-{network}")
    done = ada.run(*UNPRIVILEGED, installed().python, "-P", "-c", ENTER, program, network, cwd, nested)

    assert done.returncode == 0, done.stderr
    count, *said = done.stdout.split()
    assert int(count) < 8
    assert said == ["lo", "kept", str(ada.uid)]


@sample(1)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_clis_own_sandbox_works_inside(ada: Account, network: Network) -> None:
    """If its settings enable it, the real CLI's commands get their own network and view of the files."""
    required_program("socat")
    top, place = Path(__file__).parents[2], folder(ada, f"cli-{network}")
    code, root = place / "code", folder(ada, f"cli-{network}/root")
    shutil.copytree(top / "tests" / "rehearsal", code / "tests" / "rehearsal")
    (code / "tests" / "system").mkdir()
    shutil.copy(top / "tests" / "system" / "claude_stage.py", code / "tests" / "system")
    program = shutil.copy(top / "tests" / "system" / "programs" / "sandboxed_claude.py", code)
    real = next(installed().packages.glob("claude_agent_sdk/_bundled/claude"))
    cli = place / "own" / "claude"
    cli.parent.mkdir()
    given = json.dumps({"sandbox": {"enabled": True, "allowUnsandboxedCommands": False}})
    cli.write_text(
        "#!/bin/bash\nfor word; do\n"
        f"  case $word in --settings=*) word='--settings={given}' ;; esac\n"
        f'  words+=("$word")\ndone\nexec {real} "${{words[@]}}"\n'
    )
    cli.chmod(0o755)
    subprocess.run(["chmod", "-R", "a+rX", place], check=True)
    look = "echo there > file; touch /var/tmp/x 2>&1 || echo kept; cut -d: -f1 /proc/net/dev | tail -n +3; id -u"
    words = (installed().python, program, root, bubblewrap(), network, cli, look)
    done = ada.run(*UNPRIVILEGED, *words, env={**ada.env, "PYTHONPATH": str(code)}, cwd=code, timeout=150)

    assert done.returncode == 0, done.stderr
    assert "Read-only file system" in done.stdout
    assert done.stdout.split()[-3:] == ["kept", "lo", str(ada.uid)]
    assert (root / "work" / "file").read_text() == "there\n"


@asynccontextmanager
async def executor(of: Account, hutchd: FakeHutchd) -> AsyncIterator[Process]:
    """Run an executor as the account, connected to its own hutchd."""
    async with hutchd.up():
        hutchd.path.chmod(0o666)
        process = await anyio.open_process(
            [*UNPRIVILEGED, str(installed().python), "-P", "-m", "hutch_executor"],
            stdout=subprocess.DEVNULL,
            stderr=None,
            cwd="/",
            env=of.env,
            start_new_session=True,
            user=of.uid,
            group=of.gid,
            extra_groups=[],
        )
        try:
            assert process.stdin is not None
            await process.stdin.send(msgspec.json.encode(boot(hutchd.path)) + b"\n")
            await hutchd.until(lambda: hutchd.hellos)
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()


LOOK = r"""
for path in /proc/[0-9]*; do
  for file in cmdline environ; do tr '\0' ' ' < "$path/$file"; echo; done
done
for pid; do
  [ "$pid" -gt 64 ] || continue
  kill -0 "$pid" 2>/dev/null && echo "reached $pid"
  ls "/proc/$pid/fd" >/dev/null 2>&1 && echo "looked into $pid"
done
ls -A /tmp /home /var/lib /run
ls -d /proc/[0-9]* | wc -l
"""


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory that every account can traverse."""
    with tempfile.TemporaryDirectory(prefix="hutch-run-") as made:
        Path(made).chmod(0o711)
        yield Path(made)


async def test_no_process_of_hutch_is_visible_inside(ada: Account, bob: Account, sockets: Path) -> None:
    """Neither its own executor nor another account's is visible, nor their memory or files."""
    cwd, spool = folder(ada, "seen"), folder(ada, "seen-spool")
    hutchds = FakeHutchd(sockets / "ada.sock"), FakeHutchd(sockets / "bob.sock")
    async with executor(ada, hutchds[0]) as own, executor(bob, hutchds[1]) as other:
        spec = m.SandboxSpec(bubblewrap(), (str(sockets),))
        session = prepare(cwd, home=str(ada.home), spool=str(spool), sandbox=spec)
        await hutchds[0].call("prepare_session", session)
        (cwd / "look.sh").write_text(LOOK)
        (cwd / "look.sh").chmod(0o644)
        look = f"sh look.sh {own.pid} {other.pid} {os.getpid()}"
        line = json.dumps({"tool": "Bash", "input": {"command": look}, "run": True})
        await hutchds[0].call("execute_prompt", prompt(line))
        end = await hutchds[0].ended()
        (said,) = (data["text"] for data in hutchds[0].of_kind("tool_result"))
        with anyio.fail_after(WAIT):
            await hutchds[0].call("shutdown", m.Shutdown("done"))

    assert end["state"] == "completed"
    assert "sh look.sh" in said
    told = ("hutch_executor", "reached", "looked into", "token-of-the-test", bob.name, ".sock")
    assert [word for word in told if word in said] == []
    assert int(said.split()[-1]) < 8
