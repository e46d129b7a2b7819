"""Rules as users write them (Claude Code's syntax), parsed into types.

A rule is `Tool` or `Tool(specifier)`. The tool has Claude's name for it (`Bash`) or the name of the action
(`run_command`). If a rule can mean two things, a rule that allows gets the narrower meaning, and a rule that asks or
denies the broader one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hutch_daemon.permissions.addresses import NotAnAddressError, canonical_host
from hutch_daemon.permissions.paths import BadPatternError, PathPattern, compile_pattern
from hutch_daemon.permissions.programs.row import base_name
from hutch_daemon.permissions.shell.words import Word

Effect = Literal["allow", "ask", "deny"]
LayerName = Literal["host", "account", "project", "session", "answered"]
Fit = Literal["no", "maybe", "yes"]

LONGEST_RULE = 4_000


class BadRuleError(ValueError):
    """The text is not a rule; the message explains the mistake to the user."""


class _MoreThanACommandError(BadRuleError):
    """The text is a shell line, but not one simple command."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a rule, for users: its text, its layer, and the name of the file or answer that contains it."""

    text: str
    layer: LayerName
    source: str
    effect: Effect


@dataclass(frozen=True, slots=True)
class Glob:
    """Text with stars; each star matches any characters. Matching takes linear time."""

    pieces: tuple[str, ...]

    @property
    def literal(self) -> bool:
        return len(self.pieces) == 1

    @property
    def anything(self) -> bool:
        return len(self.pieces) > 1 and not any(self.pieces)

    def fits(self, text: str) -> bool:
        first, *rest = self.pieces
        if not rest:
            return text == first
        last = rest.pop()
        if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
            return False
        at, end = len(first), len(text) - len(last)
        for piece in rest:
            found = text.find(piece, at, end)
            if found < 0:
                return False
            at = found + len(piece)
        return True


_ANY = Glob(("", ""))


@dataclass(frozen=True, slots=True)
class CommandRule:
    """A rule about commands that start with these words."""

    origin: Origin
    words: tuple[Glob, ...]
    """The words of the command. Empty for a rule about all commands, or about one line that is not a simple command."""
    open: bool
    """True if more words may follow."""
    line: str
    """The text in the parentheses, for rules that allow exactly this line."""
    program: Glob
    """The base name of the program in lower case, for rules that ask or deny."""
    exact: bool = False
    """True if the rule spells a whole command without stars."""

    def spells(self, argv: tuple[Word, ...]) -> int | None:
        """Match a rule that allows: return how many words of the command it spells; None if it does not match."""
        if self.words and self.words[0].pieces[0] != argv[0].text:
            return None
        if len(argv) < len(self.words) or (not self.open and len(argv) != len(self.words)):
            return None
        for pattern, word in zip(self.words, argv, strict=False):
            if not word.sure or not pattern.fits(word.text) or (pattern.anything and word.text.startswith("-")):
                return None
        spelled = 0
        while spelled < len(self.words) and self.words[spelled].pieces[0]:
            spelled += 1
        return spelled

    def forbids(self, argv: tuple[Word, ...]) -> Fit:
        """Match a rule that asks or denies. Options of the command may be in any order and place."""
        if not self.words:
            return "yes"
        if not argv or not argv[0].sure:
            return "maybe"
        if not self.program.fits(base_name(argv[0].text).lower()):
            return "no"
        rest = argv[1:]
        otherwise: Fit = "maybe" if not all(word.sure for word in rest) else "no"
        options = [word for word in self.words[1:] if word.pieces[0].startswith("-")]
        if not all(_has_option(option, rest) for option in options):
            return otherwise
        wanted = [word for word in self.words[1:] if not word.pieces[0].startswith("-")]
        at = extra = 0
        after_option = skipping = False
        for word in rest:
            while at < len(wanted) and wanted[at].anything:
                at, skipping = at + 1, True
            if at < len(wanted) and not word.sure:
                return "maybe"
            if at < len(wanted) and wanted[at].fits(word.text):
                at, after_option, skipping = at + 1, False, False
            elif word.text.startswith("-"):
                after_option = "=" not in word.text
            elif after_option:
                after_option = False
            elif at < len(wanted) and not skipping:
                return "no"
            elif not skipping:
                extra += 1
        if any(not word.anything for word in wanted[at:]):
            return otherwise
        return "yes" if self.open or not extra else "no"


def _loosely(program: Glob) -> Glob:
    return Glob(
        tuple(base_name(piece).lower() if at == 0 else piece.lower() for at, piece in enumerate(program.pieces))
    )


def _has_option(option: Glob, words: tuple[Word, ...]) -> bool:
    """Return whether the words contain the option. A long one may be abbreviated; short ones may be in a bundle."""
    given = [word.text for word in words if word.text.startswith("-")]
    if not option.literal:
        return any(option.fits(text) for text in given)
    name = option.pieces[0]
    if name in given:
        return True
    if name.startswith("--"):
        return any(
            text.startswith(name + "=") or (len(text) > 3 and name.startswith(text.split("=")[0])) for text in given
        )
    letters = {letter for text in given for letter in (text[2:3] if text.startswith("--") else text[1:]).lower()}
    return set(name[1:].lower()) <= letters


@dataclass(frozen=True, slots=True)
class PathRule:
    """A rule about an action on files. `pattern` is None for all files."""

    origin: Origin
    action: Literal["read", "edit", "search"]
    pattern: PathPattern | None

    def covers(self, path: str, workspace: str) -> bool:
        return self.pattern is None or self.pattern.covers(path, workspace)

    def may_lie_below(self, directory: str, workspace: str) -> bool:
        return self.pattern is None or self.pattern.may_lie_below(directory, workspace)


@dataclass(frozen=True, slots=True)
class HostRule:
    """A rule about web addresses. `host` is None for all hosts; with `below`, the rule covers only its sub-domains."""

    origin: Origin
    host: str | None
    below: bool

    def covers(self, host: str) -> bool:
        return self.host is None or (host.endswith("." + self.host) if self.below else host == self.host)


def _folded(name: str) -> str:
    """Return a tool's name without case and, for an MCP tool, with `_` for a dot, as the CLI spells a server's name."""
    name = name.lower()
    return name.replace(".", "_") if name.startswith("mcp__") else name


@dataclass(frozen=True, slots=True)
class NameRule:
    """A rule about tools by name: MCP tools, all tools of an MCP server, and tools that take no specifier."""

    origin: Origin
    name: Glob

    def covers(self, tool: str, server: str | None = None) -> bool:
        """Return whether the rule covers a tool. `server` is the MCP server that the tool is taken to be of.

        A rule that allows must spell the server: in `mcp__foo__*` the star does not reach over to a server `foo__bar`.
        A rule that asks or denies may also name the server as `mcp__foo__bar`.
        """
        if self.origin.effect == "allow":
            spelled = server is None or self.name.pieces[0].startswith(f"mcp__{server}__")
            return spelled and self.name.fits(tool)
        whole_server = server is not None and self.name.fits(_folded(f"mcp__{server}"))
        return whole_server or self.name.fits(_folded(tool))


Rule = CommandRule | PathRule | HostRule | NameRule

_TOOLS: dict[str, Literal["command", "read", "edit", "search", "fetch", "name"]] = {
    "Bash": "command",
    "run_command": "command",
    "Read": "read",
    "NotebookRead": "read",
    "read": "read",
    "Edit": "edit",
    "Write": "edit",
    "MultiEdit": "edit",
    "NotebookEdit": "edit",
    "edit": "edit",
    "Grep": "search",
    "Glob": "search",
    "LS": "search",
    "search": "search",
    "WebFetch": "fetch",
    "fetch": "fetch",
}
_SHAPE = re.compile(r"([A-Za-z][A-Za-z0-9_.\-]*\*?(?:[A-Za-z0-9_.\-*]*))(?:\((.*)\))?", re.DOTALL)
_STARS = re.compile(r"\*+")


def parse_rule(text: str, effect: Effect, layer: LayerName, source: str, *, base: str, home: str) -> Rule:
    """Parse one rule. `base` is the directory that `/x` starts from. Raises `BadRuleError`."""
    origin = Origin(text, layer, source, effect)
    if len(text) > LONGEST_RULE or any(ord(char) < 32 and char not in "\t\n" for char in text):
        raise BadRuleError("it is longer than 4,000 characters, or has control characters")
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise BadRuleError("it is not of the form Tool or Tool(specifier)")
    tool, specifier = match.group(1), match.group(2)
    kind = _TOOLS.get(tool, "name")
    if specifier is not None and not specifier.strip():
        raise BadRuleError("nothing is between the parentheses; for every call write only the tool's name")
    if kind == "command":
        return _command_rule(origin, specifier)
    if kind == "fetch":
        return _host_rule(origin, specifier)
    if kind == "name":
        if specifier is not None:
            raise BadRuleError(f"{tool} takes no specifier; these do: Bash, Read, Edit, Grep, Glob and WebFetch")
        return _name_rule(origin, tool)
    if specifier is None or specifier == "*":
        return PathRule(origin, kind, None)
    try:
        pattern = compile_pattern(specifier, base=base, home=home, fold=effect != "allow")
    except BadPatternError as error:
        raise BadRuleError(str(error)) from error
    return PathRule(origin, kind, pattern)


def _command_rule(origin: Origin, specifier: str | None) -> CommandRule:
    if specifier is None or specifier.strip() in {"*", ":*"}:
        return CommandRule(origin, (), True, "", _ANY)
    line = specifier.strip()
    body = line
    is_open = False
    for ending in (":*", " *"):
        if line.endswith(ending):
            body, is_open = line[: -len(ending)].rstrip(), True
            break
    try:
        words = _rule_words(body)
    except _MoreThanACommandError:
        if is_open or origin.effect != "allow":
            raise
        # Not a simple command: the rule allows exactly this line.
        return CommandRule(origin, (), False, line, _ANY)
    if not words:
        raise BadRuleError("no word is before the star")
    if origin.effect == "allow" and not words[0].literal:
        raise BadRuleError("a rule that allows must name its program without a star")
    if not is_open and len(words[-1].pieces) > 1 and not words[-1].pieces[-1] and words[-1].pieces[0]:
        # `npm run test*`: the star at the end also matches more words.
        is_open = True
    exact = not is_open and all(word.literal for word in words)
    return CommandRule(origin, words, is_open, line, _loosely(words[0]), exact)


def _rule_words(text: str) -> tuple[Glob, ...]:
    """Return the words of a rule. Quotes and backslashes work as in the shell; a star outside quotes is a wildcard."""
    words: list[Glob] = []
    pieces: list[str] | None = None
    quote = ""
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if quote:
            if char == quote:
                quote = ""
                continue
            if quote == '"' and char in "$`":
                raise _MoreThanACommandError("there is an expansion inside quotes")
            if quote == '"' and char == "\\" and text[at : at + 1] in tuple('$`"\\'):
                char = text[at]
                at += 1
        elif char in " \t\n":
            if char == "\n":
                raise _MoreThanACommandError("it is more than one line")
            if pieces is not None:
                words.append(Glob(tuple(pieces)))
            pieces = None
            continue
        elif char in "'\"":
            quote = char
            pieces = pieces or [""]
            continue
        elif char in "|&;<>()`$":
            raise _MoreThanACommandError(
                f"`{char}` is outside quotes: a rule names one command; a line of several is judged command by command"
            )
        elif char == "\\":
            if at == len(text):
                raise BadRuleError("a backslash is at the end")
            char = text[at]
            at += 1
        elif char == "*":
            pieces = [*(pieces or [""]), ""]
            continue
        pieces = pieces or [""]
        pieces[-1] += char
    if quote:
        raise BadRuleError("a quote is not closed")
    if pieces is not None:
        words.append(Glob(tuple(pieces)))
    return tuple(words)


def _host_rule(origin: Origin, specifier: str | None) -> HostRule:
    if specifier is None or specifier in {"*", "domain:*"}:
        return HostRule(origin, None, False)
    kind, _, host = specifier.partition(":")
    if kind != "domain" or not host:
        raise BadRuleError("a rule for WebFetch is written WebFetch(domain:example.com)")
    below = host.startswith("*.")
    host = host.removeprefix("*.")
    try:
        return HostRule(origin, canonical_host(host.strip()), below)
    except NotAnAddressError as error:
        raise BadRuleError(str(error)) from error


def _name_rule(origin: Origin, tool: str) -> NameRule:
    name = tool
    if not tool.startswith("mcp__") and "*" in tool:
        raise BadRuleError("only the names of MCP tools may contain a star")
    if tool.startswith("mcp__"):
        server, found, of_server = tool[5:].partition("__")
        if not server or (origin.effect == "allow" and "*" in server) or (found and not of_server):
            raise BadRuleError("a rule for an MCP server is written mcp__server, mcp__server__* or mcp__server__tool")
        if not found and not server.endswith("*"):
            name = f"mcp__{server}__*"
    if origin.effect != "allow":
        name = _folded(name)
    return NameRule(origin, Glob(tuple(_STARS.split(name))))
