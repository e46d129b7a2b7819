"""The demo: a Claude session asks before its edit and makes a failing test pass, with a rehearsed model on loopback.

Everything but the model is real: hutchd, an executor, the SDK with its command line program, git, the tests. It needs
no account and no key, touches nothing outside a temporary directory, and prints what it checked.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import anyio
import msgspec

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.events import Event
from tests.rehearsal.scripts import RUN_TEST, demo, write_demo_repository
from tests.rehearsal.server import Model, serve

PROMPT = "A test fails here. Make it pass."
RULES = ["--allow", "Bash(git ls-files)", "--allow", "Bash(env)", "--allow", f"Bash({RUN_TEST})"]


def say(text: str) -> None:
    """Print a line of the demo's own."""
    print(f"demo: {text}", flush=True)


class Demo:
    """One run, in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.key = f"sk-rehearsal-{secrets.token_hex(24)}"
        self.repository = root / "till"
        self.edits_asked = 0
        self.failures: list[str] = []

    @property
    def env(self) -> dict[str, str]:
        """A clean environment, in which hutchd and hutch find each other."""
        kept = {name: os.environ[name] for name in ("PATH", "TERM", "NO_COLOR") if name in os.environ}
        return {
            **kept,
            "HOME": str(self.root / "home"),
            "LANG": "C.UTF-8",
            "HUTCH_CONFIG": str(self.root / "hutch.toml"),
            "HUTCH_STATE_DIR": str(self.root / "state"),
            "HUTCH_RUNTIME_DIR": str(self.root / "run"),
        }

    @property
    def socket(self) -> Path:
        """The path of this hutchd's client socket."""
        return self.root / "run" / "client.sock"

    async def hutch(self, *args: str, stdin: bytes | None = None, check: bool = True) -> str:
        """Run `hutch`; return its output."""
        done = await anyio.run_process(
            [sys.executable, "-m", "hutch_client", *args],
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            env=self.env,
            check=False,
            stderr=None,
            cwd=self.repository,
        )
        if check and done.returncode:
            raise SystemExit(f"demo: `hutch {' '.join(args)}` failed with {done.returncode}; {self.log_end()}")
        return done.stdout.decode()

    def log_end(self) -> str:
        """Return the end of hutchd's log, for a demo that went wrong."""
        log = self.root / "hutchd.log"
        return f"hutchd's log ends with:\n{log.read_text(errors='replace')[-4000:]}" if log.exists() else "no log"

    def check(self, what: str, holds: bool) -> None:
        """Print whether a condition holds; keep it as a failure if not."""
        say(f"{'✓' if holds else '✗'} {what}")
        if not holds:
            self.failures.append(what)

    async def run(self) -> None:
        """Run the whole demo."""
        for folder in ("home", "till", "state", "run"):
            (self.root / folder).mkdir(mode=0o700)
        write_demo_repository(self.repository)
        async with serve(key=self.key, script=demo) as model:
            (self.root / "hutch.toml").write_text(f'[providers.anthropic]\nbase_url = "{model.url}"\n')
            with (self.root / "hutchd.log").open("wb") as log:
                daemon = await anyio.open_process(
                    [sys.executable, "-m", "hutch_daemon"],
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            try:
                await self.show(model)
            finally:
                with anyio.CancelScope(shield=True):
                    await self.hutch("daemon", "stop", "--stop", check=False)
                    with anyio.move_on_after(30):
                        await daemon.wait()
                    if daemon.returncode is None:
                        daemon.kill()
                    await daemon.aclose()

    async def show(self, model: Model) -> None:
        """Run the session and check its outcome."""
        say("hutchd starts; a key goes to it by standard input")
        with anyio.fail_after(60):
            while not self.socket.exists():  # noqa: ASYNC110 a file that another process makes
                await anyio.sleep(0.05)
        await self.hutch("key", "add", "anthropic", stdin=self.key.encode())
        say(f'hutch run "{PROMPT}"')
        code = await (self.with_a_person() if sys.stdin.isatty() and sys.stdout.isatty() else self.by_itself())
        self.check("the turn completed", code == 0)
        say("git diff")
        print(await self.output("git", "--no-pager", "diff"), flush=True)
        say("hutch usage")
        print(await self.hutch("usage"), flush=True)
        tests = await anyio.run_process(RUN_TEST.split(), cwd=self.repository, check=False, env=self.env)
        self.check("the failing test passes", tests.returncode == 0)
        async with HutchClient.connect(self.socket) as hutch:
            asked = await hutch.list_permissions(m.ListPermissions(state=None))
            events = "".join([line async for line in self.record(hutch)])
        edits = [one for one in asked if one.call.action == "edit"]
        self.check("the edit was asked about, and allowed by an answer", [one.state for one in edits] == ["allowed"])
        self.check("the model server got the right key at every request", bool(model.turns) and self.only_key(model))
        self.check("the agent's shell showed its environment, and the key was not in it", self.shell_was_clean(events))

    def only_key(self, model: Model) -> bool:
        """Whether each request carried the key."""
        return all(request.key == self.key for request in model.requests)

    def shell_was_clean(self, events: str) -> bool:
        """Whether the record holds the output of `env` and does not hold the key."""
        return "HOME=" in events and self.key not in events

    async def record(self, hutch: HutchClient) -> AsyncIterator[str]:
        """Return all events of all sessions as JSON."""
        after = 0
        while True:
            page: m.EventsPage = await hutch.call("read_events", m.ReadEvents("*", after))
            for event in page.events:
                yield bytes(event).decode()
                after = msgspec.json.decode(event, type=Event).position
            if not page.more:
                return

    async def with_a_person(self) -> int:
        """Let the person at the terminal watch and answer."""
        process = await anyio.open_process(
            [sys.executable, "-m", "hutch_client", "run", *RULES, PROMPT],
            env=self.env,
            cwd=self.repository,
            stdin=None,
            stdout=None,
            stderr=None,
        )
        return await process.wait()

    async def by_itself(self) -> int:
        """Show the stream, and decide each request as a user would; print each decision."""
        async with HutchClient.connect(self.socket) as hutch, anyio.create_task_group() as tasks:
            tasks.start_soon(self.answer, hutch)
            process = await anyio.open_process(
                [sys.executable, "-m", "hutch_client", "run", *RULES, PROMPT],
                env=self.env,
                cwd=self.repository,
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=subprocess.STDOUT,
            )
            code = await process.wait()
            tasks.cancel_scope.cancel()
        return code

    async def answer(self, hutch: HutchClient) -> None:
        """Allow the edit of `till.py`; deny every other call."""
        async with hutch.follow(m.FollowEvents("*", skip=("text_delta", "thinking_delta"), answers=True)) as follow:
            async for event in follow:
                if event.kind == "permission_asked":
                    asked = msgspec.json.decode(event.data, type=Asked).permission
                    fine = asked.call.action == "edit" and asked.call.paths == (str(self.repository / "till.py"),)
                    decision: Literal["allow", "deny"] = "allow" if fine else "deny"
                    say(f"hutch asks: {asked.call.agent_tool} {' '.join(asked.call.paths)}; the answer is {decision}")
                    await hutch.answer_permission(m.AnswerPermission(asked.id, decision))

    async def output(self, *argv: str) -> str:
        """Return the output of a command."""
        done = await anyio.run_process(argv, cwd=self.repository, env=self.env)
        return done.stdout.decode()


class Asked(msgspec.Struct):
    """The data of `permission_asked`, typed."""

    permission: m.Permission


def main() -> None:
    """Run the demo; exit 0 when all that it checks holds."""
    root = Path(tempfile.mkdtemp(prefix="hutch-demo-"))
    try:
        shown = Demo(root)
        anyio.run(shown.run)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if shown.failures:
        raise SystemExit(f"demo: failed: {'; '.join(shown.failures)}")
    say("ok")


if __name__ == "__main__":
    main()
