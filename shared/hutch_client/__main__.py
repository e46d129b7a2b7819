"""The command `hutch`: imports the module of the command and turns an error into a sentence and an exit code."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from itertools import dropwhile
from typing import Final

from hutch_client import exits
from hutch_client.commands import GROUPS, MODULES, PRIVATE, PRIVATE_DOC, Command, Parser
from hutch_client.streams import mend_streams, write_nowhere
from hutch_shared.encoding import encoding_fault
from hutch_shared.errors import HutchError, Reason

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    mend_streams()
    words = [*(sys.argv[1:] if argv is None else argv)]
    if (fault := encoding_fault(words, os.environ)) is not None:
        return exits.FAILED if "_ARGCOMPLETE" in os.environ else _complain(fault, exits.USAGE)
    if "_ARGCOMPLETE" in os.environ:  # the shell completes a line
        from hutch_client.commands.completion import answer

        answer()
    name, *rest = [*dropwhile(PRIVATE.__eq__, words)] or ["help"]
    private = words[:1] == [PRIVATE]
    if name in _HELP and rest and rest[0] in MODULES:
        name, *rest = *rest, "-h"
    name = {"--version": "version"}.get(name, name)
    if name not in MODULES and name not in _HELP:
        return _complain(f"There is no command `{name}`.{_nearest(name)} `hutch help` lists them.", exits.USAGE)
    try:
        if name in _HELP:
            print(_overview(), flush=True)
            return exits.OK
        commands: dict[str, Command] = importlib.import_module(f"hutch_client.commands.{MODULES[name]}").COMMANDS
        command = commands[name]
        parser = Parser(prog=f"hutch {name}", description=command.doc)
        command.arguments(parser)
        code = _run(command, parser.parse_args(rest), private=private)
        sys.stdout.flush()
    except HutchError as error:
        return _complain(_sentence(error), exits.of_error(error))
    except UnicodeError:  # a file, a directory's name or standard input
        return _complain("Something that was read is not UTF-8, so it cannot be used.", exits.USAGE)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it: no error
        write_nowhere()
        return exits.OK
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        write_nowhere()
        return _complain(f"The output could not be written: {error.strerror}.", exits.FAILED)
    return code


def _run(command: Command, given: argparse.Namespace, *, private: bool) -> int:
    if not private and not getattr(given, "private", False):
        return command.run(given)
    from hutch_client.endpoint import private_chosen

    with private_chosen():
        return command.run(given)


_HELP: Final = ("help", "-h", "--help")
_CANNOT_WRITE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _overview() -> str:
    lines = ["usage: hutch COMMAND …      `hutch COMMAND -h` explains it", ""]
    for title, commands in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<12}{doc}" for name, (_, doc) in commands.items()), ""]
    lines.append(f"{PRIVATE}, before or after the command: {PRIVATE_DOC}")
    return "\n".join(lines)


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, MODULES, 1)
    return f" Did you mean `{near[0]}`?" if near else ""


def _sentence(error: HutchError) -> str:
    """Return hutchd's message, with the next step if it names none."""
    if error.reason is not Reason.ISOLATION_UNAVAILABLE or "hutch doctor" in error.message:
        return error.message
    return f"{error.message} `hutch status` shows what this host offers, `hutch doctor` how to get what is missing."


def _complain(sentence: str, code: int) -> int:
    from hutch_client.untrusted import plain

    print(f"hutch: {plain(sentence)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
