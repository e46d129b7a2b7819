"""Refreshes access tokens. Each credential has at most one exchange at a time; other callers wait for its result.

A provider accepts a refresh token once, and a second use logs the owner out everywhere. So an exchange completes even
if its caller is cancelled, and new tokens are stored before they are used. No other program may refresh the same
log-in.
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import replace
from time import monotonic
from typing import Any, Final
from urllib.parse import urlencode

import anyio
from anyio import to_thread

from hutch_daemon.keys.credential import Credential, Refresh, secret_of
from hutch_daemon.keys.vault import Vault
from hutch_daemon.settings import SettingsInForce
from hutch_shared import broker_link as link
from hutch_shared.errors import HutchError, Reason
from hutch_shared.times import now_ms

__all__ = ["FreshKeys"]

_EARLY_MS: Final = 120_000
"""The remaining life of a token, in ms, below which it is refreshed before use."""
_RECENT: Final = 30.0
"""Seconds after a refresh during which a rejected token is not refreshed again."""
_TIMEOUT: Final = 30.0
_MAX_REPLY_BYTES: Final = 1 << 20
_UNUSABLE: Final = (
    *(OSError, http.client.HTTPException),
    *(ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError, HutchError),
)
"""The errors of a token endpoint's response that breaks off, is not HTTP, or lacks a field."""


class FreshKeys:
    """Gives the broker keys, after refreshing access tokens that are about to expire."""

    def __init__(self, vault: Vault, settings: SettingsInForce) -> None:
        """Store new tokens in `vault`."""
        self._vault = vault
        self._settings = settings
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._exchanged: dict[str, float] = {}

    async def __call__(self, key: str, rejected: bool) -> link.Key:
        """Return the key of a credential. `rejected`: the provider refused the last one.

        Raises `no_key`; `key_unreadable`, with a sentence for the key's owner if a refresh failed.
        """
        row, credential = await self._vault.reveal_id(key)
        if credential.refresh is not None:
            credential = await self._fresh(key, rejected)
        left = None if credential.expires_at is None else (credential.expires_at - now_ms()) / 1000
        return link.Key(
            secret=credential.secret.reveal(),
            kind=credential.kind,
            base_url=credential.base_url or self._settings.current.provider(row.provider).base_url,
            expires_in=left,
        )

    async def _fresh(self, key: str, rejected: bool) -> Credential:
        with anyio.CancelScope(shield=True):
            async with self._locks[key]:
                credential = await self._fresh_alone(key, rejected)
        return credential

    async def _fresh_alone(self, key: str, rejected: bool) -> Credential:
        row, credential = await self._vault.reveal_id(key)
        ends = credential.expires_at is not None and credential.expires_at - now_ms() < _EARLY_MS
        recent = monotonic() - self._exchanged.get(key, -_RECENT) < _RECENT
        if credential.refresh is None or not (ends or (rejected and not recent)):
            return credential
        try:
            credential = await to_thread.run_sync(
                _exchange, credential, credential.refresh, self._settings.current.broker.ca_file
            )
        except HutchError as error:
            raise HutchError(
                error.reason,
                f"The log-in {row.name} for {row.provider} could not be refreshed: {error.message} Log in again and"
                f" store the new log-in with `hutch key add {row.provider} --name {row.name} --oauth`; waiting requests"
                " then continue.",
            ) from None
        await self._vault.put_credential(row.owner, row.provider, row.name, credential)
        self._exchanged[key] = monotonic()
        return credential


def _exchange(credential: Credential, refresh: Refresh, ca_file: str | None) -> Credential:
    """Request new tokens. Blocks. Follows no redirect; error messages contain no text of the response."""
    trusted = ssl.create_default_context()
    if ca_file is not None:
        trusted.load_verify_locations(ca_file)
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=trusted))
    form = {"grant_type": "refresh_token", "refresh_token": refresh.token.reveal(), "client_id": refresh.client_id}
    request = urllib.request.Request(  # noqa: S310  # the URL was checked when it was stored
        refresh.url,
        urlencode(form).encode(),
        {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"},
    )
    try:
        with opener.open(request, timeout=_TIMEOUT) as response:
            answer: Any = json.loads(response.read(_MAX_REPLY_BYTES))
        secret = secret_of(answer["access_token"])
        token = secret_of(answer["refresh_token"]) if answer.get("refresh_token") else refresh.token
        ends = now_ms() + int(float(answer["expires_in"]) * 1000) if "expires_in" in answer else None
    except urllib.error.HTTPError as error:
        error.close()
        raise HutchError(Reason.KEY_UNREADABLE, f"the provider refused it (HTTP {error.code}).") from None
    except _UNUSABLE:
        raise HutchError(Reason.KEY_UNREADABLE, "its answer is not usable; the next request tries again.") from None
    return replace(credential, secret=secret, expires_at=ends, refresh=replace(refresh, token=token))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None
