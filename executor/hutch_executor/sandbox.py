"""The walls around an agent: the words that start a program inside bubblewrap. `python -m` this tries them.

Theory. The agent sees a list of places, each where it is outside: the system's programs read-only, its working
directory, what its account's tools need, nothing else. A list of what is hidden would miss what nobody thought of; so
hiding is only for what lies inside a place that is shown. Of two places the deeper one counts, whoever named it: a
project's folder is seen in a home that is not, Hutch's state is not seen in a project's folder, and the programs of
Hutch that lie in one are read-only there.

What is always true of a program inside:

- It has a pid namespace of its own: it sees no process of Hutch's, and all that it started ends with it, or with the
  executor.
- It has no capability and can gain none; what is set-uid does not help it.
- It can open no Unix socket that it is not shown. The network is the host's.
- `--disable-userns` is not used: the agent may build walls of its own inside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["try_walls", "walls"]

Place = Literal["read", "write", "private", "hidden", "devices", "processes"]

_SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu", "/snap", "/sys"),
    *("/var/lib/dpkg", "/var/lib/rpm", "/var/lib/ca-certificates", "/var/cache/fontconfig"),
)
_PRIVATE: Final = ("/tmp", "/var/tmp", "/run")  # noqa: S108 -- empty ones of its own
_OF_ROOT: Final = ("/etc/shadow", "/etc/gshadow", "/etc/shadow-", "/etc/gshadow-", "/etc/ssl/private")
"""What an agent that runs as uid 0 could read in what is shown of the system."""

_TOOLS: Final = (
    *(".gitconfig", ".config/git", ".local/bin", ".local/lib", ".local/pipx", "bin", ".bash_profile", ".bashrc"),
    *(".profile", ".zshenv", ".asdf", ".bun", ".cargo", ".deno", ".ghcup", ".juliaup", ".local/share/mise"),
    *(".local/share/pnpm", ".local/share/uv", ".nix-profile", ".npm-global", ".nvm", ".opam", ".pyenv", ".rbenv"),
    *(".rustup", ".sdkman", ".swiftly", ".volta", "go/bin"),
)
"""Below the home, with `tools`: where developers' tools live that are installed for one account."""
_CACHES: Final = (".cache", ".cargo/git", ".cargo/registry", ".gradle", ".npm", "go/pkg")
"""Below the home: what tools must be able to write. It goes with the agent, so that nothing it left is run outside."""
_SECRETS: Final = (
    *(".aws", ".azure", ".boto", ".cargo/credentials", ".cargo/credentials.toml", ".claude", ".claude.json", ".codex"),
    *(".config/gcloud", ".config/gh", ".config/glab-cli", ".config/google-chrome", ".config/chromium", ".config/op"),
    *(".config/rclone", ".config/hub", ".config/helm", ".config/doctl", ".docker", ".gem/credentials", ".gemini"),
    *(".git-credentials", ".config/git/credentials", ".gnupg", ".gradle/gradle.properties", ".kube", ".my.cnf"),
    *(".m2/settings.xml", ".m2/settings-security.xml", ".mozilla", ".netrc", ".npmrc", ".password-store", ".pgpass"),
    *(".pypirc", ".s3cfg", ".ssh", ".terraform.d", ".terraformrc", ".thunderbird", ".vault-token", ".yarnrc.yml"),
    *(".bash_history", ".python_history", ".psql_history", ".zsh_history", ".local/share/keyrings"),
    *(".local/share/opencode", ".config/hutch", ".local/state/hutch"),
)
"""Below the home, with `tools` and `read_only`: where keys and what people typed are kept."""


def walls(
    spec: m.SandboxSpec,
    cwd: str,
    home: str,
    *,
    show: Iterable[str] = (),
    write: Iterable[str] = (),
    sockets: Iterable[str] = (),
) -> tuple[str, ...]:
    """Return the words to put before a command that is to run inside, in `cwd`. Looks at the file system.

    `show` and `write` add to those of `spec`, `sockets` are directories that are seen whatever hides them. What
    does not exist is left out. `isolation_unavailable` when no wall can stand there: the working directory is, or
    contains, the home or a place of the system, or lies in what is hidden.
    """
    real = os.path.realpath(cwd)
    _refuse_unfit(real, home, spec.hide)
    places = _places(spec, home, (*spec.show, *show))
    places |= _existing((*spec.write, *write, cwd), "write")
    places |= _existing(spec.hide, "hidden")
    words = [
        spec.program,
        *("--die-with-parent", "--new-session", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
        *("--cap-drop", "ALL"),
    ]
    for path in sorted(places, key=lambda path: (path.rstrip("/").count("/"), path)):
        if places[path] != "hidden" or _around(path, places) not in ("hidden", "private"):  # it is not there
            words += _words(path, places)
    for path in sockets:
        words += ["--ro-bind", path, path]  # dialling needs no more, and nobody can put another socket there
    return (*words, "--chdir", cwd, "--")


def _refuse_unfit(cwd: str, home: str, hidden: Iterable[str]) -> None:
    if not os.path.isabs(home) or os.path.realpath(home) == "/":
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"A sandbox needs a home of the account's own, not {home!r}.")
    for place in (home, *_SYSTEM, "/dev", "/proc", "/run"):
        if Path(os.path.realpath(place)).is_relative_to(cwd):
            raise HutchError(
                Reason.ISOLATION_UNAVAILABLE,
                f"No sandbox can be around a session in {cwd}, since {place} lies in it; work in a folder of its own.",
            )
    for path in hidden:
        if Path(cwd).is_relative_to(os.path.realpath(path)):
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"{cwd} lies in {path}, which no agent may see.")


def _places(spec: m.SandboxSpec, home: str, show: Iterable[str]) -> dict[str, Place]:
    """Return what each path is to be, but for what can be written and what is hidden last."""

    def below_home(names: Iterable[str], place: Place) -> dict[str, Place]:
        return _existing((os.path.join(home, name) for name in names), place)

    places: dict[str, Place] = dict.fromkeys(_PRIVATE, "private")
    places |= {path: "read" for path in _SYSTEM if os.path.exists(path)}
    resolver = os.path.dirname(os.path.realpath("/etc/resolv.conf"))
    if resolver.startswith("/run/"):
        places[resolver] = "read"
    places[home] = "read" if spec.home == "read_only" else "private"
    if spec.home == "tools":
        places |= below_home(_TOOLS, "read")
    places |= _existing(show, "read")
    if spec.home != "hidden":
        places |= below_home(_CACHES, "private") | below_home(_SECRETS, "hidden")
    if os.geteuid() == 0:
        places |= _existing(_OF_ROOT, "hidden")
        places["/proc/sys"] = "read"  # what uid 0 may write there steers the host
    places["/dev"], places["/proc"] = "devices", "processes"
    return places


def _existing(paths: Iterable[str], place: Place) -> dict[str, Place]:
    """Return those that are there, where a link leads to; what is shown also where it was named."""
    found: dict[str, Place] = {}
    for path in paths:
        if os.path.exists(path):
            found[os.path.realpath(path)] = place
            if place in ("read", "write"):
                found[os.path.normpath(path)] = place
    return found


def _around(path: str, places: Mapping[str, Place]) -> Place:
    """Return what the nearest place is that `path` lies in."""
    return next((places[str(one)] for one in Path(path).parents if str(one) in places), "private")


def _words(path: str, places: Mapping[str, Place]) -> list[str]:
    place = places[path]
    if place in ("read", "write") and os.path.realpath(path) != path:
        if os.path.dirname(path) == "/":  # /bin and its like
            return ["--symlink", os.readlink(path), path]
        if _around(path, places) in ("read", "write"):  # the link itself is seen there
            return []
    match place:
        case "devices":
            return ["--dev", path]
        case "processes":
            return ["--proc", path]
        case "read":
            return ["--ro-bind", path, path]
        case "write":
            return ["--bind", path, path]
        case "hidden" if not os.path.isdir(path):
            return ["--ro-bind", "/dev/null", path]  # devices cannot be opened there
        case _:
            return ["--tmpfs", path]


# ---------------------------------------------------------------- trying them

_TRIAL: Final = """
[ $$ -lt 16 ] || { echo "it shares its processes with the host"; exit 1; }
: > "$PWD/tried" || { echo "the working directory cannot be written"; exit 1; }
for path; do
  if [ -d "$path" ]; then seen=$(ls -A "$path"); else seen=$(head -c 1 "$path" 2>/dev/null); fi
  [ -z "$seen" ] || { echo "$path can be seen"; exit 1; }
done
"""
_TRIAL_DEADLINE: Final = 20.0


def try_walls(spec: m.SandboxSpec, home: str) -> str:
    """Run a small program inside and return why the walls do not hold, or nothing when they do. Blocks for a moment."""
    try:
        with tempfile.TemporaryDirectory(prefix="hutch-walls-") as workspace:
            words = walls(spec, workspace, home)
            done = subprocess.run(
                [*words, "/bin/sh", "-c", _TRIAL, "trial", *spec.hide],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TRIAL_DEADLINE,
                check=False,
            )
            if done.returncode == 0 and not os.path.exists(os.path.join(workspace, "tried")):
                return "what is written inside does not arrive"
    except HutchError as error:
        return error.message
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stdout + done.stderr).strip().splitlines()
    return "" if done.returncode == 0 else said[-1] if said else f"it ended with exit code {done.returncode}"


def main() -> int:
    """Try the walls of the specification on standard input; print why they do not hold."""
    why = try_walls(msgspec.json.decode(sys.stdin.buffer.read(), type=m.SandboxSpec), os.path.expanduser("~"))
    print(why)  # noqa: T201
    return 1 if why else 0


if __name__ == "__main__":
    raise SystemExit(main())
