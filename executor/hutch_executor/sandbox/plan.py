"""The plan of a sandbox: the places that it shows, makes writable and hides, and bubblewrap's arguments for that.

The plan is the same for both kinds of sandbox; `landlock` has the rights for it.

Theory. The agent sees a list of places, each at its real path: the system's programs read-only, its working directory,
what its account's tools need. A list of hidden places alone would miss every place that its author did not think of, so
hiding is only for places inside shown ones. If one place lies in another, the deeper one decides, whatever list it came
from: a project is shown in a hidden home, Hutch's state is hidden in a shown project, and Hutch's programs are
read-only there.

Always true of a program inside bubblewrap (`landlock` says what holds there):

- It has a pid namespace of its own. It sees no process of Hutch, and the processes that it started end with it or with
  the executor.
- It has no capability and can gain none, not even through set-uid programs.
- It can open only Unix sockets that are shown. With `full` it uses the host's network; otherwise a network namespace of
  its own with nothing but loopback, and no abstract socket of the host.
- A place is mounted at its real path only; links lead to it as they do outside. So nothing hidden has a second name.
- Nothing that is hidden or read-only inside a writable place can be moved, nor can any folder in between.
- `--disable-userns` is not used: an agent may make sandboxes of its own inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hutch_executor.sandbox.places import (
    CACHES,
    PRIVATE,
    ROOT_ONLY,
    SECRETS,
    SYSTEM,
    TOOLS,
    TYPED_SECRETS,
    Access,
    holds_key,
    in_home,
)
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["SandboxPlan", "plan_sandbox"]

_EMPTY: Final = str(Path(__file__).parents[1] / "py.typed")
"""An empty file to mount over a hidden one. Not a device, which cannot be opened there: some tools would fail."""
_BARE: Final = ("private", "hidden")
"""Places that show nothing of the host."""


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """A sandbox, as places by their real path. Not yet made: `enforcement` makes it."""

    kind: m.SandboxKind
    program: str
    """bubblewrap; empty with Landlock."""
    cwd: str
    network: str
    places: Mapping[str, Access]
    links: Mapping[str, str]
    """Symbolic links that lead to places, and their targets."""

    def argv(self, seccomp: int | None = None) -> tuple[str, ...]:
        """Return bubblewrap's command; the command to run inside goes after it.

        bubblewrap reads a seccomp filter from the inherited descriptor `seccomp`, to its end.
        """
        arguments = [
            self.program,
            *("--die-with-parent", "--new-session", "--unshare-user", "--unshare-pid", "--unshare-ipc"),
            "--unshare-uts",
            *(() if self.network == "full" else ("--unshare-net",)),
            *("--cap-drop", "ALL"),
            *(() if seccomp is None else ("--seccomp", str(seccomp))),
        ]
        for path in sorted({*self.places, *self.links}, key=lambda path: (path.rstrip("/").count("/"), path)):
            around = _around(path, self.places)
            if path in self.places:
                arguments += _mount(path, self.places[path], around)
            elif around in _BARE:
                arguments += ["--symlink", self.links[path], path]
        return (*arguments, "--chdir", self.cwd, "--")


def plan_sandbox(
    spec: m.SandboxSpec,
    cwd: str,
    home: str,
    *,
    show: Iterable[str] = (),
    write: Iterable[str] = (),
    sockets: Iterable[str] = (),
    taken: Iterable[str] = (),
    read_only: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> SandboxPlan:
    """Plan a sandbox whose commands run in `cwd`. Looks at the file system.

    `show` and `write` add to those of `spec`; `sockets` are directories that are shown even inside hidden places.
    `taken` are paths at which nothing can be made inside. `environ` gives the XDG variables. Left out are paths that do
    not exist, and paths through a link that an agent could have made. `isolation_unavailable` if no sandbox is
    possible: `cwd` is or contains the home or a place of the system, or lies in a hidden place.
    With `read_only`, `cwd` can be read and not be changed.
    """
    _require_fit(os.path.realpath(cwd), home, spec.hide)
    show, write, sockets = (*spec.show, *show), (*spec.write, *write), tuple(sockets)
    writable = [os.path.realpath(path) for path in (*write, cwd)]
    show, write = (*show, *((cwd,) if read_only else ())), (*write, *(() if read_only else (cwd,)))
    show, write = _fixed(show, writable), _fixed(write, writable)
    places, tools = _shown_places(spec, home, show, writable, environ)
    places |= _existing(write, "write")
    places |= _existing(spec.hide, "hidden")
    places |= _existing(sockets, "read")  # an agent can connect there, but cannot add a socket
    places |= _pinned(places)
    places |= dict.fromkeys(taken, "taken")
    links = _links((*SYSTEM, *PRIVATE, *tools, *show, *write, *sockets, home))
    return SandboxPlan(spec.kind, spec.program, cwd, spec.network, places, links)


def _require_fit(cwd: str, home: str, hidden: Iterable[str]) -> None:
    if not os.path.isabs(home) or os.path.realpath(home) == "/":
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"A sandbox needs a home of the account's own, not {home!r}.")
    for place in (home, *SYSTEM, "/dev", "/proc", "/run"):
        if Path(os.path.realpath(place)).is_relative_to(cwd):
            raise HutchError(
                Reason.ISOLATION_UNAVAILABLE,
                f"A session in {cwd} cannot have a sandbox, since {place} lies in it; work in a folder of its own.",
            )
    for path in hidden:
        if Path(cwd).is_relative_to(os.path.realpath(path)):
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"{cwd} lies in {path}, which no agent may see.")


def _shown_places(
    spec: m.SandboxSpec, home: str, show: Iterable[str], writable: Sequence[str], environ: Mapping[str, str]
) -> tuple[dict[str, Access], list[str]]:
    """Return all places but the writable ones and `spec.hide`; and the paths of the tools before links are resolved."""

    def below(names: Iterable[str]) -> list[str]:
        return [path for name in names for path in in_home(name, home, environ)]

    places = _existing(PRIVATE, "private") | _existing(SYSTEM, "read")
    resolver = os.path.dirname(os.path.realpath("/etc/resolv.conf"))
    if resolver.startswith("/run/"):
        places[resolver] = "read"
    places[os.path.realpath(home)] = "read" if spec.home == "read_only" and os.path.isdir(home) else "private"
    tools = _fixed(below(TOOLS), writable) if spec.home == "tools" else []
    places |= _existing(tools, "read")
    if spec.home != "hidden":
        places |= _existing(filter(holds_key, below(TYPED_SECRETS)), "hidden")
    places |= _existing(show, "read")
    if spec.home != "hidden":
        places |= _existing(below(CACHES), "private") | _existing(below(SECRETS), "hidden")
    if os.geteuid() == 0:
        places |= _existing(ROOT_ONLY, "hidden")
        places["/proc/sys"] = "read"  # uid 0 could change the host's kernel settings there
    places["/dev"], places["/proc"] = "devices", "processes"
    return places, tools


def _fixed(paths: Iterable[str], writable: Sequence[str]) -> list[str]:
    """Return the paths whose links, if any, lie outside writable places: an agent cannot lead them elsewhere."""

    def is_writable(link: str) -> bool:
        return any(Path(link).is_relative_to(place) for place in writable)

    return [path for path in paths if not any(map(is_writable, _links((path,))))]


def _existing(paths: Iterable[str], access: Access) -> dict[str, Access]:
    """Return the paths that exist, each at its real path."""
    return {os.path.realpath(path): access for path in paths if os.path.exists(path)}


def _pinned(places: Mapping[str, Access]) -> dict[str, Access]:
    """Return the folders between a writable place and a protected one inside it: each is mounted onto itself.

    A mount point cannot be renamed. Otherwise an agent could move such a folder, with the hidden places in it, to where
    the next agent sees it, or could put another folder in the place of a program that Hutch starts.
    """
    found: dict[str, Access] = {}
    for path, access in places.items():
        between: list[str] = []
        for folder in map(str, Path(path).parents):
            if folder in places:
                if access != "write" and places[folder] == "write":
                    found |= dict.fromkeys(between, "pinned")
                break
            between.append(folder)
    return found


def _links(paths: Iterable[str]) -> dict[str, str]:
    """Return the symbolic links on the way to `paths`, by their real path, so that every path works inside too."""
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


def _around(path: str, places: Mapping[str, Access]) -> Access:
    """Return the access of the nearest place that `path` lies in."""
    return next((places[str(one)] for one in Path(path).parents if str(one) in places), "private")


def _mount(path: str, access: Access, around: Access) -> list[str]:
    match access:
        case "read" if around == "read":
            return []
        case "devices":
            return ["--dev", path]
        case "processes":
            return ["--proc", path]
        case "read":
            return ["--ro-bind", path, path]
        case "write" | "pinned":
            return ["--bind", path, path]
        case "hidden" if around in _BARE:  # the place around it shows nothing, not even this name
            return []
        case "taken":
            return ["--ro-bind", _EMPTY, path]
        case "hidden" if not os.path.isdir(path):
            return ["--ro-bind", _EMPTY, path]
        case _:
            return ["--tmpfs", path]
