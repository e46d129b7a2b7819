"""Matches rules that deny or ask with every command that a line might run."""

from __future__ import annotations

import re

from hutch_daemon.permissions.addresses import possible_hosts
from hutch_daemon.permissions.assessment import CallContext, RuleHit
from hutch_daemon.permissions.layers import RuleSet
from hutch_daemon.permissions.paths import inside
from hutch_daemon.permissions.programs.row import base_name
from hutch_daemon.permissions.programs.table import READS_BELOW, is_known
from hutch_daemon.permissions.rules import CommandRule, Fit, PathRule
from hutch_daemon.permissions.searching import as_paths, operands_of, shown
from hutch_daemon.permissions.shell.words import SimpleCommand

_ALL_IN_IT = re.compile(r"((^|/)\.?\*+)+/*$")
_TREE_OPTIONS = re.compile(r"-[A-Za-z]*[rR][A-Za-z]*|--recursive|--r[a-z]*")


def forbidding(
    rules: RuleSet, commands: tuple[SimpleCommand, ...], directories: tuple[str, ...], context: CallContext
) -> tuple[RuleHit | None, str | None]:
    """Return the first rule that matches a command, a file or a host of the line.

    Without a match, return None and the reason why a rule might still match, or None if none can.
    """
    # A rule `Read` without a pattern concerns only the agent's own tools, because nearly every command reads a file.
    of_paths = [rule for rule in rules.paths if rule.action == "edit" or (rule.pattern and rule.action == "read")]
    doubt: str | None = None
    for rule in rules.commands:
        for command in commands:
            fit: Fit = rule.forbids(command.words) if command.words else "no"
            if fit == "yes":
                return RuleHit(rule.origin, shown(command)), None
            if fit == "maybe" or (fit == "no" and _may_run(command, rule)):
                doubt = doubt or f"`{shown(command)}` might match `{rule.origin.text}`"
        if not rule.words:
            return RuleHit(rule.origin, "every command"), None
    if of_paths:
        hit, unsure = _forbidden_files(of_paths, commands, directories, context)
        if hit:
            return hit, None
        doubt = doubt or unsure
    if rules.hosts:
        for command in commands:
            for word in command.words[1:]:
                for host in possible_hosts(word.text) if "//" in word.text else ():
                    for host_rule in rules.hosts:
                        if host_rule.host is not None and host_rule.covers(host):
                            return RuleHit(host_rule.origin, host), None
    return None, doubt


def _may_run(command: SimpleCommand, rule: CommandRule) -> bool:
    """Return whether an unknown program gets the rule's program as an operand, as `sudo` gets the command to run."""
    if not command.words or is_known(command.words[0].text):
        return False
    return any(rule.program.literal and rule.program.fits(base_name(word.text).lower()) for word in command.words[1:])


def _forbidden_files(
    rules: list[PathRule], commands: tuple[SimpleCommand, ...], directories: tuple[str, ...], context: CallContext
) -> tuple[RuleHit | None, str | None]:
    doubt: str | None = None
    for command in commands:
        below = _reads_below(command)
        for word, reads, writes in dict.fromkeys(operands_of(command)):
            concerned = [rule for rule in rules if (rule.action == "read" and (reads or writes)) or writes]
            if not concerned:
                continue
            if not word.sure:
                doubt = doubt or f"`{word.text}` might name a file of `{concerned[0].origin.text}`"
            for text in as_paths(word.text):
                for directory in directories:
                    target = context.target(text, directory)
                    if target.real is None:
                        doubt = doubt or f"`{text}` could not be resolved"
                    for path in target.both:
                        for rule in concerned:
                            if rule.covers(path, context.workspace):
                                return RuleHit(rule.origin, path), None
                            if below and rule.may_lie_below(path, context.workspace):
                                doubt = doubt or f"`{text}` may contain files of `{rule.origin.text}`"
        if below and rules and len(command.words) < 3:
            doubt = doubt or f"`{shown(command)}` may read files of `{rules[0].origin.text}`"
    return None, doubt


def _reads_below(command: SimpleCommand) -> bool:
    """Return whether the command reads all files below its operands."""
    if not command.words:
        return False
    options = READS_BELOW.get(base_name(command.words[0].text))
    if not options:
        return options is not None
    texts = [word.text for word in command.words[1:] if word.text.startswith("-")]
    return any(
        text in options or (not text.startswith("--") and any(letter in options for letter in text[1:]))
        for text in texts
    )


def destroys(commands: tuple[SimpleCommand, ...], directories: tuple[str, ...], context: CallContext) -> str | None:
    """Return a reason if a command would remove the root, the home or a directory above it; otherwise None.

    The user must decide about such a command in every mode.
    """
    for command in commands:
        if not command.words:
            continue
        name, words = base_name(command.words[0].text), command.words[1:]
        removes_tree = name == "rm" and any(_TREE_OPTIONS.fullmatch(word.text) for word in words)
        if not removes_tree and not (name == "find" and any(word.text == "-delete" for word in words)):
            continue
        for word in words:
            if word.text.startswith("-"):
                continue
            if not word.sure and (name == "rm" and word.text[:1] in "$`{\"'"):
                return f"`{shown(command)}` removes a directory whose name is unknown"
            emptied = _ALL_IN_IT.sub("", word.text) or ("/" if word.text.startswith("/") else ".")
            for directory in directories:
                if any(inside(context.home, path) for path in context.target(emptied, directory).both):
                    return f"`{shown(command)}` removes the root or the home"
    return None
