"""The usage of a turn: tokens and dollars, from the sums that the CLI keeps. Pure."""

from __future__ import annotations

from hutch_executor.runners.claude.lines import ModelUsage
from hutch_shared.events import UsageSeen

__all__ = ["UsageMeter", "total"]


class UsageMeter:
    """Turns the CLI's sums since its start into the usage of each turn."""

    def __init__(self, before: dict[str, ModelUsage] | None) -> None:
        """Start from the sums of a resumed conversation, or from None if they are unknown."""
        self._before = before

    def turn(self, sums: dict[str, ModelUsage] | None) -> list[UsageSeen]:
        """Return the usage since the last call, by model; models without usage are left out.

        With unknown starting sums the first call returns nothing: counting too little is better than counting twice.
        """
        known, self._before = self._before, {**(self._before or {}), **(sums or {})}
        if known is None:
            return []
        used = []
        for model, now in (sums or {}).items():
            before = known.get(model, ModelUsage())
            seen = UsageSeen(
                now.input_tokens - before.input_tokens,
                now.output_tokens - before.output_tokens,
                now.cache_read_input_tokens - before.cache_read_input_tokens,
                now.cache_creation_input_tokens - before.cache_creation_input_tokens,
                round(now.cost_usd - before.cost_usd, 9),
                model,
                total=True,
            )
            if seen.input_tokens or seen.output_tokens or seen.usd:
                used.append(seen)
        return used


def total(used: list[UsageSeen]) -> UsageSeen | None:
    """Return the sum over all models; None if nothing was used."""
    if not used:
        return None
    return UsageSeen(
        sum(u.input_tokens for u in used),
        sum(u.output_tokens for u in used),
        sum(u.cache_read_tokens for u in used),
        sum(u.cache_write_tokens for u in used),
        round(sum(u.usd or 0.0 for u in used), 9),
        used[0].model if len(used) == 1 else None,
        total=True,
    )
