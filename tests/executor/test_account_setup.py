"""The account's set-up for its agent: PATH as after a login, and a umask that fits the working directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest

from hutch_executor.account.notify import run_notify
from hutch_executor.account.setup import Setup, login_path, set_up, umask_for
from hutch_shared import messages as m
from tests.executor.fake_hutchd import QUESTION, WAIT, dead

SHELLS = [program for program in ("/bin/sh", "/bin/bash", "/usr/bin/zsh", "/usr/bin/fish") if shutil.which(program)]


def shell(directory: Path, script: str) -> str:
    """Return a login shell that always runs `script`; in it, `$4` is the command that the shell was given."""
    made = directory / "shell"
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(0o755)
    return str(made)


@pytest.mark.parametrize("program", SHELLS)
async def test_path_is_the_login_shells(tmp_path: Path, program: str) -> None:
    """The account's files set PATH. Empty, relative and duplicate entries are left out."""
    text = 'echo "hello, $USER"; export PATH="$HOME/bin:here::/usr/bin:$HOME/bin"'
    (tmp_path / ".profile").write_text(text)
    (tmp_path / ".zprofile").write_text(text)
    (tmp_path / ".config" / "fish").mkdir(parents=True)
    (tmp_path / ".config" / "fish" / "config.fish").write_text("set -gx PATH $HOME/bin here /usr/bin")

    found = await login_path(str(tmp_path), program)

    assert found == f"{tmp_path}/bin:/usr/bin"


async def test_a_login_sees_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The account's start-up files do not see the variables that the executor was started with."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    (tmp_path / ".profile").write_text("export PATH=/$(env | sed 's/=.*//' | sort | tr '\\n' '.')")

    found = await login_path(str(tmp_path), "/bin/sh")

    assert found is not None
    assert (
        {"HOME", "SHELL"}
        <= set(found[1:].split("."))
        <= {
            *("HOME", "SHELL", "PATH", "USER", "LOGNAME", "LANG", "PWD", "OLDPWD", "SHLVL", "_", ""),
        }
    )


@pytest.mark.parametrize("program", ["/usr/sbin/nologin", "/bin/false", "", "sh", "/no/such/shell"])
async def test_an_account_without_a_login_shell_has_the_executors_path(tmp_path: Path, program: str) -> None:
    """Reasons: the shell does not exist, cannot be executed, or prints nothing."""
    assert await login_path(str(tmp_path), program) is None


@pytest.mark.parametrize(
    "script",
    [
        "echo garbage",
        'export PATH=here; exec /bin/sh -c "$3"',
        'PATH=/x; exec /bin/sh -c "$3; $3"',
        r"""PATH="$(printf '/x\n/y')" exec /bin/sh -c "$3" """,
        r"""PATH="$(printf '/x\377')" exec /bin/sh -c "$3" """,
        "exec yes /usr/bin | head -c 10000000",
        'PATH="/$(/usr/bin/head -c 20000 /dev/zero | /usr/bin/tr "\\0" x)" exec /bin/sh -c "$3"',
    ],
)
async def test_an_unusable_answer_of_the_shell_is_ignored(tmp_path: Path, script: str) -> None:
    """Examples: garbage, two answers, relative directories, several lines, bytes that are not text, too long."""
    assert await login_path(str(tmp_path), shell(tmp_path, script)) is None


async def test_a_login_that_hangs_is_killed(tmp_path: Path) -> None:
    """The shell's children are killed too; the agent gets the executor's PATH."""
    pid = tmp_path / "pid"
    program = shell(tmp_path, f"sleep 600 & echo $! > {pid}.new; mv {pid}.new {pid}; wait")

    with anyio.fail_after(WAIT):
        found = await login_path(str(tmp_path), program, deadline=1.0)

    assert found is None
    await dead(int(pid.read_text()))


@pytest.mark.parametrize(
    ("mode", "umask"), [(0o2775, 0o002), (0o2770, 0o002), (0o2755, 0o022), (0o775, 0o022), (0o700, 0o022)]
)
def test_a_directory_shared_by_a_group_gets_a_group_writable_umask(tmp_path: Path, mode: int, umask: int) -> None:
    """If the directory is setgid and group-writable, the group may write the agent's new files."""
    tmp_path.chmod(mode)

    assert umask_for("auto", str(tmp_path)) == umask


def test_a_umask_is_octal_or_the_executors_own() -> None:
    """A directory that the account cannot examine does not count as shared."""
    assert umask_for("027", "/") == 0o027
    assert umask_for("0077", "/") == 0o077
    assert umask_for("", "/") == -1
    assert umask_for("auto", "/no/such/place") == 0o022


async def test_without_set_up_nothing_is_looked_up(tmp_path: Path) -> None:
    """If the account is hutchd's own, PATH and umask stay the executor's."""
    assert await set_up(m.AccountSetup(), str(tmp_path), str(tmp_path)) == Setup()
    assert Setup().environ({"PATH": "/a", "X": "y"}) == {"PATH": "/a", "X": "y"}


async def test_the_notify_command_gets_the_set_up_too(tmp_path: Path) -> None:
    """The notify command gets the account's PATH, and creates files with the account's umask."""
    setup = Setup("/nowhere/of/the/account:/usr/bin:/bin", 0o027)

    found = await run_notify(m.RunNotify(("sh", "-c", f"echo $PATH > {tmp_path}/told"), QUESTION, WAIT), setup)

    assert found.ok
    assert (tmp_path / "told").read_text().strip() == setup.path
    assert (tmp_path / "told").stat().st_mode & 0o777 == 0o640
