"""The environment variables that make Hutch's program the shell of an agent's commands; see the README beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from hutch_executor.sandbox.places import SYSTEM

__all__ = ["shell_variables"]

ShellKind = Literal["bash", "zsh"]

_PROGRAMS: Final = Path(__file__).parent
_USUAL: Final = ("/bin", "/usr/bin", "/usr/local/bin", "/opt/homebrew/bin")


def shell_variables(env: Mapping[str, str], *, in_sandbox: bool) -> dict[str, str]:
    """Return the variables for a CLI with the environment `env`, before its runtime directory is taken away.

    The account's shell is the one that the CLI would choose: `$SHELL` if that is bash or zsh, otherwise zsh, then bash.
    In a sandbox it is a shell of the system. Without any, the agent's commands fail and say so.
    """
    shell = _shell_of_account(env, in_sandbox=in_sandbox)
    program = str(_PROGRAMS / f"hutch-{_kind(shell)}")
    variables = {
        "CLAUDE_CODE_SHELL": program,
        "CLAUDE_CODE_SHELL_PREFIX": str(_PROGRAMS / "hutch-command"),
        "HUTCH_AGENT_SHELL": shell,
    }
    if (runtime := env.get("XDG_RUNTIME_DIR")) and not in_sandbox:
        variables["HUTCH_AGENT_RUNTIME_DIR"] = runtime
        variables["SHLVL"] = "1"  # below the level 2 bash would read .bashrc before each command: its input is a socket
    return variables


def _shell_of_account(env: Mapping[str, str], *, in_sandbox: bool) -> str:
    own = env.get("SHELL", "")
    kinds: tuple[ShellKind, ...] = ("bash", "zsh") if _kind(own) == "bash" else ("zsh", "bash")
    found = [shutil.which(kind, path=env.get("PATH")) for kind in kinds]
    usual = [f"{folder}/{kind}" for kind in kinds for folder in _USUAL]
    candidates = [own if _kind(own) else None, found[0], *usual, found[1]]
    for shell in candidates:
        if shell and os.path.isabs(shell) and os.access(shell, os.X_OK) and not (in_sandbox and not _is_shown(shell)):
            return shell
    return "/bin/bash"


def _is_shown(shell: str) -> bool:
    """Return whether each sandbox shows the shell: the path and what it leads to belong to the system."""
    paths = (Path(shell), Path(os.path.realpath(shell)))
    return all(any(path.is_relative_to(place) for place in SYSTEM) for path in paths)


def _kind(shell: str) -> ShellKind | None:
    """Return the kind of a shell by its path, as the CLI does: the name counts first."""
    for part in (Path(shell).name, shell):
        if "zsh" in part:
            return "zsh"
        if "bash" in part:
            return "bash"
    return None
