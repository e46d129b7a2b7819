"""Tries whether agents can have a sandbox here, and keeps the result or the reason why not.

The executor sets up the sandbox (with bubblewrap), so the executor's own program tries it: as the account, it runs a
small command in a sandbox that hides Hutch's own paths, once with each network, and reports the failures. A session's
sandbox depends on this result and on the settings. bubblewrap may be removed while hutchd runs, so it is checked again
for each session: if `lost` returns a reason, no session may start, rather than one with less isolation than promised.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import join, realpath
from pathlib import Path

import anyio
import msgspec

from hutch_daemon.settings import SandboxSettings
from hutch_shared import messages as m

__all__ = ["PROBE_COMMAND", "SandboxProbe", "TrialRun", "probe"]

PROBE_COMMAND = (sys.executable, "-P", "-m", "hutch_executor.sandbox")
TrialRun = Callable[[m.SandboxSpec], Awaitable[str]]
"""Tries the sandbox as an account; returns a `SandboxTrial` as JSON, or a sentence that says why there is none."""
_DEADLINE = 60.0


@dataclass(frozen=True, slots=True)
class SandboxProbe:
    """The result of a probe."""

    program: str | None = None
    """The path of bubblewrap; None if the sandbox does not work."""
    why: str = "The sandbox was not probed."
    """The reason why the sandbox does not work or, if it works, the version of bubblewrap."""
    hide: tuple[str, ...] = ()
    """Paths of Hutch that no agent may see."""
    show: tuple[str, ...] = ()
    """Programs of Hutch, which no agent may change."""
    unavailable_networks: Mapping[str, str] = field(default_factory=dict)
    """The reasons why the sandbox does not work with some values of `[sandbox] network`, by value."""

    def spec_for(self, cwd: str, home: str, settings: SandboxSettings) -> tuple[m.SandboxSpec | None, str]:
        """Return the sandbox of a session in the directory `cwd`, or None and the reason why there is none."""

        def absolute(paths: Sequence[str]) -> tuple[str, ...]:
            return tuple(join(home, path[2:]) if path.startswith("~/") else path for path in paths)

        if settings.mode == "off":
            return None, 'There is no sandbox around the agent: the settings say [sandbox] mode = "off".'
        missing = self._missing(settings)
        if any(Path(name).is_relative_to(cwd) for name in (home, realpath(home))):
            missing = missing or "There is no sandbox around the agent: it works in the home itself."
        if inside := next((path for path in self.hide if Path(path).is_relative_to(cwd)), None):  # agents could move it
            missing = missing or f"There is no sandbox around the agent: {inside} lies in its working directory."
        if self.program is None or missing:
            return None, missing
        return (
            m.SandboxSpec(
                program=self.program,
                hide=(*self.hide, *absolute(settings.hide)),
                show=(*self.show, *absolute(settings.show)),
                write=absolute(settings.write),
                home=settings.home,
                network=settings.network,
                allow=settings.allow,
            ),
            "",
        )

    def lost(self) -> str:
        """Return a sentence if the sandbox worked but bubblewrap is gone now, otherwise "". Cheap."""
        if self.program is None or os.access(self.program, os.X_OK):
            return ""
        return (
            f"There is no sandbox around the agent: {self.program} was there when hutchd started, and is gone now, or"
            " may not be run any more."
        )

    def _missing(self, settings: SandboxSettings) -> str:
        if self.program is None:
            return self.why
        if why := self.lost():
            return why
        if why := self.unavailable_networks.get(settings.network, ""):
            asked = f'[sandbox] network = "{settings.network}"'
            return f"There is no sandbox around the agent: {asked} does not work here ({why})."
        return ""


async def probe(
    hide: Sequence[str], show: Sequence[str], *, command: Sequence[str] = PROBE_COMMAND, trial: TrialRun | None = None
) -> SandboxProbe:
    """Find bubblewrap and try the sandbox with each network, with `trial` or, by default, as hutchd's account.

    Takes a fraction of a second, or a minute if something hangs. Raises only the errors of `trial`.
    """
    program = shutil.which("bwrap")
    if program is None:
        return SandboxProbe(why="There is no sandbox around the agent: bubblewrap (bwrap) is not installed.")
    hide = tuple(dict.fromkeys((*hide, *map(realpath, hide))))  # cwd may contain the path under either name
    spec = m.SandboxSpec(program, hide, tuple(show))
    output = await (trial(spec) if trial is not None else _run(command, msgspec.json.encode(spec)))
    try:
        trial_result = msgspec.json.decode(output, type=m.SandboxTrial)
    except msgspec.DecodeError:
        trial_result = m.SandboxTrial({"full": output})
    found = trial_result.faults
    if why := found.pop("full", ""):
        return SandboxProbe(why=f"There is no sandbox around the agent: bubblewrap cannot set one up here ({why}).")
    version = await _run((program, "--version")) or "bubblewrap"
    return SandboxProbe(program, version, hide, tuple(show), found)


async def _run(command: Sequence[str], question: bytes = b"") -> str:
    """Return the output of a command, or a description of its failure."""
    try:
        with anyio.fail_after(_DEADLINE):
            done = await anyio.run_process(command, input=question, stderr=subprocess.PIPE, check=False)
    except (OSError, TimeoutError) as error:
        return str(error) or "it took too long"
    output = (done.stdout or done.stderr).decode(errors="replace").strip()
    return output or f"exit code {done.returncode}"
