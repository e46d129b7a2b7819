"""A session's commands in their sandbox: the argv, the environment, the way to the network.

All runners start their commands through this module, so all agents have the same sandbox. A command whose sandbox
cannot be made does not run (`isolation_unavailable`); there is no fallback.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import anyio
from anyio import to_thread

from hutch_executor.account import agent_dir
from hutch_executor.sandbox import private_home
from hutch_executor.sandbox.egress import EgressProxy, NetworkBridge
from hutch_executor.sandbox.enforcement import Enforced, enforce
from hutch_executor.sandbox.git_dirs import git_dirs
from hutch_executor.sandbox.places import is_inside
from hutch_executor.sandbox.plan import plan_sandbox
from hutch_executor.sandbox.probe import make_and_try
from hutch_executor.sandbox.programs import PROGRAMS, PROXY_PORT, bridge_argv
from hutch_shared import messages as m
from hutch_shared.allow_list import AllowList
from hutch_shared.errors import HutchError, Reason

__all__ = ["SandboxedCommand", "SessionSandbox", "git_settings"]

_GIT: Final = (("safe.bareRepository", "explicit"),)
"""git uses a bare repository only if it is named: a folder that looks like one could name programs to run."""
_GIT_INSIDE: Final = (*_GIT, ("commit.gpgSign", "false"), ("tag.gpgSign", "false"))
"""Inside a sandbox the user's signing keys are hidden, so signing would only make commits fail."""
_HOME, _TMP = "home", "tmp"
"""The folders of an agent's private folder."""
_OUTSIDE: Final = frozenset({"TMPDIR", "XDG_RUNTIME_DIR"})
"""Variables that name places outside the sandbox."""
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_PROXY: Final = f"http://127.0.0.1:{PROXY_PORT}"


@dataclass(frozen=True, slots=True)
class SandboxedCommand:
    """A command that runs in a sandbox. It inherits `descriptors`. Close it when it has ended."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    descriptors: tuple[int, ...]
    enforced: Enforced
    bridge: NetworkBridge | None = None

    def close(self) -> None:
        """Close the command's sandbox and its network bridge, if it has one. Safe to call twice. Blocks."""
        self.enforced.close()
        if self.bridge is not None:
            self.bridge.close()

    async def aclose(self) -> None:
        """Close it in a thread, also on cancel: a slow file system can keep its supervisor busy for seconds."""
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self.close)


class SessionSandbox:
    """The sandbox of one session. Each of its commands gets a sandbox of its own. The methods block for a moment."""

    def __init__(self, session: m.PrepareSession, spec: m.SandboxSpec) -> None:
        """Start the proxy if the network needs one. `isolation_unavailable` if the allow-list cannot be read."""
        self._session = session
        self._spec = spec
        self._proxy: EgressProxy | None = None
        self._agent_dir = agent_dir.agent_dir_of(session)
        self._private: str | None = None
        """Under Landlock, the folder with the agent's home and its temporary files, once it is made."""
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
        read_only: bool = False,
    ) -> SandboxedCommand:
        """Return `argv` as a command in the sandbox. First tries the sandbox with a command that does nothing.

        `show`, `write`, `sockets`, `taken` and `read_only` are as in `plan_sandbox`. `isolation_unavailable`, with the
        reason, if the sandbox cannot be made.
        """
        spec, session = self._spec, self._session
        git = git_dirs(session.cwd)
        plan = plan_sandbox(
            spec,
            session.cwd,
            session.home,
            show=(*show, *PROGRAMS, *git.show, *(git.write if read_only else ())),
            write=(*write, *(() if read_only else git.write), *self._private_places()),
            sockets=sockets,
            taken=taken,
            read_only=read_only,
        )
        has_sockets = bool(sockets)
        enforced, fault = make_and_try(lambda: enforce(plan, sockets=has_sockets), with_bridge=self._proxy is not None)
        try:
            if fault:
                message = f"The sandbox could not be made, and nothing runs without it: {fault}"
                raise HutchError(Reason.ISOLATION_UNAVAILABLE, message)
            enforced.ready()
            inside = {name: value for name, value in env.items() if name not in _OUTSIDE} | git_settings(_GIT_INSIDE)
            if spec.network != "full":
                inside = {name: value for name, value in inside.items() if name.upper() not in _PROXIES}
            if self._private is not None:
                inside |= self._private_variables(self._private, plan.links, enforced.shown, inside)
            if self._proxy is None:
                return SandboxedCommand((*enforced.argv, *argv), inside, enforced.descriptors, enforced)
            inside |= {"NODE_USE_ENV_PROXY": "1"}
            for name in _PROXIES:
                inside |= dict.fromkeys((name, name.lower()), "" if name == "NO_PROXY" else _PROXY)
            bridge = self._proxy.open_bridge()
        except BaseException:
            enforced.close()
            raise
        return SandboxedCommand(
            (*enforced.argv, *bridge_argv(bridge.descriptor), *argv),
            inside,
            (*enforced.descriptors, bridge.descriptor),
            enforced,
            bridge,
        )

    def _private_places(self) -> tuple[str, ...]:
        """Return the folder that stands for an empty home and /tmp under Landlock; make it at the first call."""
        if self._spec.kind != "landlock":
            return ()
        if self._private is None:
            agent_dir.make(self._agent_dir)
            self._private = agent_dir.make_scratch(self._agent_dir)
        return (self._private,)

    def _private_variables(
        self, private: str, links: Mapping[str, str], shown: Sequence[str], env: Mapping[str, str]
    ) -> dict[str, str]:
        """Fill the home with links to what is `shown` of the real one, and return the variables for it.

        PATH loses the folders that are not shown: a shell would find a program there, and fail to start it.
        """
        home = os.path.join(private, _HOME)
        folder, scratch = os.path.split(private)
        try:
            private_home.make(folder, f"{scratch}/{_TMP}")
            private_home.fill(folder, f"{scratch}/{_HOME}", self._session.home, shown, links)
        except OSError as error:
            why = f"The agent's home and temporary files cannot be made in {private}: {error.strerror}."
            raise HutchError(Reason.AGENT_UNAVAILABLE, why) from error
        temporary = os.path.join(private, _TMP)
        variables = {"HOME": home, "TMPDIR": temporary, "TMPPREFIX": f"{temporary}/zsh"}  # zsh's own name for it
        variables |= private_home.moved(env, self._session.home, home)
        if path := env.get("PATH"):
            folders = [
                one for one in path.split(":") if any(is_inside(os.path.realpath(one), place) for place in shown)
            ]
            variables["PATH"] = ":".join(folders) or os.defpath
        return variables

    def close(self) -> None:
        """End the proxy and remove the agent's temporary files. Safe to call twice."""
        if self._proxy is not None:
            self._proxy.close()
        if self._private is not None:
            with suppress(OSError):  # the next executor of the session removes what is left
                agent_dir.remove_scratch(self._agent_dir)
            self._private = None


def git_settings(settings: Sequence[tuple[str, str]] = _GIT) -> dict[str, str]:
    """Return the environment variables that give git these settings; they override git's files."""
    env = {"GIT_CONFIG_COUNT": str(len(settings))}
    for at, (key, value) in enumerate(settings):
        env |= {f"GIT_CONFIG_KEY_{at}": key, f"GIT_CONFIG_VALUE_{at}": value}
    return env
