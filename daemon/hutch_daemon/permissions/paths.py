"""Path patterns and the paths that they match. Works on text alone: the caller resolves symbolic links.

Patterns look like those of .gitignore: `//abs` starts at the file system's root, `~/x` at the home, `/x` at the base of
the rule's layer, `a/b` at the work directory; a bare `name` matches at any depth. A pattern covers the files that it
names and everything below them. It matches one path component at a time; `**` matches any number of components. The
time is at most the product of both lengths.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

_PROTECTED_TEXT = (
    ".git .claude .hutch .vscode .idea .mcp.json .gitconfig .gitmodules .ssh .envrc .ripgreprc .npmrc .bashrc "
    ".bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv .zprofile .zlogin .zlogout .inputrc "
    ".xprofile .xsessionrc .xinitrc .xsession .kshrc .cshrc .tcshrc .pam_environment .config/fish .config/git "
    ".config/autostart .config/systemd .config/environment.d .config/direnv .local/bin .cargo/config.toml "
    ".cargo/config .husky .githooks .pre-commit-config.yaml lefthook.yml .lefthook.yml .yarnrc .yarnrc.yml "
    ".pnpmfile.cjs .curlrc .wgetrc .vimrc .exrc .gdbinit .lldbinit .tmux.conf .psqlrc .sqliterc .mailcap"
)
_PROTECTED = frozenset(_PROTECTED_TEXT.split())
"""Files that can make a program, a shell or an agent run commands, or that contain an agent's own rules."""
GIT_HEAD = "head"
"""git may take a directory with a file of this name for a repository, whose settings can run programs."""
_PROTECTED_FIRST = frozenset(name.partition("/")[0] for name in _PROTECTED if name.startswith("."))
_MAGIC = re.compile(r"[*?\[]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SKIPPED_BY_FILESYSTEMS = "Cf"


class BadPatternError(ValueError):
    """The path pattern cannot be read; the text says why."""


def plain(path: str) -> str:
    """Return an absolute path without `.`, `..` and double slashes, computed from its text alone."""
    if path[:1] == "/" and "//" not in path and "/." not in path and path[-1] != "/":
        return path
    return posixpath.normpath("/" + path.lstrip("/"))


def absolute(word: str, cwd: str, home: str) -> str:
    """Return the absolute path that a word means. `..` stays in it, so that the resolver follows links in order."""
    if word == "~" or word.startswith("~/"):
        word = home + word[1:]
    return word if word.startswith("/") else cwd.rstrip("/") + "/" + word


def can_be_path(text: str) -> bool:
    """Return whether a file can have this name and the name can be sent to the resolver."""
    return 0 < len(text) <= 4096 and "\0" not in text and not _SURROGATE.search(text)


def inside(path: str, directory: str) -> bool:
    """Return whether a plain path is the directory itself or below it."""
    root = directory.rstrip("/")
    return path == root or path.startswith(root + "/")


@lru_cache(maxsize=4096)
def folded(text: str) -> str:
    """Return a form of the text that is equal for names that a case-insensitive file system takes for the same.

    Ignores case, Unicode composition and invisible characters.
    """
    if text.isascii():
        return text.lower()
    seen = "".join(char for char in text if unicodedata.category(char) != _SKIPPED_BY_FILESYSTEMS)
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", seen).casefold())


def names_of(path: str) -> tuple[str, ...]:
    return tuple(name for name in path.split("/") if name)


def protected_name(path: str) -> str | None:
    """Return the protected name in a path, or None. Only a rule that spells this name can allow a write to the path."""
    names = names_of(folded(path))
    for at, name in enumerate(names):
        trimmed = name.rstrip(". ")
        if trimmed in _PROTECTED:
            return trimmed
        if at and f"{names[at - 1]}/{name}" in _PROTECTED:
            return f"{names[at - 1]}/{name}"
    return GIT_HEAD if names and names[-1].rstrip(". ") == GIT_HEAD else None


def may_become_protected(pattern: str) -> str | None:
    """Return a protected name that the shell could expand this file name pattern to, or None.

    In the shell, only a pattern that starts with a dot matches names that start with a dot.
    """
    for name in names_of(folded(pattern)):
        if name.startswith(".") and _MAGIC.search(name):
            matches = re.compile(fnmatch.translate(name)).match
            return next((known for known in sorted(_PROTECTED_FIRST) if matches(known)), None)
    return None


@dataclass(frozen=True, slots=True)
class _Name:
    text: str
    matches: Callable[[str], object] | None
    """Matches one path component; None for `**`."""


def _name(text: str) -> _Name:
    if text == "**":
        return _Name(text, None)
    if not _MAGIC.search(text):
        return _Name(text, text.__eq__)
    return _Name(text, re.compile(fnmatch.translate(text)).match)


@dataclass(frozen=True, slots=True)
class PathPattern:
    """A compiled pattern."""

    root: tuple[str, ...] | None
    """The directory where the pattern starts, as components; None for the work directory of the judged call."""
    names: tuple[_Name, ...]
    """The components of the pattern."""
    anywhere: bool
    """True if the pattern matches in every directory below `root`."""
    fold: bool
    """True if the pattern ignores case and the other differences that `folded` removes."""

    def _begins(self, workspace: str) -> tuple[str, ...]:
        return self.root if self.root is not None else names_of(folded(workspace) if self.fold else workspace)

    def covers(self, path: str, workspace: str) -> bool:
        """Return whether the pattern names a plain absolute path, or a directory above it."""
        names = names_of(folded(path) if self.fold else path)
        root = self._begins(workspace)
        depth = len(root)
        if names[:depth] != root:
            return False
        below = names[depth:]
        if not self.anywhere:
            return _leads(self.names, below)
        if len(self.names) == 1 and self.names[0].matches is not None:
            return any(map(self.names[0].matches, below))
        return any(_leads(self.names, below[start:]) for start in range(len(below)))

    def may_lie_below(self, directory: str, workspace: str) -> bool:
        """Return whether the pattern might name something inside the directory."""
        names = names_of(folded(directory) if self.fold else directory)
        root = self._begins(workspace)
        shared = min(len(names), len(root))
        if names[:shared] != root[:shared]:
            return False
        if self.anywhere or len(names) <= len(root):
            return True
        for name, given in zip(self.names, names[len(root) :], strict=False):
            if name.matches is None:
                return True
            if not name.matches(given):
                return False
        return True

    def spells(self, name: str) -> bool:
        """Return whether the pattern contains the protected name without wildcards, so that its author meant it."""
        written = [*(self.root or ()), *(part.text for part in self.names)]
        wanted = name.split("/")
        return any([folded(part) for part in written[at : at + len(wanted)]] == wanted for at in range(len(written)))


def _leads(pattern: tuple[_Name, ...], names: tuple[str, ...]) -> bool:
    """Return whether the pattern matches the components or a prefix of them, which is a directory above the path."""
    reachable = {0}
    for name in (*names, None):
        for at in sorted(reachable):
            while at < len(pattern) and pattern[at].matches is None:
                at += 1
                reachable.add(at)
        if len(pattern) in reachable:
            return True
        if name is None:
            break
        reachable = {
            at if matches is None else at + 1
            for at, matches in ((at, pattern[at].matches) for at in reachable)
            if matches is None or matches(name)
        }
    return False


def compile_pattern(text: str, *, base: str, home: str, fold: bool) -> PathPattern:
    """Compile a pattern. `fold`: ignore case, as some file systems do; used for rules that deny or ask.

    Raises `BadPatternError`. All directories are absolute and resolved.
    """
    if not text or len(text) > 1000 or any(ord(char) < 32 for char in text):
        raise BadPatternError("the path is empty, longer than 1,000 characters, or has control characters")
    if text.startswith("!"):
        raise BadPatternError("a path rule cannot be negated")
    if text.startswith("~") and not text.startswith("~/") and text != "~":
        raise BadPatternError("only `~/` is read, not another user's home")
    rest = text.removeprefix("./")
    anywhere = False
    root: str | None
    if text.startswith("//"):
        root = "/"
        rest = text[2:]
    elif text.startswith("~"):
        root = home
        rest = text[1:]
    elif text.startswith("/"):
        root = base
    else:
        anywhere = text == rest and rest != "**" and "/" not in rest.rstrip("/")
        # A bare name in a rule that denies or asks covers every directory; in a rule that allows, the work directory.
        root = "/" if anywhere and fold else None
    names = names_of(rest)
    if ".." in names:
        raise BadPatternError("a path rule cannot contain `..`")
    names = tuple(name for name in names if name != ".")
    if fold:
        names = tuple(folded(name) for name in names)
        root = root and folded(root)
    return PathPattern(None if root is None else names_of(root), tuple(_name(name) for name in names), anywhere, fold)


@dataclass(frozen=True, slots=True)
class PathTarget:
    """A path as written and as resolved. A rule that allows must cover both; a rule that denies or asks, only one."""

    written: str
    real: str | None
    """The resolved path; None if it could not be resolved, so that no rule allows it."""

    @property
    def both(self) -> tuple[str, ...]:
        return (self.written,) if self.real is None or self.real == self.written else (self.written, self.real)

    def within(self, directory: str) -> bool:
        return self.real is not None and inside(self.written, directory) and inside(self.real, directory)


def path_target(word: str, cwd: str, home: str, real: Mapping[str, str]) -> PathTarget:
    """Return the path that a word means. `real` maps absolute paths, plain or with `..`, to resolved paths."""
    key = absolute(word, cwd, home)
    written = plain(key)
    found = real.get(key, real.get(written))
    return PathTarget(written, None if found is None else plain(found))
