"""Gathers the layers of the policy: the host's file, the account's rules, the project's file, the session's rules.

The decisions are made in `permissions.policy`. If the host's file cannot be read, its layer is broken and every call
asks.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio

from hutch_daemon.permissions.layers import Layer, Policy, compile_policy, parse_policy_toml
from hutch_daemon.permissions.rules import BadRuleError, parse_rule
from hutch_daemon.services.access import Caller
from hutch_daemon.services.accounts import Accounts
from hutch_daemon.signals import Signal
from hutch_daemon.store import rules
from hutch_daemon.store.rows import RuleEffect, RuleRow, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.project_file import POLICY_FILE, UNUSABLE

__all__ = ["EFFECTS", "Layered", "PolicyLayers", "rules_of", "with_tools"]

EFFECTS: Final[tuple[RuleEffect, ...]] = ("allow", "ask", "deny")


@dataclass(frozen=True, slots=True)
class Layered:
    """Layers, the problems with them, and the home of the account that they apply to."""

    layers: tuple[Layer, ...]
    problems: tuple[str, ...]
    home: str

    def policy(self) -> Policy:
        """Return the compiled policy. Equal layers are compiled once."""
        return _compiled(self.layers, self.home)


@functools.lru_cache(maxsize=256)
def _compiled(layers: tuple[Layer, ...], home: str) -> Policy:
    return compile_policy(layers, home=home)


@dataclass(frozen=True, slots=True)
class _SeenProject:
    """The last project file that a session's executor sent, and whether it found none after that."""

    file: m.ProjectFile
    removed: bool = False


class PolicyLayers:
    """Gathers the layers of rules. It is the `PolicyOf` of `Approvals`."""

    def __init__(
        self,
        store: Store,
        host_file: Path,
        accounts: Accounts,
    ) -> None:
        """`host_file` is the host's policy file. `accounts` finds the home that `~` means in a session's rules."""
        self._store = store
        self._host_file = host_file
        self._accounts = accounts
        self._projects: dict[str, _SeenProject] = {}
        """By session; no entry if its executor has sent no project file."""
        self.project_changed: Signal[[str]] = Signal()
        """Emitted with a session whose executor sent another project file than before."""
        self._host_seen: tuple[int, ...] = ()

    async def __call__(self, session: SessionRow) -> Policy:
        """Return the policy for a session, with the project file that its executor sent last."""
        return (await self.layered(session.owner, session.cwd, session)).policy()

    def note_project(self, session: str, project: m.ProjectFile | None, *, asked_again: bool = False) -> None:
        """Take the project file that a session's executor has read; None means that there is none.

        What a removed file allowed is not allowed any more. What it denied or asked about stays so for the session: its
        agent may have removed it. An executor that asks again sends what it read at first: that counts only if no file
        is known.
        """
        known = self._projects.get(session)
        if asked_again and known is not None:
            return
        if project is not None:
            seen = _SeenProject(project)
        elif known is not None:
            seen = _SeenProject(known.file, removed=True)
        else:
            return
        if seen != known:
            self._projects[session] = seen
            self.project_changed.emit(session)

    async def check_host_file(self) -> bool:
        """Look at the host's file; return whether it changed since the last look. The first look finds any file new."""
        before, self._host_seen = self._host_seen, await anyio.to_thread.run_sync(_mark_of, self._host_file)
        return before != self._host_seen

    def home_of(self, session: SessionRow) -> str:
        """Return the home of the session's account."""
        return self._accounts.of_session(session).home

    def forget(self, session: str) -> None:
        """Drop the project file of a closed session."""
        self._projects.pop(session, None)

    async def check_mode(self, session: SessionRow) -> None:
        """Raise `policy_forbids` if the session's mode is `bypass` and the host forbids that mode."""
        if session.permission_mode == "bypass" and (await self(session)).bypass_forbidden:
            raise HutchError(Reason.POLICY_FORBIDS, "The host's policy forbids the mode bypass.")

    def check_rules(self, owner: int, given: m.Rules, *, base: str) -> None:
        """Raise `invalid_rule` for the first rule that cannot be read."""
        home = self._accounts.by_uid(owner).home
        for effect in EFFECTS:
            for text in rules_of(given, effect):
                try:
                    parse_rule(text, effect, "session", "given", base=base, home=home)
                except BadRuleError as error:
                    raise HutchError(Reason.INVALID_RULE, f"The rule {text!r} cannot be used: {error}.") from error

    async def layered(
        self, owner: int, cwd: str, session: SessionRow | None = None, project: m.ProjectFile | None = None
    ) -> Layered:
        """Gather the layers that apply to an owner in a directory and, if given, to a session there.

        Without `project`, use the file that the session's executor sent last.
        """
        account = self._accounts.by_uid(owner)
        home = self._accounts.of_session(session).home if session is not None else account.home
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
        removed = False
        if project is None and session is not None and (seen := self._projects.get(session.id)) is not None:
            project, removed = seen.file, seen.removed
        if project is not None:
            # The executor is not trusted: compute the digest from the text, and the path from the session.
            path, digest = posixpath.join(cwd, *POLICY_FILE), hashlib.sha256(project.text.encode()).hexdigest()
            trusted = await self._store.read(lambda conn: rules.is_trusted(conn, owner, path, digest))
            origin = f"{path}, removed since" if removed else path
            layer, wrong = parse_policy_toml(project.text, "project", cwd, origin, trusted=trusted and not removed)
            if project.text.startswith(UNUSABLE):  # not TOML, so the layer is broken; the executor sent the reason
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
        """Return the current layers in a form for users."""
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


def with_tools(given: m.Rules, options: m.AgentOptions) -> m.Rules:
    """Return the rules of a session together with the tools that the agent's options allow and disallow."""
    allow = dict.fromkeys((*given.allow, *options.allowed_tools))
    deny = dict.fromkeys((*given.deny, *options.disallowed_tools))
    return m.Rules(tuple(allow), given.ask, tuple(deny))


def rules_of(rules: m.Rules, effect: RuleEffect) -> tuple[str, ...]:
    """Return the rules of one effect."""
    match effect:
        case "allow":
            return rules.allow
        case "ask":
            return rules.ask
        case "deny":
            return rules.deny


def _note(layer: Layer) -> str:
    if layer.broken:
        return f"It cannot be read ({layer.broken}): until then, every call asks."
    if layer.name == "project" and not layer.trusted:
        return "Not trusted: its rules that deny or ask apply, its rules that allow do not."
    return ""


def _layer(name: str, rows: tuple[RuleRow, ...], base: str, origin: str) -> Layer:
    def of(effect: str) -> tuple[str, ...]:
        return tuple(row.rule for row in rows if row.effect == effect)

    return Layer(name, of("allow"), of("ask"), of("deny"), base, origin)  # type: ignore[arg-type]


def _mark_of(path: Path) -> tuple[int, ...]:
    """Return numbers that differ after a file was changed or replaced; none for a file that cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _host_layer(path: Path) -> tuple[list[Layer], tuple[str, ...]]:
    """Read the host's file. A missing file gives no layer; an unreadable file gives a broken layer."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], ()
    except (OSError, UnicodeDecodeError) as error:
        return [Layer("host", base="/", origin=str(path), broken=str(error))], (f"{path} cannot be read: {error}",)
    layer, problems = parse_policy_toml(text, "host", "/", str(path))
    return [layer], problems
