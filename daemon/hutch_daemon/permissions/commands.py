"""Matches a command line with the rules: does a rule deny a part or ask about it, and do rules allow all of it?

The line is read twice. The generous reading (`searching`) finds every command that might run, for rules that deny or
ask (`forbidding`). The strict reading finds exactly the commands that run, for rules that allow (`allowing`).
"""

from __future__ import annotations

from hutch_daemon.permissions.allowing import allowing, oddity
from hutch_daemon.permissions.assessment import Assessment, CallContext, RuleHit
from hutch_daemon.permissions.forbidding import destroys, forbidding
from hutch_daemon.permissions.layers import Policy
from hutch_daemon.permissions.searching import directories_of, everything_in
from hutch_shared.messages import Suggestion


def assess(policy: Policy, line: str, context: CallContext) -> Assessment:
    """Match a command line with the rules. Takes any text; never raises."""
    commands, complete = everything_in(line)
    directories = directories_of(commands, context.cwd, context.home)
    programs = tuple(tuple(word.text for word in command.words) for command in commands if command.words)
    denied, may_deny = forbidding(policy.deny, commands, directories, context)
    if denied is not None:
        return Assessment(denied=denied, programs=programs)
    asked, may_ask = forbidding(policy.ask, commands, directories, context)
    ruin = destroys(commands, directories, context)
    odd = oddity(line)
    doubt = odd or may_deny or may_ask
    if doubt is None and not complete and (policy.deny or policy.ask):
        doubt = "not every command in the line can be read"
    refused = odd or may_deny or may_ask or ruin or ""
    hits: tuple[RuleHit, ...] | None = None
    proposals: tuple[Suggestion, ...] = ()
    if asked is None and not refused:
        hits, refused, proposals = allowing(policy, line, context)
    return Assessment(
        asked=asked,
        allowed=hits,
        refused=refused,
        doubt=doubt,
        destroys=ruin,
        programs=programs,
        suggestions=proposals,
    )
