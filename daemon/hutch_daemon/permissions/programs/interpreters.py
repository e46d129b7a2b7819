"""Table rows of programs that run other programs or code: interpreters, shells, wrappers, editors, shell builtins."""

from __future__ import annotations

from typing import Final

from hutch_daemon.permissions.programs.row import Program, ProgramKind, names, rows

_RUN_MODULES = names(
    "timeit cProfile profile trace pdb bdb ipdb pudb runpy coverage debugpy code IPython asyncio viztracer scalene "
    "kernprof memory_profiler doctest pyinstrument"
)
"""Python modules that run the program that their operand names."""
ROWS: Final = rows(
    (
        "python pypy",
        Program(ProgramKind.PINNED, flags=names("-m -u -B -I -s -S -E -O -OO -q -b"), runs_next=_RUN_MODULES),
    ),
    (
        "node nodejs ruby perl php lua luajit Rscript julia ts-node tsx osascript groovy scala elixir",
        Program(ProgramKind.PINNED),
    ),
    ("bash sh zsh dash ksh fish ash", Program(ProgramKind.PINNED, flags=names("-e -u -x -eu -ex -eux -n"))),
    (
        "npx bunx pnpx uvx",
        Program(
            ProgramKind.PINNED,
            flags=names("-y --yes --no-install --no"),
            short="cp",
            long=names("call package from with node-options script-shell userconfig prefix"),
        ),
    ),
    ("java", Program(ProgramKind.EXACT)),
    (
        (
            "sudo doas su env xargs parallel ssh watch strace ltrace gdb lldb script expect nsenter unshare chroot "
            "setsid flock ionice chrt taskset systemd-run at batch crontab tmux screen vim vi nvim nano emacs ed ex "
            "less more man busybox toybox rlwrap unbuffer entr socat nc ncat telnet command builtin exec eval source "
            ". trap alias unalias export declare typeset local readonly let set unset shopt enable hash bind "
            "complete compopt compgen read readarray mapfile getopts pushd popd dirs coproc fc history ld.so "
            "ld-linux-x86-64.so fakeroot proot bwrap firejail runuser start-stop-daemon cron perf valgrind time "
            "timeout nice nohup stdbuf setarch linux64 linux32 sg newgrp pkexec dbus-run-session xvfb-run direnv "
            "mise asdf sqlite3 sqlite psql mysql mariadb duckdb mongosh mongo sftp ftp lftp fzf hyperfine watchexec "
            "nodemon concurrently dc m4 gnuplot octave R gs ipython jupyter irb pry tclsh wish ghci guile racket "
            "sbcl erl clojure clj jshell ansible ansible-playbook capsh setpriv prlimit numactl choom faketime "
            "torsocks torify proxychains xdg-open open launchctl caffeinate arch cgexec eatmydata chronic ifne vipe "
            "pee mosh autossh sshpass pssh dtach abduco zellij asciinema rr cross-env dotenv foreman honcho forever "
            "ld ld.bfd ld.gold ld.lld lld crun runc logsave repeat noglob nocorrect"
        ),
        Program(ProgramKind.EXACT),
    ),
)
