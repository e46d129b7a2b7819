"""A session's commands in their sandbox: the argv, the environment, the way to the network.

All runners start their commands through this module, so all agents have the same sandbox. A command whose sandbox
cannot be made does not run (`isolation_unavailable`); there is no fallback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hutch_executor.sandbox.egress import EgressProxy, NetworkBridge
from hutch_executor.sandbox.git_dirs import git_dirs
from hutch_executor.sandbox.plan import plan_sandbox
from hutch_executor.sandbox.probe import find_fault
from hutch_executor.sandbox.programs import PROGRAMS, PROXY_PORT, bridge_argv
from hutch_shared import messages as m
from hutch_shared.allow_list import AllowList
from hutch_shared.errors import HutchError, Reason

__all__ = ["SandboxedCommand", "SessionSandbox", "git_settings"]

_GIT: Final = (("safe.bareRepository", "explicit"),)
"""git uses a bare repository only if it is named: a folder that looks like one could name programs to run."""
_GIT_INSIDE: Final = (*_GIT, ("commit.gpgSign", "false"), ("tag.gpgSign", "false"))
"""Inside a sandbox the user's signing keys are hidden, so signing would only make commits fail."""
_OUTSIDE: Final = frozenset({"TMPDIR", "XDG_RUNTIME_DIR"})
"""Variables that name places outside the sandbox."""
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_PROXY: Final = f"http://127.0.0.1:{PROXY_PORT}"


@dataclass(frozen=True, slots=True)
class SandboxedCommand:
    """A command that runs in a sandbox. It inherits `descriptors`. Call `close` when it has ended."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    bridge: NetworkBridge | None = None

    def close(self) -> None:
        """Close the command's network bridge, if it has one. Safe to call twice."""
        if self.bridge is not None:
            self.bridge.close()


class SessionSandbox:
    """The sandbox of one session. Each of its commands gets a sandbox of its own. The methods block for a moment."""

    def __init__(self, session: m.PrepareSession, spec: m.SandboxSpec) -> None:
        """Start the proxy if the network needs one. `isolation_unavailable` if the allow-list cannot be read."""
        self._session = session
        self._spec = spec
        self._proxy: EgressProxy | None = None
        if spec.network == "allow-list":
            try:
                self._proxy = EgressProxy(AllowList.read(spec.allow))
            except ValueError as error:
                raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"[sandbox] allow cannot be read: {error}.") from error

    def __repr__(self) -> str:
        return f"<SessionSandbox {self._session.session} network {self._spec.network}>"

    def wrap(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        show: Iterable[str] = (),
        write: Iterable[str] = (),
        sockets: Iterable[str] = (),
        taken: Iterable[str] = (),
    ) -> SandboxedCommand:
        """Return `argv` as a command in the sandbox. First tries the sandbox with a command that does nothing.

        `show`, `write`, `sockets` and `taken` are as in `plan_sandbox`. `isolation_unavailable`, with the reason, if
        the sandbox cannot be made.
        """
        spec, session = self._spec, self._session
        git = git_dirs(session.cwd)
        sandbox = plan_sandbox(
            spec,
            session.cwd,
            session.home,
            show=(*show, *PROGRAMS, *git.show),
            write=(*write, *git.write),
            sockets=sockets,
            taken=taken,
        ).argv()
        if fault := find_fault(sandbox, with_bridge=self._proxy is not None):
            message = f"The sandbox could not be made, and nothing runs without it: {fault}"
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, message)
        inside = {name: value for name, value in env.items() if name not in _OUTSIDE} | git_settings(_GIT_INSIDE)
        if spec.network != "full":
            inside = {name: value for name, value in inside.items() if name.upper() not in _PROXIES}
        if self._proxy is None:
            return SandboxedCommand((*sandbox, *argv), inside)
        inside |= {"NODE_USE_ENV_PROXY": "1"}
        for name in _PROXIES:
            inside |= dict.fromkeys((name, name.lower()), "" if name == "NO_PROXY" else _PROXY)
        bridge = self._proxy.open_bridge()
        return SandboxedCommand(
            (*sandbox, *bridge_argv(bridge.descriptor), *argv), inside, (bridge.descriptor,), bridge
        )

    def close(self) -> None:
        """End the proxy. Safe to call twice."""
        if self._proxy is not None:
            self._proxy.close()


def git_settings(settings: Sequence[tuple[str, str]] = _GIT) -> dict[str, str]:
    """Return the environment variables that give git these settings; they override git's files."""
    env = {"GIT_CONFIG_COUNT": str(len(settings))}
    for at, (key, value) in enumerate(settings):
        env |= {f"GIT_CONFIG_KEY_{at}": key, f"GIT_CONFIG_VALUE_{at}": value}
    return env
