"""The veto: reasons why an open rule does not allow a command although the rule's words match."""

from __future__ import annotations

from typing import Final

from hutch_daemon.permissions.programs.row import Argv, Program, ProgramKind, base_name, names, option_of
from hutch_daemon.permissions.programs.table import lookup

__all__ = ["script_of", "veto"]

_RUNS_SCRIPTS: Final = names(
    "python pypy node nodejs ruby perl php lua luajit Rscript julia ts-node tsx osascript groovy "
    "scala elixir bash sh zsh dash ksh fish ash"
)
"""Programs whose operand is a script."""
_OPTIONS_FIRST: Final = _RUNS_SCRIPTS | names("npx bunx pnpx uvx")
"""Programs that pass the words after their operand to the program that the operand names."""


def veto(argv: Argv, spelled: int) -> str | None:
    """Return the reason why an open rule that spells the first `spelled` words does not allow the command, or None."""
    program = lookup(argv[0])
    if program.kind is ProgramKind.EXACT:
        return f"{base_name(argv[0])} runs other commands: only a rule for the whole command opens it"
    if program.kind is ProgramKind.PINNED and (reason := _unpinned(program, argv, spelled)):
        return reason
    if not (
        program.kind is ProgramKind.PINNED
        and not program.has_subcommands
        and base_name(argv[0]).rstrip("0123456789.") in _OPTIONS_FIRST
    ):
        own = argv[: argv.index("--")] if program.hands_on and "--" in argv else argv
        reason = option_of(own, program.short, program.long, program.words)
        if reason:
            return reason
    return program.check(argv, spelled) if program.check else None


def _unpinned(program: Program, argv: Argv, spelled: int) -> str | None:
    """Return a reason unless the rule names the program that a PINNED program runs; None if it does."""
    name = base_name(argv[0])
    at = 1
    while at < spelled and argv[at] in program.flags:
        at += 1
    if at >= spelled or argv[at].startswith("-"):
        return f"{name} runs what its operand names: the rule must name that too"
    if program.has_subcommands and argv[at] in program.exact:
        return f"{name} {argv[at]} runs other commands: only a rule for the whole command opens it"
    module = "-m" in argv[1:at]
    if (program.has_subcommands or module) and argv[at] in program.runs_next:
        at += 2 if argv[at : at + 2] in {("tool", "run"), ("coverage", "run")} else 1
        if at >= spelled or argv[at].startswith("-"):
            return f"{name} {argv[at - 1]} runs what its operand names: the rule must name that too"
    return None


def script_of(argv: Argv) -> str | None:
    """Return the program or script that the command names by a relative path, or None."""
    if "/" in argv[0]:
        return None if argv[0].startswith("/") else argv[0]
    program = lookup(argv[0])
    if program.kind is ProgramKind.EXACT:
        named = (word for word in argv[1:] if "/" in word or argv[0] in {"source", "."})
        return next((word for word in named if not word.startswith(("/", "~", "-"))), None)
    runs_script = program.kind is ProgramKind.PINNED and not program.has_subcommands
    if not runs_script or base_name(argv[0]).rstrip("0123456789.") not in _RUNS_SCRIPTS:
        return None
    for word in argv[1:]:
        if word == "-m" and "-m" in program.flags:
            return None
        if not word.startswith("-"):
            return None if word.startswith(("/", "~")) else word
    return None
