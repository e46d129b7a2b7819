"""The programs that Hutch itself runs in a folder that an agent could have changed.

`run_in_project` is the one way to run such a program: in the session's sandbox, like a command of the agent, and with a
working directory that it cannot change unless it must. A repository in that folder names programs in its settings:
hooks, filters, a file system monitor, external diffs, text converters, a pager. So whatever of Hutch's needs git there
gets the git of `git_reading`, which runs none of them. Claude's CLI is such a program too: it asks git for the state of
the project by itself.

The rules of that git are here; the program `reading_git/git` applies them. It holds in each kind of sandbox, and
without one: then it is all that protects, since the repository's programs would have the account's rights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio

from hutch_executor.account.commands import run_command
from hutch_executor.account.environment import without_places
from hutch_executor.process.oom import agent_first
from hutch_executor.sandbox.command import SessionSandbox
from hutch_shared.errors import HutchError, Reason

__all__ = ["READING_GIT", "git_reading", "run_in_project"]

READING_GIT: Final = str(Path(__file__).with_name("reading_git"))
"""The folder with the git that only reads, and nothing else."""
_RULES: Final = "HUTCH_AGENT_GIT"
_FOLDER: Final = "HUTCH_AGENT_GIT_FOLDER"
"""The variables with the rules, and with the folder, which the shell of the agent's commands takes off PATH again."""

_SETTINGS: Final = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.virtualFilesystem": "",
    "core.alternateRefsCommand": "false",
    "core.pager": "cat",
    "core.editor": "false",
    "core.askPass": "false",
    "core.sshCommand": "false",
    "credential.helper": "",
    "sequence.editor": "false",
    "interactive.diffFilter": "cat",
    "protocol.allow": "never",
    "diff.external": "",
    "diff.ignoreSubmodules": "all",
    "diff.submodule": "short",
    "status.submoduleSummary": "false",
    "submodule.recurse": "false",
    "log.showSignature": "false",
    "gpg.program": "false",
    "gpg.openpgp.program": "false",
    "gpg.x509.program": "false",
    "gpg.ssh.program": "false",
    "gpg.ssh.defaultKeyCommand": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "safe.bareRepository": "explicit",
}
"""Settings that no file of git's overrides. From git-config(1): those that name a program, or make git start one."""
_DRIVERS: Final = (
    ("filter", "clean", ""),
    ("filter", "smudge", ""),
    ("filter", "process", ""),
    ("filter", "required", "false"),
    ("diff", "command", ""),
    ("diff", "textconv", "cat"),
    ("diff", "cachetextconv", "false"),
    ("merge", "driver", "false"),
    ("hook", "enabled", "false"),
)
"""Settings of each driver and hook that is configured: section, variable, value. An empty filter changes nothing."""
_ENVIRONMENT: Final = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    "GIT_EDITOR": "false",
    "GIT_SEQUENCE_EDITOR": "false",
    "GIT_ASKPASS": "false",
    "SSH_ASKPASS": "false",
    "GIT_SSH_COMMAND": "false",
    "GIT_ALLOW_PROTOCOL": "",  # none: a repository can make git fetch what it lacks
    "GIT_NO_LAZY_FETCH": "1",
}
_UNSET: Final = ("GIT_EXTERNAL_DIFF", "GIT_PROXY_COMMAND", "GIT_EXEC_PATH", "GIT_SSH", "GIT_TEMPLATE_DIR")
_SUBMODULES: Final = "--ignore-submodules=all"
"""git would start itself in each submodule, whose drivers have other names. A setting of the submodule would win."""
_DIFFS: Final = f"--no-ext-diff --no-textconv {_SUBMODULES}"
_READ: Final = {
    "status": _SUBMODULES,
    **dict.fromkeys(("diff", "diff-files", "diff-index", "diff-tree", "log", "show"), _DIFFS),
    "blame": "--no-textconv",
    **dict.fromkeys(
        (
            *("cat-file", "check-attr", "check-ignore", "count-objects", "describe", "for-each-ref", "ls-files"),
            *("ls-tree", "merge-base", "name-rev", "rev-list", "rev-parse", "show-ref", "symbolic-ref", "var"),
            "version",
        ),
        "",
    ),
}
"""The subcommands that only read, with the options that go before the caller's."""
_CONTRARY: Final = "--ext-d* --textc* --ignore-sub* --submodule* --recurse-sub*"
"""Options of the caller that those would lose against. They are left out; also if they are shortened, as git allows."""
_READ_IN_SOME_FORMS: Final = {
    "branch": "-D -a -r -v -vv --all --remotes --list --show-current --contains* --merged* --format=* --sort=*",
    "config": "-l -z --list --get* --local --global --system --worktree --includes --type=* --bool get list",
    "remote": "-v get-url",
    "worktree": "list add remove lock unlock prune",
}
"""Subcommands that are allowed if their first argument is one of these patterns, or missing.

They read, but for `worktree` and `branch -D`: the CLI makes and removes the worktree of a sub-agent whose call asks for
one and was allowed. Files come into it without filters and hooks.
"""


def git_reading(path: str, changeable: Iterable[str]) -> dict[str, str]:
    """Return the variables with which `git` is a git that only reads. `path` is the PATH of the caller.

    The git that it runs is the first one on `path` that lies in none of the places `changeable`, the folders that an
    agent may change. It refuses, with exit code 128 and a sentence, whatever does not read.
    """
    lines = [
        f"path {without_places(path, changeable) or os.defpath}",
        *(f"set {name} {value}" for name, value in _SETTINGS.items()),
        *(f"driver {section} {name} {value}" for section, name, value in _DRIVERS),
        *(f"env {name} {value}" for name, value in _ENVIRONMENT.items()),
        *(f"unset {name}" for name in _UNSET),
        f"contrary {_CONTRARY}",
        *(f"read {name} {options}".rstrip() for name, options in _READ.items()),
        *(f"only {name} {patterns}" for name, patterns in _READ_IN_SOME_FORMS.items()),
        "end",
    ]
    return {
        "PATH": f"{READING_GIT}:{path}" if path else READING_GIT,
        _RULES: "\n".join(lines),
        _FOLDER: READING_GIT,
    }


async def run_in_project(
    sandbox: SessionSandbox | None,
    argv: Sequence[str],
    take: Callable[[bytes], object],
    *,
    cwd: str,
    env: Mapping[str, str],
    read_only: bool = True,
    **options: Any,
) -> int:
    """Run a program in the working directory `cwd` of a session, pass its output to `take`, and return its exit code.

    It runs in the session's sandbox if there is one, where it cannot change the working directory unless `read_only`
    is False. Otherwise it has the rights of the account: it must be one that obeys nothing that it finds there, as git
    with `git_reading` is. `options` are those of `run_command`, whose rules for ending hold.

    `isolation_unavailable` if the sandbox cannot be made: then nothing runs. OSError if the program cannot be started.
    """
    if sandbox is None:
        return await run_command(agent_first(argv), take, cwd=cwd, env=env, **options)
    command = await anyio.to_thread.run_sync(lambda: sandbox.wrap(argv, env, read_only=read_only))
    try:
        return await run_command(
            agent_first(command.argv), take, cwd=cwd, env=command.env, pass_fds=command.descriptors, **options
        )
    except FileNotFoundError as error:  # bubblewrap was removed meanwhile
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"The sandbox is gone: {error}") from error
    finally:
        await command.aclose()
