"""Reject code that starts a process, except where the table below says why and in which folder.

A program that Hutch starts must not obey what an agent left in a folder. So each place that starts one is listed, with
its reason and the folder in which the program runs; anything else goes through one of these places. Exit code 1 with
one line per finding.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

TOP: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = (
    "daemon/hutch_broker",
    "daemon/hutch_daemon",
    "daemon/hutch_launcher",
    "executor/hutch_executor",
    "shared/hutch_client",
    "shared/hutch_shared",
)
INSTEAD: Final = (
    "starts a process. In a folder that an agent could have changed use run_in_project"
    " (hutch_executor/sandbox/project_programs.py), which gives it the session's sandbox. A place of another kind needs"
    " a row in scripts/process_starts.py: why it starts one, and in which folder that no agent can change"
)
STARTERS: Final = {
    "subprocess": ("run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"),
    "os": (
        *("system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "startfile"),
        *(f"exec{way}" for way in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
        *(f"spawn{way}" for way in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    ),
    "pty": ("fork", "spawn"),
    "asyncio": ("create_subprocess_exec", "create_subprocess_shell"),
    "asyncio.subprocess": ("create_subprocess_exec", "create_subprocess_shell"),
    "anyio": ("open_process", "run_process"),
    "anyio.to_process": ("run_sync",),
    "multiprocessing": ("Process", "Pool", "get_context"),
    "concurrent.futures": ("ProcessPoolExecutor",),
    "_posixsubprocess": ("fork_exec",),
    "hutch_executor.account.commands": ("run_command",),
}
_NAMES: Final = frozenset(f"{module}.{name}" for module, names in STARTERS.items() for name in names)

_HOME: Final = "the account's home, or /"
_ROOT: Final = "/"
_PROJECT: Final = "the session's working directory, in its sandbox"
_CALLER: Final = "the user's own: they have called `hutch` there, and it looks at no file in it"
_KEPT: Final = "that of its caller: it becomes the program"
ALLOWED: Final[dict[str, tuple[str, str]]] = {
    # place: (why it starts a process, the folder in which the program runs)
    "daemon/hutch_daemon/doctor/delegate.py:run_as": ("doctor looks with the rights of an account", _ROOT),
    "daemon/hutch_daemon/doctor/sandboxes.py:try_as_caller": ("doctor tries the sandboxes", _ROOT),
    "daemon/hutch_daemon/doctor/space.py:_over_quota": ("only quota(1) knows the quotas", _ROOT),
    "daemon/hutch_daemon/doctor/sudo.py:_rules": ("only sudo knows its rules", _ROOT),
    "daemon/hutch_daemon/environments/launcher_client.py:_sudo": ("the launcher, by sudo", _ROOT),
    "daemon/hutch_daemon/environments/same_user.py:_start": ("executors of hutchd's own account", _HOME),
    "daemon/hutch_daemon/environments/sandbox_probe.py:_output": ("the trial of the sandboxes", _ROOT),
    "daemon/hutch_daemon/keys/supervisor.py:_spawn": ("the broker", _ROOT),
    "daemon/hutch_launcher/child.py:_execute": ("executors of other accounts", _HOME),
    "daemon/hutch_launcher/groups.py:fork_into": ("the process that becomes an executor", _HOME),
    "daemon/hutch_launcher/sweep.py:sweep": ("kills an account's processes with its rights; no program", _ROOT),
    "executor/hutch_executor/account/commands.py:run_command": ("its callers are listed here", "that of its caller"),
    "executor/hutch_executor/account/notify.py:run_notify": ("the user's notify command", _HOME),
    "executor/hutch_executor/account/setup.py:login_path": ("the login shell knows the account's PATH", _HOME),
    "executor/hutch_executor/process/oom.py:find_choom": ("tries choom(1)", _ROOT),
    "executor/hutch_executor/process/reaper.py:_become_reaper": ("the reaper above an executor", _ROOT),
    "executor/hutch_executor/process/reaper.py:fork_reaper": ("the reaper above an executor; no program", _ROOT),
    "executor/hutch_executor/runners/claude/spawn.py:spawn": ("Claude's CLI, the agent itself", _PROJECT),
    "executor/hutch_executor/sandbox/confine.py:main": ("confines a command of an agent", _KEPT),
    "executor/hutch_executor/sandbox/netns_bridge.py:main": ("gives a command of an agent the proxy", _KEPT),
    "executor/hutch_executor/sandbox/probe.py:find_fault": ("tries a sandbox: a small command in it", _PROJECT),
    "executor/hutch_executor/sandbox/project_programs.py:run_in_project": ("the one way in a project", _PROJECT),
    "shared/hutch_client/commands/daemon.py:_logs": ("`hutch daemon logs -f` becomes tail(1)", _ROOT),
    "shared/hutch_client/commands/daemon.py:_restore": ("`hutch daemon restore` becomes hutchd", _CALLER),
    "shared/hutch_client/commands/daemon.py:_run": ("`hutch daemon run` becomes hutchd", _CALLER),
    "shared/hutch_client/commands/doctor.py:_examine_inside": ("`hutchd --doctor`", _CALLER),
    "shared/hutch_client/commands/doctor.py:_sudo_rule": ("visudo(8) checks the rule", _ROOT),
    "shared/hutch_client/editor.py:edit_input": ("the user's editor", "a new private one"),
    "shared/hutch_client/install/commands.py:try_command": ("the service manager's commands", _ROOT),
    "shared/hutch_client/starting.py:_start": ("hutchd", _ROOT),
    "shared/hutch_client/starting.py:run_hutchd": ("hutchd, with an option that only prints", _CALLER),
    "shared/hutch_shared/processes.py:boot_id": ("sysctl(8) on macOS, by its path", _CALLER),
    "shared/hutch_shared/processes.py:is_stopped": ("ps(1) on macOS, by its path", _CALLER),
    "shared/hutch_shared/processes.py:start_time": ("ps(1) on macOS, by its path", _CALLER),
}


class Start(NamedTuple):
    """One place that starts a process: `path:function`, the line and the name that is used."""

    place: str
    line: int
    name: str


def main() -> int:
    """Print the findings; return the exit code."""
    found = list(findings(TOP, PACKAGES, ALLOWED))
    for finding in found:
        print(finding)
    return 1 if found else 0


def findings(top: Path, packages: Iterable[str], allowed: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each start below `top` that is not allowed, and each allowed place that starts nothing."""
    modules = [path for package in packages for path in sorted((top / package).rglob("*.py"))]
    starts = [start for path in modules for start in found_in(path, top)]
    yield from (f"{one.place}:{one.line}: {one.name} {INSTEAD}." for one in starts if one.place not in allowed)
    unused = allowed.keys() - {start.place for start in starts}
    yield from (f"{place}: scripts/process_starts.py lists it, and it starts no process." for place in sorted(unused))


def found_in(path: Path, top: Path) -> Iterator[Start]:
    """Yield the places in a module that start a process, or hand the function that does so to something else."""
    tree = ast.parse(path.read_text())
    names = _imported(tree)
    for node, function in _nodes(tree, "module"):
        dotted = _dotted(node, names)
        if dotted in _NAMES:
            yield Start(f"{path.relative_to(top)}:{function}", node.lineno, dotted)


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return what each imported name stands for, wherever it is imported."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions of a module that are no types, each with the innermost function around it."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or (isinstance(node, ast.Subscript) and name == "value"):
            continue
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _nodes(child, child.name)
            elif isinstance(child, ast.AST):
                if isinstance(child, ast.Attribute | ast.Name):
                    yield child, function
                yield from _nodes(child, function)


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """Return what an expression names, with imports resolved; "" if it is no plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join((names[node.id], *reversed(parts)))


if __name__ == "__main__":
    sys.exit(main())
