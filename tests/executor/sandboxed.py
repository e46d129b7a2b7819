"""Runs a shell command in a session's sandbox."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from hutch_executor.sandbox.command import SessionSandbox

__all__ = ["output_of"]


def output_of(sandbox: SessionSandbox, command: str, env: Mapping[str, str], **ways: Any) -> str:
    """Run a shell command of the session and return its output, errors included. `ways` are those of `wrap`."""
    with closing(sandbox.wrap(("/bin/sh", "-c", command), env, **ways)) as inside:
        done = subprocess.run(
            inside.argv,
            env=inside.env,
            cwd=inside.enforced.cwd,
            pass_fds=inside.descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
    return done.stdout.strip()
