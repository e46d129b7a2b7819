"""The sudo rule that lets hutchd start hutch-launcher on hosts without its unit: its text, and a check of a host.

Pure. The rule allows one command without arguments (`""`). Any wider rule (a pattern, a second command, another
account) is a way to become root. So only exactly this rule is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from hutch_shared.errors import HutchError, Reason

__all__ = ["FILE", "allowed", "faults", "rule"]

FILE: Final = "/etc/sudoers.d/hutch"

_PLAIN: Final = re.compile(r"/[A-Za-z0-9_./+-]+")
_ACCOUNT: Final = re.compile(r"[a-z_][A-Za-z0-9_.-]*")
_DEFAULTS: Final = "env_reset, !requiretty, !use_pty, !pam_session, !log_input, !log_output, !noexec"
_LISTED: Final = re.compile(r"\s+(\(.*)")


def rule(command: str, account: str) -> str:
    """Return the text of `FILE`: `command` is hutch-launcher, `account` that of hutchd.

    INVALID_PARAMS if sudo could read one of them as something else than itself.

    The launcher's standard input is the connection to hutchd. So sudo must not insert a terminal or a log (`use_pty`,
    `log_input`, `log_output`) or require a terminal (`requiretty`). Without a PAM session the launcher replaces sudo
    instead of being its child, and a log-out does not end the launcher. `noexec` would prevent executors from starting
    programs. By default sudo closes the descriptors from 3 on (`closefrom`); the launcher needs only 0, 1 and 2.
    """
    if not _PLAIN.fullmatch(command) or "/../" in f"{command}/":
        raise HutchError(
            Reason.INVALID_PARAMS, f"{command!r} has characters with a meaning for sudo: install Hutch elsewhere."
        )
    if not _ACCOUNT.fullmatch(account):
        raise HutchError(
            Reason.INVALID_PARAMS, f"The account {account!r} has characters with a meaning for sudo: use another one."
        )
    return (
        f"# {FILE}: hutchd may start hutch-launcher, with no arguments, and nothing else.\n"
        f"Defaults!{command} {_DEFAULTS}\n"
        f'{account} ALL=(root) NOPASSWD: {command} ""\n'
    )


def allowed(listing: str) -> list[str]:
    """Return the rules in the output of `sudo -l -U ACCOUNT`, unchanged."""
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
    """Return a sentence for each difference between an account's rules and the wanted rule."""
    wanted = f'(root) NOPASSWD: {command} ""'
    sentences = [] if wanted in rules else [f"The rule is missing: {wanted}"]
    for one in rules:
        if one == wanted:
            continue
        wild = " with wildcards, which match more than they seem to" if re.search(r"[*?\[\]!^]", one) else ""
        sentences.append(f"The account may do more by sudo{wild}: {one}")
    return sentences
