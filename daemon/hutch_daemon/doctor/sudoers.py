"""The one sudo rule by which hutchd may start hutch-launcher where it has no unit: its text, and a check of others.

Pure. The rule names one command, with `""`: no arguments. Anything wider (a pattern, a second command, another account)
is a way to become root. So the rule counts only if it is exactly this one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from hutch_shared.errors import HutchError, Reason
from hutch_shared.paths import HOST_ACCOUNT

__all__ = ["FILE", "allowed", "faults", "rule"]

FILE: Final = "/etc/sudoers.d/hutch"

_PLAIN: Final = re.compile(r"/[A-Za-z0-9_./+-]+")
_DEFAULTS: Final = "env_reset, !requiretty, !use_pty, !pam_session, !log_input, !log_output, !noexec"
_LISTED: Final = re.compile(r"\s+(\(.*)")


def rule(command: str, account: str = HOST_ACCOUNT) -> str:
    """Return the text of `FILE`; `command` is hutch-launcher. INVALID_PARAMS for a path that could be a pattern.

    The connection is the launcher's standard input. So sudo must neither put a terminal or a log between (`use_pty`,
    `log_input`, `log_output`) nor require one (`requiretty`). Without a PAM session the launcher replaces sudo instead
    of being its child, and no log-out ends the launcher. `noexec` would keep executors from starting programs.
    By default sudo closes the descriptors from 3 on (`closefrom`); the launcher needs 0, 1 and 2 only.
    """
    if not _PLAIN.fullmatch(command) or "/../" in f"{command}/":
        raise HutchError(
            Reason.INVALID_PARAMS, f"{command!r} has characters with a meaning for sudo: install Hutch elsewhere."
        )
    return (
        f"# {FILE}: hutchd may start hutch-launcher, with no arguments, and nothing else.\n"
        f"Defaults!{command} {_DEFAULTS}\n"
        f'{account} ALL=(root) NOPASSWD: {command} ""\n'
    )


def allowed(listing: str) -> list[str]:
    """Return the rules that `sudo -l -U ACCOUNT` printed, as they are spelled there."""
    rules: list[str] = []
    begun = False
    for line in listing.splitlines():
        if not begun:
            begun = " may run the following commands " in line
        elif (found := _LISTED.fullmatch(line)) is not None:
            rules.append(found[1])
        elif line.strip() and rules:
            rules[-1] += f" {line.strip()}"
    return rules


def faults(rules: Sequence[str], command: str) -> list[str]:
    """Return a sentence for each way in which an account's rules differ from the one; empty if they do not."""
    wanted = f'(root) NOPASSWD: {command} ""'
    sentences = [] if wanted in rules else [f"The rule is missing: {wanted}"]
    for one in rules:
        if one == wanted:
            continue
        wild = " with wildcards, which match more than they seem to" if re.search(r"[*?\[\]!^]", one) else ""
        sentences.append(f"The account may do more by sudo{wild}: {one}")
    return sentences
