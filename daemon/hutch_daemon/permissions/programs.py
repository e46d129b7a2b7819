"""What is known of programs: which run others, which options write or run, which only read.

A table, so that a reviewer can read it. An *open* rule (`Bash(sort:*)`) leaves the rest of the line to the agent; the
table takes back what must never come in that way. A rule that spells a whole command is not held against the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import MappingProxyType


class Kind(Enum):
    PLAIN = "does what its name says"
    READS = "only reads, whatever its options"
    WRITES = "writes the files it is given"
    PINNED = "runs what its operand names: the rule must name it too"
    EXACT = "runs whatever it is given: the rule must spell the whole command"


@dataclass(frozen=True, slots=True)
class Program:
    """One row. `short` are letters of options, `long` names of options without dashes, `words` whole words."""

    kind: Kind = Kind.PLAIN
    short: str = ""
    long: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    """Of a PINNED one: options without a value that may stand before the operand."""
    deep: frozenset[str] = frozenset()
    """Sub-commands that need a further operand in the rule."""
    exact: frozenset[str] = frozenset()
    """Sub-commands that only a whole command opens."""
    sub: bool = False
    """Whether the first operand is a sub-command."""
    stops: bool = False
    """Whether what stands behind `--` is handed on and is none of its own options."""
    check: Callable[[tuple[str, ...], int], str | None] | None = field(default=None, repr=False)
    """What options alone cannot say: the command and how many of its words the rule spells → why not, or None."""


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# ---------------------------------------------------------------- checks

_SED_PRINTS = re.compile(r"(\d+|\$|/(?:[^/\\\n]|\\[^\n])*/)?(,(\d+|\$|\+\d+|/(?:[^/\\\n]|\\[^\n])*/))?!?[pdq=]")
_SED_REPLACES = re.compile(
    r"(\d+(,(\d+|\$))?)?s([/|#,])(?:(?!\4)[^\\\n;]|\\[^\n])*\4(?:(?!\4)[^\\\n;]|\\[^\n])*\4[gpiI\d]*"
)


def _sed(argv: tuple[str, ...], spelled: int) -> str | None:
    scripts: list[str] = []
    operands: list[str] = []
    words = iter(argv[1:])
    for word in words:
        if re.fullmatch(r"-[nErsuz]*e", word):
            scripts.append(next(words, ""))
        elif word.startswith("-") and not re.fullmatch(r"-[nErsuz]+|--quiet|--silent|--regexp-extended", word):
            return "sed writes files and runs programs by its options"
        elif not word.startswith("-"):
            operands.append(word)
    scripts = scripts or operands[:1]
    if not scripts or not all(_SED_PRINTS.fullmatch(text) or _SED_REPLACES.fullmatch(text) for text in scripts):
        return "a sed script can write files and run programs; only plain ones are told apart"
    return None


def _awk(argv: tuple[str, ...], spelled: int) -> str | None:
    words = iter(argv[1:])
    for word in words:
        if word in {"-F", "-v"}:
            next(words, None)
        elif word.startswith("-") and not re.match(r"-[Fv].", word):
            return "awk loads programs by its options"
        elif not word.startswith("-"):
            if re.search(r"[|>@`]|system|getline|ARGV|close|PROCINFO", re.sub(r"\|\||>=", "", word)):
                return "an awk program can write files and run programs; only plain ones are told apart"
            return "options behind an awk program" if any(rest.startswith("-") for rest in words) else None
    return "awk without a program"


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


def subcommand(argv: tuple[str, ...]) -> str:
    """The first word that is no option; empty if there is none."""
    return next((word for word in argv[1:] if not word.startswith("-")), "")


def _git(argv: tuple[str, ...], spelled: int) -> str | None:
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
            else "git config with options"
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
        return "a git address that runs a program"
    return option_of(argv[at:], _GIT_SHORT.get(sub, ""), _GIT_LONG, frozenset())


def _targets(argv: tuple[str, ...], spelled: int) -> str | None:
    for word in argv[spelled:]:
        if "=" in word or (not word.startswith("-") and not word.isdigit()):
            return f"{word} is another target, or changes what {base_name(argv[0])} runs"
    return None


def _go(argv: tuple[str, ...], spelled: int) -> str | None:
    for word in argv[1:]:
        if word.startswith("-") and word.lstrip("-").split("=")[0] in _GO_OPTIONS:
            return f"go {word.split('=')[0]} runs programs or writes files"
    return None


_GO_OPTIONS = names(
    "exec toolexec vettool fixtool overlay modfile o C ldflags gcflags asmflags gccgoflags outputdir pkgdir"
)
_TAR_BUNDLE = re.compile(r"[A-Za-z]*[FI][A-Za-z]*")


def _tar(argv: tuple[str, ...], spelled: int) -> str | None:
    if any(":" in word for word in argv[1:]):
        return "tar runs a remote shell for an archive with a colon in its name"
    return "tar runs a program" if len(argv) > 1 and _TAR_BUNDLE.fullmatch(argv[1]) else None


def _uniq(argv: tuple[str, ...], spelled: int) -> str | None:
    operands = [word for word in argv[1:] if not word.startswith(("-", "+"))]
    return "the second file of uniq is written" if len(operands) > 1 else None


_PRINTF_SETS = re.compile(r"%[^A-Za-z%]*[hlLjzt]*n|%\(")
_EVALUATES = re.compile(r"\[.*[$`]", re.DOTALL)


def _printf(argv: tuple[str, ...], spelled: int) -> str | None:
    if any(word.startswith("-v") for word in argv[1:2]) or any(_PRINTF_SETS.search(word) for word in argv[1:3]):
        return "printf sets variables: by -v, and by %n in its format"
    return _evaluates(argv, spelled)


def _evaluates(argv: tuple[str, ...], spelled: int) -> str | None:
    """Where shells want a number, they evaluate the index of an array, and what is substituted in it."""
    word = next((word for word in argv[1:] if _EVALUATES.search(word)), None)
    return None if word is None else f"{argv[0]} may evaluate {word}"


_OF_A_COMPILER = re.compile(
    r"@|-f(pass-)?plugin|-fuse-ld|-fmodule-mapper|-W[lap],|-X(linker|clang|assembler|preprocessor|arch)|-ccc|-[BT]|"
    r"--?(wrapper|specs|load|plugin|config|iplugindir|ld-path|(cuda|rocm|hip|ptxas)-path|gcc-(toolchain|install-dir))"
)
_HARMLESS_FORMAT = re.compile(r"[a-z]+(-[a-z]+)*")


def _compiler(argv: tuple[str, ...], spelled: int) -> str | None:
    word = next((word for word in argv[1:] if _OF_A_COMPILER.match(word)), None)
    return None if word is None else f"{base_name(argv[0])} {word} may run programs"


def _answers(argv: tuple[str, ...], spelled: int) -> str | None:
    """Programs that read further words from files (`@file`)."""
    word = next((word for word in argv[1:] if word.startswith("@")), None)
    return None if word is None else f"{base_name(argv[0])} reads options from {word}"


_RUNNER_OPTIONS = re.compile(
    r"-[vqkn]+|-j\d*|--(verbose|quiet|info|stacktrace|offline|parallel|no-daemon|keep-going|continue|dry-run|silent|"
    r"color|no-color|batch-mode|no-rebuild|print-errorlogs)|-D(test|groups)=[A-Za-z0-9_.#,-]+|-DskipTests|"
    r"--tests=[A-Za-z0-9_.*]+"
)


def _runner(argv: tuple[str, ...], spelled: int) -> str | None:
    """Runners of tasks with many options that run or load something: only plain ones pass."""
    word = next((w for w in argv[spelled:] if w.startswith("-") and not _RUNNER_OPTIONS.fullmatch(w)), None)
    return _targets(argv, spelled) if word is None else f"{base_name(argv[0])} {word} may change what it runs"


def _dotnet(argv: tuple[str, ...], spelled: int) -> str | None:
    word = next((word for word in argv[1:] if word.startswith("@") or re.match(r"/[A-Za-z]+:", word)), None)
    return None if word is None else f"dotnet {word} may change what is run"


def _gh(argv: tuple[str, ...], spelled: int) -> str | None:
    return "gh hands on to git what stands behind `--`" if "--" in argv else None


def _eslint(argv: tuple[str, ...], spelled: int) -> str | None:
    for at, word in enumerate(argv):
        name, found, value = word.partition("=")
        if not found and word.startswith("-f") and not word.startswith("--"):
            value = word[2:] or "".join(argv[at + 1 : at + 2])
        elif name in {"--format", "--forma", "--form"}:
            value = value if found else "".join(argv[at + 1 : at + 2])
        else:
            continue
        if not _HARMLESS_FORMAT.fullmatch(value):
            return f"eslint loads {value}"
    return None


# ---------------------------------------------------------------- the table

_RUN_MODULES = names(
    "timeit cProfile profile trace pdb bdb ipdb pudb runpy coverage debugpy code IPython asyncio viztracer scalene "
    "kernprof memory_profiler doctest pyinstrument"
)
"""Modules of Python that run what their operand names."""
_TABLE: dict[str, Program] = {}


def _rows(names: str, program: Program) -> None:
    _TABLE.update(dict.fromkeys(names.split(), program))


_rows(
    "ls cat head tail wc grep egrep fgrep cut tr nl stat du df basename dirname realpath "
    "readlink md5sum sha1sum sha256sum sha512sum cksum pwd whoami id groups uname which diff cmp "
    "comm jq echo true false seq sleep fold fmt rev tac od hexdump strings ps free uptime printenv "
    "nproc tty : expr paste join expand",
    Program(Kind.READS),
)
_rows("printf", Program(Kind.READS, check=_printf))
_rows("test [", Program(Kind.READS, words=names("-v -R"), check=_evaluates))
_rows("jobs", Program(short="x"))
_rows("wait", Program(short="p"))
_rows("date", Program(Kind.READS, short="s", long=names("set")))
_rows("file", Program(Kind.READS, short="C", long=names("compile")))
_rows("tree", Program(Kind.READS, short="oR"))
_rows("sort", Program(Kind.READS, short="oT", long=names("output compress-program temporary-directory")))
_rows("rg", Program(Kind.READS, short="z", long=names("pre hostname-bin search-zip")))
_rows("fd fdfind", Program(Kind.READS, short="xX", long=names("exec exec-batch")))
_rows("ag", Program(Kind.READS, long=names("pager")))
_rows("ack", Program(Kind.READS, long=names("pager ackrc output")))
_rows("uniq", Program(Kind.READS, check=_uniq))
_rows(
    "find",
    Program(Kind.READS, words=names("-exec -execdir -ok -okdir -delete -fprint -fprint0 -fprintf -fls -files0-from")),
)
_rows("sed gsed", Program(check=_sed))
_rows("awk gawk mawk nawk", Program(check=_awk))
_rows("git", Program(check=_git, sub=True))
_rows(
    "tee touch mkdir cp mv rm rmdir ln install dd truncate chmod chown chgrp patch unzip gunzip gzip sponge 7z 7za 7zz "
    "ffmpeg",
    Program(Kind.WRITES),
)
_rows("xxd base64", Program(Kind.WRITES, short="o", long=names("output")))
_rows("zip", Program(Kind.WRITES, words=names("-T -TT"), long=names("unzip-command test")))
_rows(
    "tar gtar bsdtar",
    Program(
        Kind.WRITES,
        short="FI",
        long=names(
            "checkpoint-action use-compress-program to-command info-script new-volume-script rsh-command rmt-command"
        ),
        check=_tar,
    ),
)
_rows("rsync", Program(Kind.WRITES, short="eM", long=names("rsh rsync-path remote-option config")))
_rows("scp sftp", Program(Kind.WRITES, short="oSFD"))
_rows(
    "curl",
    Program(
        Kind.WRITES,
        short="oOKDcJ",
        long=names(
            "output remote-name remote-name-all config dump-header cookie-jar output-dir trace trace-ascii "
            "libcurl stderr etag-save hsts alt-svc engine proto-redir unix-socket"
        ),
    ),
)
_rows(
    "wget",
    Program(
        Kind.WRITES,
        short="eOPoai",
        long=names(
            "execute output-document directory-prefix output-file append-output use-askpass config "
            "input-file post-file body-file save-cookies hsts-file warc-file"
        ),
    ),
)
_rows("split csplit", Program(Kind.WRITES, long=names("filter")))
_rows("xz zstd bzip2", Program(Kind.WRITES, short="o"))
_rows("gcc cc clang g++ c++ clang++", Program(check=_compiler))
_rows("rustc", Program(short="CZ", long=names("codegen sysroot"), check=_answers))
_rows(
    "javac ar ranlib nm objdump strip", Program(long=names("plugin processor processorpath"), short="J", check=_answers)
)
_rows("bat batcat delta", Program(long=names("pager")))
_rows("ip", Program(short="b", words=names("exec"), long=names("batch")))
_rows("tcpdump", Program(short="zw"))
_rows("pandoc", Program(short="FL", long=names("filter lua-filter defaults data-dir pdf-engine extract-media")))
_rows("latex pdflatex xelatex lualatex latexmk tex", Program(Kind.EXACT))
_rows("ctags", Program(long=names("options")))
_rows("gpg gpg2", Program(long=names("photo-viewer exec-path keyserver-options agent-program options homedir")))
_rows("openssl", Program(words=names("-engine -provider -provider-path -config"), long=names("engine provider config")))
_rows("ssh-keygen", Program(short="DP", words=names("-w")))
_rows("nmap", Program(long=names("script datadir"), short="o"))
_rows("cpio", Program(Kind.WRITES, short="FIO", long=names("rsh-command file")))
_rows("yq", Program(Kind.WRITES))
_rows("shuf", Program(Kind.READS, short="o", long=names("output")))
_rows("mypy dmypy", Program(long=names("python-executable config-file install-types")))
_rows("pyright basedpyright", Program(long=names("pythonpath venvpath project venv-path")))
_rows("pylint", Program(long=names("init-hook load-plugins rcfile")))
_rows("flake8", Program(long=names("config append-config")))
_rows("rubocop", Program(short="rc", long=names("require config plugin")))
_rows(
    "eslint",
    Program(
        short="c",
        long=names("config rulesdir resolve-plugins-relative-to parser plugin output-file"),
        check=_eslint,
    ),
)
_rows("prettier stylelint", Program(long=names("config plugin plugin-search-dir custom-syntax custom-formatter")))
_rows("clang-tidy", Program(words=names("-load -plugin"), long=names("load plugin")))
_rows("golangci-lint", Program(short="c", long=names("config")))
_rows("tox", Program(short="xc", words=names("exec e"), long=names("override conf workdir"), stops=True))
_rows("nox", Program(short="f", long=names("noxfile"), stops=True))
_rows("coverage", Program(Kind.PINNED, deep=names("run"), sub=True, long=names("rcfile")))

_rows("python pypy", Program(Kind.PINNED, flags=names("-m -u -B -I -s -S -E -O -OO -q -b"), deep=_RUN_MODULES))
_rows(
    "node nodejs ruby perl php lua luajit Rscript julia ts-node tsx osascript groovy scala elixir", Program(Kind.PINNED)
)
_rows("bash sh zsh dash ksh fish ash", Program(Kind.PINNED, flags=names("-e -u -x -eu -ex -eux -n")))
_rows(
    "npx bunx pnpx uvx",
    Program(
        Kind.PINNED,
        flags=names("-y --yes --no-install --no"),
        short="cp",
        long=names("call package from with node-options script-shell userconfig prefix"),
    ),
)
_rows(
    "npm pnpm yarn bun",
    Program(
        Kind.PINNED,
        short="Cc",
        long=names(
            "script-shell prefix userconfig globalconfig node-options dir cwd shell git call import-map preload "
            "require viewer browser editor init-module use-yarnrc"
        ),
        stops=True,
        deep=names("run run-script exec x explore dlx create init rum urn node"),
        sub=True,
    ),
)
_rows(
    "deno",
    Program(
        Kind.PINNED,
        deep=names("run task eval repl"),
        exact=names("eval repl"),
        sub=True,
        long=names("config import-map"),
    ),
)
_rows(
    "make gmake",
    Program(
        Kind.PINNED,
        short="fCIEeo",
        long=names("file makefile directory include-dir eval environment-overrides"),
        check=_targets,
    ),
)
_rows(
    "just task rake gradle gradlew mvn mvnw ant bazel bazelisk cmake ninja meson invoke fab",
    Program(Kind.PINNED, check=_runner),
)
_rows("go", Program(Kind.PINNED, deep=names("run"), exact=names("generate tool env"), sub=True, check=_go))
_rows(
    "cargo",
    Program(Kind.PINNED, long=names("config manifest-path target-dir artifact-dir codegen"), short="ZC", sub=True),
)
_rows(
    "uv poetry pipenv pdm hatch rye pipx conda mamba",
    Program(
        Kind.PINNED,
        deep=names("run tool"),
        exact=names("shell"),
        sub=True,
        long=names("with directory project config-file python"),
    ),
)
_rows(
    "pip", Program(Kind.PINNED, sub=True, long=names("python target prefix config-settings global-option build-option"))
)
_rows(
    "docker podman nerdctl",
    Program(
        Kind.PINNED,
        exact=names("run exec compose buildx build create cp import load plugin context container image volume"),
        sub=True,
        short="Hc",
        long=names("host config context"),
    ),
)
_rows(
    "kubectl oc helm",
    Program(
        Kind.PINNED,
        exact=names("exec run debug attach cp plugin edit proxy config plugin kustomize"),
        sub=True,
        long=names("kubeconfig kuberc post-renderer server"),
    ),
)
_rows("gh glab", Program(Kind.PINNED, exact=names("alias extension config api codespace"), sub=True, check=_gh))
_rows("java", Program(Kind.EXACT))
_rows(
    "sudo doas su env xargs parallel ssh watch strace ltrace gdb lldb script expect nsenter unshare "
    "chroot setsid flock ionice chrt taskset systemd-run at batch crontab tmux screen vim vi nvim "
    "nano emacs ed ex less more man busybox toybox rlwrap unbuffer entr socat nc ncat telnet command "
    "builtin exec eval source . trap alias unalias export declare typeset local readonly let set "
    "unset shopt enable hash bind complete compopt compgen read readarray mapfile getopts pushd popd "
    "dirs coproc fc history ld.so ld-linux-x86-64.so fakeroot proot bwrap firejail runuser "
    "start-stop-daemon cron perf valgrind time timeout nice nohup stdbuf setarch linux64 linux32 sg "
    "newgrp pkexec dbus-run-session xvfb-run direnv mise asdf sqlite3 sqlite psql mysql mariadb duckdb mongosh mongo "
    "sftp ftp lftp fzf hyperfine watchexec nodemon concurrently dc m4 gnuplot octave R gs ipython jupyter irb pry "
    "tclsh wish ghci guile racket sbcl erl clojure clj jshell ansible ansible-playbook capsh setpriv prlimit numactl "
    "choom faketime torsocks torify proxychains xdg-open open launchctl caffeinate arch cgexec eatmydata chronic ifne "
    "vipe pee mosh autossh sshpass pssh dtach abduco zellij asciinema rr cross-env dotenv foreman honcho forever ld "
    "ld.bfd ld.gold ld.lld lld crun runc logsave repeat noglob nocorrect",
    Program(Kind.EXACT),
)

_rows(
    "bundle composer mix rails swift stack cabal opam nix pyenv rbenv nodenv nvm fnm volta lerna nx turbo rush pm2 hg "
    "svn jj terraform tofu vagrant pulumi zig dart flutter sbt lein rebar3 gem brew systemctl",
    Program(
        Kind.PINNED,
        deep=names("exec run runner x eval script repl tool"),
        exact=names("shell develop edit console"),
        long=names(
            "config config-file config-option config-dir diff-cmd diff3-cmd editor-cmd merge-tool tool option expr "
            "chdir script require"
        ),
        sub=True,
    ),
)
_rows(
    "apt apt-get yum dnf zypper pacman apk snap",
    Program(Kind.PINNED, sub=True, short="co", long=names("option config")),
)
_rows("pre-commit", Program(Kind.PINNED, sub=True, short="c", long=names("config")))
_rows(
    "dotnet",
    Program(
        Kind.PINNED,
        sub=True,
        deep=names("run exec tool"),
        short="p",
        long=names("property settings test-adapter-path"),
        check=_dotnet,
    ),
)
_rows("nix-shell", Program(Kind.EXACT))
_rows(
    "dpkg",
    Program(
        short="irPA", long=names("install unpack configure remove purge pre-invoke post-invoke admindir instdir root")
    ),
)

PROGRAMS: Mapping[str, Program] = MappingProxyType(_TABLE)
_PLAIN = Program()
PRINTS_ITS_WORDS = names("echo printf true false : pwd")
"""Programs that take no word for a file."""
READS_BELOW: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(("rg", "ag", "ack", "tar", "zip", "rsync"), frozenset[str]()),
        **dict.fromkeys(("grep", "egrep", "fgrep", "diff", "cp", "scp"), names("r R a --recursive --archive")),
    }
)
"""Programs that read all that lies below a directory: at once, or with one of these options."""


LINKS = names("ln cp mv tar gtar bsdtar unzip rsync install git patch dd")
"""Programs that can change where a path leads, for what comes later in the line."""


def base_name(program: str) -> str:
    return program.rsplit("/", 1)[-1]


@lru_cache(maxsize=1024)
def lookup(program: str) -> Program:
    """The row of a program, by its base name, and without a version (`python3.12`)."""
    name = base_name(program)
    found = PROGRAMS.get(name) or PROGRAMS.get(name.rstrip("0123456789.-"))
    # On a Mac, GNU's programs are there with a `g` before their names.
    return found or (PROGRAMS.get(name[1:]) if name.startswith("g") else None) or _PLAIN


def is_known(program: str) -> bool:
    """Whether the table says what the program does."""
    return lookup(program) is not _PLAIN


def option_of(argv: tuple[str, ...], short: str, long: frozenset[str], words: frozenset[str]) -> str | None:
    """Why the options forbid it, or None. A long option counts however it is abbreviated, a short one in a bundle.

    Some programs take long options behind one dash too; three letters are the least to tell them from a bundle.
    """
    for word in argv[1:]:
        if word in words:
            return f"{base_name(argv[0])} {word} writes files or runs programs"
        if word.startswith("--"):
            name = word[2:].split("=", 1)[0]
            if name and any(known.startswith(name) for known in long):
                return f"{base_name(argv[0])} --{name} writes files or runs programs"
        elif word.startswith("-") and (
            any(letter in short for letter in word[1:]) or _behind_one_dash(word[1:].split("=", 1)[0], long)
        ):
            return f"{base_name(argv[0])} {word} may write files or run programs"
    return None


def _behind_one_dash(name: str, long: frozenset[str]) -> bool:
    return name in long or (len(name) > 2 and any(known.startswith(name) for known in long))


def veto(argv: tuple[str, ...], spelled: int) -> str | None:
    """Why an open rule that spells the first `spelled` words does not open this command, or None."""
    program = lookup(argv[0])
    if program.kind is Kind.EXACT:
        return f"{base_name(argv[0])} runs other commands: only a rule for the whole command opens it"
    if program.kind is Kind.PINNED and (reason := _unpinned(program, argv, spelled)):
        return reason
    if not (
        program.kind is Kind.PINNED and not program.sub and base_name(argv[0]).rstrip("0123456789.") in _INTERPRETERS
    ):
        own = argv[: argv.index("--")] if program.stops and "--" in argv else argv
        reason = option_of(own, program.short, program.long, program.words)
        if reason:
            return reason
    return program.check(argv, spelled) if program.check else None


_SCRIPTED = names(
    "python pypy node nodejs ruby perl php lua luajit Rscript julia ts-node tsx osascript groovy "
    "scala elixir bash sh zsh dash ksh fish ash"
)
"""Programs whose operand is a script."""
_INTERPRETERS = _SCRIPTED | names("npx bunx pnpx uvx")
"""Programs whose words behind the operand belong to what the operand names."""


def _unpinned(program: Program, argv: tuple[str, ...], spelled: int) -> str | None:
    name = base_name(argv[0])
    at = 1
    while at < spelled and argv[at] in program.flags:
        at += 1
    if at >= spelled or argv[at].startswith("-"):
        return f"{name} runs what it is told: the rule must name that too"
    if program.sub and argv[at] in program.exact:
        return f"{name} {argv[at]} runs other commands: only a rule for the whole command opens it"
    module = "-m" in argv[1:at]
    if (program.sub or module) and argv[at] in program.deep:
        at += 2 if argv[at : at + 2] in {("tool", "run"), ("coverage", "run")} else 1
        if at >= spelled or argv[at].startswith("-"):
            return f"{name} {argv[at - 1]} runs what it is told: the rule must name that too"
    return None


def script_of(argv: tuple[str, ...]) -> str | None:
    """A program or script that the command names by a path from where it runs, or None."""
    if "/" in argv[0]:
        return None if argv[0].startswith("/") else argv[0]
    program = lookup(argv[0])
    if program.kind is Kind.EXACT:
        named = (word for word in argv[1:] if "/" in word or argv[0] in {"source", "."})
        return next((word for word in named if not word.startswith(("/", "~", "-"))), None)
    if program.kind is not Kind.PINNED or program.sub or base_name(argv[0]).rstrip("0123456789.") not in _SCRIPTED:
        return None
    for word in argv[1:]:
        if word == "-m" and "-m" in program.flags:
            return None
        if not word.startswith("-"):
            return None if word.startswith(("/", "~")) else word
    return None
