"""Table rows of compilers, linters, test and task runners, package managers and cloud tools."""

from __future__ import annotations

import re
from typing import Final

from hutch_daemon.permissions.programs.row import Argv, Program, ProgramKind, base_name, names, rows


def _targets(argv: Argv, spelled: int) -> str | None:
    for word in argv[spelled:]:
        if "=" in word or (not word.startswith("-") and not word.isdigit()):
            return f"{word} is another target, or changes what {base_name(argv[0])} runs"
    return None


def _go(argv: Argv, spelled: int) -> str | None:
    for word in argv[1:]:
        if word.startswith("-") and word.lstrip("-").split("=")[0] in _GO_OPTIONS:
            return f"go {word.split('=')[0]} runs programs or writes files"
    return None


_GO_OPTIONS = names(
    "exec toolexec vettool fixtool overlay modfile o C ldflags gcflags asmflags gccgoflags outputdir pkgdir"
)
_OF_A_COMPILER = re.compile(
    r"@|-f(pass-)?plugin|-fuse-ld|-fmodule-mapper|-W[lap],|-X(linker|clang|assembler|preprocessor|arch)|-ccc|-[BT]|"
    r"--?(wrapper|specs|load|plugin|config|iplugindir|ld-path|(cuda|rocm|hip|ptxas)-path|gcc-(toolchain|install-dir))"
)
_HARMLESS_FORMAT = re.compile(r"[a-z]+(-[a-z]+)*")


def _compiler(argv: Argv, spelled: int) -> str | None:
    word = next((word for word in argv[1:] if _OF_A_COMPILER.match(word)), None)
    return None if word is None else f"{base_name(argv[0])} {word} may run programs"


def _answers(argv: Argv, spelled: int) -> str | None:
    """Check programs that read more options from files (`@file`)."""
    word = next((word for word in argv[1:] if word.startswith("@")), None)
    return None if word is None else f"{base_name(argv[0])} reads options from {word}"


_RUNNER_OPTIONS = re.compile(
    r"-[vqkn]+|-j\d*|--(verbose|quiet|info|stacktrace|offline|parallel|no-daemon|keep-going|continue|dry-run|silent|"
    r"color|no-color|batch-mode|no-rebuild|print-errorlogs)|-D(test|groups)=[A-Za-z0-9_.#,-]+|-DskipTests|"
    r"--tests=[A-Za-z0-9_.*]+"
)


def _runner(argv: Argv, spelled: int) -> str | None:
    """Check task runners. Many of their options run or load something, so only a list of plain options is accepted."""
    word = next((w for w in argv[spelled:] if w.startswith("-") and not _RUNNER_OPTIONS.fullmatch(w)), None)
    return _targets(argv, spelled) if word is None else f"{base_name(argv[0])} {word} may change what it runs"


def _dotnet(argv: Argv, spelled: int) -> str | None:
    word = next((word for word in argv[1:] if word.startswith("@") or re.match(r"/[A-Za-z]+:", word)), None)
    return None if word is None else f"dotnet {word} may change what it runs"


def _gh(argv: Argv, spelled: int) -> str | None:
    return "gh passes words after `--` to git" if "--" in argv else None


def _eslint(argv: Argv, spelled: int) -> str | None:
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


ROWS: Final = rows(
    ("gcc cc clang g++ c++ clang++", Program(check=_compiler)),
    ("rustc", Program(short="CZ", long=names("codegen sysroot"), check=_answers)),
    (
        "javac ar ranlib nm objdump strip",
        Program(long=names("plugin processor processorpath"), short="J", check=_answers),
    ),
    ("ip", Program(short="b", words=names("exec"), long=names("batch"))),
    ("tcpdump", Program(short="zw")),
    ("pandoc", Program(short="FL", long=names("filter lua-filter defaults data-dir pdf-engine extract-media"))),
    ("latex pdflatex xelatex lualatex latexmk tex", Program(ProgramKind.EXACT)),
    ("ctags", Program(long=names("options"))),
    ("gpg gpg2", Program(long=names("photo-viewer exec-path keyserver-options agent-program options homedir"))),
    ("openssl", Program(words=names("-engine -provider -provider-path -config"), long=names("engine provider config"))),
    ("ssh-keygen", Program(short="DP", words=names("-w"))),
    ("nmap", Program(long=names("script datadir"), short="o")),
    ("mypy dmypy", Program(long=names("python-executable config-file install-types"))),
    ("pyright basedpyright", Program(long=names("pythonpath venvpath project venv-path"))),
    ("pylint", Program(long=names("init-hook load-plugins rcfile"))),
    ("flake8", Program(long=names("config append-config"))),
    ("rubocop", Program(short="rc", long=names("require config plugin"))),
    (
        "eslint",
        Program(
            short="c",
            long=names("config rulesdir resolve-plugins-relative-to parser plugin output-file"),
            check=_eslint,
        ),
    ),
    ("prettier stylelint", Program(long=names("config plugin plugin-search-dir custom-syntax custom-formatter"))),
    ("clang-tidy", Program(words=names("-load -plugin"), long=names("load plugin"))),
    ("golangci-lint", Program(short="c", long=names("config"))),
    ("tox", Program(short="xc", words=names("exec e"), long=names("override conf workdir"), hands_on=True)),
    ("nox", Program(short="f", long=names("noxfile"), hands_on=True)),
    ("coverage", Program(ProgramKind.PINNED, runs_next=names("run"), has_subcommands=True, long=names("rcfile"))),
    (
        "npm pnpm yarn bun",
        Program(
            ProgramKind.PINNED,
            short="Cc",
            long=names(
                "script-shell prefix userconfig globalconfig node-options dir cwd shell git call import-map preload "
                "require viewer browser editor init-module use-yarnrc"
            ),
            hands_on=True,
            runs_next=names("run run-script exec x explore dlx create init rum urn node"),
            has_subcommands=True,
        ),
    ),
    (
        "deno",
        Program(
            ProgramKind.PINNED,
            runs_next=names("run task eval repl"),
            exact=names("eval repl"),
            has_subcommands=True,
            long=names("config import-map"),
        ),
    ),
    (
        "make gmake",
        Program(
            ProgramKind.PINNED,
            short="fCIEeo",
            long=names("file makefile directory include-dir eval environment-overrides"),
            check=_targets,
        ),
    ),
    (
        "just task rake gradle gradlew mvn mvnw ant bazel bazelisk cmake ninja meson invoke fab",
        Program(ProgramKind.PINNED, check=_runner),
    ),
    (
        "go",
        Program(
            ProgramKind.PINNED,
            runs_next=names("run"),
            exact=names("generate tool env"),
            has_subcommands=True,
            check=_go,
        ),
    ),
    (
        "cargo",
        Program(
            ProgramKind.PINNED,
            long=names("config manifest-path target-dir artifact-dir codegen"),
            short="ZC",
            has_subcommands=True,
        ),
    ),
    (
        "uv poetry pipenv pdm hatch rye pipx conda mamba",
        Program(
            ProgramKind.PINNED,
            runs_next=names("run tool"),
            exact=names("shell"),
            has_subcommands=True,
            long=names("with directory project config-file python"),
        ),
    ),
    (
        "pip",
        Program(
            ProgramKind.PINNED,
            has_subcommands=True,
            long=names("python target prefix config-settings global-option build-option"),
        ),
    ),
    (
        "docker podman nerdctl",
        Program(
            ProgramKind.PINNED,
            exact=names("run exec compose buildx build create cp import load plugin context container image volume"),
            has_subcommands=True,
            short="Hc",
            long=names("host config context"),
        ),
    ),
    (
        "kubectl oc helm",
        Program(
            ProgramKind.PINNED,
            exact=names("exec run debug attach cp plugin edit proxy config plugin kustomize"),
            has_subcommands=True,
            long=names("kubeconfig kuberc post-renderer server"),
        ),
    ),
    (
        "gh glab",
        Program(
            ProgramKind.PINNED, exact=names("alias extension config api codespace"), has_subcommands=True, check=_gh
        ),
    ),
    (
        (
            "bundle composer mix rails swift stack cabal opam nix pyenv rbenv nodenv nvm fnm volta lerna nx turbo "
            "rush pm2 hg svn jj terraform tofu vagrant pulumi zig dart flutter sbt lein rebar3 gem brew systemctl"
        ),
        Program(
            ProgramKind.PINNED,
            runs_next=names("exec run runner x eval script repl tool"),
            exact=names("shell develop edit console"),
            long=names(
                "config config-file config-option config-dir diff-cmd diff3-cmd editor-cmd merge-tool tool option expr "
                "chdir script require"
            ),
            has_subcommands=True,
        ),
    ),
    (
        "apt apt-get yum dnf zypper pacman apk snap",
        Program(ProgramKind.PINNED, has_subcommands=True, short="co", long=names("option config")),
    ),
    ("pre-commit", Program(ProgramKind.PINNED, has_subcommands=True, short="c", long=names("config"))),
    (
        "dotnet",
        Program(
            ProgramKind.PINNED,
            has_subcommands=True,
            runs_next=names("run exec tool"),
            short="p",
            long=names("property settings test-adapter-path"),
            check=_dotnet,
        ),
    ),
    ("nix-shell", Program(ProgramKind.EXACT)),
    (
        "dpkg",
        Program(
            short="irPA",
            long=names("install unpack configure remove purge pre-invoke post-invoke admindir instdir root"),
        ),
    ),
)
