"""Random runs of many requests against one budget: the broker's own code, with simulated time and streams.

`python -m tests.broker.budget_runs --runs 1000 --seed 1` prints the figures. The provider of a run knows what it really
charges: its models write between two and six bytes per token, and its prices are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio

from hutch_broker.bill import Bill
from hutch_broker.budgets import HeldBudget
from hutch_broker.judge import Refusal
from hutch_broker.metering import meter_for
from hutch_broker.prices import PriceTable, Unpriced
from hutch_broker.request_cost import RequestAsk, most
from hutch_shared.broker_link import Price

BUDGET = 1.0
WAIT = 60.0
REQUESTS = 100


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the clock of its loop instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout:
            self.loop.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing can run."""

    def __init__(self) -> None:
        """Start at 0 seconds."""
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Return the simulated time."""
        return self.now


@dataclass
class Outcome:
    """The result of a run, in US dollars."""

    seed: int
    spent: float = 0.0
    """What the provider charges for what it sent."""
    counted: float = 0.0
    """What the broker recorded."""
    left: float = 0.0
    largest_step: float = 0.0
    """The most that one chunk of one request cost."""
    served: int = 0
    cut: int = 0
    hung_up: int = 0
    waited_in_vain: int = 0
    refused_at_end: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def over(self) -> float:
        """What was spent above the budget."""
        return self.spent - BUDGET

    @property
    def wrong(self) -> list[str]:
        """What must not be, as sentences."""
        wrong = list(self.faults)
        if self.over > self.largest_step + 1e-9:
            wrong.append(f"${self.over:.4f} over the budget, ${self.largest_step:.4f} in the largest step")
        if self.spent > self.counted + 1e-9:
            wrong.append(f"${self.spent:.4f} spent, ${self.counted:.4f} counted")
        if abs(self.left - (BUDGET - self.counted)) > 1e-9:
            wrong.append(f"${self.left:.4f} left after ${self.counted:.4f}")
        return [f"seed {self.seed}: {one}" for one in wrong]


class _Provider:
    """The answer to one request as chunks, each with what the provider charges for it."""

    def __init__(self, random: Random, ask: RequestAsk, price: Price) -> None:
        self.chunks: list[tuple[bytes, float]] = []
        self._price = price
        tokens = random.randint(1, ask.size)
        cached = random.randint(0, tokens) if random.random() < 0.5 else 0
        written = random.randint(0, tokens - cached) if ask.keeps else 0
        for_hour = written if ask.keeps == "1h" else 0
        usage = {
            "input_tokens": tokens - cached - written,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": written,
            "cache_creation": {"ephemeral_1h_input_tokens": for_hour, "ephemeral_5m_input_tokens": written - for_hour},
            "output_tokens": 0,
        }
        begun = (
            (tokens - cached - written) * price.input
            + cached * (price.cache_read or 0.0)
            + (written - for_hour) * price.input * 1.25
            + for_hour * price.input * 2
        ) / 1e6
        most_output = ask.output or 0
        output, searches = 0, 0
        said: list[tuple[bytes, float]] = []
        for _ in range(random.randint(1, 24)):
            if searches < (ask.searches or 0) and random.random() < 0.3:
                searches += 1
                block = {"type": "server_tool_use", "name": "web_search"}
                said.append((_event(type="content_block_start", content_block=block), 0.01))
                continue
            size = random.randint(1, 4000)
            new = min(most_output - output, int(size / random.uniform(2, 6)))
            output += new
            kind, name = random.choice([("text_delta", "text"), ("thinking_delta", "thinking")])
            delta = {"type": kind, name: "x" * size}
            said.append((_event(type="content_block_delta", delta=delta), new * price.output / 1e6))
            if output >= most_output:
                break
            if random.random() < 0.1:
                said.append((_event(type="message_delta", usage={"output_tokens": output}), 0.0))
        final = {"output_tokens": output, "server_tool_use": {"web_search_requests": searches}}
        if ask.streams:
            first = _event(type="message_start", message={"model": ask.model, "usage": usage})
            last = _event(type="message_delta", usage=final) + _event(type="message_stop")
            self.chunks = [(first, begun), *said, (last, 0.0)]
        else:
            whole = json.dumps({"model": ask.model, "usage": usage | final}).encode()
            half = len(whole) // 2
            self.chunks = [(whole[:half], 0.0), (whole[half:], begun + sum(usd for _, usd in said))]


def _event(**value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class _Run:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.outcome = Outcome(seed)
        self.budget = HeldBudget(BUDGET)
        self.own = {
            f"m-{n}": Price(
                input=(price := self.random.choice([0.1, 1.0, 3.0, 15.0])),
                output=price * self.random.choice([1, 5, 10]),
                cache_read=price / 10,
            )
            for n in range(4)
        }
        self.prices = PriceTable(self.own)

    def _ask(self) -> RequestAsk:
        random = self.random
        return RequestAsk(
            model=random.choice([*self.own]),
            size=random.choice([200, 5_000, 40_000]),
            output=random.choice([64, 1024, 32_000, 128_000]),
            searches=random.choice([0, 0, 0, 3]),
            keeps=random.choice(["", "5m", "1h"]),
            streams=random.random() < 0.9,
        )

    async def _request(self) -> None:
        random = self.random
        ask = self._ask()
        await anyio.sleep(random.uniform(0, 120))
        with anyio.move_on_after(random.uniform(0, 30) if random.random() < 0.3 else 1000) as agent:
            await self._served(ask)
        self.outcome.hung_up += agent.cancelled_caught

    async def _served(self, ask: RequestAsk) -> None:
        random, budget, outcome = self.random, self.budget, self.outcome
        bill = Bill(self.prices, None, ask=ask)
        highest = most(self.prices, None, ask)
        assert not isinstance(highest, Unpriced)
        reservation = await budget.reserve(highest, WAIT)
        if isinstance(reservation, Refusal):
            outcome.refused_at_end += budget.usd <= 0
            outcome.waited_in_vain += budget.usd > 0
            if budget.usd > 0 and not budget.open:
                outcome.faults.append(f"refused while alone with ${budget.usd:.4f} left")
            return
        bill.reserve(budget, reservation)
        bill.sent = True
        outcome.served += 1
        spent, status = 0.0, 0
        try:
            await anyio.sleep(random.uniform(0, 10))
            if random.random() < 0.1:
                status = 529
                return
            status = 200
            kind = "text/event-stream" if ask.streams else "application/json"
            bill.meter = meter_for("anthropic", kind)
            chunks = _Provider(random, ask, self.own[ask.model]).chunks
            breaks = random.randint(1, len(chunks)) if random.random() < 0.2 else len(chunks) + 1
            for chunk, usd in chunks[:breaks]:
                spent += usd
                outcome.largest_step = max(outcome.largest_step, usd)
                bill.meter.feed(chunk)
                if bill.exceeds():
                    outcome.cut += 1
                    if not ask.streams:
                        outcome.faults.append("cut although the answer arrives as a whole")
                    return
                await anyio.sleep(random.uniform(0, 2))
            bill.complete = breaks > len(chunks)
        finally:
            outcome.spent += spent
            cost = bill.settle(status)
            if cost.usd is None:
                outcome.faults.append(f"unknown: {cost.why_unknown}")
            outcome.counted += cost.usd or 0.0

    async def __call__(self) -> Outcome:
        async with anyio.create_task_group() as tasks:
            for _ in range(REQUESTS):
                tasks.start_soon(self._request)
        self.outcome.left = self.budget.usd
        if self.budget.open:
            self.outcome.faults.append(f"{self.budget.open} reservations are left")
        return self.outcome


def run(seed: int) -> Outcome:
    """Make one run of 100 requests against one dollar."""
    return anyio.run(_Run(seed), backend_options={"loop_factory": VirtualLoop})


def main() -> int:
    """Make many runs and print their figures. Exit code 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    outcomes = [run(seed) for seed in range(given.seed, given.seed + given.runs)]
    wrong = [one for outcome in outcomes for one in outcome.wrong]
    over = max(outcomes, key=lambda one: one.over)
    print(
        f"{len(outcomes)} runs of {REQUESTS} requests: {sum(one.served for one in outcomes)} served,"
        f" {sum(one.cut for one in outcomes)} cut, {sum(one.hung_up for one in outcomes)} hung up,"
        f" {sum(one.waited_in_vain for one in outcomes)} waited in vain,"
        f" {sum(one.refused_at_end for one in outcomes)} refused with nothing left;"
        f" at most ${max(0.0, over.over):.4f} over (its largest step ${over.largest_step:.4f});"
        f" {sum(one.over > 0 for one in outcomes)} runs over, {len(wrong)} wrong"
    )
    print("\n".join(wrong[:20]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
