"""Programs that run the command after them.

A rule that allows a command also allows it inside five wrappers, if their options are plain. A rule that denies or asks
matches every command that a program might run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from hutch_daemon.permissions.programs.row import base_name, names
from hutch_daemon.permissions.shell.reader import RESERVED

LOOKED_THROUGH = names("timeout nice time nohup stdbuf")
_WRAPPER_OPTIONS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "timeout": re.compile(r"--signal=\w+|--kill-after=[\d.]+[smhd]?|--foreground|--preserve-status|--verbose|-v"),
        "nice": re.compile(r"-\d+|-n-?\d+|--adjustment=-?\d+"),
        "time": re.compile(r"-p"),
        "nohup": re.compile(r"(?!)"),
        "stdbuf": re.compile(r"-[ioe][0LKMG\d]+|--(input|output|error)=[0LKMG\d]+"),
    }
)
_WRAPPER_VALUES: Mapping[str, frozenset[str]] = MappingProxyType(
    {"timeout": names("-s -k --signal --kill-after"), "nice": names("-n --adjustment"), "stdbuf": names("-i -o -e")}
)
_VALUE = re.compile(r"-?[A-Za-z0-9.]+")
_DURATION = re.compile(r"[0-9]+(\.[0-9]+)?[smhd]?")


def unwrap(argv: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the command inside `timeout nice time nohup stdbuf`, also nested; None if their options are not plain."""
    while argv and argv[0] in LOOKED_THROUGH:
        name, at = argv[0], 1
        while at < len(argv) and argv[at].startswith("-"):
            if argv[at] in _WRAPPER_VALUES.get(name, frozenset()):
                if at + 1 >= len(argv) or not _VALUE.fullmatch(argv[at + 1]):
                    return None
                at += 2
            elif _WRAPPER_OPTIONS[name].fullmatch(argv[at]):
                at += 1
            else:
                return None
        if name == "timeout":
            if at >= len(argv) or not _DURATION.fullmatch(argv[at]):
                return None
            at += 1
        argv = argv[at:]
        if not argv or not argv[0] or argv[0] in RESERVED - {"time"} or "=" in argv[0]:
            return None
        if argv[0] == "time":
            return None
    return argv


WRAPPERS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(
            names(
                "sudo doas env xargs command builtin exec setsid ionice strace ltrace watch unbuffer unshare busybox "
                "toybox npx bunx pnpx uvx parallel script rlwrap nohup nice time stdbuf systemd-run fakeroot coproc "
                "entr perf valgrind pkexec xvfb-run dbus-run-session bwrap firejail setarch then do else ! if while "
                "until { chronic ifne eatmydata torsocks torify proxychains caffeinate arch setpriv prlimit numactl rr "
                "cross-env hyperfine noglob nocorrect watchexec nodemon concurrently"
            ),
            0,
        ),
        **dict.fromkeys(
            names(
                "timeout flock chroot taskset chrt ssh uv poetry pipenv pdm hatch rye pipx nsenter runuser su sg "
                "direnv faketime choom cgexec logsave repeat dotenv foreman honcho autossh mosh sshpass"
            ),
            1,
        ),
        **dict.fromkeys(names("docker podman nerdctl kubectl oc ip"), 2),
    }
)
"""Programs that run the command after them, with the number of their own operands that may come first."""
SHELLS = names(
    "bash sh zsh dash ksh fish ash su eval env watch ssh script flock trap alias xargs parallel sg runuser busybox "
    "hyperfine watchexec nodemon concurrently mosh autossh"
)
"""Programs that read some of their words as a shell line."""
_SUB_RUNS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(names("npm pnpm yarn bun composer lerna"), names("exec x dlx")),
        **dict.fromkeys(
            names("bundle stack cabal opam mise asdf pyenv rbenv nodenv nvm fnm volta nix rush rails mix swift pm2"),
            names("exec x run runner shell develop start"),
        ),
    }
)
"""Programs with the sub-commands that run the command after them."""
_HIDES = SHELLS | frozenset(WRAPPERS) | frozenset(_SUB_RUNS) | names("find gfind fd fdfind git")
_FIND_RUNS = names("-exec -execdir -ok -okdir -x --exec -X --exec-batch")


def hidden_commands(argv: tuple[str, ...], most: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the commands that a command may run, and the texts that it may give to a shell. Generous.

    Stops after the command that brings the total number of words above `most`.
    """
    name = base_name(argv[0])
    commands: list[tuple[str, ...]] = []
    lines: list[str] = []
    if name not in _HIDES:
        return commands, lines
    if name in WRAPPERS:
        own, after_option = WRAPPERS[name], False
        for at in range(1, len(argv)):
            word = argv[at]
            if word.startswith("-") or ("=" in word and name in {"env", "sudo", "doas", "cross-env"}):
                after_option = word.startswith("-")
                continue
            commands.append(argv[at:])
            most -= len(argv) - at
            if most < 0:
                return commands, []
            if not after_option:
                if own == 0:
                    break
                own -= 1
            after_option = False
    if name in _SUB_RUNS and len(argv) > 2 and argv[1] in _SUB_RUNS[name]:
        for at in range(2, len(argv)):
            commands.append(argv[at:])
            most -= len(argv) - at
            if most < 0:
                return commands, []
    if name in {"find", "gfind", "fd", "fdfind"}:
        for at, word in enumerate(argv[:-1]):
            if word in _FIND_RUNS:
                commands.append(argv[at + 1 :])
                most -= len(argv) - at - 1
                if most < 0:
                    return commands, []
    if name == "git":
        for at, word in enumerate(argv[:-1]):
            if word == "-c":
                lines.append(argv[at + 1].partition("!")[2])
            elif word in {"--exec", "-x", "foreach", "run"}:
                lines.append(argv[at + 1])
                commands.append(argv[at + 1 :])
                most -= len(argv) - at - 1
                if most < 0:
                    return commands, []
    if name in SHELLS:
        lines += [word for word in argv[1:] if not word.startswith("-") and (" " in word or name != "env")]
        lines += [word.partition("=")[2] for word in argv[1:] if "=" in word]
        if name in {"eval", "ssh"}:
            lines.append(" ".join(argv[1:]))
    return commands, [line for line in lines if line]
