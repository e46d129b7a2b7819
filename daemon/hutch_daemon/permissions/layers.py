"""Where rules come from, and how they become one policy.

Five layers, merged: host, account, project, session, and what people answered. No layer outranks another one; that
deny beats ask beats allow is what keeps the host's word. Two things are tied to a layer: only the host can forbid the
mode `bypass`, and a project's own file can allow nothing unless its owner trusted it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hutch_daemon.permissions.rules import (
    BadRuleError,
    CommandRule,
    Effect,
    HostRule,
    LayerName,
    NameRule,
    PathRule,
    Rule,
    parse_rule,
)

_EFFECTS: tuple[Effect, ...] = ("deny", "ask", "allow")
LARGEST_FILE = 64 * 1024
"""Characters of a policy file."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The rules of one place. `base`: the directory in which `/x` in its path rules begins. `origin`: for people."""

    name: LayerName
    allow: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    base: str = "/"
    origin: str = ""
    trusted: bool = False
    """Of a project: its owner has said yes to this very file, by its digest. Others are trusted by where they stand."""
    forbid_bypass: bool = False
    """Of the host: the mode `bypass` is taken for `ask`."""
    broken: str = ""
    """Why the file could not be read as a policy: what it denies is not known, so everything asks."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules of one effect, by what they are about, each kind in the order of the layers."""

    commands: tuple[CommandRule, ...]
    paths: tuple[PathRule, ...]
    hosts: tuple[HostRule, ...]
    names: tuple[NameRule, ...]

    def __bool__(self) -> bool:
        return bool(self.commands or self.paths or self.hosts or self.names)

    @classmethod
    def of(cls, rules: Sequence[Rule]) -> RuleSet:
        return cls(
            commands=tuple(rule for rule in rules if isinstance(rule, CommandRule)),
            paths=tuple(rule for rule in rules if isinstance(rule, PathRule)),
            hosts=tuple(rule for rule in rules if isinstance(rule, HostRule)),
            names=tuple(rule for rule in rules if isinstance(rule, NameRule)),
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """Compiled rules. Immutable, so that one can be kept for as long as its layers are the same."""

    allow: RuleSet
    ask: RuleSet
    deny: RuleSet
    problems: tuple[str, ...]
    """What could not be read, for people."""
    broken: str | None
    """Why everything asks: a rule that asks or denies could not be read. None if all could."""
    bypass_forbidden: bool
    home: str


def compile_policy(layers: Sequence[Layer], *, bypass_forbidden: bool = False, home: str) -> Policy:
    """Merge layers into a policy. Never raises for a bad rule: `problems` tells.

    A bad rule that allows is left out; a bad one that asks or denies makes everything ask. `home` is where
    `~/` begins, absolute and resolved.
    """
    rules: dict[Effect, list[Rule]] = {"allow": [], "ask": [], "deny": []}
    problems: list[str] = []
    broken: str | None = None
    for layer in layers:
        where = layer.origin or layer.name
        if layer.broken:
            broken = broken or f"{where} cannot be read as a policy: {layer.broken}"
        untrusted = layer.name == "project" and not layer.trusted
        if untrusted and layer.allow:
            count = len(layer.allow)
            subject = "1 rule that allows is" if count == 1 else f"{count} rules that allow are"
            problems.append(f"{where}: {subject} left out until the project is trusted")
        for effect in _EFFECTS:
            if untrusted and effect == "allow":
                continue
            texts: tuple[str, ...] = getattr(layer, effect)
            for text in texts:
                try:
                    rule = parse_rule(text, effect, layer.name, where, base=layer.base, home=home)
                except BadRuleError as error:
                    problems.append(f"{where}: {effect} {text!r}: {error}")
                    if effect != "allow":
                        broken = broken or f"{where} holds a rule to {effect} that cannot be read: {text!r}"
                else:
                    rules[effect].append(rule)
    return Policy(
        allow=RuleSet.of(rules["allow"]),
        ask=RuleSet.of(rules["ask"]),
        deny=RuleSet.of(rules["deny"]),
        problems=tuple(problems),
        broken=broken,
        bypass_forbidden=bypass_forbidden or any(layer.forbid_bypass for layer in layers if layer.name == "host"),
        home=home,
    )


def parse_policy_toml(
    text: str, name: LayerName, base: str, origin: str, *, trusted: bool = False
) -> tuple[Layer, tuple[str, ...]]:
    """A policy file and what is wrong with it, for people. Never raises: a file that is no policy is a broken layer.

    The file holds a table `[permissions]` with lists `allow`, `ask` and `deny`; the host's also `forbid_bypass`.
    """
    if len(text) > LARGEST_FILE:
        return _broken(name, base, origin, f"over {LARGEST_FILE} characters")
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        return _broken(
            name, base, origin, str(error) if isinstance(error, tomllib.TOMLDecodeError) else "not a TOML file"
        )
    problems = _unknown(data, ("permissions",), origin)
    table = data.get("permissions", {})
    if not isinstance(table, dict):
        return _broken(name, base, origin, "permissions is not a table")
    known = (*_EFFECTS, "forbid_bypass") if name == "host" else _EFFECTS
    unknown = _unknown(table, known, f"{origin}: [permissions]")
    lists: dict[str, tuple[str, ...]] = {}
    # What an unknown key was to deny is not known either.
    broken = "it holds a key that is not known" if problems or unknown else ""
    for effect in _EFFECTS:
        given = table.get(effect, [])
        if isinstance(given, list) and all(isinstance(rule, str) for rule in given):
            lists[effect] = tuple(given)
        else:
            problems.append(f"{origin}: {effect} is not a list of texts")
            broken = broken or (f"{effect} is not a list of texts" if effect != "allow" else "")
    forbid = table.get("forbid_bypass", False) if name == "host" else False
    if not isinstance(forbid, bool):
        problems.append(f"{origin}: forbid_bypass is neither true nor false; taken as true")
        forbid = True
    layer = Layer(name, base=base, origin=origin, trusted=trusted, forbid_bypass=forbid, broken=broken, **lists)
    return layer, (*problems, *unknown)


def _broken(name: LayerName, base: str, origin: str, why: str) -> tuple[Layer, tuple[str, ...]]:
    return Layer(name, base=base, origin=origin, broken=why), (f"{origin}: {why}",)


def _unknown(table: dict[str, Any], known: tuple[str, ...], where: str) -> list[str]:
    problems: list[str] = []
    for key in table:
        if key not in known:
            nearest = difflib.get_close_matches(key[:100], known, 1, 0.5)
            hint = f"; do you mean {nearest[0]}?" if nearest else f"; known are {', '.join(known)}"
            problems.append(f"{where}: unknown key {key[:100]!r}{hint}")
    return problems
