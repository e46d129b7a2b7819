"""The one sudo rule by which hutchd may start hutch-launcher where no unit can: what it says, and what else is no rule.

Pure. The rule names one command, with `""`: no arguments. Anything wider (a pattern, a second command, another account)
is a way to root, so it counts only as it is written here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from hutch_shared.errors import HutchError, Reason
from hutch_shared.units import ACCOUNT

__all__ = ["FILE", "allowed", "faults", "rule"]

FILE: Final = "/etc/sudoers.d/hutch"

_PLAIN: Final = re.compile(r"/[A-Za-z0-9_./+-]+")
_DEFAULTS: Final = "env_reset, !requiretty, !use_pty, !pam_session, !log_input, !log_output, !noexec"
_LISTED: Final = re.compile(r"\s+(\(.*)")


def rule(command: str, account: str = ACCOUNT) -> str:
    """Return the text of `FILE`; `command` is hutch-launcher. INVALID_PARAMS for a path that could be a pattern.

    The connection is the launcher's standard input. So sudo must neither put a terminal or a log between (`use_pty`,
    `log_input`, `log_output`), nor ask for one (`requiretty`); without a PAM session of its own it becomes the launcher
    instead of waiting beside it, and no logout ends that; `noexec` would keep executors from starting anything.
    Descriptors from 3 on are closed by sudo as it is (`closefrom`), which leaves what is needed: 0, 1 and 2.
    """
    if not _PLAIN.fullmatch(command) or "/../" in f"{command}/":
        raise HutchError(
            Reason.INVALID_PARAMS, f"{command!r} has characters that mean something to sudo: install Hutch elsewhere."
        )
    return (
        f"# {FILE}: hutchd may start hutch-launcher, with no arguments, and nothing else.\n"
        f"Defaults!{command} {_DEFAULTS}\n"
        f'{account} ALL=(root) NOPASSWD: {command} ""\n'
    )


def allowed(listing: str) -> list[str]:
    """Return the rules in what `sudo -l -U ACCOUNT` printed, as they are spelled there."""
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
    """Return a sentence for each way in which an account's rules are not exactly the one; none when they are."""
    wanted = f'(root) NOPASSWD: {command} ""'
    said = [] if wanted in rules else [f"The rule is not there: {wanted}"]
    for one in rules:
        if one == wanted:
            continue
        wild = " with wildcards, which match more than they seem to" if re.search(r"[*?\[\]!^]", one) else ""
        said.append(f"The account may do more by sudo{wild}: {one}")
    return said
