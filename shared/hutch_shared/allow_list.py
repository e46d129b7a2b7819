"""The hosts that an agent may reach: `[sandbox] allow`, parsed and matched. Pure.

| entry | allows |
|---|---|
| `example.com` | that host |
| `*.example.com` | its subdomains, however deep; not the host itself |
| `192.0.2.7`, `[2001:db8::7]` | that address, given itself or as the address of an allowed name |

An entry allows ports 80 and 443, or with `:port` only that port. Always true:

- Names are compared as in the DNS: without case and one final dot; other scripts as in IDNA 2008.
- An allowed name leads only to the public internet. An address of this machine or of a private network, or one where a
  cloud hands out credentials, is reachable only if an entry is that address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["Address", "AllowList", "address_of", "is_public", "plain_host"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_USUAL_PORTS: Final = (80, 443)
_ENTRY: Final = re.compile(
    r"(?P<host>\[[^\[\]]+\]|[^:\[\]]+|[0-9a-f]*:[0-9a-f]*:[0-9a-f:.]*)(:(?P<port>[0-9]{1,5}))?", re.IGNORECASE
)
_LABEL: Final = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMBER: Final = re.compile(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)")
"""Matches other spellings of an IPv4 address that some resolvers accept."""

_GLOBAL_6: Final = ipaddress.IPv6Network("2000::/3")
_EMBEDDING: Final = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32"))
"""6to4 and Teredo: they contain an IPv4 address, and are no longer in use."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_NOT_FOR_AGENTS: Final = (
    ipaddress.IPv4Network("192.0.0.0/24"),  # protocol assignments; Oracle's metadata among them
    ipaddress.IPv4Network("192.88.99.0/24"),
    ipaddress.IPv4Network("168.63.129.16/32"),  # Azure's platform: only looks like a public address
)


def plain_host(host: str) -> str:
    """Return a host name in the spelling in which names are compared. ValueError if it is not a host name."""
    name = host.removesuffix(".").lower()
    if not name.isascii():
        import idna  # large, and not needed for ASCII

        try:
            name = idna.encode(name, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError) as error:
            raise ValueError(f"{host!r} is not a name in any script") from error
    if len(name) > 253 or not _NAME.fullmatch(name) or _NUMBER.fullmatch(name):
        raise ValueError(f"{host!r} is not a host's name")
    return name


def address_of(host: str) -> Address | None:
    """Return the IP address that `host` is, with or without brackets; None if it is a name."""
    try:
        address = ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_public(address: Address) -> bool:
    """Whether this is a host's address on the public internet, and not one where a cloud hands out credentials."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        return address in _GLOBAL_6 and address.is_global and not any(address in network for network in _EMBEDDING)
    refused = address.is_multicast or address.is_reserved or any(address in network for network in _NOT_FOR_AGENTS)
    return address.is_global and not refused


@dataclass(frozen=True, slots=True)
class AllowList:
    """The parsed entries."""

    hosts: frozenset[tuple[str, int]] = frozenset()
    below: frozenset[tuple[str, int]] = frozenset()
    addresses: frozenset[tuple[Address, int]] = frozenset()

    @classmethod
    def read(cls, entries: Iterable[str]) -> AllowList:
        """Parse the entries. ValueError, with a sentence, names the first that cannot be parsed."""
        hosts: set[tuple[str, int]] = set()
        below: set[tuple[str, int]] = set()
        addresses: set[tuple[Address, int]] = set()
        for entry in entries:
            found = _ENTRY.fullmatch(entry)
            ports = _USUAL_PORTS if found is None or found["port"] is None else (int(found["port"]),)
            if found is None or not all(0 < port < 65536 for port in ports):
                raise ValueError(_unread(entry))
            host = found["host"]
            if (address := address_of(host)) is not None:
                addresses |= {(address, port) for port in ports}
                continue
            try:
                name = plain_host(host.removeprefix("*."))
            except ValueError as error:
                raise ValueError(_unread(entry)) from error
            (below if host.startswith("*.") else hosts).update((name, port) for port in ports)
        return cls(frozenset(hosts), frozenset(below), frozenset(addresses))

    def names(self, host: str, port: int) -> bool:
        """Whether an agent may request this host. Check the address that it leads to with `reaches`."""
        if (address := address_of(host)) is not None:
            return (address, port) in self.addresses
        try:
            name = plain_host(host)
        except ValueError:
            return False
        if (name, port) in self.hosts:
            return True
        while "." in name:
            name = name.partition(".")[2]
            if (name, port) in self.below:
                return True
        return False

    def reaches(self, address: Address, port: int) -> bool:
        """Whether the address of an allowed name may be dialled."""
        return is_public(address) or (address, port) in self.addresses


def _unread(entry: str) -> str:
    return (
        f"{entry!r} is not a host: write example.com, *.example.com, 192.0.2.7 or [2001:db8::7], with :port or without"
    )
