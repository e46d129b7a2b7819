"""Whether there can be walls around agents here: tried once, by really putting them up, and said in one sentence.

The executor puts them up (bubblewrap), so it is asked to try: its own program runs a small command inside walls that
hide what is Hutch's, as the account, and tells why they do not hold. What a session gets follows from that and from the
settings; nothing else decides it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import join, realpath
from pathlib import Path

import anyio
import msgspec

from hutch_daemon.settings import Sandbox
from hutch_shared import messages as m

__all__ = ["Walls", "probe"]

TRY = (sys.executable, "-P", "-m", "hutch_executor.sandbox")
_DEADLINE = 30.0


@dataclass(frozen=True, slots=True)
class Walls:
    """What was found: with `program` the walls hold, else `why` says why they do not."""

    program: str | None = None
    why: str = "No sandbox was looked for."
    hide: tuple[str, ...] = ()
    """What is Hutch's, and no agent's to see."""
    show: tuple[str, ...] = ()
    """Programs of Hutch, which no agent may change."""

    def around(self, cwd: str, home: str, settings: Sandbox) -> tuple[m.SandboxSpec | None, str]:
        """Return the walls of a session in `cwd` of the account with this home, or None and why there are none."""

        def absolute(paths: Sequence[str]) -> tuple[str, ...]:
            return tuple(join(home, path[2:]) if path.startswith("~/") else path for path in paths)

        if settings.mode == "off":
            return None, 'There is no sandbox around the agent: the settings say [sandbox] mode = "off".'
        missing = "" if self.program is not None else self.why
        if any(Path(name).is_relative_to(cwd) for name in (home, realpath(home))):
            missing = missing or "There is no sandbox around the agent: it works in the home itself."
        if inside := next((path for path in self.hide if Path(path).is_relative_to(cwd)), None):  # it could be moved
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
            ),
            "",
        )

    def describe(self, isolation: m.Isolation, spec: m.SandboxSpec | None, why: str) -> m.Isolation:
        """Return what is said of a session's isolation, with the walls that it has."""
        if spec is None:
            return msgspec.structs.replace(isolation, why=f"{isolation.why} {why}".strip())
        home = {"tools": "the tools in your home", "read_only": "your home without its secrets", "hidden": "no home"}
        return msgspec.structs.replace(
            isolation,
            why=(
                f"Sessions run as the account of hutchd, each agent in a sandbox ({self.why}): it sees its working"
                f" directory, read-only the system and {home[spec.home]}, and no process but its own."
            ),
            insiders=(
                "A process of an agent cannot reach the client socket: it is not there in its sandbox. Others are told"
                f" {isolation.insiders}"
            ),
        )


async def probe(hide: Sequence[str], show: Sequence[str], *, command: Sequence[str] = TRY) -> Walls:
    """Look for bubblewrap and try whether its walls hold for this account. Takes part of a second; never raises."""
    program = shutil.which("bwrap")
    if program is None:
        return Walls(why="There is no sandbox around the agent: bubblewrap (bwrap) is not installed.")
    hide = tuple(dict.fromkeys((*hide, *map(realpath, hide))))  # a working directory may contain it by either name
    walls = Walls(program, "", hide, tuple(show))
    trial = m.SandboxSpec(program, walls.hide, walls.show)
    why = await _run(command, msgspec.json.encode(trial))
    if why:
        return Walls(why=f"There is no sandbox around the agent: bubblewrap cannot put one up here ({why}).")
    return Walls(program, (await _run((program, "--version"))) or "bubblewrap", walls.hide, walls.show)


async def _run(command: Sequence[str], question: bytes = b"") -> str:
    """Return what the command says, or how it failed."""
    try:
        with anyio.fail_after(_DEADLINE):
            done = await anyio.run_process(command, input=question, stderr=subprocess.PIPE, check=False)
    except (OSError, TimeoutError) as error:
        return str(error) or "it took too long"
    said = (done.stdout or done.stderr).decode(errors="replace").strip()
    return said or (f"exit code {done.returncode}" if done.returncode else "")
