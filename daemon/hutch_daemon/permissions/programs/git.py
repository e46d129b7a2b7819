"""The table row of git, with the sub-commands and options that can run programs."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from hutch_daemon.permissions.programs.row import Argv, Program, names, option_of, rows

_GIT_GLOBAL = names("--no-pager --no-optional-locks --literal-pathspecs --no-replace-objects")
_GIT_LONG = names(
    "output ext-diff textconv upload-pack receive-pack exec open-files-in-pager config config-env "
    "template separate-git-dir upload-archive output-directory git-dir work-tree extcmd "
    "recurse-submodules recursive filters unsafe-paths strategy bare mirror"
)
_GIT_SHORT = MappingProxyType(
    {
        **dict.fromkeys(("archive", "format-patch"), "o"),
        **dict.fromkeys(("merge", "pull"), "s"),
        "clone": "uc",
        "grep": "O",
        "rebase": "xis",
        "commit": "t",
        "add": "e",
    }
)
_GIT_KNOWN = names(
    "status log show diff branch add commit fetch pull push stash tag checkout switch restore merge "
    "rebase reset rm mv clean init clone blame annotate shortlog describe rev-parse rev-list "
    "ls-files ls-tree ls-remote cat-file remote cherry-pick cherry revert grep reflog apply "
    "format-patch archive count-objects fsck gc name-rev merge-base diff-tree diff-index diff-files "
    "show-ref symbolic-ref for-each-ref check-ignore version whatchanged show-branch range-diff "
    "verify-commit verify-tag var notes"
)


_EXACT_GIT = names(
    "config difftool mergetool filter-branch bisect submodule instaweb send-email daemon fast-import "
    "credential gui gitk citool hook maintenance svn p4 worktree am remote-ext remote-fd shell "
    "http-backend"
)


_GIT_CONFIG_READS = names("--get --get-all --list -l")
_GIT_CONFIG_FLAGS = names("--global --local --system --show-origin --show-scope --name-only -z")


def _git(argv: Argv, spelled: int) -> str | None:
    at = 1
    while at < len(argv) and argv[at].startswith("-"):
        if argv[at] not in _GIT_GLOBAL:
            return f"git {argv[at]} changes where git looks or what it runs"
        at += 1
    if at == len(argv):
        return None
    sub = argv[at]
    if sub == "worktree" and argv[at + 1 : at + 2] == ("list",):
        return None
    if sub == "config" and _GIT_CONFIG_READS & {*argv[at + 1 : at + 2]}:
        return (
            None
            if all(not w.startswith("-") or w in _GIT_CONFIG_FLAGS for w in argv[at + 2 :])
            else "git config has an option that is not plain"
        )
    if sub in _EXACT_GIT:
        return f"git {sub} runs programs or settings"
    if sub not in _GIT_KNOWN and spelled <= at:
        return f"git {sub} may be an alias that runs anything"
    if any("::" in word for word in argv[at + 1 :]) and sub in {
        "clone",
        "fetch",
        "pull",
        "push",
        "remote",
        "ls-remote",
        "archive",
    }:
        return "a git address with `::` runs a program"
    return option_of(argv[at:], _GIT_SHORT.get(sub, ""), _GIT_LONG, frozenset())


ROWS: Final = rows(
    ("git", Program(check=_git, has_subcommands=True)),
)
