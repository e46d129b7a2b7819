"""The places that a sandbox shows, keeps private and hides, and the search for keys in files of a home. Mounts nothing.

An XDG variable may move a place out of the home; `in_home` yields both paths.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from hutch_shared.tree import LINKS, Tree, UnfitFileError

__all__ = [
    "CACHES",
    "PRIVATE",
    "ROOT_ONLY",
    "SECRETS",
    "SYSTEM",
    "TOOLS",
    "TYPED_SECRETS",
    "Access",
    "holds_key",
    "in_home",
    "is_inside",
]

Access = Literal["read", "write", "pinned", "private", "hidden", "taken", "devices", "processes"]
"""How a place is shown. `private` is empty and temporary; `pinned` is writable but cannot be renamed; `taken` is an
empty file that cannot be removed."""

SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu", "/snap", "/sys"),
    *("/home/linuxbrew/.linuxbrew", "/var/lib/dpkg", "/var/lib/rpm"),
    *("/var/lib/ca-certificates", "/var/cache/fontconfig"),
)
PRIVATE: Final = ("/tmp", "/var/tmp", "/run")  # noqa: S108
"""Directories that each sandbox has empty and for itself."""
ROOT_ONLY: Final = ("/etc/shadow", "/etc/gshadow", "/etc/shadow-", "/etc/gshadow-", "/etc/ssl/private")
"""Files in the shown system that only uid 0 may read; hidden from an agent that runs as uid 0."""

_XDG: Final = {
    ".cache": "XDG_CACHE_HOME",
    ".config": "XDG_CONFIG_HOME",
    ".local/share": "XDG_DATA_HOME",
    ".local/state": "XDG_STATE_HOME",
}
"""Folders of a home, and the variable that may move each elsewhere."""
TOOLS: Final = (
    *(".gitconfig", ".config/git", ".local/bin", ".local/lib", ".local/pipx", "bin", ".bash_profile", ".bashrc"),
    *(".profile", ".zshenv", ".asdf", ".bun", ".cargo", ".deno", ".ghcup", ".juliaup", ".local/share/mise"),
    *(".local/share/pipx", ".local/share/pnpm", ".local/share/uv", ".local/share/fnm", ".nix-profile", ".npm-global"),
    *(".nodenv", ".nvm", ".opam", ".pyenv", ".rbenv", ".rustup", ".sdkman", ".swiftly", ".volta", "go/bin"),
    *("miniconda3", "anaconda3", "miniforge3", "mambaforge", ".pixi", ".rye", ".elan", ".dotnet", ".linuxbrew"),
    *(".yarn/bin", ".foundry/bin", ".goenv", ".jenv", ".krew/bin", ".local/share/rtx"),
    *(".gitconfig?*", ".gitignore", ".gitignore_global", ".gitattributes"),
)
"""Names below the home, shown with `tools`: developers' tools installed for one account. `*` matches as in a shell."""
CACHES: Final = (".cache", ".cargo/git", ".cargo/registry", ".gradle", ".npm", "go/pkg")
"""Names below the home that tools write: private and temporary, so that nothing left there runs outside."""
TYPED_SECRETS: Final = (
    *(".bashrc", ".bash_profile", ".bash_login", ".bash_aliases", ".profile", ".zshenv", ".zshrc", ".zprofile"),
    *(".zlogin", ".config/fish/config.fish", ".gitconfig*", ".config/git/config", ".cargo/config.toml"),
    ".cargo/config",
)
"""Names below the home: settings files in which users write keys. Such a file is hidden if it holds a key."""
_READ_LIMIT: Final = 1 << 20
_KEY_IS_SET: Final = re.compile(
    rb"""(?ix)
      (?<! signing) (key | token) \w* (\s* = \s* | [\ \t]+) ["']? (?= [\w+/=.:-]* \d) \w [\w+/=.:-]{15}
    | (secret | passw(or)?d | passphrase) \w* \s* = \s* ["']? \w [^\s"']{3}
    | :// [^\s/@:]* : [^\s/@$]+ @ | :// [\w-]{20,} @ | authorization:
    | \b (sk-[a-z0-9]+- | gh[pousr]_ | github_pat_ | glpat- | xox[a-z]- | AKIA) \w{8}
    """
)
SECRETS: Final = (
    *(".aws", ".azure", ".boto", ".cargo/credentials", ".cargo/credentials.toml", ".claude", ".claude.json", ".codex"),
    *(".config/gcloud", ".config/gh", ".config/glab-cli", ".config/google-chrome", ".config/chromium", ".config/op"),
    *(".config/rclone", ".config/hub", ".config/helm", ".config/doctl", ".docker", ".gem/credentials", ".gemini"),
    *(".git-credentials", ".config/git/credentials", ".gnupg", ".gradle/gradle.properties", ".kube", ".my.cnf"),
    *(".m2/settings.xml", ".m2/settings-security.xml", ".mozilla", ".netrc", ".npmrc", ".password-store", ".pgpass"),
    *(".pypirc", ".s3cfg", ".ssh", ".terraform.d", ".terraformrc", ".thunderbird", ".vault-token", ".yarnrc.yml"),
    *(".bash_history", ".python_history", ".psql_history", ".zsh_history", ".local/share/keyrings"),
    *(".local/share/opencode", ".config/hutch", ".local/state/hutch", ".local/share/uv/credentials"),
    *(".npm-global/etc/npmrc", ".dotnet/corefx", ".config/anthropic", ".config/github-copilot", ".config/opencode"),
    *(".config/pip", ".config/pypoetry/auth.toml", ".config/composer/auth.json", ".composer/auth.json"),
    ".config/containers",
    *(".bundle/config", ".pip", ".netlify", ".fly", ".oci", ".databrickscfg", ".huggingface", ".kaggle", ".cursor"),
    *(".copilot", ".config/BraveSoftware", ".config/microsoft-edge", ".config/vivaldi", ".config/Code", ".var/app"),
    *("snap", ".config/sops", ".config/age", ".local/share/kwalletd", ".pki", ".authinfo", ".authinfo.gpg", ".envrc"),
    *(".node_repl_history", ".mysql_history", ".sqlite_history", ".lesshst", ".viminfo", ".local/share/fish"),
    *(".local/share/atuin", ".histfile", ".zhistory", ".local/share/containers", ".secrets", ".env"),
    # sockets of programs that hand out keys or run commands:
    *(".git-credential-cache", ".1password", ".bitwarden-ssh-agent.sock", ".colima", ".lima", ".rd"),
    *(".orbstack", ".local/share/podman", ".config/Bitwarden"),
)
"""Names below the home, hidden with `tools` and `read_only`: keys, and histories of typed commands."""


def is_inside(path: str, place: str) -> bool:
    """Return whether a real path is `place` or lies in it, by its text: a plan compares all its places this way."""
    return path == place or path.startswith(f"{place.rstrip('/')}/")


def in_home(name: str, home: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths that `name` below the home may have for this account, XDG variables included."""
    if "*" in name:
        yield from glob.iglob(os.path.join(glob.escape(home), name))
    else:
        yield os.path.join(home, name)
    for usual, variable in _XDG.items():
        moved = environ.get(variable, "")
        if os.path.isabs(moved) and Path(name).is_relative_to(usual):
            yield os.path.join(moved, os.path.relpath(name, usual))


def holds_key(path: str) -> bool:
    """Whether the file seems to set a key. False for a file that the account, and so its agent, cannot read."""
    try:
        with Tree("/") as tree:
            return _KEY_IS_SET.search(tree.read(path, _READ_LIMIT, links=LINKS).data) is not None
    except (OSError, UnfitFileError):
        return False
