"""Examines each kind of sandbox by trying it, and says what bubblewrap would add where Landlock takes its place."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from hutch_daemon.doctor.finding import Finding
from hutch_daemon.environments.sandbox_probe import (
    BUBBLEWRAP_ADDS,
    PROBE_COMMAND,
    how_to_install,
    kinds_of,
    read_trial,
)
from hutch_daemon.environments.user_namespaces import closed_by
from hutch_daemon.settings import Settings
from hutch_shared import messages as m
from hutch_shared.paths import Paths

__all__ = ["SandboxTry", "examine_sandboxes", "try_as_caller"]

SandboxTry = Callable[[bytes], subprocess.CompletedProcess[bytes]]
"""Runs the executor's trial with a specification as JSON on standard input, as the account in question."""
_SECONDS: Final = 60.0
_CONTAINER: Final = "in a container, /proc must not be masked, and user namespaces must be allowed"
_KERNEL: Final = "it needs Linux 5.13 or later, with landlock among the kernel's security modules (lsm=…)"


def examine_sandboxes(
    settings: Settings,
    paths: Paths,
    who: str,
    try_sandbox: SandboxTry,
    *,
    path: str | None = None,
    untried: str = "",
) -> Iterator[Finding]:
    """Try bubblewrap and Landlock as the account `who`; takes a few seconds, or minutes if something hangs.

    `path` is the PATH on which bubblewrap is searched, by default the caller's. `untried` says why bubblewrap cannot be
    tried; then only its presence and the kernel's settings are examined.
    """
    if settings.sandbox.mode == "off":
        yield Finding('sandbox: the settings say [sandbox] mode = "off"')
        return
    hide = (str(paths.state), str(paths.runtime))
    program = shutil.which("bwrap", path=path)
    locked = _tried(try_sandbox, m.SandboxSpec("", hide, kind="landlock"))
    has_landlock = "full" not in locked.faults
    fault, fewer = f"bubblewrap (bwrap) is not installed: {how_to_install()}", ""
    if program is not None:
        trial = m.SandboxTrial() if untried else _tried(try_sandbox, m.SandboxSpec(program, hide))
        fewer = _fewer(trial)
        fault = trial.faults.get("full", "")
        if fault:
            fault = f"{program} does not work as {who} ({fault}): {closed_by() or _CONTAINER}"
        elif untried:
            fault = closed_by()
    yield _of_bubblewrap(
        fault,
        f"{program} {f'is installed; {untried}' if untried else f'works, tried as {who}'}{fewer}",
        is_needed=_needs_bubblewrap(settings) or not has_landlock,
    )
    subject = "sandbox by Landlock"
    if has_landlock:
        yield Finding(f"{subject}: ABI {locked.abi} works, tried as {who}{_fewer(locked)}")
        return
    why = f"it does not work ({locked.faults['full']}): {_KERNEL}"
    yield (
        Finding(subject, f"Without bubblewrap agents have no sandbox: {why}") if fault else Finding(f"{subject}: {why}")
    )


def try_as_caller(given: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run the trial as the caller's own account; a `SandboxTry`."""
    return subprocess.run(PROBE_COMMAND, input=given, capture_output=True, check=False, timeout=_SECONDS, cwd="/")


def _of_bubblewrap(fault: str, works: str, *, is_needed: bool) -> Finding:
    subject = "sandbox by bubblewrap"
    if not fault:
        return Finding(f"{subject}: {works}")
    text = f"{fault}. It would add {BUBBLEWRAP_ADDS}."
    return Finding(subject, text) if is_needed else Finding(f"{subject}: {text}")


def _needs_bubblewrap(settings: Settings) -> bool:
    """Return whether the settings refuse sessions without bubblewrap."""
    sandbox = settings.sandbox
    only = kinds_of(sandbox) == ("bubblewrap",)
    return settings.isolation.require == "strict" or only or sandbox.network == "allow-list"


def _tried(try_sandbox: SandboxTry, spec: m.SandboxSpec) -> m.SandboxTrial:
    try:
        done = try_sandbox(msgspec.json.encode(spec))
    except (OSError, subprocess.TimeoutExpired) as error:
        return m.SandboxTrial({"full": f"it could not be tried: {error}".rstrip(".")})
    if done.stdout.strip():
        return read_trial(done.stdout)
    last = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
    return m.SandboxTrial({"full": last.rstrip(".") or f"no output, exit code {done.returncode}"})


def _fewer(trial: m.SandboxTrial) -> str:
    """Return a clause about the networks that do not work."""
    return "".join(
        f'; not with [sandbox] network = "{network}": {why}'
        for network, why in trial.faults.items()
        if network != "full"
    )
