"""Access tokens that end, exchanged for fresh ones: one exchange at a time for a credential, however many wait for it.

A provider takes a refresh token once, and a race for it logs its owner out everywhere. So the exchange is not given
up when who asked for it goes away, and the new tokens are stored before anybody uses them. A grant that Hutch
refreshes is Hutch's alone: it must not be shared with a program that refreshes it too.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any, Final
from urllib.parse import urlencode

import anyio
from anyio import to_thread

from hutch_daemon.keys.credential import Credential, Refresh, secret_of
from hutch_daemon.keys.vault import Vault
from hutch_daemon.settings import Settings
from hutch_shared import broker_link as link
from hutch_shared.errors import HutchError, Reason
from hutch_shared.times import now_ms

__all__ = ["FreshKeys"]

_EARLY_MS: Final = 120_000
"""A token that ends within this time is exchanged before it is given."""
_RECENT: Final = 30.0
"""Seconds in which a token that was rejected is not exchanged once more."""
_TIMEOUT: Final = 30.0
_LONGEST: Final = 1 << 20


class FreshKeys:
    """Gives the broker its keys, fresh where they can be refreshed."""

    def __init__(self, vault: Vault, settings: Callable[[], Settings]) -> None:
        """Keep what is exchanged in `vault`."""
        self._vault = vault
        self._settings = settings
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._exchanged: dict[str, float] = {}

    async def __call__(self, key: str, rejected: bool) -> link.Key:
        """Return the key of a credential; `rejected`: the provider refused the last.

        `no_key`, `key_unreadable`; where an exchange failed the latter is a sentence for the key's owner.
        """
        row, credential = await self._vault.reveal_id(key)
        if credential.refresh is not None:
            credential = await self._fresh(key, rejected)
        left = None if credential.expires_at is None else (credential.expires_at - now_ms()) / 1000
        return link.Key(
            secret=credential.secret.reveal(),
            kind=credential.kind,
            base_url=credential.base_url or self._settings().provider(row.provider).base_url,
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
                _exchange, credential, credential.refresh, self._settings().broker.ca_file
            )
        except HutchError as error:
            raise HutchError(
                error.reason,
                f"The log-in {row.name} for {row.provider} could not be refreshed: {error.message} Log in anew and"
                f" store that with `hutch key add {row.provider} --name {row.name} --oauth`: what waits goes on then.",
            ) from None
        await self._vault.put_credential(row.owner, row.provider, row.name, credential)
        self._exchanged[key] = monotonic()
        return credential


def _exchange(credential: Credential, refresh: Refresh, ca_file: str | None) -> Credential:
    """Ask for new tokens. Blocks. No redirect is followed, and no text of the answer is shown."""
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
            answer: Any = json.loads(response.read(_LONGEST))
        secret = secret_of(answer["access_token"])
        token = secret_of(answer["refresh_token"]) if answer.get("refresh_token") else refresh.token
        ends = now_ms() + int(float(answer["expires_in"]) * 1000) if "expires_in" in answer else None
    except urllib.error.HTTPError as error:
        error.close()
        raise HutchError(Reason.KEY_UNREADABLE, f"its provider refuses (HTTP {error.code}).") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, HutchError):
        raise HutchError(Reason.KEY_UNREADABLE, "there was no usable answer; the next request tries again.") from None
    return replace(credential, secret=secret, expires_at=ends, refresh=replace(refresh, token=token))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None
