"""Matches a command line with the rules that allow, narrowly.

A line is allowed only if the strict and the generous reading find the same commands, a rule allows each command, and a
rule allows the write to each redirection target.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hutch_daemon.permissions import suggestions
from hutch_daemon.permissions.assessment import CallContext, RuleHit
from hutch_daemon.permissions.layers import Policy
from hutch_daemon.permissions.paths import GIT_HEAD, PathTarget, absolute, may_become_protected, plain, protected_name
from hutch_daemon.permissions.programs.row import ProgramKind, base_name, subcommand
from hutch_daemon.permissions.programs.table import CHANGES_PATHS, lookup
from hutch_daemon.permissions.programs.veto import script_of, veto
from hutch_daemon.permissions.searching import MOST_DIRECTORIES, NOWHERE, as_paths, shown
from hutch_daemon.permissions.shell.grammar import LONGEST, find
from hutch_daemon.permissions.shell.reader import NotUnderstoodError, understand
from hutch_daemon.permissions.shell.words import SimpleCommand, Word
from hutch_daemon.permissions.wrappers import unwrap
from hutch_shared.messages import Suggestion

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_HARMLESS_TEXT = (
    "CI NO_COLOR FORCE_COLOR CLICOLOR CLICOLOR_FORCE PY_COLORS CARGO_TERM_COLOR TZ LANG LC_ALL LC_CTYPE COLUMNS TERM "
    "NODE_ENV DEBUG VERBOSE LOG_LEVEL PORT HUSKY RUST_BACKTRACE RUST_LOG RUST_TEST_THREADS PYTHONUNBUFFERED "
    "PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHONUTF8 GOOS GOARCH GOMAXPROCS CGO_ENABLED"
)
_HARMLESS_VARIABLES = frozenset(_HARMLESS_TEXT.split())
"""Environment variables that change only a program's output, or select one of a few harmless modes."""
_WHOLE = "the whole command"


def oddity(line: str) -> str | None:
    """Return the reason why a line must not be parsed at all (its length, control characters), or None."""
    if len(line) > LONGEST:
        return f"the line is longer than {LONGEST:,} characters"
    if _CONTROL.search(line):
        return "the line contains control characters"
    return None


def allowing(
    policy: Policy, line: str, context: CallContext
) -> tuple[tuple[RuleHit, ...] | None, str, tuple[Suggestion, ...]]:
    """Return the rules that allow the line, one per command; otherwise None, the reason, and suggested rules."""
    if context.cwd == context.workspace:
        # Only in the work directory: elsewhere the same words may name other programs and files.
        for rule in policy.allow.commands:
            if not rule.open and rule.line and rule.line == line.strip():
                return (RuleHit(rule.origin, "the whole line"),), "", ()
    try:
        commands = understand(line)
    except NotUnderstoodError as error:
        return None, f"the line is not understood: {error}", _this_line(line, context)
    simple = [command for command in commands if command.words]
    if not simple:
        return None, "the line contains no command", ()
    if [(c.words, c.reads, c.writes) for c in simple] != [(c.words, c.reads, c.writes) for c in find(line).commands]:
        return None, "the line can be read in more than one way", _this_line(line, context)
    walk = _Allowing(policy, context, (context.cwd,), (context.cwd,), [], [], [], [])
    walk.walk(commands)
    if walk.refusals:
        complete = len(walk.proposals) == len(walk.refusals)
        return None, walk.refusals[0], tuple(dict.fromkeys(walk.proposals)) if complete else ()
    return tuple(walk.hits), "", ()


def _this_line(line: str, context: CallContext) -> tuple[Suggestion, ...]:
    """Return a suggested rule for exactly this line, or nothing if no rule can express the line."""
    text = line.strip()
    if context.cwd != context.workspace or "\n" in text or "*" in text or len(text) > 500 or oddity(text):
        return ()
    return (Suggestion(rule=f"Bash({text})", note="only this exact line"),)


@dataclass(slots=True)
class _Allowing:
    """Walks the commands of a line; collects the rules that allow them and the reasons why some are not allowed."""

    policy: Policy
    context: CallContext
    here: tuple[str, ...]
    """The directories in which the next command may run."""
    seen: tuple[str, ...]
    """All directories that the line may have entered so far."""
    stack: list[tuple[tuple[str, ...], tuple[str, ...]]]
    """`here` and `seen` before each open parenthesis."""
    hits: list[RuleHit]
    refusals: list[str]
    proposals: list[Suggestion]
    linked: str = ""
    """The name of an earlier program in the line that may have changed where a path leads; "" if there is none."""

    def walk(self, commands: tuple[SimpleCommand, ...]) -> None:
        before = ""
        for command in commands:
            if command.then == "(":
                self.stack.append((self.here, self.seen))
            elif command.then == ")":
                self.here, self.seen = self.stack.pop()
            elif command.words:
                self._command(command, alone=before != "|" and command.then not in {"|", "&"})
            if command.then in {";", "||", "&"}:
                # The next command runs even if a `cd` before it failed.
                self.here = self.seen
            before = command.then

    def _command(self, command: SimpleCommand, *, alone: bool) -> None:
        if command.words[0].text == "cd":
            self._enter(command, alone=alone)
            return
        for assignment in command.assigns:
            name = assignment.partition("=")[0]
            if name not in _HARMLESS_VARIABLES:
                self.refusals.append(f"`{name}` is set for a command and may change what it runs")
        hit, reason = self._ruled(command.words)
        if hit is None:
            self.refusals.append(reason)
            proposal = suggestions.of_command(command.words)
            if proposal is not None and self._other_file_here(tuple(word.text for word in command.words)) is None:
                self.proposals.append(proposal)
        else:
            self.hits.append(hit)
        for word in command.writes:
            self._write(word.text)
        argv = unwrap(tuple(word.text for word in command.words)) or ("ln",)
        if base_name(argv[0]) in CHANGES_PATHS:
            self.linked = command.words[0].text
        for word in command.reads:
            if word.text.startswith("/dev/") and word.text not in NOWHERE:
                self.refusals.append(f"`{word.text}` is a device")
        if not (hit is not None and hit.what == _WHOLE) and _may_write(command.words):
            for word in command.words[1:]:
                self._keep_off(word, base_name(argv[0]))

    def _keep_off(self, word: Word, program: str) -> None:
        for text in as_paths(word.text):
            if not word.sure and (name := may_become_protected(text)) is not None:
                self.refusals.append(f"`{text}` may expand to {name}, which can make programs run")
            for base in self.here:
                for path in self.context.target(text, base).both:
                    name = protected_name(path)
                    # For most programs `HEAD` is not a file.
                    if name is not None and (name != GIT_HEAD or program in _NAMES_FILES):
                        self.refusals.append(f"`{text}` is {name} or lies in it, which can make programs run")

    def _enter(self, command: SimpleCommand, *, alone: bool) -> None:
        words = command.words
        plain_form = len(words) == 2 and words[1].sure and words[1].text and not words[1].text.startswith(("-", "+"))
        if not plain_form or not alone or command.writes or command.reads or command.assigns:
            self.refusals.append("`cd` does not go to one plain directory")
            return
        if self.linked:
            self.refusals.append(f"`{self.linked}` earlier in the line may change where `cd` leads")
            return
        targets = [self.context.target(words[1].text, base) for base in self.here]
        if not all(found.within(self.context.workspace) for found in targets):
            self.refusals.append(f"`cd {words[1].text}` leaves the work directory")
            return
        self.here = tuple(dict.fromkeys(found.written for found in targets))
        self.seen = tuple(dict.fromkeys((*self.seen, *self.here)))
        if len(self.seen) > MOST_DIRECTORIES:
            self.refusals.append("the line changes its directory too often")

    def _write(self, target: str) -> None:
        if target in NOWHERE:
            return
        if self.linked:
            self.refusals.append(f"`{self.linked}` earlier in the line may change where `{target}` leads")
            return
        if plain(absolute(target, self.here[0], self.context.home)).startswith("/dev/"):
            self.refusals.append(f"`{target}` is a device")
            return
        for base in self.here:
            hit, reason = allowed_path(self.policy, ("edit",), self.context.target(target, base), self.context)
            if hit is None:
                self.refusals.append(f"it writes `{target}`: {reason}")
                return
            self.hits.append(hit)

    def _ruled(self, words: tuple[Word, ...]) -> tuple[RuleHit | None, str]:
        """Return the rule that allows the command, as it is or without its wrappers; otherwise None and the reason."""
        argv = tuple(word.text for word in words)
        for rule in self.policy.allow.commands:
            if rule.exact and rule.spells(words) is not None and self._other_file_here(argv) is None:
                return RuleHit(rule.origin, _WHOLE), ""
        inner = unwrap(argv)
        if inner is None:
            return None, f"`{argv[0]}` has options that are not plain"
        words = self._from_here(words[len(argv) - len(inner) :])
        inner = tuple(word.text for word in words)
        if not words[0].sure or "~" in words[0].text[:1]:
            return None, "the name of the program is not plain"
        if (stray := self._other_file_here(inner)) is not None:
            return None, stray
        reason = f"no rule allows `{shown(SimpleCommand(words))}`"
        for rule in self.policy.allow.commands:
            spelled = rule.spells(words)
            if spelled is None:
                continue
            objection = None if rule.exact else (_open_to_names(words, spelled) or veto(inner, spelled))
            if objection is None:
                return RuleHit(rule.origin, _WHOLE if rule.exact else shown(SimpleCommand(words))), ""
            reason = f"`{rule.origin.text}` does not cover this: {objection}"
        return None, reason

    def _from_here(self, words: tuple[Word, ...]) -> tuple[Word, ...]:
        """Read `git -C directory status` as `git status`.

        Only if `directory` is below the work directory and the sub-command creates no files there.
        """
        if len(words) < 4 or words[0].text != "git" or words[1].text != "-C":
            return words
        directory, rest = words[2], words[3:]
        if not directory.sure or not directory.text or self.linked or rest[0].text in _GIT_PUTS:
            return words
        if not all(self.context.target(directory.text, base).within(self.context.workspace) for base in self.here):
            return words
        return (words[0], *rest)

    def _other_file_here(self, argv: tuple[str, ...]) -> str | None:
        """Return the reason why the command's script is not the script of a rule, or None.

        A relative path in a rule starts at the work directory, a relative path in the command at its directory.
        """
        if all(base == self.context.workspace for base in self.here) or (script := script_of(argv)) is None:
            return None
        return f"`{script}` is a different file here than in the work directory"


_NAMES_FILES = CHANGES_PATHS | {"tee", "touch"}
_GIT_PUTS = frozenset(["mv", "clone", "init", "apply", "worktree", "bundle", "checkout-index"])


def _may_write(words: tuple[Word, ...]) -> bool:
    """Return whether the program may write the files named by its operands. Most git commands write tracked files."""
    argv = unwrap(tuple(word.text for word in words)) or (words[0].text,)
    if base_name(argv[0]) == "git":
        return subcommand(argv) in _GIT_PUTS
    return lookup(argv[0]).kind is not ProgramKind.READS


def _open_to_names(words: tuple[Word, ...], spelled: int) -> str | None:
    """Return the reason why a file name pattern is unsafe (it could match a name that starts with `-`), or None."""
    program = lookup(words[0].text)
    if program.kind is ProgramKind.READS and not (program.short or program.long or program.words or program.check):
        return None
    for word in words[max(1, spelled) :]:
        if not word.sure and word.text[:1] in "*?[-":
            return f"a file name that matches `{word.text}` may be read as an option"
    return None


def allowed_path(
    policy: Policy, actions: tuple[str, ...], target: PathTarget, context: CallContext
) -> tuple[RuleHit | None, str]:
    """Return the rule that allows an action on a path, as written and as resolved; otherwise None and the reason."""
    if target.real is None:
        return None, f"{target.written} could not be resolved"
    hit: RuleHit | None = None
    for path in target.both:
        guarded = protected_name(path) if "edit" in actions else None
        hit = None
        for rule in policy.allow.paths:
            if rule.action not in actions or not rule.covers(path, context.workspace):
                continue
            if guarded is None or (rule.pattern is not None and rule.pattern.spells(guarded)):
                hit = RuleHit(rule.origin, path)
                break
        if hit is None:
            if guarded is not None:
                return None, f"{path} is in {guarded}, which can make programs run"
            return None, f"no rule allows {path}"
    return hit, ""
