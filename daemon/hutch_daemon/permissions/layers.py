"""Compiles the rules of all layers into one policy.

There are five layers: host, account, project, session, and the answers of users. No layer outranks another: a rule that
denies wins over a rule that asks, and a rule that asks over a rule that allows, in whatever layers they are. Two things
depend on the layer: only the host can forbid the mode `bypass`, and a project's rules that allow are ignored until the
session's owner trusts the file.
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
"""The largest policy file, in characters."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The rules of one source. `base` is the directory where `/x` in a path rule starts; `origin` is for users."""

    name: LayerName
    allow: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    base: str = "/"
    origin: str = ""
    trusted: bool = False
    """Only for a project: True if the session's owner trusts a file with this digest. Other layers need no trust."""
    forbid_bypass: bool = False
    """Only for the host: True makes the mode `bypass` work as `ask`."""
    broken: str = ""
    """The reason why the file could not be read; "" if it was read. Every call asks, as the file may deny anything."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of one effect, grouped by subject, in the order of the layers."""

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
    """Compiled rules. Immutable, so callers can cache it while the layers stay the same."""

    allow: RuleSet
    ask: RuleSet
    deny: RuleSet
    problems: tuple[str, ...]
    """One sentence for users for each rule or file that could not be read."""
    broken: str | None
    """The reason why every call asks: a rule that asks or denies could not be read. Otherwise None."""
    bypass_forbidden: bool
    home: str


def compile_policy(layers: Sequence[Layer], *, bypass_forbidden: bool = False, home: str) -> Policy:
    """Merge layers into a policy. A bad rule raises nothing: it is listed in `problems`.

    A bad rule that allows is ignored; a bad rule that asks or denies makes every call ask. `home`, an absolute and
    resolved path, is the directory that `~/` means.
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
            problems.append(f"{where}: {subject} ignored until the project is trusted")
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
                        broken = broken or f"{where} has a rule to {effect} that cannot be read: {text!r}"
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
    """Return the layer of a policy file, and its problems for users. An unreadable file gives a `broken` layer.

    The file has a table `[permissions]` with lists `allow`, `ask` and `deny`, and the host's file `forbid_bypass`.
    """
    if len(text) > LARGEST_FILE:
        return _broken(name, base, origin, f"it is longer than {LARGEST_FILE} characters")
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        return _broken(
            name, base, origin, str(error) if isinstance(error, tomllib.TOMLDecodeError) else "it is not a TOML file"
        )
    problems = _unknown(data, ("permissions",), origin)
    table = data.get("permissions", {})
    if not isinstance(table, dict):
        return _broken(name, base, origin, "permissions is not a table")
    known = (*_EFFECTS, "forbid_bypass") if name == "host" else _EFFECTS
    unknown = _unknown(table, known, f"{origin}: [permissions]")
    lists: dict[str, tuple[str, ...]] = {}
    # An unknown key may have been meant to deny something.
    broken = "it has an unknown key" if problems or unknown else ""
    for effect in _EFFECTS:
        given = table.get(effect, [])
        if isinstance(given, list) and all(isinstance(rule, str) for rule in given):
            lists[effect] = tuple(given)
        else:
            problems.append(f"{origin}: {effect} is not a list of strings")
            broken = broken or (f"{effect} is not a list of strings" if effect != "allow" else "")
    forbid = table.get("forbid_bypass", False) if name == "host" else False
    if not isinstance(forbid, bool):
        problems.append(f"{origin}: forbid_bypass is neither true nor false; it is read as true")
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
            hint = f"; did you mean {nearest[0]}?" if nearest else f"; known keys: {', '.join(known)}"
            problems.append(f"{where}: unknown key {key[:100]!r}{hint}")
    return problems
