"""The shell of an agent's commands: the programs that Claude Code calls, and the variables that make it call them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

from hutch_executor.runners.claude import shell
from hutch_executor.runners.claude.shell import shell_variables
from hutch_executor.sandbox.project_programs import READING_GIT, git_reading

PROGRAMS = Path(shell.__file__).parent
SHELLS = [
    pytest.param(
        kind, marks=pytest.mark.skipif(shutil.which(kind) is None, reason=f"{kind} is not installed (scripts/prepare)")
    )
    for kind in ("bash", "zsh")
]
OWN = {"LANG": "C.UTF-8", "HUTCH_AGENT_RUN": "a-mark", "HUTCH_EXECUTOR_ID": "x-1", "ODD": "a b\n'c'\"$d", "EMPTY": ""}
REMOVED = {"CLAUDE_CODE_MESSAGING_SOCKET": "", "CLAUDE_CODE_MESSAGING_TOKEN": "", "XDG_RUNTIME_DIR": "/proc"}

Sandboxed = Literal["bare", "in a sandbox"]


def given(kind: str, home: Path, sandboxed: Sandboxed = "bare") -> dict[str, str]:
    """Return the environment that Claude Code gives to the shell of a command."""
    real = shutil.which(kind)
    assert real is not None
    account = {"PATH": os.environ["PATH"], "HOME": str(home), "SHELL": real, "XDG_RUNTIME_DIR": "/run/user/7"}
    ours = shell_variables(account, in_sandbox=sandboxed == "in a sandbox")
    return account | OWN | ours | REMOVED | {"SHELL": ours["CLAUDE_CODE_SHELL"]}


def run(*argv: str, env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a program whose input is a socket, as Claude Code's pipes are. bash may read .bashrc then."""
    one, other = socket.socketpair()
    with one, other:
        return subprocess.run(argv, env=env, cwd=cwd, stdin=one.fileno(), capture_output=True, check=False, timeout=60)


def through(env: Mapping[str, str], script: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a script as Claude Code does: its shell runs the program of the prefix with the script as one argument."""
    quoted = script.replace("'", "'\"'\"'")
    command = f"'{env['CLAUDE_CODE_SHELL_PREFIX']}' '{quoted}'"
    return run(env["CLAUDE_CODE_SHELL"], "-c", command, env=env, cwd=cwd)


def seen(output: bytes) -> dict[str, str]:
    """Return the variables that `env -0` wrote, without those in which shells count and note themselves."""
    pairs = (line.decode().partition("=") for line in output.split(b"\0") if line)
    return {name: value for name, _, value in pairs if name not in ("_", "SHLVL", "OLDPWD")}


@pytest.mark.parametrize("kind", SHELLS)
@pytest.mark.parametrize("sandboxed", ["bare", "in a sandbox"])
def test_a_command_sees_the_environment_of_its_account(tmp_path: Path, kind: str, sandboxed: Sandboxed) -> None:
    """Nothing is added. In a sandbox, which does not show the runtime directory, there is none."""
    env = given(kind, tmp_path, sandboxed)
    account = {name: value for name, value in env.items() if name in (*OWN, "PATH", "HOME", "XDG_RUNTIME_DIR")}
    account["SHELL"] = env["HUTCH_AGENT_SHELL"]
    if sandboxed == "bare":
        account["XDG_RUNTIME_DIR"] = "/run/user/7"
    else:
        del account["XDG_RUNTIME_DIR"]
    direct = run(env["HUTCH_AGENT_SHELL"], "-c", "env -0", env=account, cwd=tmp_path)
    ran = through(env, "env -0", tmp_path)

    assert ran.stderr == b""
    assert seen(ran.stdout) == seen(direct.stdout)


@pytest.mark.parametrize("kind", SHELLS)
def test_a_command_runs_in_the_shell_of_its_account(tmp_path: Path, kind: str) -> None:
    """Its words, its directory and its exit code are the ones of the script."""
    env = given(kind, tmp_path)
    ran = through(env, "pwd -P; echo ${BASH_VERSION:+bash}${ZSH_VERSION:+zsh} \"it's\" '$HOME' é; exit 7", tmp_path)
    login = run(env["CLAUDE_CODE_SHELL"], "-c", "-l", "echo $XDG_RUNTIME_DIR", env=env, cwd=tmp_path)

    assert ran.stdout.decode().splitlines() == [str(tmp_path.resolve()), f"{kind} it's $HOME é"]
    assert ran.returncode == 7
    assert login.stdout == b"/run/user/7\n"


@pytest.mark.parametrize("kind", SHELLS)
def test_a_command_gets_the_git_of_its_account(tmp_path: Path, kind: str) -> None:
    """The git that only reads is for Claude Code alone: it leaves PATH, also the one that goes into the snapshot.

    The text of a command stays as it is.
    """
    env = given(kind, tmp_path)
    reading = git_reading(env["PATH"], ())
    snapshot = (
        f"SNAPSHOT_FILE={tmp_path}/snapshot\ncat > \"$SNAPSHOT_FILE\" << 'END'\nexport PATH={reading['PATH']}\nEND\n"
    )
    ran = through(env | reading, "env -0", tmp_path)
    server = run(env["CLAUDE_CODE_SHELL_PREFIX"], "'/bin/sh' '-c' 'env -0'", env=env | reading, cwd=tmp_path)
    made = run(env["CLAUDE_CODE_SHELL"], "-c", "-l", snapshot, env=env | reading, cwd=tmp_path)
    text = through(env | reading, f"echo {READING_GIT}:x", tmp_path)

    for output in (ran.stdout, server.stdout):
        assert seen(output)["PATH"] == env["PATH"]
        assert not [name for name in seen(output) if name.startswith("HUTCH_AGENT_GIT")]
    assert made.returncode == 0
    assert (tmp_path / "snapshot").read_text() == f"export PATH={env['PATH']}\n"
    assert text.stdout.decode() == f"{READING_GIT}:x\n"


@pytest.mark.parametrize("kind", SHELLS)
def test_an_mcp_server_starts_without_the_shells_startup_files(tmp_path: Path, kind: str) -> None:
    """Their output would disturb the protocol. The server replaces the shell and sees the account's environment."""
    for name in (".bashrc", ".zshrc", ".zshenv", ".profile"):
        (tmp_path / name).write_text("echo read\n")
    env = {name: value for name, value in given(kind, tmp_path).items() if name != "SHLVL"}
    ran = run(env["CLAUDE_CODE_SHELL_PREFIX"], "'/bin/sh' '-c' 'cat /proc/$PPID/comm; env -0'", env=env, cwd=tmp_path)
    parent, _, variables = ran.stdout.partition(b"\n")

    assert parent.decode() == Path("/proc/self/comm").read_text().strip()
    assert seen(variables)["XDG_RUNTIME_DIR"] == "/run/user/7"
    assert "CLAUDE_CODE_SHELL" not in seen(variables)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"HUTCH_AGENT_SHELL": ""}, "does not name the shell"),
        ({"HUTCH_AGENT_SHELL": "bash"}, "does not name the shell"),
        ({"HUTCH_AGENT_SHELL": "/missing/bash"}, "no shell at /missing/bash"),
        ({"CLAUDE_CODE_MESSAGING_SOCKET": "/tmp/cc-socks/1.sock"}, "takes messages from other programs"),
    ],
)
@pytest.mark.parametrize("program", ["hutch-bash", "hutch-command"])
def test_nothing_runs_in_a_shell_that_is_not_the_accounts(
    tmp_path: Path, changed: dict[str, str], said: str, program: str
) -> None:
    """It fails closed, with a sentence for the agent."""
    arguments = ("touch ran",) if program == "hutch-command" else ("-c", "touch ran")
    ran = run(str(PROGRAMS / program), *arguments, env=given("bash", tmp_path) | changed, cwd=tmp_path)

    assert (ran.returncode, list(tmp_path.iterdir())) == (126, [])
    assert said in ran.stderr.decode()


def test_the_prefix_takes_exactly_one_script(tmp_path: Path) -> None:
    """Anything else is not what Claude Code does, and does not run."""
    env = given("bash", tmp_path)
    codes = [run(env["CLAUDE_CODE_SHELL_PREFIX"], *more, env=env, cwd=tmp_path).returncode for more in ((), ("a", "b"))]

    assert codes == [126, 126]


def test_without_the_prefix_program_nothing_runs(tmp_path: Path) -> None:
    """Claude Code takes another shell if it cannot find ours; then the command is not found."""
    env = given("bash", tmp_path) | {"CLAUDE_CODE_SHELL_PREFIX": str(tmp_path / "missing")}
    ran = through(env, "touch ran", tmp_path)

    assert (ran.returncode, list(tmp_path.iterdir())) == (127, [])


def test_the_shell_is_the_one_that_claude_code_would_choose(tmp_path: Path) -> None:
    """$SHELL if it is bash or zsh, otherwise zsh, then bash. In a sandbox it is one that the sandbox shows."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "zsh", "fish"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)

    def chosen(shell: str, *, in_sandbox: bool = False) -> tuple[str, str]:
        made = shell_variables({"SHELL": shell, "PATH": str(folder)}, in_sandbox=in_sandbox)
        return made["HUTCH_AGENT_SHELL"], Path(made["CLAUDE_CODE_SHELL"]).name

    assert chosen(f"{folder}/bash") == (f"{folder}/bash", "hutch-bash")
    assert chosen(f"{folder}/zsh") == (f"{folder}/zsh", "hutch-zsh")
    assert chosen(f"{folder}/fish") == (f"{folder}/zsh", "hutch-zsh")
    (folder / "zsh").unlink()
    assert chosen("/missing/bash") == (f"{folder}/bash", "hutch-bash")
    assert not chosen(f"{folder}/bash", in_sandbox=True)[0].startswith(str(tmp_path))


def test_all_programs_are_one_file() -> None:
    """Claude Code finds out the kind of a shell by its name."""
    assert {name.resolve() for name in PROGRAMS.glob("hutch-*")} == {PROGRAMS / "hutch-bash"}
    assert all(os.access(name, os.X_OK) for name in PROGRAMS.glob("hutch-*"))
