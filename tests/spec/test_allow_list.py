"""Which hosts an allow-list names, and which addresses are the public internet's."""

from __future__ import annotations

import ipaddress

import pytest

from hutch_shared.allow_list import AllowList, address_of, is_public

ALLOW = AllowList.read(
    ("example.com", "*.example.org", "Bücher.example:8443", "git.example:22", "192.0.2.7", "[2001:db8::7]:8080", "::1")
)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("example.com", 443),
        ("example.com", 80),
        ("EXAMPLE.com.", 443),
        ("a.example.org", 443),
        ("a.b.example.org", 80),
        ("xn--bcher-kva.example", 8443),
        ("bücher.example", 8443),
        ("BÜCHER.example.", 8443),
        ("git.example", 22),
        ("192.0.2.7", 80),
        ("[::ffff:192.0.2.7]", 443),
        ("[2001:DB8:0::7]", 8080),
        ("::1", 443),
    ],
)
def test_a_named_host_is_allowed(host: str, port: int) -> None:
    """A named host is allowed in every spelling of its name or address."""
    assert ALLOW.names(host, port)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("example.com", 8080),
        ("a.example.com", 443),
        ("example.com.evil.net", 443),
        ("notexample.com", 443),
        ("example.org", 443),
        ("badexample.org", 443),
        ("example.com..", 443),
        (".example.org", 443),
        ("git.example", 443),
        ("bücher.example", 443),
        ("192.0.2.8", 80),
        ("3221225991", 80),
        ("0xc0.0.2.7", 80),
        ("192.0.2.7.", 80),
        ("[2001:db8::7]", 443),
        ("", 443),
        ("example.com\0.example.org", 443),
        ("example.com/.example.org", 443),
    ],
)
def test_a_host_that_is_not_named_is_refused(host: str, port: int) -> None:
    """A host without an entry is refused, and so is an address in a spelling that some programs read differently."""
    assert not ALLOW.names(host, port)


@pytest.mark.parametrize(
    "entry",
    [
        *("", "*", "*.", "**.example.com", "a.*.com", "https://example.com", "example.com/path", "example.com:0"),
        *("example.com:65536", "example.com:", "user@example.com", "a b", "a..b", "127.1", "0x7f.1", "[::1"),
        "10.0.0.0/8",
    ],
)
def test_an_entry_that_names_no_host_is_refused(entry: str) -> None:
    """The error names the entry and shows a valid one."""
    with pytest.raises(ValueError, match=r"write example\.com") as refused:
        AllowList.read(("example.com", entry))

    assert repr(entry) in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1", "240.0.0.1"),
        *("255.255.255.255", "198.18.0.1", "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1"),
        *("fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "fd00:ec2::254", "fc00::1", "64:ff9b::7f00:1"),
        *("64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2001:db8::1", "2002:0808:0808::1"),
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)
def test_an_address_of_this_machine_a_private_network_or_a_cloud_is_not_public(address: str) -> None:
    """Such an address is not public inside an IPv6 address either."""
    read = address_of(address)

    assert read is not None
    assert not is_public(read)
    assert not ALLOW.reaches(read, 443) or str(read) == "::1"


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_other_addresses_are_public(address: str) -> None:
    """A public address is public behind NAT64 too."""
    read = address_of(address)

    assert read is not None
    assert is_public(read)


def test_an_address_that_is_named_is_reached_at_its_port() -> None:
    """A private address is reachable only if an entry is that address."""
    named = AllowList.read(("10.1.2.3:5432",))

    assert named.reaches(ipaddress.IPv4Address("10.1.2.3"), 5432)
    assert not named.reaches(ipaddress.IPv4Address("10.1.2.3"), 443)
    assert not named.reaches(ipaddress.IPv4Address("10.1.2.4"), 5432)
