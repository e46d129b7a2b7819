"""Table rows of programs that show, search, copy, pack, fetch and edit files."""

from __future__ import annotations

import re
from typing import Final

from hutch_daemon.permissions.programs.row import Argv, Program, ProgramKind, names, rows

_SED_PRINTS = re.compile(r"(\d+|\$|/(?:[^/\\\n]|\\[^\n])*/)?(,(\d+|\$|\+\d+|/(?:[^/\\\n]|\\[^\n])*/))?!?[pdq=]")
_SED_REPLACES = re.compile(
    r"(\d+(,(\d+|\$))?)?s([/|#,])(?:(?!\4)[^\\\n;]|\\[^\n])*\4(?:(?!\4)[^\\\n;]|\\[^\n])*\4[gpiI\d]*"
)


def _sed(argv: Argv, spelled: int) -> str | None:
    scripts: list[str] = []
    operands: list[str] = []
    words = iter(argv[1:])
    for word in words:
        if re.fullmatch(r"-[nErsuz]*e", word):
            scripts.append(next(words, ""))
        elif word.startswith("-") and not re.fullmatch(r"-[nErsuz]+|--quiet|--silent|--regexp-extended", word):
            return "sed options can write files and run programs"
        elif not word.startswith("-"):
            operands.append(word)
    scripts = scripts or operands[:1]
    if not scripts or not all(_SED_PRINTS.fullmatch(text) or _SED_REPLACES.fullmatch(text) for text in scripts):
        return "a sed script can write files and run programs, and this one is not a plain one"
    return None


def _awk(argv: Argv, spelled: int) -> str | None:
    words = iter(argv[1:])
    for word in words:
        if word in {"-F", "-v"}:
            next(words, None)
        elif word.startswith("-") and not re.match(r"-[Fv].", word):
            return "awk options can load programs"
        elif not word.startswith("-"):
            if re.search(r"[|>@`]|system|getline|ARGV|close|PROCINFO", re.sub(r"\|\||>=", "", word)):
                return "an awk program can write files and run programs, and this one is not a plain one"
            return "options come after the awk program" if any(rest.startswith("-") for rest in words) else None
    return "awk has no program"


_TAR_BUNDLE = re.compile(r"[A-Za-z]*[FI][A-Za-z]*")


def _tar(argv: Argv, spelled: int) -> str | None:
    if any(":" in word for word in argv[1:]):
        return "tar runs a remote shell for an archive whose name has a colon"
    return "tar runs a program" if len(argv) > 1 and _TAR_BUNDLE.fullmatch(argv[1]) else None


def _uniq(argv: Argv, spelled: int) -> str | None:
    operands = [word for word in argv[1:] if not word.startswith(("-", "+"))]
    return "uniq writes its second file" if len(operands) > 1 else None


_PRINTF_SETS = re.compile(r"%[^A-Za-z%]*[hlLjzt]*n|%\(")
_EVALUATES = re.compile(r"\[.*[$`]", re.DOTALL)


def _printf(argv: Argv, spelled: int) -> str | None:
    if any(word.startswith("-v") for word in argv[1:2]) or any(_PRINTF_SETS.search(word) for word in argv[1:3]):
        return "printf can set variables (-v, %n)"
    return _evaluates(argv, spelled)


def _evaluates(argv: Argv, spelled: int) -> str | None:
    """Check for `[`…`]`: where a shell expects a number, it evaluates an array index and the substitutions in it."""
    word = next((word for word in argv[1:] if _EVALUATES.search(word)), None)
    return None if word is None else f"{argv[0]} may evaluate {word}"


ROWS: Final = rows(
    (
        (
            "ls cat head tail wc grep egrep fgrep cut tr nl stat du df basename dirname realpath "
            "readlink md5sum sha1sum sha256sum sha512sum cksum pwd whoami id groups uname which diff cmp "
            "comm jq echo true false seq sleep fold fmt rev tac od hexdump strings ps free uptime printenv "
            "nproc tty : expr paste join expand"
        ),
        Program(ProgramKind.READS),
    ),
    ("printf", Program(ProgramKind.READS, check=_printf)),
    ("test [", Program(ProgramKind.READS, words=names("-v -R"), check=_evaluates)),
    ("jobs", Program(short="x")),
    ("wait", Program(short="p")),
    ("date", Program(ProgramKind.READS, short="s", long=names("set"))),
    ("file", Program(ProgramKind.READS, short="C", long=names("compile"))),
    ("tree", Program(ProgramKind.READS, short="oR")),
    ("sort", Program(ProgramKind.READS, short="oT", long=names("output compress-program temporary-directory"))),
    ("rg", Program(ProgramKind.READS, short="z", long=names("pre hostname-bin search-zip"))),
    ("fd fdfind", Program(ProgramKind.READS, short="xX", long=names("exec exec-batch"))),
    ("ag", Program(ProgramKind.READS, long=names("pager"))),
    ("ack", Program(ProgramKind.READS, long=names("pager ackrc output"))),
    ("uniq", Program(ProgramKind.READS, check=_uniq)),
    (
        "find",
        Program(
            ProgramKind.READS,
            words=names("-exec -execdir -ok -okdir -delete -fprint -fprint0 -fprintf -fls -files0-from"),
        ),
    ),
    ("sed gsed", Program(check=_sed)),
    ("awk gawk mawk nawk", Program(check=_awk)),
    (
        (
            "tee touch mkdir cp mv rm rmdir ln install dd truncate chmod chown chgrp patch unzip gunzip gzip sponge "
            "7z 7za 7zz ffmpeg"
        ),
        Program(ProgramKind.WRITES),
    ),
    ("xxd base64", Program(ProgramKind.WRITES, short="o", long=names("output"))),
    ("zip", Program(ProgramKind.WRITES, words=names("-T -TT"), long=names("unzip-command test"))),
    (
        "tar gtar bsdtar",
        Program(
            ProgramKind.WRITES,
            short="FI",
            long=names(
                "checkpoint-action use-compress-program to-command info-script new-volume-script rsh-command "
                "rmt-command"
            ),
            check=_tar,
        ),
    ),
    ("rsync", Program(ProgramKind.WRITES, short="eM", long=names("rsh rsync-path remote-option config"))),
    ("scp", Program(ProgramKind.WRITES, short="oSFD")),
    (
        "curl",
        Program(
            ProgramKind.WRITES,
            short="oOKDcJ",
            long=names(
                "output remote-name remote-name-all config dump-header cookie-jar output-dir trace trace-ascii "
                "libcurl stderr etag-save hsts alt-svc engine proto-redir unix-socket"
            ),
        ),
    ),
    (
        "wget",
        Program(
            ProgramKind.WRITES,
            short="eOPoai",
            long=names(
                "execute output-document directory-prefix output-file append-output use-askpass config "
                "input-file post-file body-file save-cookies hsts-file warc-file"
            ),
        ),
    ),
    ("split csplit", Program(ProgramKind.WRITES, long=names("filter"))),
    ("xz zstd bzip2", Program(ProgramKind.WRITES, short="o")),
    ("bat batcat delta", Program(long=names("pager"))),
    ("cpio", Program(ProgramKind.WRITES, short="FIO", long=names("rsh-command file"))),
    ("yq", Program(ProgramKind.WRITES)),
    ("shuf", Program(ProgramKind.READS, short="o", long=names("output"))),
)
