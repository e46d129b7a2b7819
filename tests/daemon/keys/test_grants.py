"""What an executor may have of a key, and what the audit says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hutch_daemon.settings import ProviderSettings, Settings
from hutch_daemon.store import audit
from hutch_shared.errors import HutchError, Reason
from tests.daemon.keys.stage import HOLDER, KEY, OWNER, session, vault_stage

DIRECT = Settings(providers={"anthropic": ProviderSettings(delivery="direct", base_url="https://gateway.example")})


async def always(executor: str, session: str) -> bool:
    return True


async def test_a_direct_key_is_the_owners_choice_and_recorded(tmp_path: Path) -> None:
    """The secret itself, where the settings say so; the audit has the fact and never the value."""
    async with vault_stage(tmp_path) as stage:
        await stage.put()
        grant = await stage.grants(DIRECT, stage.broker(DIRECT, always)).grant(session(), "anthropic", HOLDER)
        (line,), _ = await stage.store.read(audit.read)
        (key,) = (await stage.vault.list_(OWNER)).keys

    assert (grant.delivery, grant.value, grant.base_url) == ("direct", KEY, "https://gateway.example")
    assert (line.action, line.outcome, line.session, line.subject) == ("get_api_key", "direct", "s-1", key.id)
    assert KEY not in str(line)
    assert key.uses == 1


async def test_a_refusal_is_recorded(tmp_path: Path) -> None:
    """Who asked for a key that is not there is in the audit too."""
    async with vault_stage(tmp_path) as stage:
        with pytest.raises(HutchError) as refused:
            await stage.grants(DIRECT).grant(session(credential="work"), "anthropic")
        (line,), _ = await stage.store.read(audit.read)

    assert refused.value.reason is Reason.NO_KEY
    assert line.outcome == "no_key"


async def test_it_is_explained_which_key_is_used_and_how_it_is_handed_out(tmp_path: Path) -> None:
    """The choice and the delivery, each with its reason."""
    async with vault_stage(tmp_path) as stage:
        await stage.put()
        direct = await stage.grants(DIRECT, stage.broker(DIRECT, always)).explain(OWNER, "anthropic")
        lease = await stage.grants(Settings(), stage.broker(Settings(), always)).explain(OWNER, "anthropic")
        without = await stage.grants(Settings()).explain(OWNER, "anthropic")

    assert (direct.key.name, direct.why) == ("default", "it is your only key for anthropic")
    assert [one.delivery for one in (direct, lease, without)] == ["direct", "lease", "direct"]
    assert "settings" in direct.delivery_why
    assert "no broker" in without.delivery_why
