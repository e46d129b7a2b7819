"""Counts the files of Hutch that one `ps` and one prompt enter in hutchd, and the moves between them.

It starts a hutchd that counts calls into Hutch's own code, in all its threads: SIGUSR1 starts a count, and SIGUSR2
makes it write the result. An executor of the script agent answers the prompt. Everything is in a temporary directory.

`moves` counts pairs of files: a function in the first calls or resumes one in the second. `turns` counts pairs of files
entered one after the other in one task, so it counts returns too. Each pair counts once. A worker's thread and a
callback of the event loop have no caller. hutchd's own loops are quiet meanwhile: their intervals are long.

`--list` prints the files and the moves too. `--root DIR` walks another checkout with the same counting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import anyio

from hutch_client.client import HutchClient
from hutch_shared import messages as m

_ROOT: Final = Path(__file__).resolve().parents[1]
_OURS: Final = ("daemon", "shared", "executor")
_STEP: Final = asyncio.Handle._run.__code__  # noqa: SLF001 # typeshed has no public name for a step of the loop
_QUIET: Final = """\
[executors]
spares = 0
[sockets]
ping_interval = 600
"""
_START: Final = 30.0
"""Seconds for hutchd to start, on a slow machine."""


class Counter:
    """Counts calls into the code below the roots while it is switched on."""

    def __init__(self, roots: tuple[str, ...], output: Path) -> None:
        """Write each count to `output` when it ends."""
        self._roots = roots
        self._output = output
        self._on = False
        self._clear()

    def _clear(self) -> None:
        self._entered: dict[str, None] = {}
        self._functions: set[tuple[str, str]] = set()
        self._moves: dict[tuple[str, str], None] = {}
        self._turns: dict[tuple[str, str], None] = {}
        self._last: dict[object, str] = {}

    def begin(self, *_: object) -> None:
        """Start a new count."""
        self._clear()
        self._on = True

    def end(self, *_: object) -> None:
        """Write the counts as one JSON object, and stop."""
        self._on = False
        result = {
            "files": len(self._entered),
            "moves": len(self._moves),
            "turns": len(self._turns),
            "functions": len(self._functions),
            "entered": list(self._entered),
            "between": [f"{one} > {other}" for one, other in self._moves],
            "in_turn": [f"{one} > {other}" for one, other in self._turns],
        }
        partial = self._output.with_suffix(".part")
        partial.write_text(json.dumps(result))
        partial.rename(self._output)

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Count an event of the profiler (`sys.setprofile`)."""
        if not self._on or event != "call" or not frame.f_code.co_filename.startswith(self._roots):
            return
        name, caller = self._name(frame.f_code), self._caller(frame)
        self._entered[name] = None
        self._functions.add((name, frame.f_code.co_qualname))
        if caller not in (None, name):
            self._moves[caller or "", name] = None
        task = _current_task()
        last = self._last.get(task or threading.get_ident()) if task is not None or caller is not None else None
        if last not in (None, name):
            self._turns[last or "", name] = None
        self._last[task or threading.get_ident()] = name

    def _caller(self, frame: FrameType) -> str | None:
        """Return the nearest file of Hutch among the callers, in the same step of the event loop."""
        one = frame.f_back
        while one is not None and one.f_code is not _STEP:
            if one.f_code.co_filename.startswith(self._roots):
                return self._name(one.f_code)
            one = one.f_back
        return None

    def _name(self, code: CodeType) -> str:
        return next(code.co_filename.removeprefix(root) for root in self._roots if code.co_filename.startswith(root))


def _current_task() -> object:
    try:
        return asyncio.current_task()
    except RuntimeError:  # in the thread of a worker
        return None


def serve(root: Path, output: Path) -> None:
    """Run the hutchd of a checkout in this process, counting between SIGUSR1 and SIGUSR2."""
    counter = Counter(tuple(f"{root / name}/" for name in _OURS), output)
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
            while not output.exists():  # noqa: ASYNC110 the end makes the file
                await anyio.sleep(0.05)
        found: dict[str, Any] = json.loads(output.read_text())
        return found


async def walk(host: Host, socket: Path, folder: Path) -> list[dict[str, Any]]:
    """After a warm-up, count two walks, `ps` and `prompt`, each on a connection of its own."""
    async with HutchClient.connect(socket) as client:
        session = await client.open_session(m.OpenSession("script", str(folder)))
        await prompt(client, session.id, "warm up")
    found = []
    for name in ("ps", "prompt"):
        await anyio.sleep(1.0)  # let late work of the last walk end
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


async def main(checkout: Path, *, listed: bool) -> None:
    """Print a JSON line for each walk."""
    with tempfile.TemporaryDirectory(prefix="hutch-walk-") as temporary:
        root = Path(temporary)
        (root / "work").mkdir()
        (root / "home").mkdir()
        (root / "hutch.toml").write_text(_QUIET)
        env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(root / "home"),
            "HUTCH_CONFIG": str(root / "hutch.toml"),
            "HUTCH_STATE_DIR": str(root / "state"),
            "HUTCH_RUNTIME_DIR": str(root / "run"),
            "PYTHONPATH": os.pathsep.join(str(checkout / name) for name in _OURS),
        }
        command = [sys.executable, "-m", "scripts.walking", "--serve", str(checkout), str(root / "walk.json")]
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
        shown = one if listed else {name: one[name] for name in ("walk", "files", "moves", "turns", "functions")}
        print(json.dumps(shown))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description="Trace one ps and one prompt in a real hutchd.")
        parser.add_argument("--list", action="store_true", help="print the files and the moves too")
        parser.add_argument("--root", type=Path, default=_ROOT, help="the checkout to walk (default: this one)")
        given = parser.parse_args()
        anyio.run(lambda: main(given.root.resolve(), listed=given.list))
