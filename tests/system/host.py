"""A host for a test: its own directories and settings, a real hutchd, and the real `hutch` command.

All processes of a host, and no others, have its HOME. A process that is left when the host ends fails the test and is
killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.rehearsal import Model
from tests.system import processes
from tests.system.double import double_python

KEY = "sk-ant-the-key-of-this-host-0123456789"
"""The key that the scripted model accepts."""

HUTCHD = (sys.executable, "-m", "hutch_daemon")
HUTCH = (sys.executable, "-m", "hutch_client")
SETTINGS_READ = "settings read"
"""The text that hutchd logs once it has read its settings again."""
START = 60.0
"""Seconds that a hutchd may take to answer, on a slow machine."""


@dataclass(frozen=True, slots=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return its standard output, parsed as JSON."""
        return json.loads(self.out)


def settings_for(model: Model, more: str = "") -> str:
    """Return settings for a Claude that uses `model` and retries each request once."""
    return f'[providers.anthropic]\nbase_url = "{model.url}"\n[turns]\nretries = 1\n{more}'


@dataclass(slots=True)
class Host:
    """Directories, settings and at most one running hutchd."""

    root: Path
    settings: str
    extra_env: dict[str, str] = field(default_factory=dict)
    daemon: anyio.abc.Process | None = None
    program: tuple[str, ...] = HUTCHD
    """The command that starts hutchd."""
    _scripts: int = 0

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def runtime(self) -> Path:
        return self.root / "run"

    @property
    def config(self) -> Path:
        return self.root / "hutch.toml"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def log(self) -> Path:
        return self.root / "hutchd.log"

    @property
    def socket(self) -> Path:
        return self.runtime / "client.sock"

    @property
    def mark(self) -> str:
        return f"HOME={self.home}"

    @property
    def env(self) -> dict[str, str]:
        """Return a clean environment: of the machine's, only PATH is kept."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "HUTCH_CONFIG": str(self.config),
            "HUTCH_STATE_DIR": str(self.state),
            "HUTCH_RUNTIME_DIR": str(self.runtime),
            **self.extra_env,
        }

    async def start(self, *, env: Mapping[str, str] | None = None) -> None:
        """Start hutchd and wait until it answers. If it does not, the error shows its log."""
        assert self.daemon is None
        self.write_settings()
        with self.log.open("ab") as log:
            self.daemon = await anyio.open_process(
                self.program,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.env, **(env or {})},
                cwd=self.root,
            )
        with anyio.move_on_after(START):
            while self.daemon.returncode is None:
                try:
                    async with self.client(redial_for=0.0) as client:
                        await client.get_status()
                        return
                except Exception:  # noqa: BLE001 - any error means that hutchd is not ready yet
                    await anyio.sleep(0.05)
        raise AssertionError(f"hutchd did not start (code {self.daemon.returncode}):\n{self.log_text()}")

    async def kill(self) -> None:
        """Send SIGKILL to hutchd only."""
        await self._end(signal.SIGKILL)

    async def stop(self, *, within: float = 60.0) -> int:
        """Send SIGTERM and wait for the exit; return the exit code."""
        with anyio.fail_after(within):
            return await self._end(signal.SIGTERM)

    async def exited(self, *, within: float = 60.0) -> int:
        """Wait until hutchd exits by itself; return the exit code."""
        with anyio.fail_after(within):
            return await self._end(None)

    async def _end(self, number: signal.Signals | None) -> int:
        assert self.daemon is not None
        if number is not None and self.daemon.returncode is None:
            self.daemon.send_signal(number)
        code = await self.daemon.wait()
        await self.daemon.aclose()
        self.daemon = None
        return code

    @property
    def pid(self) -> int:
        assert self.daemon is not None
        return self.daemon.pid

    def signal(self, number: signal.Signals) -> None:
        """Send hutchd a signal."""
        assert self.daemon is not None
        self.daemon.send_signal(number)

    def client(self, **settings: Any) -> AbstractAsyncContextManager[HutchClient]:
        """Return a Python client of this host."""
        return HutchClient.connect(self.socket, **settings)

    async def hutchd(self, *args: str, env: Mapping[str, str] | None = None, within: float = 60.0) -> Done:
        """Run a second hutchd, which must exit by itself."""
        with anyio.fail_after(within):
            done = await anyio.run_process(
                [*HUTCHD, *args], check=False, env={**self.env, **(env or {})}, cwd=self.root
            )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    async def hutch(
        self,
        *args: str,
        input: str = "",
        code: int | None = 0,
        env: Mapping[str, str] | None = None,
        within: float = 120.0,
    ) -> Done:
        """Run the `hutch` command; `code` is the expected exit code (None: any)."""
        with anyio.fail_after(within):
            done = await anyio.run_process(
                [*HUTCH, *args],
                input=input.encode(),
                check=False,
                env={**self.env, "NO_COLOR": "1", **(env or {})},
                cwd=self.work,
            )
        result = Done(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert code is None or result.code == code, f"hutch {' '.join(args)}: {result}\n{self.log_text()}"
        return result

    @asynccontextmanager
    async def hutch_beside(self, *args: str) -> AsyncIterator[anyio.abc.Process]:
        """Run the `hutch` command during the block, with its output in pipes; kill it if it is left at the end."""
        process = await anyio.open_process(
            [*HUTCH, *args], stdin=subprocess.DEVNULL, env={**self.env, "NO_COLOR": "1"}, cwd=self.work
        )
        async with process:
            try:
                yield process
            finally:
                if process.returncode is None:
                    process.kill()

    async def claude(
        self, hutch: HutchClient, folder: str, mode: m.PermissionMode = "bypass", **more: Any
    ) -> m.Session:
        """Open a session of Claude in a folder of its own below `work`."""
        return await hutch.open_session(m.OpenSession("claude", str(self.folder(folder)), permission_mode=mode, **more))

    async def script(
        self, hutch: HutchClient, lines: Sequence[Mapping[str, Any]], folder: str | None = None, **more: Any
    ) -> m.Session:
        """Open a session that runs these script lines, whatever the prompt is."""
        self._scripts += 1
        name = f"script-{self._scripts}"
        options = m.AgentOptions(script=self.script_file(name, lines))
        return await hutch.open_session(
            m.OpenSession("script", str(self.folder(folder or name)), options=options, **more)
        )

    def folder(self, name: str) -> Path:
        """Return a new folder below `work`."""
        made = self.work / name
        made.mkdir(exist_ok=True)
        return made

    def write_settings(self) -> None:
        """Write the settings file."""
        self.config.write_text(self.settings)

    async def reload(self, settings: str) -> None:
        """Make hutchd read these settings, which is faster than starting a new hutchd."""
        self.settings = settings
        self.write_settings()
        before = self.log.read_text().count(SETTINGS_READ)
        self.signal(signal.SIGHUP)
        with anyio.fail_after(START):
            while self.log.read_text().count(SETTINGS_READ) == before:
                await anyio.sleep(0.02)

    def log_text(self) -> str:
        """Return the ends of hutchd's log and of the executors' output."""
        logs = [self.log, *self.state.glob("executors/*")]
        return "".join(log.read_text(errors="replace")[-20_000:] for log in logs if log.is_file())

    def script_file(self, name: str, lines: Sequence[Mapping[str, Any]]) -> str:
        """Write a script for the script runner; return its path."""
        path = self.root / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)


@asynccontextmanager
async def host(
    settings: str = "", *, start: bool = True, env: Mapping[str, str] | None = None, double: bool = False
) -> AsyncIterator[Host]:
    """Create a host and start its hutchd; at the end, check that no process is left.

    With `double` its agents are the double of the Claude CLI, which starts in a tenth of the time.
    """
    root = Path(tempfile.mkdtemp(prefix="hutch-host-"))
    made = Host(root, settings, dict(env or {}))
    if double:
        made.program = (str(double_python()), *HUTCHD[1:])
    for directory in (made.state, made.runtime, made.home, made.work):
        directory.mkdir(mode=0o700)
    failed = True
    try:
        if start:
            await made.start()
        yield made
        failed = False
    finally:
        with anyio.CancelScope(shield=True):
            try:
                if made.daemon is not None:
                    with anyio.move_on_after(30):
                        await made.stop()
                    if made.daemon is not None:
                        await made.kill()
                left = await processes.gone(made.mark, within=0 if failed else 20)
                processes.kill(left)
                await processes.gone(made.mark, within=10)
            finally:
                if failed:
                    print(f"---- hutchd of {root.name} ----\n{made.log_text()}")
                shutil.rmtree(root, ignore_errors=True)
    assert not left, f"left behind: {left}"
