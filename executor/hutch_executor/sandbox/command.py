"""A session's commands, put inside its walls: their words, their environment, their way to the network.

Whatever drives an agent comes through here, so that all agents have the same walls. Where they cannot be put up the
command is not run (`isolation_unavailable`); there is no way around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hutch_executor.sandbox import plan as sandbox
from hutch_executor.sandbox.egress import Door, Egress
from hutch_executor.sandbox.git_dirs import git_dirs
from hutch_shared import messages as m
from hutch_shared.allow_list import AllowList
from hutch_shared.errors import HutchError, Reason

__all__ = ["Enclosure", "Entered", "git_settings"]

_GIT: Final = (("safe.bareRepository", "explicit"),)
"""A folder that looks like a repository is none unless it is named as one: its settings name programs to run."""
_GIT_INSIDE: Final = (*_GIT, ("commit.gpgSign", "false"), ("tag.gpgSign", "false"))
"""Inside walls nobody signs in the person's name: the keys are not there, and a commit would fail."""
_OUTSIDE: Final = frozenset({"TMPDIR", "XDG_RUNTIME_DIR"})
"""Variables that name places which are not there inside walls."""
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_PROXY: Final = f"http://127.0.0.1:{sandbox.PROXY_PORT}"


@dataclass(frozen=True, slots=True)
class Entered:
    """A command with the words that put it inside. It inherits `descriptors`; `close` when it has ended."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    door: Door | None = None

    def close(self) -> None:
        """Close its way to the network. Safe twice."""
        if self.door is not None:
            self.door.close()


class Enclosure:
    """The walls of one session, which may be entered as often as it has commands. Its methods block for a moment."""

    def __init__(self, session: m.PrepareSession, spec: m.SandboxSpec) -> None:
        """Start what the network needs. `isolation_unavailable` when the list of hosts cannot be read."""
        self._session = session
        self._spec = spec
        self._egress: Egress | None = None
        if spec.network == "allow-list":
            try:
                self._egress = Egress(AllowList.read(spec.allow))
            except ValueError as error:
                raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"[sandbox] allow cannot be read: {error}.") from error

    def enter(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        show: Iterable[str] = (),
        write: Iterable[str] = (),
        sockets: Iterable[str] = (),
    ) -> Entered:
        """Return how to run `argv` inside, after it was tried there with a command that does nothing.

        `isolation_unavailable` with the reason when it cannot be; see `sandbox.walls` for the rest.
        """
        spec, session = self._spec, self._session
        git = git_dirs(session.cwd)
        words = sandbox.walls(
            spec,
            session.cwd,
            session.home,
            show=(*show, *sandbox.PROGRAMS, *git.show),
            write=(*write, *git.write),
            sockets=sockets,
        )
        if why := sandbox.trouble(words, door=self._egress is not None):
            message = f"The sandbox could not be put up, and nothing runs without it: {why}"
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, message)
        inside = {name: value for name, value in env.items() if name not in _OUTSIDE} | git_settings(_GIT_INSIDE)
        if spec.network != "full":
            inside = {name: value for name, value in inside.items() if name.upper() not in _PROXIES}
        if self._egress is None:
            return Entered((*words, *argv), inside)
        inside |= {"NODE_USE_ENV_PROXY": "1"}
        for name in _PROXIES:
            inside |= dict.fromkeys((name, name.lower()), "" if name == "NO_PROXY" else _PROXY)
        door = self._egress.open_door()
        return Entered((*words, *sandbox.doorway_words(door.descriptor), *argv), inside, (door.descriptor,), door)

    def close(self) -> None:
        """End what the network needed. Safe twice."""
        if self._egress is not None:
            self._egress.close()


def git_settings(settings: Sequence[tuple[str, str]] = _GIT) -> dict[str, str]:
    """Return the variables that give git these settings, over those of its files."""
    env = {"GIT_CONFIG_COUNT": str(len(settings))}
    for at, (key, value) in enumerate(settings):
        env |= {f"GIT_CONFIG_KEY_{at}": key, f"GIT_CONFIG_VALUE_{at}": value}
    return env
