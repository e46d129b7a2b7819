from __future__ import annotations

import subprocess

import pytest

from hutch_daemon.doctor.sudoers import allowed, faults, rule
from hutch_shared.errors import HutchError
from tests.programs import visudo

COMMAND = "/opt/hutch/bin/hutch-launcher"
ONE = f'(root) NOPASSWD: {COMMAND} ""'
LISTING = """Matching Defaults entries for hutch on host:
    env_reset, mail_badpass, secure_path=/usr/bin

Runas and Command-specific defaults for hutch:
    Defaults!/opt/hutch/bin/hutch-launcher env_reset, !requiretty

User hutch may run the following commands on host:
"""


def test_the_rule_is_one_command_without_arguments() -> None:
    """The rule's defaults put no terminal, log or session between hutchd and the launcher."""
    _, defaults, line = rule(COMMAND, "hutch").splitlines()

    assert line == f'hutch ALL=(root) NOPASSWD: {COMMAND} ""'
    assert defaults.startswith(f"Defaults!{COMMAND} ")
    for word in ("env_reset", "!requiretty", "!use_pty", "!pam_session", "!log_input", "!log_output", "!noexec"):
        assert word in defaults


@pytest.mark.parametrize(
    "command", ["/opt/*/launcher", "/opt/a b", "relative", "/opt/a,b", "/opt/../x", "/o\n/x", "/a:b"]
)
def test_a_path_with_special_characters_of_sudo_is_refused(command: str) -> None:
    """Such a path could match several programs, or form several rules."""
    with pytest.raises(HutchError, match="install Hutch elsewhere"):
        rule(command, "hutch")


def test_visudo_accepts_the_rule() -> None:
    """sudo's own parser reads it."""
    done = subprocess.run(
        [visudo(), "-cf", "-"], input=rule(COMMAND, "hutch"), capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([ONE], []),
        ([], ["The rule is missing"]),
        ([ONE, "(ALL : ALL) ALL"], ["may do more by sudo: (ALL : ALL) ALL"]),
        (
            [f"(root) NOPASSWD: {COMMAND}"],
            ["The rule is missing", f"may do more by sudo: (root) NOPASSWD: {COMMAND}"],
        ),
        ([ONE, "(root) NOPASSWD: /opt/hutch/bin/*"], ["with wildcards, which match more than they seem to: (root)"]),
        ([f'(root) {COMMAND} ""'], ["The rule is missing", "may do more"]),
        ([f'(root) NOPASSWD: {COMMAND} "", /bin/sh'], ["The rule is missing", "may do more"]),
    ],
)
def test_only_the_exact_rule_is_accepted(rules: list[str], said: list[str]) -> None:
    """Without `""` any argument would be allowed; with a pattern or a second command, other programs."""
    listing = LISTING + "".join(f"    {one}\n" for one in rules)
    found = faults(allowed(listing), COMMAND)

    assert allowed(listing) == rules
    assert len(found) == len(said)
    assert all(part in one for part, one in zip(said, found, strict=True))


def test_lines_that_sudo_wraps_are_joined() -> None:
    """An account without rules has none in the result."""
    broken = f'{LISTING}    (root) NOPASSWD: {COMMAND}\n        ""\n'

    assert allowed(broken) == [ONE]
    assert allowed("User hutch is not allowed to run sudo on host.\n") == []
