"""Walks of hutchd: the files of ours that one `ps` and one prompt enter, and the moves between them.

A hutchd is started that counts calls into Hutch's own code, in all its threads; it begins with SIGUSR1 and writes what
it counted with SIGUSR2. An executor of the script agent answers the prompt. Everything is in a temporary directory.

A move is a call, or a resumption, in another file than the one before it in the same thread; each pair of files counts
once. `--list` prints the files and the moves too.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import anyio

from hutch_client.client import HutchClient
from hutch_shared import messages as m

_ROOT: Final = Path(__file__).resolve().parents[1]
_OURS: Final = ("daemon", "shared", "executor")
_START: Final = 30.0
"""Seconds for hutchd to start, on a slow machine."""


class Counter:
    """Counts calls into the code below the roots while it is switched on."""

    def __init__(self, roots: tuple[str, ...], output: Path) -> None:
        """Write to `output` at each end of a count."""
        self._roots = roots
        self._output = output
        self._on = False
        self._calls: dict[int, list[CodeType]] = {}

    def begin(self, *_: object) -> None:
        """Start a new count."""
        self._calls, self._on = {}, True

    def end(self, *_: object) -> None:
        """Write what was counted, as one JSON object, and stop."""
        self._on = False
        found = {thread: list(calls) for thread, calls in self._calls.items()}
        moves: dict[tuple[str, str], None] = {}
        total = 0
        for calls in found.values():
            files = [self._name(code) for code in calls]
            steps = [(one, other) for one, other in pairwise(files) if one != other]
            moves |= dict.fromkeys(steps)
            total += len(steps)
        entered = dict.fromkeys(self._name(code) for calls in found.values() for code in calls)
        functions = {(code.co_filename, code.co_qualname) for calls in found.values() for code in calls}
        result = {
            "files": len(entered),
            "moves": len(moves),
            "steps": total,
            "functions": len(functions),
            "entered": list(entered),
            "between": [" → ".join(move) for move in moves],
        }
        partial = self._output.with_suffix(".part")
        partial.write_text(json.dumps(result))
        partial.rename(self._output)

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Be a profile function (`sys.setprofile`)."""
        if self._on and event == "call" and frame.f_code.co_filename.startswith(self._roots):
            self._calls.setdefault(threading.get_ident(), []).append(frame.f_code)

    def _name(self, code: CodeType) -> str:
        return next(code.co_filename.removeprefix(root) for root in self._roots if code.co_filename.startswith(root))


def serve(output: Path) -> None:
    """Run hutchd in this process, counting between SIGUSR1 and SIGUSR2."""
    counter = Counter(tuple(f"{_ROOT / name}/" for name in _OURS), output)
    signal.signal(signal.SIGUSR1, counter.begin)
    signal.signal(signal.SIGUSR2, counter.end)
    threading.setprofile(counter.profile)
    sys.setprofile(counter.profile)
    sys.argv = ["hutchd"]
    runpy.run_module("hutch_daemon", run_name="__main__", alter_sys=True)


class Host:
    """A hutchd that counts, in `root`."""

    def __init__(self, root: Path, daemon: anyio.abc.Process) -> None:
        """Use a running hutchd."""
        self._root = root
        self._daemon = daemon

    async def begin(self) -> None:
        """Start a count."""
        (self._root / "walk.json").unlink(missing_ok=True)
        os.kill(self._daemon.pid, signal.SIGUSR1)
        await anyio.sleep(0.2)

    async def end(self) -> dict[str, Any]:
        """End the count and return it."""
        os.kill(self._daemon.pid, signal.SIGUSR2)
        output = self._root / "walk.json"
        with anyio.fail_after(_START):
            while not output.exists():  # noqa: ASYNC110 a file is what it ends with
                await anyio.sleep(0.05)
        found: dict[str, Any] = json.loads(output.read_text())
        return found


async def walk(host: Host, socket: Path, folder: Path) -> list[dict[str, Any]]:
    """Walk twice, each time on a connection of its own, when everything that happens once has happened."""
    async with HutchClient.connect(socket) as client:
        session = await client.open_session(m.OpenSession("script", str(folder)))
        await prompt(client, session.id, "warm up")
    found = []
    for name in ("ps", "prompt"):
        await anyio.sleep(1.0)  # what the walk before left to do
        await host.begin()
        async with HutchClient.connect(socket) as client:
            if name == "ps":
                await client.list_sessions()
            else:
                await prompt(client, session.id, "hello")
        await anyio.sleep(0.3)
        found.append({"walk": name, **await host.end()})
    async with HutchClient.connect(socket) as client:
        await client.close_session(session.id, force=True)
    return found


async def prompt(client: HutchClient, session: str, text: str) -> None:
    """Submit a prompt and follow its events to the end."""
    async with client.follow(m.FollowEvents(session, after=-1)) as follow:
        await client.submit_prompt(session, text)
        async for event in follow:
            if event.kind == "turn_ended":
                return


async def main(*, listed: bool) -> None:
    """Print a JSON line for each walk."""
    with tempfile.TemporaryDirectory(prefix="hutch-walk-") as temporary:
        root = Path(temporary)
        (root / "work").mkdir()
        (root / "home").mkdir()
        (root / "hutch.toml").write_text("[executors]\nspares = 0\n")
        env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(root / "home"),
            "HUTCH_CONFIG": str(root / "hutch.toml"),
            "HUTCH_STATE_DIR": str(root / "state"),
            "HUTCH_RUNTIME_DIR": str(root / "run"),
        }
        command = [sys.executable, "-m", "scripts.walking", "--serve", str(root / "walk.json")]
        with (root / "log").open("wb") as log:
            daemon = await anyio.open_process(command, env=env, cwd=_ROOT, stdin=None, stdout=log, stderr=log)
        try:
            with anyio.fail_after(_START):
                while not (root / "run" / "client.sock").exists():  # noqa: ASYNC110 hutchd makes it when it serves
                    await anyio.sleep(0.1)
            found = await walk(Host(root, daemon), root / "run" / "client.sock", root / "work")
        finally:
            daemon.terminate()
            await daemon.wait()
    for one in found:
        shown = one if listed else {name: one[name] for name in ("walk", "files", "moves", "steps", "functions")}
        print(json.dumps(shown))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
    else:
        anyio.run(lambda: main(listed="--list" in sys.argv[1:]))
