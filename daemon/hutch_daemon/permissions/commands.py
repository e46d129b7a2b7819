"""A command line held against the rules: what in it is denied, what asks, and whether all of it is allowed.

Two readings of the same line. The generous one finds what may run, for rules that deny or ask; the strict one
understands the line, for rules that allow. A line is allowed only if both give the same commands, each of them has a
rule, and each file that it is connected to by a redirection may be read or written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hutch_daemon.permissions import suggestions
from hutch_daemon.permissions.addresses import possible_hosts
from hutch_daemon.permissions.layers import Policy, RuleSet
from hutch_daemon.permissions.paths import Place, absolute, can_be_path, inside, place, plain, protected_name
from hutch_daemon.permissions.programs import (
    LINKS,
    LOOKED_THROUGH,
    PRINTS_ITS_WORDS,
    READS_BELOW,
    Kind,
    base_name,
    hidden_commands,
    is_known,
    lookup,
    unwrap,
    veto,
)
from hutch_daemon.permissions.rules import CommandRule, Fit, Origin, PathRule
from hutch_daemon.permissions.shell.grammar import LONGEST, Found, find
from hutch_daemon.permissions.shell.reader import NotUnderstoodError, understand
from hutch_daemon.permissions.shell.words import Command, Word
from hutch_shared.messages import Suggestion

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_HARMLESS_VARIABLES = frozenset(
    ["CI", "NO_COLOR", "FORCE_COLOR", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "COLUMNS", "TERM"]
)
_NOWHERE = frozenset(["/dev/null", "/dev/stdout", "/dev/stderr", "/dev/stdin", "/dev/tty"])
_MOST_HIDDEN = 400
"""Commands found inside commands before the search gives up, and says so."""
_MOST_DIRECTORIES = 8
_MOST_PATHS = 200
_LONGEST_PATH = 1024
_TAKES_NO_FILE = PRINTS_ITS_WORDS | LOOKED_THROUGH
_EDITS_IN_PLACE = frozenset(["sed", "gsed", "perl", "ruby", "awk", "gawk"])
_IN_PLACE = re.compile(r"-[A-Za-z]*i|--in-place|inplace")
_ALL_IN_IT = re.compile(r"((^|/)\.?\*+)+/*$")
_TREE_OPTIONS = re.compile(r"-[A-Za-z]*[rR][A-Za-z]*|--recursive|--r[a-z]*")


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule that matched, and what it matched, for people."""

    origin: Origin
    what: str


@dataclass(frozen=True, slots=True)
class Finding:
    """All that the rules say of a call. What to do with it is the mode's business."""

    denied: Hit | None = None
    asked: Hit | None = None
    allowed: tuple[Hit, ...] | None = None
    """None: not allowed by rules, `refused` tells why. Empty: allowed by what is built in."""
    refused: str = ""
    doubt: str | None = None
    """Why it cannot be shown that no rule denies it or asks; None if that was shown."""
    destroys: str | None = None
    """Why a person decides even where nothing else asks: it would remove the root or the home."""
    programs: tuple[tuple[str, ...], ...] = ()
    suggestions: tuple[Suggestion, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a call happens. All directories are absolute and resolved; `real` maps paths to what they resolve to."""

    cwd: str
    home: str
    workspace: str
    real: Mapping[str, str]

    def place(self, word: str, cwd: str | None = None) -> Place:
        return place(word, cwd or self.cwd, self.home, self.real)


# ---------------------------------------------------------------- what may run


def _everything(line: str) -> tuple[tuple[Command, ...], bool]:
    """The commands of a line and those inside them (`sudo x`, `sh -c x`, `find -exec x`); whether that is all."""
    found: Found = find(line)
    complete = found.complete
    commands = list(found.commands)
    pending = list(found.commands)
    budget = _MOST_HIDDEN
    while pending:
        command = pending.pop()
        argv = tuple(word.text for word in command.words)
        if not argv or not command.words[0].sure:
            complete = complete and not argv
            continue
        behind, lines = hidden_commands(argv)
        budget -= len(behind) + len(lines)
        if budget < 0:
            return tuple(dict.fromkeys(commands)), False
        sure = dict(enumerate(command.words))
        inner = [Command(tuple(sure[len(argv) - len(words) + at] for at in range(len(words)))) for words in behind]
        for text in lines:
            # A text that is no line of shell (a host, a user) reads as a command too; that only denies more.
            inner += find(text[:LONGEST]).commands
        commands += inner
        pending += inner
    return tuple(dict.fromkeys(commands)), complete


def _directories(commands: tuple[Command, ...], cwd: str, home: str) -> tuple[str, ...]:
    """Directories in which parts of the line may run, as far as `cd` names them."""
    seen = [cwd]
    for command in commands:
        if len(command.words) == 2 and command.words[0].text in {"cd", "pushd"} and len(seen) < _MOST_DIRECTORIES:
            seen += [plain(absolute(command.words[1].text, base, home)) for base in tuple(seen)]
    return tuple(dict.fromkeys(seen[:_MOST_DIRECTORIES]))


def _as_paths(word: str) -> Iterator[str]:
    """The ways in which a program may take a word for the name of a file."""
    if len(word) > _LONGEST_PATH or not can_be_path(word):
        return
    if not word.startswith("-"):
        yield word
    elif len(word) > 2 and not word.startswith("--"):
        yield word[2:]
    for sign in ("=", ":", "@"):
        _, found, after = word.partition(sign)
        if found and after:
            yield after


def _operands(command: Command) -> Iterator[tuple[Word, bool, bool]]:
    """Words of a command that may be files; whether it may read and whether it may write them."""
    for word in command.reads:
        yield word, True, False
    for word in command.writes:
        if word.text not in _NOWHERE:
            yield word, False, True
    if not command.words or base_name(command.words[0].text) in _TAKES_NO_FILE:
        return
    in_place = base_name(command.words[0].text) in _EDITS_IN_PLACE and any(
        _IN_PLACE.match(w.text) for w in command.words
    )
    writes = in_place or lookup(command.words[0].text).kind is Kind.WRITES
    for word in command.words[1:]:
        yield word, True, writes
    if "/" in command.words[0].text:
        yield command.words[0], True, False


def paths_of(line: str, cwd: str, home: str) -> tuple[str, ...]:
    """Absolute paths that the judgement of the line will ask about; bounded. Their `..` are still in them."""
    commands, _ = _everything(line)
    directories = _directories(commands, cwd, home)
    paths: dict[str, None] = {}
    for command in commands:
        for word, _, _ in _operands(command):
            for text in _as_paths(word.text):
                for directory in directories:
                    paths[absolute(text, directory, home)] = None
        if len(paths) > _MOST_PATHS:
            break
    return tuple(paths)[:_MOST_PATHS]


# ---------------------------------------------------------------- deny and ask


def _forbidding(
    rules: RuleSet, commands: tuple[Command, ...], directories: tuple[str, ...], scene: Scene
) -> tuple[Hit | None, str | None]:
    """The first rule that matches any of the commands, their files or addresses; else why one might."""
    # `Read` alone in deny is about the agent's own tools: nearly every command reads some file.
    of_paths = [rule for rule in rules.paths if rule.action == "edit" or (rule.pattern and rule.action == "read")]
    doubt: str | None = None
    for rule in rules.commands:
        for command in commands:
            fit: Fit = rule.forbids(command.words) if command.words else "no"
            if fit == "yes":
                return Hit(rule.origin, _shown(command)), None
            if fit == "maybe" or (fit == "no" and _may_run(command, rule)):
                doubt = doubt or f"`{_shown(command)}` might be what `{rule.origin.text}` is about"
        if not rule.words:
            return Hit(rule.origin, "every command"), None
    if of_paths:
        hit, unsure = _forbidden_files(of_paths, commands, directories, scene)
        if hit:
            return hit, None
        doubt = doubt or unsure
    if rules.hosts:
        for command in commands:
            for word in command.words[1:]:
                for host in possible_hosts(word.text) if "//" in word.text else ():
                    for host_rule in rules.hosts:
                        if host_rule.host is not None and host_rule.covers(host):
                            return Hit(host_rule.origin, host), None
    return None, doubt


def _may_run(command: Command, rule: CommandRule) -> bool:
    """Whether a program that the table does not know is given the name of the rule's program, as a wrapper would be."""
    if is_known(command.words[0].text):
        return False
    return any(rule.program.literal and rule.program.fits(base_name(word.text).lower()) for word in command.words[1:])


def _forbidden_files(
    rules: list[PathRule], commands: tuple[Command, ...], directories: tuple[str, ...], scene: Scene
) -> tuple[Hit | None, str | None]:
    doubt: str | None = None
    for command in commands:
        below = _reads_below(command)
        for word, reads, writes in dict.fromkeys(_operands(command)):
            concerned = [rule for rule in rules if (rule.action == "read" and (reads or writes)) or writes]
            if not concerned:
                continue
            if not word.sure:
                doubt = doubt or f"`{word.text}` might name a file of `{concerned[0].origin.text}`"
            for text in _as_paths(word.text):
                for directory in directories:
                    for path in scene.place(text, directory).both:
                        for rule in concerned:
                            if rule.covers(path, scene.workspace):
                                return Hit(rule.origin, path), None
                            if below and rule.may_lie_below(path, scene.workspace):
                                doubt = doubt or f"what lies below `{text}` may include files of `{rule.origin.text}`"
        if below and rules and len(command.words) < 3:
            doubt = doubt or f"`{_shown(command)}` may read files of `{rules[0].origin.text}`"
    return None, doubt


def _reads_below(command: Command) -> bool:
    """Whether the command reads whole directories."""
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


def _destroys(commands: tuple[Command, ...], directories: tuple[str, ...], scene: Scene) -> str | None:
    """Why a person decides whatever the mode: the command would remove the root, the home or what holds it."""
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
                return f"`{_shown(command)}` removes a directory whose name is not known"
            emptied = _ALL_IN_IT.sub("", word.text) or ("/" if word.text.startswith("/") else ".")
            for directory in directories:
                if any(inside(scene.home, path) for path in scene.place(emptied, directory).both):
                    return f"`{_shown(command)}` removes the root or the home"
    return None


def _shown(command: Command) -> str:
    text = " ".join(word.text for word in command.words)
    return text if len(text) <= 120 else text[:119] + "…"


# ---------------------------------------------------------------- allow


@dataclass(slots=True)
class _Allowing:
    """The walk over an understood line: which directory it is in, what was allowed, what still has no rule."""

    policy: Policy
    scene: Scene
    here: tuple[str, ...]
    seen: tuple[str, ...]
    stack: list[tuple[tuple[str, ...], tuple[str, ...]]]
    hits: list[Hit]
    refusals: list[str]
    proposals: list[Suggestion]
    linked: str = ""
    """A program that ran earlier in the line and may have changed where a path leads."""

    def walk(self, commands: tuple[Command, ...]) -> None:
        before = ""
        for command in commands:
            if command.then == "(":
                self.stack.append((self.here, self.seen))
            elif command.then == ")":
                self.here, self.seen = self.stack.pop()
            elif command.words:
                self._command(command, alone=before != "|" and command.then not in {"|", "&"})
            if command.then in {";", "||", "&"}:
                # What comes next runs whether or not a `cd` before it worked.
                self.here = self.seen
            before = command.then

    def _command(self, command: Command, *, alone: bool) -> None:
        if command.words[0].text == "cd":
            self._enter(command, alone=alone)
            return
        for assignment in command.assigns:
            name = assignment.partition("=")[0]
            if name not in _HARMLESS_VARIABLES:
                self.refusals.append(f"`{name}` is set for a command, and may change what it runs")
        hit, reason = self._ruled(command.words)
        if hit is None:
            self.refusals.append(reason)
            proposal = suggestions.of_command(command.words)
            if proposal is not None:
                self.proposals.append(proposal)
        else:
            self.hits.append(hit)
        for word in command.writes:
            self._write(word.text)
        if base_name((unwrap(tuple(word.text for word in command.words)) or ("ln",))[0]) in LINKS:
            self.linked = command.words[0].text
        for word in command.reads:
            if word.text.startswith("/dev/") and word.text not in _NOWHERE:
                self.refusals.append(f"`{word.text}` is a device")
        if lookup(command.words[0].text).kind is Kind.WRITES and not (hit is not None and hit.what == _WHOLE):
            for word in command.words[1:]:
                self._keep_off(word)

    def _keep_off(self, word: Word) -> None:
        for text in _as_paths(word.text):
            for base in self.here:
                for path in self.scene.place(text, base).both:
                    name = protected_name(path)
                    if name is not None:
                        self.refusals.append(f"`{text}` is in {name}, which can make programs run")

    def _enter(self, command: Command, *, alone: bool) -> None:
        words = command.words
        plain_form = len(words) == 2 and words[1].sure and words[1].text and not words[1].text.startswith(("-", "+"))
        if not plain_form or not alone or command.writes or command.reads or command.assigns:
            self.refusals.append("`cd` to a place that is not plain")
            return
        if self.linked:
            self.refusals.append(f"`{self.linked}` earlier in the line may change where `cd` leads")
            return
        places = [self.scene.place(words[1].text, base) for base in self.here]
        if not all(found.within(self.scene.workspace) for found in places):
            self.refusals.append(f"`cd {words[1].text}` leaves the work directory")
            return
        self.here = tuple(dict.fromkeys(found.written for found in places))
        self.seen = tuple(dict.fromkeys((*self.seen, *self.here)))
        if len(self.seen) > _MOST_DIRECTORIES:
            self.refusals.append("the line changes its directory too often")

    def _write(self, target: str) -> None:
        if target in _NOWHERE:
            return
        if self.linked:
            self.refusals.append(f"`{self.linked}` earlier in the line may change where `{target}` leads")
            return
        if plain(absolute(target, self.here[0], self.scene.home)).startswith("/dev/"):
            self.refusals.append(f"`{target}` is a device")
            return
        for base in self.here:
            hit, reason = allowed_path(self.policy, ("edit",), self.scene.place(target, base), self.scene)
            if hit is None:
                self.refusals.append(f"it writes `{target}`: {reason}")
                return
            self.hits.append(hit)

    def _ruled(self, words: tuple[Word, ...]) -> tuple[Hit | None, str]:
        """The rule that allows this command, as it stands or through its wrappers; else why none does."""
        argv = tuple(word.text for word in words)
        for rule in self.policy.allow.commands:
            if rule.exact and rule.spells(words) is not None:
                return Hit(rule.origin, _WHOLE), ""
        inner = unwrap(argv)
        if inner is None:
            return None, f"`{argv[0]}` is not used in a plain way"
        words = words[len(argv) - len(inner) :]
        if not words[0].sure or "~" in words[0].text[:1]:
            return None, "the name of the program is not plain"
        reason = f"no rule allows `{_shown(Command(words))}`"
        for rule in self.policy.allow.commands:
            spelled = rule.spells(words)
            if spelled is None:
                continue
            objection = None if rule.exact else (_open_to_names(words, spelled) or veto(inner, spelled))
            if objection is None:
                return Hit(rule.origin, _WHOLE if rule.exact else _shown(Command(words))), ""
            reason = f"`{rule.origin.text}` does not reach so far: {objection}"
        return None, reason


_WHOLE = "the whole command"


def _open_to_names(words: tuple[Word, ...], spelled: int) -> str | None:
    """Why a file name pattern in the command is more than a name: what it expands to could be read as an option."""
    program = lookup(words[0].text)
    if program.kind is Kind.READS and not (program.short or program.long or program.words or program.check):
        return None
    for word in words[max(1, spelled) :]:
        if not word.sure and word.text[:1] in "*?[-":
            return f"a file name that `{word.text}` stands for may be read as an option"
    return None


def allowed_path(policy: Policy, actions: tuple[str, ...], spot: Place, scene: Scene) -> tuple[Hit | None, str]:
    """The rule that allows an action at a place, as it is written and as it is; else why none does."""
    if spot.real is None:
        return None, f"nobody could tell what {spot.written} resolves to"
    hit: Hit | None = None
    for path in spot.both:
        guarded = protected_name(path) if "edit" in actions else None
        hit = None
        for rule in policy.allow.paths:
            if rule.action not in actions or not rule.covers(path, scene.workspace):
                continue
            if guarded is None or (rule.pattern is not None and rule.pattern.spells(guarded)):
                hit = Hit(rule.origin, path)
                break
        if hit is None:
            if guarded is not None:
                return None, f"{path} is in {guarded}, which can make programs run"
            return None, f"no rule allows {path}"
    return hit, ""


# ---------------------------------------------------------------- the whole


def assess(policy: Policy, line: str, scene: Scene) -> Finding:
    """Hold a command line against the rules. Takes any text; never raises."""
    commands, complete = _everything(line)
    directories = _directories(commands, scene.cwd, scene.home)
    programs = tuple(tuple(word.text for word in command.words) for command in commands if command.words)
    denied, may_deny = _forbidding(policy.deny, commands, directories, scene)
    if denied is not None:
        return Finding(denied=denied, programs=programs)
    asked, may_ask = _forbidding(policy.ask, commands, directories, scene)
    destroys = _destroys(commands, directories, scene)
    odd = _odd(line)
    doubt = odd or may_deny or may_ask
    if doubt is None and not complete and (policy.deny or policy.ask):
        doubt = "not every command in the line can be read"
    refused = odd or may_deny or may_ask or destroys or ""
    hits: tuple[Hit, ...] | None = None
    proposals: tuple[Suggestion, ...] = ()
    if asked is None and not refused:
        hits, refused, proposals = _allowed(policy, line, scene)
    return Finding(
        asked=asked,
        allowed=hits,
        refused=refused,
        doubt=doubt,
        destroys=destroys,
        programs=programs,
        suggestions=proposals,
    )


def _odd(line: str) -> str | None:
    """Why the text is no line that could be understood, before any grammar."""
    if len(line) > LONGEST:
        return f"the line is over {LONGEST:,} characters long"
    if _CONTROL.search(line):
        return "the line holds control characters"
    return None


def _allowed(policy: Policy, line: str, scene: Scene) -> tuple[tuple[Hit, ...] | None, str, tuple[Suggestion, ...]]:
    for rule in policy.allow.commands:
        if not rule.open and rule.line and rule.line == line.strip():
            return (Hit(rule.origin, "the whole line"),), "", ()
    try:
        commands = understand(line)
    except NotUnderstoodError as error:
        return None, f"the line is not understood: {error}", _this_line(line)
    simple = [command for command in commands if command.words]
    if not simple:
        return None, "the line holds no command", ()
    if [(c.words, c.reads, c.writes) for c in simple] != [(c.words, c.reads, c.writes) for c in find(line).commands]:
        return None, "the line can be read in more than one way", _this_line(line)
    walk = _Allowing(policy, scene, (scene.cwd,), (scene.cwd,), [], [], [], [])
    walk.walk(commands)
    if walk.refusals:
        complete = len(walk.proposals) == len(walk.refusals)
        return None, walk.refusals[0], tuple(dict.fromkeys(walk.proposals)) if complete else ()
    return tuple(walk.hits), "", ()


def _this_line(line: str) -> tuple[Suggestion, ...]:
    """The exact line as a rule, if it can be one."""
    text = line.strip()
    if "\n" in text or "*" in text or len(text) > 500 or _odd(text):
        return ()
    return (Suggestion(rule=f"Bash({text})", note="only this very line"),)
