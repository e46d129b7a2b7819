"""Random shell lines, for the comparison with bash and for fuzzing."""

from __future__ import annotations

import random

PROGRAMS = ("git", "ls", "cat", "grep", "rm", "touch", "npm", "head", "make")
_WRAPPED = (
    "timeout 5 ",
    "nice ",
    "nice -n 5 ",
    "nohup ",
    "stdbuf -oL ",
    "time ",
    "time -p ",
    "env ",
    "timeout -k 1 5 ",
)
_RUNS_ITS_WORDS = ("sudo ", "sudo -u ", "xargs ", "find -exec ", "sh -c ", "eval ", "docker ", "git -c x ", "cd a; ")
_WORDS = (
    "status", "push", "-l", "--all", "a", "b.txt", "x=1", "'a b'", '"c d"', "a\\ b", "-", "--", "''", '""', "{}",
    "a{b}c", "HEAD~1",
    "'$(rm x)'", "'a;b'", '"a|b"', "\\;", "\\&", "'#'", "a#b", "#c", "@{0}", "2", "10", "~", "~/x", "*.txt", "./a",
    "b?", "é", "\\'",
    '"\'"', "'\"'", "'a'\"b\"c", "!", "=", "a=b", "\\\n", "+x", "%", "^a", "in", "do", "if", "time", "then", '"a$"',
    "'`rm`'", "\\$x",
    '"\\$x"', '"\\`rm\\`"', "a,b", "]", "1a", "-n", "\\\\", '"\\\\"', "'\\'",
    "$?", '"$?"', '"a $? b"', "'$?'", "a$?", '"\\$?"',
)  # fmt: skip
_NASTY = (
    "$(rm x)", "`rm x`", "$x", "${x}", "{a,b}", "<(rm)", ">(rm)", "$'rm'", "r\\\nm", "\\\n", "\r", "\x00", "$((1))",
    "$[1]", "<<E\n",
    "<<<x", "\u00a0", "\u200b", "((", "))", ";;", "{ ", " }", "function f", "f()", "[[", "]]", "case x in", "esac",
    "$", "`", "'", '"',
    "\\", "\udc80", "a[$(rm)]=1", "!(", "{1..3}", "\v", "\f", "&&&", "|||", "<>", "<&", "2>&", ">|", "coproc",
    "select", "@(a|b)",
)  # fmt: skip
_JOINTS = (
    " && ",
    " || ",
    "; ",
    " | ",
    " & ",
    "\n",
    ";",
    "|",
    "&&",
    "||",
    "&",
    " |& ",
    " ;\n",
    "\n\n",
    " # note\n",
    "#x\n",
    " \\\n",
)
_REDIRECTIONS = (
    ">/dev/null", "2>/dev/null", "2>&1", ">&2", "&>/dev/null", "</dev/null", ">out", ">>out", "> out", "2> out",
    "1>out", ">|out",
    "<in", "3>out", "2>&-", "&>>out", "1>&2", "12>out", "a>out",
)  # fmt: skip


def command(random_: random.Random) -> str:
    """Return one simple command, sometimes with an assignment, a wrapper or a redirection."""
    parts: list[str] = []
    if random_.random() < 0.08:
        parts.append(random_.choice(("CI=1", "TZ=UTC", "X=1", "PATH=/x")))
    parts.append(random_.choice(PROGRAMS))
    parts += (random_.choice(_WORDS) for _ in range(random_.choice((0, 1, 1, 2, 3, 5))))
    if random_.random() < 0.3:
        parts.insert(random_.randrange(len(parts) + 1), random_.choice(_REDIRECTIONS))
    wrapper = random_.choice(_WRAPPED) if random_.random() < 0.12 else ""
    return wrapper + random_.choice((" ", " ", " ", "  ", "\t")).join(parts)


def plausible(random_: random.Random) -> str:
    """Return a line that the parser often understands."""
    text = ""
    for number in range(random_.choice((1, 1, 2, 2, 3, 4))):
        text += (random_.choice(_JOINTS) if number else "") + command(random_)
        if random_.random() < 0.05:
            text = f"({text})"
    if random_.random() < 0.15:
        at = random_.randrange(len(text) + 1)
        text = text[:at] + random_.choice((*_NASTY, *_JOINTS, *_REDIRECTIONS)) + text[at:]
    if random_.random() < 0.1:
        at = random_.randrange(len(text))
        text = text[:at] + text[at + 1 :]
    return text


def hostile(random_: random.Random) -> str:
    """Return a line of fragments in any order, sometimes with one repeated very often."""
    pieces = (*_NASTY, *_WORDS, *_JOINTS, *_REDIRECTIONS, *_WRAPPED, *_RUNS_ITS_WORDS, *PROGRAMS, " ", " ")
    if random_.random() < 0.01:
        return random_.choice(pieces) * random_.randrange(1, 4000)
    return "".join(random_.choice(pieces) for _ in range(random_.randrange(1, random_.choice((6, 20, 60)))))
