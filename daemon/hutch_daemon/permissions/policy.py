"""Decides a tool call from the owner's rules. Pure: reads no clock and no file.

The first of these decides: a rule that denies; a rule that asks; a rule to deny or ask that could not be read; the
mode; a rule that allows. Specificity and layer of a rule do not matter. If none of them decides, the user is asked; in
the mode `unattended` the call is denied.

| mode | allowed without a rule | always asks, even where a rule allows it |
|---|---|---|
| ask | reading and searching inside the work directory | |
| accept_edits | reading, searching and editing inside the work directory | |
| plan | reading and searching inside the work directory | commands, edits, tools of MCP servers, others |
| bypass | every call that certainly no rule denies or asks about | removing the root or the home |
| unattended | | entering the mode plan (a call that would ask is denied) |

In every mode the agent's own files need no rule, as `own_paths` lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hutch_daemon.permissions import suggestions
from hutch_daemon.permissions.addresses import NotAnAddressError, host_of, possible_hosts
from hutch_daemon.permissions.allowing import allowed_path
from hutch_daemon.permissions.assessment import Assessment, CallContext, RuleHit
from hutch_daemon.permissions.commands import assess
from hutch_daemon.permissions.layers import Layer, Policy, RuleSet, compile_policy, parse_policy_toml
from hutch_daemon.permissions.names import assess_name
from hutch_daemon.permissions.own_paths import is_own
from hutch_daemon.permissions.paths import absolute, can_be_path, protected_name
from hutch_daemon.permissions.searching import paths_of
from hutch_shared.messages import PermissionMode, Suggestion, ToolCall
from hutch_shared.vocabulary import enters_plan

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
    """A decision, the rule that made it, and the reason."""

    decision: Literal["allow", "ask", "deny"]
    rule: str | None
    """The text of the rule that decided; None if no rule did."""
    layer: str | None
    why: str
    """One sentence for the user."""
    suggestions: tuple[Suggestion, ...] = ()
    """Narrow rules that a user could add by answering `always`; only for `ask`."""
    programs: tuple[tuple[str, ...], ...] = ()
    """The commands that were judged, each as its words."""


def paths_to_resolve(call: ToolCall, cwd: str, home: str) -> tuple[str, ...]:
    """Return the absolute paths that `judge` needs in `real`: at most 200 for a command.

    The session's account resolves them, following links in order. `cwd` and `home` are absolute and resolved.
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
    agent_dir: str | None = None,
    mcp_servers: Collection[str] | None = None,
) -> Verdict:
    """Decide a call. Never raises, whatever the call contains.

    `real` maps each path of `paths_to_resolve` to its resolved path, as the session's account sees it. A path that is
    missing there can be denied but not allowed. `cwd`, `home` and `workspace` are absolute and resolved. Path rules
    such as `src/**` start at `workspace`, and the mode `accept_edits` allows edits below it. `agent_dir` contains the
    agent's own files; see `own_paths`. `mcp_servers` are the names of the session's MCP servers; None if they are not
    known, outside of a session.
    """
    context = CallContext(cwd, home, workspace, real, agent_dir)
    return _settle(policy, call, mode, _look(policy, call, context, mode, mcp_servers))


# ---------------------------------------------------------------- matching the rules


def _look(
    policy: Policy, call: ToolCall, context: CallContext, mode: PermissionMode, mcp_servers: Collection[str] | None
) -> Assessment:
    named = assess_name(policy, call, mcp_servers)
    match call.action:
        case "run_command":
            if not call.command:
                assessment = Assessment(refused="the call names no command")
            else:
                assessment = assess(policy, call.command, context)
        case "read" | "edit":
            assessment = _files(policy, call, context, mode)
        case "search":
            assessment = _files(policy, call, context, mode) if call.paths else named
        case "fetch":
            assessment = _address(policy, call)
        case _:
            return named
    # A rule may also name the agent's tool itself.
    return replace(assessment, denied=assessment.denied or named.denied, asked=assessment.asked or named.asked)


_FORBIDS: dict[str, tuple[str, ...]] = {"read": ("read",), "edit": ("edit", "read"), "search": ("search", "read")}
_ALLOWS: dict[str, tuple[str, ...]] = {"read": ("read",), "edit": ("edit",), "search": ("search", "read")}
_TOOL = {"read": "Read", "edit": "Edit", "search": "Grep"}


def _files(policy: Policy, call: ToolCall, context: CallContext, mode: PermissionMode) -> Assessment:
    if not call.paths or not all(map(can_be_path, call.paths)):
        return Assessment(refused="the call names no file", doubt="the call names no file")
    targets = [context.target(path) for path in call.paths]
    forbids = _FORBIDS[call.action]

    def first(rules: RuleSet) -> RuleHit | None:
        for rule in rules.paths:
            if rule.action in forbids:
                for target in targets:
                    for path in target.both:
                        if rule.covers(path, context.workspace):
                            return RuleHit(rule.origin, path)
        return None

    denied, asked = first(policy.deny), first(policy.ask)
    if denied or asked:
        return Assessment(denied=denied, asked=asked)
    lost = next((target.written for target in targets if target.real is None), None)
    if lost is not None:
        reason = f"{lost} could not be resolved"
        return Assessment(refused=reason, doubt=reason)
    unsure = _may_search(policy, context, call) if call.action == "search" else None
    if unsure is None and all(is_own(context.agent_dir, call.action, target, mode) for target in targets):
        return Assessment(allowed=(), own=True)
    hits: list[RuleHit] = []
    for target in targets:
        hit, reason = allowed_path(policy, _ALLOWS[call.action], target, context)
        if hit is not None and not (unsure and _allowed_by_reading(policy, hit)):
            hits.append(hit)
        elif unsure:
            return Assessment(refused=unsure, doubt=unsure)
        elif not (target.within(context.workspace) and _passes(call, mode) and not _guarded(call, target.both)):
            proposal = None if _guarded(call, target.both) else suggestions.of_path(_TOOL[call.action], target.written)
            return Assessment(refused=reason, suggestions=() if proposal is None else (proposal,))
    return Assessment(allowed=tuple(hits))


def _allowed_by_reading(policy: Policy, hit: RuleHit) -> bool:
    """Return whether a rule for reading allowed the search.

    A rule for searching covers all files below its directory; a rule for reading allows only the files that it covers.
    """
    return any(rule.action != "search" for rule in policy.allow.paths if rule.origin == hit.origin)


def _may_search(policy: Policy, context: CallContext, call: ToolCall) -> str | None:
    """Return the reason why the search may show a file whose reading a rule denies or asks about, or None."""
    for rule in (*policy.deny.paths, *policy.ask.paths):
        if rule.action in {"read", "search"}:
            for path in call.paths:
                if any(rule.may_lie_below(target, context.workspace) for target in context.target(path).both):
                    return f"{path} may contain files of `{rule.origin.text}`"
    return None


def _guarded(call: ToolCall, paths: tuple[str, ...]) -> bool:
    return call.action == "edit" and any(protected_name(path) for path in paths)


def _passes(call: ToolCall, mode: PermissionMode) -> bool:
    """Return whether the mode allows this action in the work directory without a rule."""
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


# ---------------------------------------------------------------- deciding


def _settle(policy: Policy, call: ToolCall, mode: PermissionMode, assessment: Assessment) -> Verdict:
    if assessment.denied is not None:
        return _by_rule("deny", assessment.denied, assessment)
    if assessment.asked is not None:
        return _ask(mode, _by_rule("ask", assessment.asked, assessment))
    if policy.broken is not None:
        return _ask(
            mode, Verdict("ask", None, None, f"Every call asks, because {policy.broken}.", programs=assessment.programs)
        )
    if assessment.own:
        return Verdict("allow", None, None, "This is a file of the agent's own, which belongs to this session alone.")
    reason = _always_asks(call, mode, assessment)
    if reason is None and mode == "bypass" and not policy.bypass_forbidden:
        if assessment.doubt is None or not (policy.deny or policy.ask or call.action == "run_command"):
            why = "No rule denies this or asks about it, and the mode bypass allows the rest."
            return Verdict("allow", None, None, why, (), assessment.programs)
        reason = f"The mode bypass asks because a rule might deny the call: {assessment.doubt}"
    if reason is None and assessment.allowed is not None:
        if not assessment.allowed:
            why = f"In the mode {mode} this needs no rule inside the work directory."
            return Verdict("allow", None, None, why, (), assessment.programs)
        return _by_rule("allow", assessment.allowed[-1], assessment)
    sentence = _sentence(reason or assessment.refused)
    suggested = assessment.suggestions if reason is None else ()
    return _ask(mode, Verdict("ask", None, None, sentence, suggested, assessment.programs))


def _always_asks(call: ToolCall, mode: PermissionMode, assessment: Assessment) -> str | None:
    """Return the reason why the user must decide even where a rule allows the call, or None."""
    if call.action in {"question", "plan"}:
        return "only the user can answer it"
    if mode == "unattended" and enters_plan(call):
        return "in the mode plan it would wait for a user, and read what the mode unattended denies"
    if assessment.destroys is not None:
        return assessment.destroys
    if mode == "plan" and call.action in {"run_command", "edit", "mcp", "other"} and not enters_plan(call):
        return "in the mode plan every command and change needs the user"
    return None


def _by_rule(decision: Literal["allow", "ask", "deny"], hit: RuleHit, assessment: Assessment) -> Verdict:
    verb = {"allow": "allows", "ask": "asks about", "deny": "denies"}[decision]
    what = hit.what if len(hit.what) <= 200 else hit.what[:199] + "…"
    why = f"{hit.origin.text} ({hit.origin.source}) {verb} {what}."
    return Verdict(decision, hit.origin.text, hit.origin.layer, why, (), assessment.programs)


def _ask(mode: PermissionMode, verdict: Verdict) -> Verdict:
    """Return the verdict that asks or, in the mode `unattended`, one that denies."""
    if mode != "unattended":
        return verdict
    return replace(
        verdict, decision="deny", why=f"The mode unattended denies a call that would ask. {verdict.why}", suggestions=()
    )


def _sentence(text: str) -> str:
    return (text[:1].upper() + text[1:]).rstrip(".") + "."
