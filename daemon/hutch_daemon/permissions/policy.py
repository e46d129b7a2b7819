"""Decides a tool call from the owner's rules: pure, reads no clock and no file.

What decides, in this order: a rule that denies; a rule that asks; a rule to deny or ask that nobody could read; the
mode. Specificity never counts, nor the layer in which a rule stands. What no rule and no mode settles is asked, and
where nobody may be asked it is denied.

| mode | passes without a rule | asks whatever the rules allow |
|---|---|---|
| ask | reading and searching inside the work directory | |
| accept_edits | that, and editing inside the work directory | |
| plan | reading and searching inside the work directory | commands, edits, tools of servers |
| bypass | everything that cannot be denied or asked about | removing the root or the home |
| unattended | | (nothing: what would ask is denied) |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hutch_daemon.permissions import suggestions
from hutch_daemon.permissions.addresses import NotAnAddressError, host_of, possible_hosts
from hutch_daemon.permissions.allowing import allowed_path
from hutch_daemon.permissions.assessment import Assessment, CallContext, RuleHit
from hutch_daemon.permissions.commands import assess
from hutch_daemon.permissions.layers import Layer, Policy, RuleSet, compile_policy, parse_policy_toml
from hutch_daemon.permissions.paths import absolute, can_be_path, protected_name
from hutch_daemon.permissions.searching import paths_of
from hutch_shared.messages import PermissionMode, Suggestion, ToolCall

__all__ = [
    "Layer",
    "Policy",
    "Suggestion",
    "Verdict",
    "compile_policy",
    "judge",
    "parse_policy_toml",
    "paths_to_resolve",
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is decided, by which rule, and why."""

    decision: Literal["allow", "ask", "deny"]
    rule: str | None
    """The text of the rule that decided; None if none did."""
    layer: str | None
    why: str
    """One sentence for a person."""
    suggestions: tuple[Suggestion, ...] = ()
    """Rules that `always` could add, narrow ones; only with `ask`."""
    programs: tuple[tuple[str, ...], ...] = ()
    """The commands that were judged, each as its words."""


def paths_to_resolve(call: ToolCall, cwd: str, home: str) -> tuple[str, ...]:
    """The absolute paths that `judge` will look for in `real`; to be resolved by the account, links followed in order.

    Bounded to about 200. `cwd` and `home` are absolute and resolved.
    """
    if call.action == "run_command":
        return paths_of(call.command, cwd, home) if call.command else ()
    return tuple(dict.fromkeys(absolute(path, cwd, home) for path in call.paths if can_be_path(path)))


def judge(
    policy: Policy,
    call: ToolCall,
    *,
    mode: PermissionMode,
    cwd: str,
    real: Mapping[str, str],
    home: str,
    workspace: str,
) -> Verdict:
    """Decide a call. Never raises, whatever the call holds.

    `real` gives for each of `paths_to_resolve` what it resolves to, for the session's account; a path that is missing
    there can be denied but not allowed. `cwd`, `home` and `workspace` are absolute and resolved. `workspace` is where
    path rules such as `src/**` begin and what `accept_edits` opens.
    """
    context = CallContext(cwd, home, workspace, real)
    return _settle(policy, call, mode, _look(policy, call, context, mode))


# ---------------------------------------------------------------- what the rules say


def _look(policy: Policy, call: ToolCall, context: CallContext, mode: PermissionMode) -> Assessment:
    named = _by_name(policy, call)
    match call.action:
        case "run_command":
            found = assess(policy, call.command, context) if call.command else Assessment(refused="it names no command")
        case "read" | "edit":
            found = _files(policy, call, context, mode)
        case "search":
            found = _files(policy, call, context, mode) if call.paths else named
        case "fetch":
            found = _address(policy, call)
        case _:
            return named
    # A rule may also name the agent's tool itself.
    return replace(found, denied=found.denied or named.denied, asked=found.asked or named.asked)


def _by_name(policy: Policy, call: ToolCall) -> Assessment:
    name = f"mcp__{call.server}__{call.tool}" if call.action == "mcp" and call.server and call.tool else call.agent_tool

    def first(rules: RuleSet) -> RuleHit | None:
        return next((RuleHit(rule.origin, name) for rule in rules.names if rule.covers(name)), None)

    allowed = first(policy.allow)
    proposal = suggestions.of_tool(name) if call.action in {"mcp", "other", "search"} else None
    return Assessment(
        denied=first(policy.deny),
        asked=first(policy.ask),
        allowed=None if allowed is None else (allowed,),
        refused=f"no rule allows the tool {name[:200]}",
        suggestions=() if proposal is None else (proposal,),
    )


_FORBIDS: dict[str, tuple[str, ...]] = {"read": ("read",), "edit": ("edit", "read"), "search": ("search", "read")}
_ALLOWS: dict[str, tuple[str, ...]] = {"read": ("read",), "edit": ("edit",), "search": ("search", "read")}
_TOOL = {"read": "Read", "edit": "Edit", "search": "Grep"}


def _files(policy: Policy, call: ToolCall, context: CallContext, mode: PermissionMode) -> Assessment:
    if not call.paths or not all(map(can_be_path, call.paths)):
        return Assessment(refused="it names no file", doubt="it names no file")
    places = [context.path_target(path) for path in call.paths]
    forbids = _FORBIDS[call.action]

    def first(rules: RuleSet) -> RuleHit | None:
        for rule in rules.paths:
            if rule.action in forbids:
                for spot in places:
                    for path in spot.both:
                        if rule.covers(path, context.workspace):
                            return RuleHit(rule.origin, path)
        return None

    denied, asked = first(policy.deny), first(policy.ask)
    if denied or asked:
        return Assessment(denied=denied, asked=asked)
    lost = next((spot.written for spot in places if spot.real is None), None)
    if lost is not None:
        reason = f"nobody could tell what {lost} resolves to"
        return Assessment(refused=reason, doubt=reason)
    unsure = _may_search(policy, context, call) if call.action == "search" else None
    hits: list[RuleHit] = []
    for spot in places:
        hit, reason = allowed_path(policy, _ALLOWS[call.action], spot, context)
        if hit is not None and not (unsure and _may_be_meant(policy, hit)):
            hits.append(hit)
        elif unsure:
            return Assessment(refused=unsure, doubt=unsure)
        elif not (spot.within(context.workspace) and _passes(call, mode) and not _guarded(call, spot.both)):
            proposal = None if _guarded(call, spot.both) else suggestions.of_path(_TOOL[call.action], spot.written)
            return Assessment(refused=reason, suggestions=() if proposal is None else (proposal,))
    return Assessment(allowed=tuple(hits))


def _may_be_meant(policy: Policy, hit: RuleHit) -> bool:
    """Whether an allowed search was allowed for reading only: a rule for searches is meant for all that lies below."""
    return any(rule.action != "search" for rule in policy.allow.paths if rule.origin == hit.origin)


def _may_search(policy: Policy, context: CallContext, call: ToolCall) -> str | None:
    """Why a search may show what a rule keeps from being read, though the place where it begins is not denied."""
    for rule in (*policy.deny.paths, *policy.ask.paths):
        if rule.action in {"read", "search"}:
            for path in call.paths:
                if any(rule.may_lie_below(spot, context.workspace) for spot in context.path_target(path).both):
                    return f"what lies below {path} may include files of `{rule.origin.text}`"
    return None


def _guarded(call: ToolCall, paths: tuple[str, ...]) -> bool:
    return call.action == "edit" and any(protected_name(path) for path in paths)


def _passes(call: ToolCall, mode: PermissionMode) -> bool:
    """Whether the mode opens the work directory for this action without a rule."""
    if call.action == "edit":
        return mode == "accept_edits"
    return mode != "unattended"


def _address(policy: Policy, call: ToolCall) -> Assessment:
    url = call.url or ""
    hosts = possible_hosts(url)

    def first(rules: RuleSet) -> RuleHit | None:
        for rule in rules.hosts:
            if rule.host is None or any(rule.covers(host) for host in hosts):
                return RuleHit(rule.origin, url)
        return None

    denied, asked = first(policy.deny), first(policy.ask)
    try:
        host = host_of(url)
    except NotAnAddressError as error:
        return Assessment(denied=denied, asked=asked, refused=str(error), doubt=str(error))
    allowed = next((rule for rule in policy.allow.hosts if rule.covers(host)), None)
    return Assessment(
        denied=denied,
        asked=asked,
        allowed=None if allowed is None else (RuleHit(allowed.origin, host),),
        refused=f"no rule allows {host}",
        suggestions=(suggestions.of_host(host),),
    )


# ---------------------------------------------------------------- what follows from it


def _settle(policy: Policy, call: ToolCall, mode: PermissionMode, found: Assessment) -> Verdict:
    if found.denied is not None:
        return _by_rule("deny", found.denied, found)
    if found.asked is not None:
        return _ask(mode, _by_rule("ask", found.asked, found))
    if policy.broken is not None:
        return _ask(
            mode, Verdict("ask", None, None, f"Everything asks, because {policy.broken}.", programs=found.programs)
        )
    reason = _for_a_person(call, mode, found)
    if reason is None and mode == "bypass" and not policy.bypass_forbidden:
        if found.doubt is None or not (policy.deny or policy.ask or call.action == "run_command"):
            return Verdict(
                "allow", None, None, "The mode bypass asks about nothing that no rule names.", (), found.programs
            )
        reason = f"In the mode bypass it must be plain that no rule denies it: {found.doubt}"
    if reason is None and found.allowed is not None:
        if not found.allowed:
            why = f"In the mode {mode} this needs no rule inside the work directory."
            return Verdict("allow", None, None, why, (), found.programs)
        return _by_rule("allow", found.allowed[-1], found)
    sentence = _sentence(reason or found.refused)
    return _ask(mode, Verdict("ask", None, None, sentence, found.suggestions if reason is None else (), found.programs))


def _for_a_person(call: ToolCall, mode: PermissionMode, found: Assessment) -> str | None:
    """Why a person decides whatever the rules allow, or None."""
    if call.action in {"question", "plan"}:
        return "only a person can answer it"
    if found.destroys is not None:
        return found.destroys
    if mode == "plan" and call.action in {"run_command", "edit", "mcp", "other"}:
        return "the mode plan runs no command and changes nothing by itself"
    return None


def _by_rule(decision: Literal["allow", "ask", "deny"], hit: RuleHit, found: Assessment) -> Verdict:
    verb = {"allow": "allows", "ask": "asks about", "deny": "denies"}[decision]
    what = hit.what if len(hit.what) <= 200 else hit.what[:199] + "…"
    why = f"{hit.origin.text} ({hit.origin.source}) {verb} {what}."
    return Verdict(decision, hit.origin.text, hit.origin.layer, why, (), found.programs)


def _ask(mode: PermissionMode, verdict: Verdict) -> Verdict:
    """A question, or where nobody may be asked its refusal."""
    if mode != "unattended":
        return verdict
    return replace(
        verdict, decision="deny", why=f"Nobody is asked in the mode unattended. {verdict.why}", suggestions=()
    )


def _sentence(text: str) -> str:
    return (text[:1].upper() + text[1:]).rstrip(".") + "."
