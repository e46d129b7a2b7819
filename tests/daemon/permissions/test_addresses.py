"""Hosts of web addresses."""

from __future__ import annotations

import pytest

from hutch_daemon.permissions.addresses import NotAnAddressError, canonical_host, host_of, possible_hosts


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://Example.com/x", "example.com"),
        ("http://example.com.:80/", "example.com"),
        ("http://[::1]:8/", "::1"),
        ("http://[::ffff:1.2.3.4]/", "1.2.3.4"),
        ("http://127.0.0.1/", "127.0.0.1"),
        ("https://bücher.test/", "xn--bcher-kva.test"),
        ("HTTPS://a_b.test/@x", "a_b.test"),
    ],
)
def test_an_address_gives_its_host_in_one_spelling(url: str, host: str) -> None:
    """The host of an address that all clients read alike is normalised."""
    assert host_of(url) == host


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "file:///etc/passwd",
        "https://",
        "https:///x",
        "https://u@h.test/",
        "https://h.test\\@e.test/",
        "http://1/",
        "http://0x7f.1/",
        "http://127.1/",
        "http://0177.0.0.1/",
        "http://h.test:0/",
        "http://h.test:99999/",
        "http://a b.test/",
        "http://a\x00b.test/",
        "http://a%2eb.test/",
        "http://..test/",
        "http://-a.test/",
        "http://[::1/",
        "http://a\u200bb.test/",
        "https:h.test",
        "javascript:x",
        "http://h.test..",
        "ftp://h.test/",
        "http://" + "a" * 300 + ".test/",
        "http://\udc80/",
    ],
)
def test_an_ambiguous_address_is_refused(url: str) -> None:
    """An address that clients read in different ways is refused with a reason."""
    with pytest.raises(NotAnAddressError, match=r"\w+"):
        host_of(url)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://a@e.test/", "e.test"),
        ("https://a.test\\@e.test/", "e.test"),
        ("https://a.test\\@e.test/", "a.test"),
        ("http://2130706433/", "127.0.0.1"),
        ("http://0x7f.1:80/", "127.0.0.1"),
        ("http://E.test./", "e.test"),
        ("//e.test/x", "e.test"),
        ("http://e.te\u200bst/", "e.test"),
    ],
)
def test_a_deny_rule_matches_every_reading(url: str, host: str) -> None:
    """A deny rule is compared with each host that some client might read in the address."""
    assert host in possible_hosts(url)


def test_a_name_in_another_script_is_another_host() -> None:
    """A Cyrillic letter makes a different host, even if it looks alike."""
    assert canonical_host("ex\u0430mple.com") != "example.com"
