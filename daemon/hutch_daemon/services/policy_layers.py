"""The policy in force: its layers gathered from the host's file, the account's rules, the project's file, the session.

Nothing here decides; `permissions.policy` does. A host file that cannot be read is a broken layer: everything asks.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import anyio

from hutch_daemon.environments.port import Account
from hutch_daemon.permissions.layers import Layer, Policy, compile_policy, parse_policy_toml
from hutch_daemon.services.access import Caller
from hutch_daemon.store import rules
from hutch_daemon.store.rows import RuleRow, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.project_file import POLICY_FILE, UNUSABLE

__all__ = ["Layered", "Policies"]


@dataclass(frozen=True, slots=True)
class Layered:
    """Layers with what is wrong with them, for an account with this home."""

    layers: tuple[Layer, ...]
    problems: tuple[str, ...]
    home: str

    def policy(self) -> Policy:
        """Return them compiled; the same layers are compiled once."""
        return _compiled(self.layers, self.home)


@functools.lru_cache(maxsize=256)
def _compiled(layers: tuple[Layer, ...], home: str) -> Policy:
    return compile_policy(layers, home=home)


class Policies:
    """Gathers layers. Called for a session it is the desk's `PolicyOf`."""

    def __init__(
        self,
        store: Store,
        host_file: Path,
        account_of: Callable[[int], Account],
        account_for: Callable[[SessionRow], Account],
    ) -> None:
        """`account_of` finds a person, `account_for` the account that a session runs as: its home is `~` there."""
        self._store = store
        self._host_file = host_file
        self._account_of = account_of
        self._account_for = account_for
        self._projects: dict[str, m.ProjectFile] = {}
        """The newest project file that each session's executor sent."""

    async def __call__(self, session: SessionRow, project: m.ProjectFile | None) -> Policy:
        """Return the policy for a session. Without `project` the file that its executor sent last counts."""
        if project is not None:
            self._projects[session.id] = project
        return (await self.layered(session.owner, session.cwd, session)).policy()

    def home_of(self, session: SessionRow) -> str:
        """Return the home of the account that the session belongs to."""
        return self._account_for(session).home

    def forget(self, session: str) -> None:
        """The session is over."""
        self._projects.pop(session, None)

    async def layered(
        self, owner: int, cwd: str, session: SessionRow | None = None, project: m.ProjectFile | None = None
    ) -> Layered:
        """Gather what counts for an owner in a directory, and in a session there.

        Without `project` the file that the session's executor sent last counts.
        """
        account = self._account_of(owner)
        home = self._account_for(session).home if session is not None else account.home
        layers, problems = await anyio.to_thread.run_sync(_host_layer, self._host_file)
        ref = session.id if session is not None else None
        stored = await self._store.read(lambda conn: rules.list_(conn, owner, project=cwd, session=ref))
        everywhere = tuple(row for row in stored if row.project is None and row.session is None)
        project_own = tuple(row for row in stored if row.project is not None and row.session is None)
        answered = tuple(row for row in stored if row.session is not None)
        if everywhere:
            layers.append(_layer("account", everywhere, home, f"rules of {account.name}"))
        if project_own:
            layers.append(_layer("account", project_own, cwd, f"rules of {account.name} for {cwd}"))
        if project is None and session is not None:
            project = self._projects.get(session.id)
        if project is not None:
            # What it is, is told by its text, and where it counts, by the session: not by who sent it.
            path, digest = posixpath.join(cwd, *POLICY_FILE), hashlib.sha256(project.text.encode()).hexdigest()
            trusted = await self._store.read(lambda conn: rules.is_trusted(conn, owner, path, digest))
            layer, wrong = parse_policy_toml(project.text, "project", cwd, path, trusted=trusted)
            if project.text.startswith(UNUSABLE):  # that is no TOML: the layer is broken already, and why is known
                layer = replace(layer, broken=project.text.removeprefix(UNUSABLE))
                wrong = (f"{path}: {layer.broken}",)
            layers.append(layer)
            problems += wrong
        if session is not None:
            own = session.rules
            layers.append(Layer("session", own.allow, own.ask, own.deny, cwd, f"session {session.name}"))
            if answered:
                layers.append(_layer("answered", answered, cwd, f"answered in session {session.name}"))
        return Layered(tuple(layers), tuple(problems), home)

    async def show(
        self,
        caller: Caller,
        cwd: str,
        session: SessionRow | None,
        mode: m.PermissionMode,
        project: m.ProjectFile | None = None,
    ) -> m.PolicyView:
        """Return the layers in force for people to read."""
        owner = session.owner if session is not None else caller.uid
        found = await self.layered(owner, cwd, session, project)
        policy = found.policy()
        shown = tuple(
            m.PolicyLayer(
                name=layer.name,
                origin=layer.origin,
                rules=m.Rules(layer.allow, layer.ask, layer.deny),
                in_force=not layer.broken and (layer.name != "project" or layer.trusted),
                note=_note(layer),
            )
            for layer in found.layers
        )
        return m.PolicyView(
            layers=shown,
            mode=mode,
            bypass_forbidden=policy.bypass_forbidden,
            problems=(*found.problems, *policy.problems),
        )


def _note(layer: Layer) -> str:
    if layer.broken:
        return f"It cannot be read ({layer.broken}): until it can, everything asks."
    if layer.name == "project" and not layer.trusted:
        return "Not trusted: what it denies and asks counts, what it allows does not."
    return ""


def _layer(name: str, rows: tuple[RuleRow, ...], base: str, origin: str) -> Layer:
    def of(effect: str) -> tuple[str, ...]:
        return tuple(row.rule for row in rows if row.effect == effect)

    return Layer(name, of("allow"), of("ask"), of("deny"), base, origin)  # type: ignore[arg-type]


def _host_layer(path: Path) -> tuple[list[Layer], tuple[str, ...]]:
    """Read the host's file; one that is not there is no layer, one that cannot be read is a broken one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], ()
    except (OSError, UnicodeDecodeError) as error:
        return [Layer("host", base="/", origin=str(path), broken=str(error))], (f"{path} cannot be read: {error}",)
    layer, problems = parse_policy_toml(text, "host", "/", str(path))
    return [layer], problems
