"""Hosts of web addresses. An address is accepted only if every HTTP client finds the same host in it."""

from __future__ import annotations

import ipaddress
import re
import socket

import idna
from yarl import URL

_NUMERIC = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*\.?", re.IGNORECASE)
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_AUTHORITY = re.compile(r"[/\\]{2,}([^/?#]*)")
_UNSEEN = re.compile(r"[\x00-\x20\x7f-\xa0\u00ad\u200b-\u200f\u2028-\u202f\u2060-\u2064\ufeff]")


class NotAnAddressError(ValueError):
    """HTTP clients could read the address differently; the text explains this to the user."""


def canonical_host(text: str) -> str:
    """Return a host in lower-case ASCII without a final dot, or an IP address in canonical form.

    Raises `NotAnAddressError`.
    """
    host = text.strip("[]") if text.startswith("[") else text
    host = host.rstrip(".") if host.endswith(".") and not host.endswith("..") else host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return str(mapped or address)
    if _NUMERIC.fullmatch(host):
        raise NotAnAddressError("the host is a number that clients read differently")
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError) as error:
            raise NotAnAddressError("the host is not a valid name") from error
    host = host.lower()
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise NotAnAddressError("the host is not a valid name")
    return host


def host_of(url: str) -> str:
    """Return the host of a web address. Raises `NotAnAddressError` if HTTP clients could find different hosts in it."""
    if len(url) > 8192 or _UNSEEN.search(url) or "\\" in url:
        raise NotAnAddressError("the address has characters that clients read differently, or is longer than 8,192")
    try:
        parsed = URL(url)
        scheme, host, user, port = parsed.scheme, parsed.raw_host, parsed.raw_user, parsed.explicit_port
    except ValueError as error:
        raise NotAnAddressError("it is not an address") from error
    if scheme not in {"http", "https"}:
        raise NotAnAddressError("it is not a web address")
    authority = _AUTHORITY.search(url)
    if user is not None or authority is None or "@" in authority.group(1):
        raise NotAnAddressError("the address names a user before the host")
    if not host or "%" in authority.group(1) or port == 0:
        raise NotAnAddressError("the address has no plain host")
    return canonical_host(host)


def possible_hosts(url: str) -> frozenset[str]:
    """Return every host that an HTTP client might find in the text, for rules that deny or ask. Never raises."""
    shown = _UNSEEN.sub("", url[:8192])
    candidates: set[str] = set()
    for authority in _AUTHORITY.findall(shown):
        for part in re.split(r"[@\\]", authority):
            candidates.add(re.sub(r":[0-9]*$", "", part))
    hosts: set[str] = set()
    for candidate in candidates:
        host = candidate.lower().rstrip(".")
        try:
            hosts.add(canonical_host(host))
        except NotAnAddressError:
            if _NUMERIC.fullmatch(host):
                try:
                    hosts.add(socket.inet_ntoa(socket.inet_aton(host)))
                except (OSError, ValueError):
                    hosts.add(host)
    return frozenset(hosts)
