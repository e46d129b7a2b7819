"""Decides what enforces the sandbox of agents by trying it: bubblewrap, otherwise Landlock, otherwise nothing.

Theory. The executor sets up sandboxes, so the executor's own program tries them: as the account, with each network,
with Hutch's own paths hidden. A kind is tried when a session needs it: Landlock only if the settings choose it or
bubblewrap does not serve them. What a trial found is kept, and each session uses it only while it can still hold:

- A trial of bubblewrap is one of a certain file (path, device, inode, size, times) and of the kernel settings that
  close user namespaces. Both are looked at before and after the trial, and before each session. If they differ,
  bubblewrap is tried again. So a bubblewrap that was replaced, removed or installed is noticed by the next session.
- A change that no such look shows is noticed by the executor: it tries a session's own sandbox at each start and
  refuses the session if that does not hold. Then `doubt` makes the next session try again.
- A trial that failed is repeated after a pause that doubles, so that a permanent failure costs little.

Always true:

- No sandbox is used that was not tried. With `[sandbox] mode = "require"` only the kinds in `[sandbox] kind` count, and
  without one only bubblewrap: Landlock holds less.
- If bubblewrap stops to hold although nothing about it has changed, and Landlock does not hold either, sessions are
  refused (`SandboxChoice.is_lost`): an agent that uses up the account's namespaces must not open the next session.
- One trial of a kind runs at a time; the others wait for its result.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from os.path import join, realpath
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from hutch_daemon.environments.user_namespaces import closed_by, kernel_settings
from hutch_daemon.settings import SandboxSettings
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff

__all__ = [
    "BUBBLEWRAP_ADDS",
    "PROBE_COMMAND",
    "KindTrial",
    "Places",
    "ProgramIdentity",
    "SandboxChoice",
    "SandboxProbe",
    "SandboxProber",
    "TrialRun",
    "find_bubblewrap",
    "how_to_install",
    "kinds_of",
    "read_trial",
    "try_here",
]

_log: Final = structlog.get_logger(__name__)

Places = tuple[Sequence[str], Sequence[str]]
"""Two lists: paths that no agent may see, and programs of Hutch that no agent may change."""
TrialRun = Callable[[m.SandboxSpec], Awaitable[str]]
"""Tries the sandbox as an account; returns a `SandboxTrial` as JSON, or a sentence that says why there is none."""
PROBE_COMMAND: Final = (sys.executable, "-P", "-m", "hutch_executor.sandbox")
BUBBLEWRAP_ADDS: Final = (
    "processes of the session's own, a private /tmp and /run, hidden names of files and processes, a loopback of its"
    " own, the network allow-list and, under another account, the level strict"
)
"""What bubblewrap adds to a sandbox by Landlock."""
_NAMES: Final[Mapping[m.SandboxKind, str]] = {"bubblewrap": "bubblewrap", "landlock": "Landlock"}
_NOT_INSTALLED: Final = "bubblewrap (bwrap) is not installed"
_DEADLINE: Final = 60.0
_ATTEMPTS: Final = 3
"""How often a bubblewrap is tried that changes during each trial."""
_PAUSES: Final = (5.0, 300.0)
"""Seconds before a failed trial is repeated if nothing has changed: the first pause, and the longest."""
_DOUBT: Final = 5.0
"""Seconds in which a result that has not changed is doubted once only."""
_LOOKS: Final = anyio.CapacityLimiter(4)
"""The limit of threads that look for bubblewrap: a folder on PATH may be on a file server that is down."""


@dataclass(frozen=True, slots=True)
class ProgramIdentity:
    """A program: its path, and the file that the path leads to."""

    path: str
    file: tuple[int, ...]
    """Its device, inode, size, and the times of its last changes of content and of status, in ns."""


@dataclass(frozen=True, slots=True)
class BubblewrapState:
    """What a trial of bubblewrap depends on, as far as a look can tell."""

    program: ProgramIdentity | None
    """None: bubblewrap is not installed."""
    kernel: tuple[str, ...]
    """The kernel settings that can close user namespaces."""


def find_bubblewrap() -> ProgramIdentity | None:
    """Return the bubblewrap that would be used now, the first on PATH; None without one. Blocks for a moment.

    One in a relative folder on PATH counts as none: it would be another one in each directory.
    """
    path = shutil.which("bwrap")
    try:
        found = os.stat(path) if path is not None else None
    except OSError:  # it went meanwhile
        return None
    if path is None or found is None or not os.path.isabs(path):
        return None
    file = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return ProgramIdentity(path, file)


async def _look() -> BubblewrapState:
    def look() -> BubblewrapState:
        return BubblewrapState(find_bubblewrap(), kernel_settings())

    return await anyio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=_LOOKS)


@dataclass(frozen=True, slots=True)
class KindTrial:
    """What was found of one kind of sandbox."""

    kind: m.SandboxKind
    faults: Mapping[str, str] = field(default_factory=dict)
    """Why it does not hold, by network; a fault of `full` is one of every network. Clauses without a full stop."""
    program: ProgramIdentity | None = None
    """The bubblewrap that was tried; None: it is not installed."""
    version: str = ""
    """The version of bubblewrap."""
    abi: int = 0
    """The kernel's Landlock ABI; 0 if it has none."""
    remedy: str = ""
    """For bubblewrap that does not hold: what to do about it."""

    @property
    def named(self) -> str:
        """The kind with its version, for the user."""
        if self.kind == "bubblewrap":
            return self.version or "bubblewrap"
        return f"Landlock, ABI {self.abi}"

    def fault(self, network: str) -> str:
        """Return a clause that says why a session with this network cannot have this sandbox, or ""."""
        if self.kind == "bubblewrap" and self.program is None:
            return _NOT_INSTALLED
        name = _NAMES[self.kind]
        if why := self.faults.get("full", ""):
            return f"{name} cannot set one up here ({why})"
        if why := self.faults.get(network, ""):
            return f'[sandbox] network = "{network}" does not work here with {name} ({why})'
        return ""


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """The sandbox of a session, or the reason why it has none."""

    spec: m.SandboxSpec | None
    why: str = ""
    """Without a sandbox: a sentence that says why."""
    named: str = ""
    """What enforces it, with the version."""
    abi: int = 0
    """The kernel's Landlock ABI, with a sandbox by Landlock."""
    more: str = ""
    """A sentence about what would hold more, and how to get it; empty if nothing would."""
    is_lost: bool = False
    """Without a sandbox: it held before, and nothing about it has changed that hutchd can see."""


@dataclass(frozen=True, slots=True)
class SandboxProbe:
    """What was found of each kind. None: it was not tried, since nothing needed it."""

    bubblewrap: KindTrial | None = None
    landlock: KindTrial | None = None
    hide: tuple[str, ...] = ()
    """Paths of Hutch that no agent may see."""
    show: tuple[str, ...] = ()
    """Programs of Hutch, which no agent may change."""
    is_lost: bool = False
    """Bubblewrap held before, does not hold now, and is unchanged."""
    untried: str = "it was not tried"

    def of(self, kind: m.SandboxKind) -> KindTrial | None:
        """Return what was found of a kind."""
        return self.bubblewrap if kind == "bubblewrap" else self.landlock

    def choose(self, cwd: str, home: str, settings: SandboxSettings) -> SandboxChoice:
        """Choose the sandbox of a session in the directory `cwd`: of the first kind that serves it.

        Looks at links in the file system.
        """

        def absolute(paths: Sequence[str]) -> tuple[str, ...]:
            return tuple(join(home, path[2:]) if path.startswith("~/") else path for path in paths)

        if settings.mode == "off":
            return _none('the settings say [sandbox] mode = "off"')
        if any(Path(name).is_relative_to(cwd) for name in (home, realpath(home))):
            return _none("it works in the home itself")
        if inside := next((path for path in self.hide if Path(path).is_relative_to(cwd)), None):  # agents could move it
            return _none(f"{inside} lies in its working directory")
        spec = m.SandboxSpec(
            program="",
            hide=(*self.hide, *absolute(settings.hide)),
            show=(*self.show, *absolute(settings.show)),
            write=absolute(settings.write),
            home=settings.home,
            network=settings.network,
            allow=settings.allow,
        )
        faults: list[str] = []
        for kind in kinds_of(settings):
            trial = self.of(kind)
            fault = self.untried if trial is None else trial.fault(settings.network)
            if not fault and kind == "landlock":
                fault = _unprotected(spec, cwd)
            if trial is None or fault:
                faults.append(fault)
                continue
            program = trial.program.path if trial.program is not None else ""
            chosen = msgspec.structs.replace(spec, kind=kind, program=program)
            more = self._more(settings) if kind == "landlock" else ""
            return SandboxChoice(chosen, named=trial.named, abi=trial.abi, more=more)
        if settings.mode == "require" and settings.kind is None:
            faults.append('with [sandbox] mode = "require" Landlock is used only if kind = "any" or "landlock"')
        return replace(_none("; ".join(faults)), is_lost=self.is_lost)

    def _more(self, settings: SandboxSettings) -> str:
        """Return a sentence about what bubblewrap would add to a sandbox by Landlock."""
        if "bubblewrap" not in kinds_of(settings):
            now = 'the settings exclude it: [sandbox] kind = "landlock"'
        elif self.bubblewrap is None:
            now = self.untried
        else:
            now = ": ".join(filter(None, (self.bubblewrap.fault(settings.network), self.bubblewrap.remedy)))
        return f"The sandbox is one of Landlock; bubblewrap would add {BUBBLEWRAP_ADDS}. Now {now}."


def kinds_of(settings: SandboxSettings) -> tuple[m.SandboxKind, ...]:
    """Return the kinds of sandbox that the settings allow, the preferred one first."""
    if settings.mode == "off":
        return ()
    match settings.kind:
        case "landlock":
            return ("landlock",)
        case "any":
            return ("bubblewrap", "landlock")
        case None if settings.mode == "auto":
            return ("bubblewrap", "landlock")
        case _:
            return ("bubblewrap",)


@dataclass(slots=True)
class _Kept:
    """The result of a trial, and how long it is used."""

    trial: KindTrial
    until: float
    state: BubblewrapState | None = None
    """For bubblewrap: what was tried."""
    doubted: float = -inf
    """The time when it was last doubted."""


class SandboxProber:
    """Tries the kinds of sandbox for one account, when they are needed and when a result may not hold any more."""

    def __init__(self, places: Places, run: TrialRun, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`run` tries a sandbox as the account."""
        hide, show = places
        self._hide = tuple(dict.fromkeys((*hide, *map(realpath, hide))))  # cwd may contain the path under either name
        self._show = tuple(show)
        self._run = run
        self._clock = clock
        self._trying = anyio.Lock()
        self._kept: dict[m.SandboxKind, _Kept] = {}
        self._pauses = {kind: Backoff(*_PAUSES, jitter=0.0, clock=clock) for kind in _NAMES}
        self._held: BubblewrapState | None = None
        """The state in which bubblewrap held last."""

    @property
    def last(self) -> SandboxProbe:
        """What is known without trying anything."""
        found = {kind: kept.trial for kind, kept in self._kept.items()}
        bubblewrap = self._kept.get("bubblewrap")
        return SandboxProbe(
            found.get("bubblewrap"),
            found.get("landlock"),
            self._hide,
            self._show,
            bubblewrap is not None and "full" in bubblewrap.trial.faults and bubblewrap.state == self._held,
        )

    async def probe(self, settings: SandboxSettings) -> SandboxProbe:
        """Return what holds now for these settings; tries each kind that it needs and for which no result is kept.

        Cheap if there is one. Otherwise it takes a fraction of a second, or a minute if something hangs. Raises only
        the errors of `run`, and keeps no result then.
        """
        kinds = kinds_of(settings)
        async with self._trying:
            state = await _look() if "bubblewrap" in kinds else None
            for kind in kinds:
                if not (await self._current(kind, state)).fault(settings.network):
                    break
            return self.last

    def doubt(self, kind: m.SandboxKind, probe: SandboxProbe) -> None:
        """Let the next session try a kind again, since a sandbox of it was refused after this probe. Returns at once.

        Does nothing if it was tried again meanwhile, or if the same result was doubted a moment ago.
        """
        kept, now = self._kept.get(kind), self._clock()
        if kept is None or kept.trial is not probe.of(kind) or now - kept.doubted < _DOUBT:
            return
        kept.doubted, kept.until = now, now

    async def _current(self, kind: m.SandboxKind, state: BubblewrapState | None) -> KindTrial:
        kept = self._kept.get(kind)
        if kept is not None and self._clock() < kept.until and (kind == "landlock" or kept.state == state):
            return kept.trial
        trial, tried = await self._try_bubblewrap() if kind == "bubblewrap" else (await self._try_landlock(), None)
        pauses = self._pauses[kind]
        if kept is None or kept.state != tried or "full" not in trial.faults:
            pauses.reset()
        until = self._clock() + pauses.next() if "full" in trial.faults else inf
        if kind == "bubblewrap" and trial.program is None:
            until = inf  # nothing was tried; the look notices one that is installed
        fresh = _Kept(trial, until, tried)
        if kept is not None and kept.trial == trial and kept.state == tried:
            fresh = replace(fresh, trial=kept.trial, doubted=kept.doubted)
        elif fault := trial.fault("full"):
            _log.warning("a sandbox of this kind does not hold", kind=kind, why=fault)
        else:
            _log.info("a sandbox of this kind holds", kind=kind, version=trial.named)
        self._kept[kind] = fresh
        if tried is not None and tried.program is not None and "full" not in trial.faults:
            self._held = tried
        return fresh.trial

    async def _try_bubblewrap(self) -> tuple[KindTrial, BubblewrapState]:
        """Try the bubblewrap of now; again if it changed meanwhile."""
        state = await _look()
        for _ in range(_ATTEMPTS):
            trial = await self._try_program(state)
            before, state = state, await _look()
            if before == state:
                return trial, state
        why = "it changed each time while it was tried"
        return KindTrial("bubblewrap", {"full": why}, state.program, remedy="try again later"), state

    async def _try_program(self, state: BubblewrapState) -> KindTrial:
        program = state.program
        if program is None:
            return KindTrial("bubblewrap", remedy=await anyio.to_thread.run_sync(how_to_install, limiter=_LOOKS))
        spec = m.SandboxSpec(program.path, self._hide, self._show)
        faults = read_trial(await self._run(spec)).faults
        remedy = closed_by(state.kernel) if "full" in faults else ""
        version = "" if "full" in faults else await _output((program.path, "--version")) or "bubblewrap"
        return KindTrial("bubblewrap", faults, program, version, remedy=remedy)

    async def _try_landlock(self) -> KindTrial:
        found = read_trial(await self._run(m.SandboxSpec("", self._hide, self._show, kind="landlock")))
        return KindTrial("landlock", found.faults, abi=found.abi)


def read_trial(output: str | bytes) -> m.SandboxTrial:
    """Return the trial that an executor printed. Any other output is the fault of every network."""
    try:
        return msgspec.json.decode(output, type=m.SandboxTrial)
    except msgspec.DecodeError:
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return m.SandboxTrial({"full": text.strip().rstrip(".") or "the trial gave no answer"})


async def try_here(spec: m.SandboxSpec, command: Sequence[str] = PROBE_COMMAND) -> str:
    """Try a sandbox as hutchd's own account; a `TrialRun`."""
    return await _output(command, msgspec.json.encode(spec))


def how_to_install() -> str:
    """Return how bubblewrap is installed here."""
    return "apt-get install bubblewrap" if shutil.which("apt-get") else "install the package bubblewrap"


def _none(why: str) -> SandboxChoice:
    return SandboxChoice(None, f"There is no sandbox around the agent: {why}.")


def _unprotected(spec: m.SandboxSpec, cwd: str) -> str:
    """Return a clause if Landlock cannot protect a place, since it lies in a writable one; otherwise "".

    A right of Landlock is one to a whole hierarchy: nothing inside can be taken out.
    """

    def named(paths: Iterable[str]) -> list[Path]:
        return [Path(name) for path in paths for name in {path, realpath(path)}]

    writable = named((cwd, *spec.write))
    for place in named((*spec.hide, *spec.show)):
        if around := next((one for one in writable if place.is_relative_to(one)), None):
            return f"Landlock cannot protect {place}, which lies in {around}, where the agent may write"
    return ""


async def _output(command: Sequence[str], question: bytes = b"") -> str:
    """Return the output of a command, or a description of its failure."""
    try:
        with anyio.fail_after(_DEADLINE):
            done = await anyio.run_process(command, input=question, stderr=subprocess.PIPE, check=False, cwd="/")
    except (OSError, TimeoutError) as error:
        return str(error) or "it took too long"
    output = (done.stdout or done.stderr).decode(errors="replace").strip()
    return output or f"exit code {done.returncode}"
