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
- It can open no Unix socket that it is not shown. The network is the host's with `full`; else one of its own, with
  nothing in it but loopback, and no abstract socket of the host.
- A place is put where it really lies, and only there; links lead to it as they do outside. So nothing that is hidden is
  seen by another name.
- Nothing that is hidden or read-only in what it may write can be moved, nor any folder in between.
- `--disable-userns` is not used: the agent may build walls of its own inside.
"""

from __future__ import annotations

import glob
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from hutch_executor.sandbox import netns_bridge
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.hardening import forbid_new_privileges

__all__ = ["PROGRAMS", "PROXY_PORT", "doorway_words", "trouble", "try_all", "try_walls", "walls"]

Place = Literal["read", "write", "fast", "private", "hidden", "devices", "processes"]

_EMPTY: Final = str(Path(__file__).parents[1].joinpath("py.typed"))
"""An empty file, to stand for one that is hidden: a device could not be opened there, and some tools give up then."""
PROXY_PORT: Final = 18118
"""Where the proxy is found inside; nothing else is on that loopback but what the agent itself puts there."""
PROGRAMS: Final = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
"""The interpreter and this code: in a working directory that contains them, the agent may not change them."""
_BARE: Final = ("private", "hidden")
"""Places where nothing of the host is."""

_SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu", "/snap", "/sys"),
    *("/home/linuxbrew/.linuxbrew", "/var/lib/dpkg", "/var/lib/rpm"),
    *("/var/lib/ca-certificates", "/var/cache/fontconfig"),
)
_PRIVATE: Final = ("/tmp", "/var/tmp", "/run")  # noqa: S108 -- empty ones of its own
_OF_ROOT: Final = ("/etc/shadow", "/etc/gshadow", "/etc/shadow-", "/etc/gshadow-", "/etc/ssl/private")
"""What an agent that runs as uid 0 could read in what is shown of the system."""

_XDG: Final = {
    ".cache": "XDG_CACHE_HOME",
    ".config": "XDG_CONFIG_HOME",
    ".local/share": "XDG_DATA_HOME",
    ".local/state": "XDG_STATE_HOME",
}
"""Where an account may have what usually lies in these folders of its home."""
_TOOLS: Final = (
    *(".gitconfig", ".config/git", ".local/bin", ".local/lib", ".local/pipx", "bin", ".bash_profile", ".bashrc"),
    *(".profile", ".zshenv", ".asdf", ".bun", ".cargo", ".deno", ".ghcup", ".juliaup", ".local/share/mise"),
    *(".local/share/pipx", ".local/share/pnpm", ".local/share/uv", ".local/share/fnm", ".nix-profile", ".npm-global"),
    *(".nodenv", ".nvm", ".opam", ".pyenv", ".rbenv", ".rustup", ".sdkman", ".swiftly", ".volta", "go/bin"),
    *("miniconda3", "anaconda3", "miniforge3", "mambaforge", ".pixi", ".rye", ".elan", ".dotnet", ".linuxbrew"),
    *(".yarn/bin", ".foundry/bin", ".goenv", ".jenv", ".krew/bin", ".local/share/rtx"),
    *(".gitconfig?*", ".gitignore", ".gitignore_global", ".gitattributes"),
)
"""Below the home, with `tools`: where developers' tools live that are installed for one account; `*` as in a shell."""
_CACHES: Final = (".cache", ".cargo/git", ".cargo/registry", ".gradle", ".npm", "go/pkg")
"""Below the home: what tools must be able to write. It goes with the agent, so that nothing it left is run outside."""
_TOLD: Final = (
    *(".bashrc", ".bash_profile", ".bash_login", ".bash_aliases", ".profile", ".zshenv", ".zshrc", ".zprofile"),
    *(".zlogin", ".config/fish/config.fish", ".gitconfig*", ".config/git/config", ".cargo/config.toml"),
    ".cargo/config",
)
"""Below the home: what people put keys into although it is not for keys. One that has some is not seen."""
_TOLD_LIMIT: Final = 1 << 20
_KEY_IS_SET: Final = re.compile(
    rb"""(?ix)
      (?<! signing) (key | token) \w* (\s* = \s* | [\ \t]+) ["']? (?= [\w+/=.:-]* \d) \w [\w+/=.:-]{15}
    | (secret | passw(or)?d | passphrase) \w* \s* = \s* ["']? \w [^\s"']{3}
    | :// [^\s/@:]* : [^\s/@$]+ @ | :// [\w-]{20,} @ | authorization:
    | \b (sk-[a-z0-9]+- | gh[pousr]_ | github_pat_ | glpat- | xox[a-z]- | AKIA) \w{8}
    """
)
_SECRETS: Final = (
    *(".aws", ".azure", ".boto", ".cargo/credentials", ".cargo/credentials.toml", ".claude", ".claude.json", ".codex"),
    *(".config/gcloud", ".config/gh", ".config/glab-cli", ".config/google-chrome", ".config/chromium", ".config/op"),
    *(".config/rclone", ".config/hub", ".config/helm", ".config/doctl", ".docker", ".gem/credentials", ".gemini"),
    *(".git-credentials", ".config/git/credentials", ".gnupg", ".gradle/gradle.properties", ".kube", ".my.cnf"),
    *(".m2/settings.xml", ".m2/settings-security.xml", ".mozilla", ".netrc", ".npmrc", ".password-store", ".pgpass"),
    *(".pypirc", ".s3cfg", ".ssh", ".terraform.d", ".terraformrc", ".thunderbird", ".vault-token", ".yarnrc.yml"),
    *(".bash_history", ".python_history", ".psql_history", ".zsh_history", ".local/share/keyrings"),
    *(".local/share/opencode", ".config/hutch", ".local/state/hutch", ".local/share/uv/credentials"),
    *(".npm-global/etc/npmrc", ".dotnet/corefx", ".config/anthropic", ".config/github-copilot", ".config/opencode"),
    *(".config/pip", ".config/pypoetry/auth.toml", ".config/composer/auth.json", ".composer/auth.json"),
    ".config/containers",
    *(".bundle/config", ".pip", ".netlify", ".fly", ".oci", ".databrickscfg", ".huggingface", ".kaggle", ".cursor"),
    *(".copilot", ".config/BraveSoftware", ".config/microsoft-edge", ".config/vivaldi", ".config/Code", ".var/app"),
    *("snap", ".config/sops", ".config/age", ".local/share/kwalletd", ".pki", ".authinfo", ".authinfo.gpg", ".envrc"),
    *(".node_repl_history", ".mysql_history", ".sqlite_history", ".lesshst", ".viminfo", ".local/share/fish"),
    *(".local/share/atuin", ".histfile", ".zhistory", ".local/share/containers", ".secrets", ".env"),
    # … and sockets behind which somebody hands out keys, or runs what he is told to
    *(".git-credential-cache", ".1password", ".bitwarden-ssh-agent.sock", ".colima", ".lima", ".rd"),
    *(".orbstack", ".local/share/podman", ".config/Bitwarden"),
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
    environ: Mapping[str, str] = os.environ,
) -> tuple[str, ...]:
    """Return the words to put before a command that is to run inside, in `cwd`. Looks at the file system.

    `show` and `write` add to those of `spec`, `sockets` are directories that are seen whatever hides them. What
    does not exist is left out. Of `environ` the XDG variables count. `isolation_unavailable` when no wall can stand
    there: the working directory is, or contains, the home or a place of the system, or lies in what is hidden.
    """
    _refuse_unfit(os.path.realpath(cwd), home, spec.hide)
    show, write, sockets = (*spec.show, *show), (*spec.write, *write, cwd), tuple(sockets)
    places, tools = _places(spec, home, show, environ)
    places |= _existing(write, "write")
    places |= _existing(spec.hide, "hidden")
    places |= _existing(sockets, "read")  # dialling needs no more, and nobody can put another socket there
    places |= _fastened(places)
    links = _links((*_SYSTEM, *_PRIVATE, *tools, *show, *write, *sockets, home))
    words = [
        spec.program,
        *("--die-with-parent", "--new-session", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
        *(() if spec.network == "full" else ("--unshare-net",)),
        *("--cap-drop", "ALL"),
    ]
    for path in sorted({*places, *links}, key=lambda path: (path.rstrip("/").count("/"), path)):
        around = _around(path, places)
        if path in places:
            words += _words(path, places[path], around)
        elif around in _BARE:
            words += ["--symlink", links[path], path]
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


def _places(
    spec: m.SandboxSpec, home: str, show: Iterable[str], environ: Mapping[str, str]
) -> tuple[dict[str, Place], list[str]]:
    """Return what each path is to be, but for what can be written and what is hidden last; and tools, as named."""

    def below(names: Iterable[str]) -> list[str]:
        return [path for name in names for path in _in_home(name, home, environ)]

    places = _existing(_PRIVATE, "private") | _existing(_SYSTEM, "read")
    resolver = os.path.dirname(os.path.realpath("/etc/resolv.conf"))
    if resolver.startswith("/run/"):
        places[resolver] = "read"
    places[os.path.realpath(home)] = "read" if spec.home == "read_only" and os.path.isdir(home) else "private"
    tools = below(_TOOLS) if spec.home == "tools" else []
    places |= _existing(tools, "read")
    if spec.home != "hidden":
        places |= _existing(filter(_tells, below(_TOLD)), "hidden")
    places |= _existing(show, "read")
    if spec.home != "hidden":
        places |= _existing(below(_CACHES), "private") | _existing(below(_SECRETS), "hidden")
    if os.geteuid() == 0:
        places |= _existing(_OF_ROOT, "hidden")
        places["/proc/sys"] = "read"  # what uid 0 may write there steers the host
    places["/dev"], places["/proc"] = "devices", "processes"
    return places, tools


def _in_home(name: str, home: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield where the account has what is usually called `name` below its home."""
    if "*" in name:
        yield from glob.iglob(os.path.join(glob.escape(home), name))
    else:
        yield os.path.join(home, name)
    for usual, variable in _XDG.items():
        given = environ.get(variable, "")
        if os.path.isabs(given) and Path(name).is_relative_to(usual):
            yield os.path.join(given, os.path.relpath(name, usual))


def _tells(path: str) -> bool:
    """Tell whether the file sets what looks like a key; one that cannot be read is no agent's to read either."""
    try:
        with open(path, "rb") as file:
            return _KEY_IS_SET.search(file.read(_TOLD_LIMIT)) is not None
    except OSError:
        return False


def _existing(paths: Iterable[str], place: Place) -> dict[str, Place]:
    """Return those that are there, where links lead to."""
    return {os.path.realpath(path): place for path in paths if os.path.exists(path)}


def _fastened(places: Mapping[str, Place]) -> dict[str, Place]:
    """Return the folders between what can be written and what lies in it and cannot: each is put onto itself.

    Such a folder cannot be renamed. Else an agent would move it, and what it hides with it, to where nothing hides it
    from the next agent, or would put another in the place of a program that Hutch starts.
    """
    found: dict[str, Place] = {}
    for path, place in places.items():
        between: list[str] = []
        for folder in map(str, Path(path).parents):
            if folder in places:
                if place != "write" and places[folder] == "write":
                    found |= dict.fromkeys(between, "fast")
                break
            between.append(folder)
    return found


def _links(paths: Iterable[str]) -> dict[str, str]:
    """Return the links that lead to these, by where they really lie: a path is to be what it is outside."""
    found: dict[str, str] = {}
    for path in paths:
        at, left = "/", _parts(path) if os.path.exists(path) else []
        while left:
            here = os.path.normpath(os.path.join(at, left.pop()))
            if here not in found and os.path.islink(here):
                found[here] = os.readlink(here)
            if here in found:
                at = "/" if found[here].startswith("/") else at
                left += _parts(found[here])
            else:
                at = here
    return found


def _parts(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _around(path: str, places: Mapping[str, Place]) -> Place:
    """Return what the nearest place is that `path` lies in."""
    return next((places[str(one)] for one in Path(path).parents if str(one) in places), "private")


def _words(path: str, place: Place, around: Place) -> list[str]:
    match place:
        case "read" if around == "read":
            return []
        case "devices":
            return ["--dev", path]
        case "processes":
            return ["--proc", path]
        case "read":
            return ["--ro-bind", path, path]
        case "write" | "fast":
            return ["--bind", path, path]
        case "hidden" if around in _BARE:  # it is not there, not even its name
            return []
        case "hidden" if not os.path.isdir(path):
            return ["--ro-bind", _EMPTY, path]
        case _:
            return ["--tmpfs", path]


def doorway_words(descriptor: int) -> tuple[str, ...]:
    """Return the words, after those of the walls, that open the door to the proxy; see `doorway`."""
    program = os.path.realpath(sys.executable)
    return (program, "-I", "-S", str(Path(netns_bridge.__file__)), str(descriptor), str(PROXY_PORT))


# ---------------------------------------------------------------- trying them

_TRIAL: Final = """
[ $$ -lt 16 ] || { echo "it shares its processes with the host"; exit 1; }
: > "$PWD/tried" || { echo "the working directory cannot be written"; exit 1; }
if [ "$1" != full ]; then
  while read -r name rest; do
    case $name in
      lo:*) ;;
      *:*) echo "it shares the network with the host"; exit 1 ;;
    esac
  done < /proc/net/dev
fi
shift
for path; do
  if [ -d "$path" ]; then seen=$(ls -A "$path"); else seen=$(head -c 1 "$path" 2>/dev/null); fi
  [ -z "$seen" ] || { echo "$path can be seen"; exit 1; }
done
"""
_TRIAL_DEADLINE: Final = 20.0
_REPLACED: Final = "in mount table"
_TRIES: Final = 4
_PAUSE: Final = 0.05


def trouble(words: Sequence[str], command: Sequence[str] = ("/bin/sh", "-c", ":"), *, door: bool = False) -> str:
    """Run a small command inside and return why that failed, or nothing when it did not. Blocks for a moment.

    With `door` the door to the proxy is tried too. A file that was replaced while it was being hidden (/etc/shadow, by
    who adds an account just then) is no failure: it is tried again.
    """
    for _ in range(_TRIES - 1):
        if _REPLACED not in (why := _trouble(words, command, door)):
            return why
        time.sleep(_PAUSE)
    return _trouble(words, command, door)


def _trouble(words: Sequence[str], command: Sequence[str], door: bool) -> str:
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            done = subprocess.run(
                [*words, *(doorway_words(theirs.fileno()) if door else ()), *command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TRIAL_DEADLINE,
                check=False,
                pass_fds=(theirs.fileno(),) if door else (),
            )
            handed = _take(ours)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        return said[-1] if said else f"it ended with exit code {done.returncode}"
    return "no way out could be opened" if door and not handed else ""


def _take(ours: socket.socket) -> int:
    """Return how many descriptors were handed through, and close them."""
    ours.setblocking(False)
    with suppress(BlockingIOError):
        _, handed, _, _ = socket.recv_fds(ours, 16, 4)
        for one in handed:
            os.close(one)
        return len(handed)
    return 0


def try_walls(spec: m.SandboxSpec, home: str) -> str:
    """Try everything that walls are for, inside; return why they do not hold, or nothing. Blocks for a moment."""
    try:
        with tempfile.TemporaryDirectory(prefix="hutch-walls-") as workspace:
            words = walls(spec, workspace, home, show=PROGRAMS)
            command = ("/bin/sh", "-c", _TRIAL, "trial", spec.network, *spec.hide)
            why = trouble(words, command, door=spec.network == "allow-list")
            if not why and not os.path.exists(os.path.join(workspace, "tried")):
                return "what is written inside does not arrive"
    except HutchError as error:
        return error.message
    except OSError as error:
        return str(error)
    return why


def try_all(spec: m.SandboxSpec, home: str) -> bytes:
    """Try walls with each network; return what does not hold, by network, as JSON. Blocks for a moment."""
    found = {"full": try_walls(msgspec.structs.replace(spec, network="full"), home)}
    if not found["full"]:
        for network in ("broker-only", "allow-list"):
            found[network] = try_walls(msgspec.structs.replace(spec, network=network), home)
    return msgspec.json.encode({name: why for name, why in found.items() if why})


def main() -> int:
    """Try the walls of the specification on standard input, with each network; print what does not hold, as JSON.

    `--no-new-privileges` tries them as an executor has them that hutch-launcher started.
    """
    if "--no-new-privileges" in sys.argv[1:]:
        forbid_new_privileges()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=m.SandboxSpec)
    found = try_all(spec, os.path.expanduser("~"))
    print(found.decode())  # noqa: T201
    return 1 if b'"full"' in found else 0
