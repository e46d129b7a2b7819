"""The form in which an executor gets a key, and the audit of it."""

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


async def test_direct_delivery_is_a_setting_and_audited(tmp_path: Path) -> None:
    """If the settings say `direct`, the executor gets the secret; the audit records that, never the value."""
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
    """A request for a missing key is in the audit too."""
    async with vault_stage(tmp_path) as stage:
        with pytest.raises(HutchError) as refused:
            await stage.grants(DIRECT).grant(session(credential="work"), "anthropic")
        (line,), _ = await stage.store.read(audit.read)

    assert refused.value.reason is Reason.NO_KEY
    assert line.outcome == "no_key"


async def test_explain_key_names_the_key_and_its_delivery(tmp_path: Path) -> None:
    """It gives the reason for each choice."""
    async with vault_stage(tmp_path) as stage:
        await stage.put()
        direct = await stage.grants(DIRECT, stage.broker(DIRECT, always)).explain(OWNER, "anthropic")
        lease = await stage.grants(Settings(), stage.broker(Settings(), always)).explain(OWNER, "anthropic")
        without = await stage.grants(Settings()).explain(OWNER, "anthropic")

    assert (direct.key.name, direct.why) == ("default", "it is your only key for anthropic")
    assert [one.delivery for one in (direct, lease, without)] == ["direct", "lease", "direct"]
    assert "settings" in direct.delivery_why
    assert "no broker" in without.delivery_why
