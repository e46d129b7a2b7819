"""A host with several users: real accounts, a real launcher as root, a real hutchd as an account of its own.

All programs are of the installed copy, which every account can read and execute. Each user has an account, and calls
`hutch` as this account. A process that is left when the host ends is a failure, and is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from hutch_client.client import HutchClient
from tests.accounts import Account, Installed, account, installed, kill_all, processes_of
from tests.system.host import START, Done

__all__ = ["SharedHost", "shared_host"]

PERMISSIVE = "bypass"
_GROUPS = Path("/sys/fs/cgroup")
CONNECTOR = Path(__file__).with_name("programs") / "connector.py"


@dataclass(slots=True)
class SharedHost:
    """Directories, settings, and the processes of the host."""

    root: Path
    code: Installed
    hutch_account: Account
    people: dict[str, Account]
    settings: str
    launcher_settings: str
    hutchd_env: dict[str, str] = field(default_factory=dict)
    daemon: subprocess.Popen[bytes] | None = None
    launcher: subprocess.Popen[bytes] | None = None
    program: tuple[Path | str, ...] = ()
    """The command that starts a hutchd in user mode; empty: the installed hutchd, in system mode."""
    around: tuple[Path | str, ...] = ()
    """A command of root that becomes the account (its uid and gid come next) and executes the rest."""
    _scripts: int = 0
    _doors: int = 0

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def runtime(self) -> Path:
        return self.root / "run"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def config(self) -> Path:
        return self.root / "etc" / "hutch.toml"

    @property
    def launcher_config(self) -> Path:
        return self.root / "etc" / "launcher.toml"

    @property
    def launcher_socket(self) -> Path:
        return self.root / "launcher" / "launcher.sock"

    @property
    def log(self) -> Path:
        return self.root / "hutchd.log"

    @property
    def env(self) -> dict[str, str]:
        """Return a clean environment with this host's paths."""
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HUTCH_CONFIG": str(self.config),
            "HUTCH_STATE_DIR": str(self.state),
            "HUTCH_RUNTIME_DIR": str(self.runtime),
        }

    # ------------------------------------------------------------ processes

    def write_settings(self) -> None:
        """Write both settings files, as root."""
        settings = self.settings
        if not self.program:
            settings = settings if "[isolation]" in settings else f"{settings}\n[isolation]\n"
            place = f'[isolation]\nlauncher_socket = "{self.launcher_socket}"\n'
            settings = settings.replace("[isolation]\n", place)
        self.config.write_text(settings)
        names = ", ".join(json.dumps(one.name) for one in self.people.values())
        self.launcher_config.write_text(
            f'serve = "{self.hutch_account.name}"\nusers = [{names}]\nspool = "{self.spool}"\n'
            f"{self.launcher_settings}\n"
        )
        for path in (self.config, self.launcher_config):
            path.chmod(0o644)

    async def start_launcher(self) -> None:
        """Start the launcher as root and wait for its socket."""
        with (self.root / "launcher.log").open("ab") as log:
            self.launcher = subprocess.Popen(
                [
                    *(self.code.command("hutch-launcher"), "--config", self.launcher_config),
                    *("--listen", self.launcher_socket),
                ],
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        with anyio.fail_after(START):
            while not self.launcher_socket.is_socket():
                assert self.launcher.poll() is None, self.log_text()
                await anyio.sleep(0.02)

    async def start(self) -> None:
        """Start hutchd as its account and wait until it answers."""
        self.write_settings()
        its = self.hutch_account
        words: list[Path | str] = [*(self.program or (self.code.command("hutchd"), "--system"))]
        if self.around:
            words = [*self.around, str(its.uid), str(its.gid), *words]
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                words,
                env={**self.env, "HOME": str(self.hutch_account.home), **self.hutchd_env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                user=None if self.around else its.uid,
                group=None if self.around else its.gid,
                extra_groups=[],
                start_new_session=True,
            )
        with anyio.move_on_after(START):
            while self.daemon.poll() is None:
                done = await self.hutch(self.hutch_account, "status", "-o", "json", code=None)
                if done.code == 0:
                    return
                await anyio.sleep(0.1)
        raise AssertionError(f"hutchd did not start (code {self.daemon.returncode}):\n{self.log_text()}")

    async def end(self, process: subprocess.Popen[bytes] | None, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the launcher or hutchd, and wait for its end."""
        assert process is not None
        process.send_signal(number)
        return await anyio.to_thread.run_sync(lambda: process.wait(90))

    # ------------------------------------------------------------ actions of users

    async def hutch(
        self,
        who: Account,
        *args: str | Path,
        input: str = "",
        code: int | None = 0,
        env: Mapping[str, str] | None = None,
        within: float = 120.0,
    ) -> Done:
        """Run the `hutch` command as a user, in their home; `code` is the expected exit code (None: any)."""
        words = [self.code.command("hutch"), *args]
        environ = {**self.env, **who.env, "NO_COLOR": "1", **(env or {})}
        done = await anyio.to_thread.run_sync(
            lambda: who.run(*words, input=input, env=environ, timeout=within), abandon_on_cancel=True
        )
        result = Done(done.returncode, done.stdout, done.stderr)
        assert code is None or result.code == code, f"hutch {' '.join(map(str, args))}: {result}\n{self.log_text()}"
        return result

    @asynccontextmanager
    async def client(self, who: Account, **settings: Any) -> AsyncIterator[HutchClient]:
        """Return the Python client as a user, connected through a process of that account."""
        self._doors += 1
        path = self.root / "doors" / f"{self._doors}.sock"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            connector = subprocess.Popen(
                [str(self.code.python), "-I", "-c", CONNECTOR.read_text(), str(self.runtime / "client.sock")],
                stdin=listening.fileno(),
                env=who.env,
                cwd="/",
                user=who.uid,
                group=who.gid,
                extra_groups=[],
            )
        try:
            async with HutchClient.connect(path, **settings) as made:
                yield made
        finally:
            connector.kill()
            connector.wait()
            path.unlink()

    def script(self, who: Account, lines: Sequence[Mapping[str, Any]]) -> Path:
        """Write a script for the script runner into a user's home; return its path."""
        self._scripts += 1
        path = who.home / f"script-{self._scripts}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.chown(path, who.uid, who.gid)
        return path

    def folder(self, who: Account, name: str) -> Path:
        """Create a working directory in a user's home."""
        made = who.home / name
        made.mkdir(mode=0o700, exist_ok=True)
        os.chown(made, who.uid, who.gid)
        return made

    async def play(
        self, who: Account, lines: Sequence[Mapping[str, Any]], *more: str | Path, folder: str = "work", **settings: Any
    ) -> list[dict[str, Any]]:
        """Run a script in a new session of a user; return its events."""
        script = self.script(who, lines)
        words: list[str | Path] = ["run", "--agent", "script", "--script", script, "--mode", PERMISSIVE, "-o", "jsonl"]
        done = await self.hutch(who, *words, "-C", self.folder(who, folder), *more, "go", **{"code": None, **settings})
        return [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]

    async def shell(self, who: Account, command: str, *more: str | Path, **settings: Any) -> str:
        """Run a shell command in a user's agent; return its output."""
        line = {"tool": "Bash", "input": {"command": command}, "run": True}
        events = await self.play(who, [line], *more, **settings)
        results = [event["data"] for event in events if event.get("kind") == "tool_result"]
        assert results, f"the command did not run: {events}\n{self.log_text()}"
        return str(results[-1]["text"] if "text" in results[-1] else results[-1])

    def log_text(self) -> str:
        """Return the ends of all logs."""
        logs = [self.log, self.root / "launcher.log", *self.state.glob("executors/*")]
        return "".join(f"== {log.name}\n{log.read_text(errors='replace')[-8000:]}" for log in logs if log.is_file())


@asynccontextmanager
async def shared_host(
    *names: str, settings: str = "", launcher: str = "", start: bool = True, own: bool = False
) -> AsyncIterator[SharedHost]:
    """Create a host for these users (`alice`, …) and start it; at the end, no process is left.

    With `own` the hutchd is the first user's, in user mode, from a virtual environment in that user's home.
    """
    code = installed()
    with ExitStack() as stack:
        people = {name: stack.enter_context(account(name[:8])) for name in names}
        hutch = people[names[0]] if own else stack.enter_context(account("hutch"))
        root = Path(tempfile.mkdtemp(prefix="hutch-t-", dir="/var/lib"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        root.chmod(0o755)
        made = SharedHost(root, code, hutch, people, settings, launcher)
        if own:
            made.program = (_environment(hutch, code), "-P", "-m", "hutch_daemon")
        for path, owner, mode in (
            (made.state, hutch, 0o700),
            (made.runtime, hutch, 0o700 if own else 0o755),
            (root / "etc", None, 0o755),
            (root / "launcher", None, 0o755),
            (root / "doors", None, 0o700),
            (made.spool, None, 0o711),
        ):
            path.mkdir()
            path.chmod(mode)
            if owner is not None:
                os.chown(path, owner.uid, owner.gid)
        made.write_settings()
        failed = True
        try:
            if start:
                await made.start_launcher()
                await made.start()
            yield made
            failed = False
        finally:
            with anyio.CancelScope(shield=True):
                left = await _end(made, failed)
    assert not left, f"left behind: {left}"


def _environment(who: Account, code: Installed) -> Path:
    """Create a virtual environment of a user's own, with all that is installed; return its interpreter."""
    root = who.home / "venv"
    packages = root / code.packages.relative_to(code.root)
    packages.mkdir(parents=True)
    (packages / "rest.pth").write_text(f"import site; site.addsitedir({str(code.packages)!r})\n")
    base = code.python.resolve()
    (root / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    python = root / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(base)
    for path in (root, *root.rglob("*")):
        os.chown(path, who.uid, who.gid, follow_symlinks=False)
    return python


async def _end(host: SharedHost, failed: bool) -> dict[str, list[int]]:
    """End everything; return the processes that hutchd did not end itself."""
    if failed:
        print(f"---- {host.root.name} ----\n{host.log_text()}")
    left: dict[str, list[int]] = {}
    if host.daemon is not None and host.daemon.poll() is None:
        await host.end(host.daemon)
        with anyio.move_on_after(20):
            while left := {name: found for name, one in host.people.items() if (found := processes_of(one.uid))}:
                await anyio.sleep(0.05)
    if host.launcher is not None and host.launcher.poll() is None:
        await host.end(host.launcher)
    for one in (*host.people.values(), host.hutch_account):
        with contextlib.suppress(AssertionError):
            kill_all(one.uid)
    names = {f"hutch-{log.stem}" for log in host.state.glob("executors/x-*.log")}
    for place, folders, _ in os.walk(_GROUPS):
        for name in names.intersection(folders):
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(place, name))
    return {} if failed else left
