"""The content of an envelope: the secret, together with the URLs that it may be sent to.

Because the URLs are sealed too, a program that can write to the database cannot divert a key to another server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

import msgspec

from hutch_shared.errors import HutchError, Reason
from hutch_shared.messages import CredentialKind
from hutch_shared.secret import Secret

__all__ = ["Credential", "Refresh", "check_url", "pack", "secret_of", "unpack"]

_SECRET: Final = re.compile(r"[\x21-\x7e]+")
_MAX_SECRET_LENGTH: Final = 16384


@dataclass(frozen=True, slots=True)
class Refresh:
    """The data for requesting a new access token: refresh token, token URL and client id."""

    token: Secret
    url: str
    client_id: str


@dataclass(frozen=True, slots=True)
class Credential:
    """A secret and its use. An `api_key` is sent in the provider's own header, other kinds as a bearer token."""

    secret: Secret
    kind: CredentialKind = "api_key"
    base_url: str | None = None
    """The URL that the secret may be sent to; None for the provider's own."""
    expires_at: int | None = None
    """The time when an access token expires, in ms since 1970."""
    refresh: Refresh | None = None


class _Packed(msgspec.Struct, frozen=True, omit_defaults=True):
    secret: str
    kind: CredentialKind = "api_key"
    base_url: str | None = None
    expires_at: int | None = None
    refresh: tuple[str, str, str] | None = None

    def __repr__(self) -> str:
        return "<packed credential>"


_decode: Final = msgspec.json.Decoder(_Packed).decode


def pack(credential: Credential) -> bytes:
    """Return the bytes for the envelope."""
    refresh = credential.refresh
    return msgspec.json.encode(
        _Packed(
            credential.secret.reveal(),
            credential.kind,
            credential.base_url,
            credential.expires_at,
            None if refresh is None else (refresh.token.reveal(), refresh.url, refresh.client_id),
        )
    )


def unpack(content: bytes) -> Credential:
    """Return the credential that was packed."""
    packed = _decode(content)
    refresh = packed.refresh
    return Credential(
        Secret(packed.secret),
        packed.kind,
        packed.base_url,
        packed.expires_at,
        None if refresh is None else Refresh(Secret(refresh[0]), refresh[1], refresh[2]),
    )


def secret_of(text: str) -> Secret:
    """Return `text` without its line end as a secret; INVALID_PARAMS if a header cannot contain it."""
    text = text.removesuffix("\n").removesuffix("\r")
    if len(text) > _MAX_SECRET_LENGTH or not _SECRET.fullmatch(text):
        raise HutchError(
            Reason.INVALID_PARAMS,
            f"A key is one line of at most {_MAX_SECRET_LENGTH} printable ASCII characters without blanks.",
        )
    return Secret(text)


def check_url(url: str) -> str:
    """Return the URL if a key may be sent there: https, or http to the loopback interface. Otherwise INVALID_PARAMS."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise HutchError(
            Reason.INVALID_PARAMS, "A base URL is https://host[:port][/path], without user, query or fragment."
        )
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise HutchError(Reason.INVALID_PARAMS, f"A key is never sent unencrypted: use https:// for {parts.hostname}.")
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
