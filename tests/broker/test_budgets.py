"""Budgets: what a request may cost, when it waits, when it is cut, and random runs of many requests."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import anyio
import pytest

from hutch_broker.bill import Bill
from hutch_broker.budgets import HeldBudget, Reservation
from hutch_broker.judge import Refusal
from hutch_broker.leases import LeaseTable
from hutch_broker.metering import meter_for
from hutch_broker.prices import PriceTable, Unpriced
from hutch_broker.request_cost import RequestAsk, most, read_request
from hutch_shared import broker_link as link
from hutch_shared.broker_link import DialectName, Price
from tests.broker.budget_runs import BUDGET, VirtualLoop, run
from tests.broker.stage import ASK, KEY, parsed, read_all, read_until, request, staged, upstream
from tests.rehearsal import Pause, Say, Stall, Usage, serve
from tests.sampling import seed

PRICES = PriceTable({"m": Price(input=1, output=2)})


def begun(budget: HeldBudget, usd: float | None) -> Reservation:
    reservation = budget.begin(usd)
    assert reservation is not None
    return reservation


# ---------------------------------------------------------------- the budget


def test_a_request_that_is_covered_begins_beside_others() -> None:
    """Reservations add up; what one did not use is free again once it has ended."""
    budget = HeldBudget(1.0)
    first = begun(budget, 0.6)

    assert budget.begin(0.5) is None
    begun(budget, 0.4)
    budget.settle(first, 0.1)
    assert budget.begin(0.6) is None
    begun(budget, 0.5)


@pytest.mark.parametrize("most", [5.0, None])
def test_a_request_that_is_alone_begins_while_anything_is_left(most: float | None) -> None:
    """It holds all that is left, until it has ended."""
    budget = HeldBudget(0.01)
    alone = begun(budget, most)

    assert budget.begin(0.001) is None
    budget.settle(alone, 0.0)
    begun(budget, most)


def test_a_request_is_cut_when_it_used_what_is_left_for_it() -> None:
    """What other requests hold is not left for it; what nobody holds is."""
    budget = HeldBudget(1.0)
    one, other = begun(budget, 0.3), begun(budget, 0.2)

    assert budget.use(one, 0.79)
    assert not budget.use(one, 0.8)
    assert not budget.use(other, 0.21)


def test_an_answer_that_is_not_streamed_is_not_cut() -> None:
    """It asks for more than the budget; while it arrives, nobody knows what it used. Its end says so."""
    budget = HeldBudget(1.0)
    body = json.dumps({"model": "m", "usage": {"input_tokens": 10, "output_tokens": 20}}).encode()
    bill = Bill(PRICES, None, ask=asked(model="m", max_tokens=1_000_000))
    bill.reserve(budget, begun(budget, 2.0))
    bill.sent, bill.meter = True, meter_for("anthropic", "application/json")
    exceeded = []
    for piece in (b"", body[:9], body[9:]):
        bill.meter.feed(piece)
        exceeded.append(bill.exceeds())
    bill.complete = True

    assert exceeded == [False, False, False]
    assert bill.settle(200).usd == pytest.approx(50 / 1e6)
    assert budget.usd == pytest.approx(1 - 50 / 1e6)


def test_a_stream_without_content_is_not_cut() -> None:
    """Its input is spent in any case, and the provider reports what it was before the content comes."""
    bill = Bill(PRICES, None, ask=asked(model="m", max_tokens=1, stream=True, messages=["word " * 100]))
    budget = HeldBudget(1e-6)
    bill.reserve(budget, begun(budget, 1.0))
    bill.sent, bill.meter = True, meter_for("anthropic", "text/event-stream")
    exceeded = []
    for text in ("", "an answer " * 50):
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        bill.meter.feed(b"event: content_block_delta\ndata: " + json.dumps(delta).encode() + b"\n\n")
        exceeded.append(bill.exceeds())

    assert exceeded == [False, True]


def test_an_unknown_cost_uses_up_the_rest_and_says_why() -> None:
    """No later request may begin."""
    budget = HeldBudget(1.0)
    budget.settle(begun(budget, 0.1), None, "The price of X is unknown.")

    refusal = anyio.run(budget.reserve, 0.1, 60.0)

    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.why) == (402, "The session's budget is used up. The price of X is unknown.")


def test_a_request_waits_for_others_and_then_begins_or_gives_up() -> None:
    """A waiting request begins once enough is free, or is refused after the wait. A cancelled one holds nothing."""
    budget = HeldBudget(1.0)
    log: list[tuple[str, float]] = []

    async def ask(name: str, usd: float) -> None:
        outcome = await budget.reserve(usd, 60.0)
        log.append((name if isinstance(outcome, Reservation) else f"{name} {outcome.status}", anyio.current_time()))

    async def main() -> None:
        begun(budget, 0.2)
        first = begun(budget, 0.7)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "large", 0.8)
            tasks.start_soon(ask, "small", 0.3)
            with anyio.move_on_after(5):
                await ask("impatient", 0.3)
            await anyio.sleep(25)
            budget.settle(first, 0.4)

    anyio.run(main, backend_options={"loop_factory": VirtualLoop})

    assert log == [("small", 30.0), ("large 402", 60.0)]
    assert budget.open == 2


# ---------------------------------------------------------------- what a request can cost


def asked(dialect: DialectName = "anthropic", path: str = "/v1/messages", **body: Any) -> RequestAsk:
    ask = read_request(dialect, path, json.dumps(body).encode())
    assert ask is not None
    return ask


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x.invalid/"}}


@pytest.mark.parametrize(
    ("body", "usd"),
    [
        ({"max_tokens": 100}, 100 * 2 / 1e6),
        ({"max_tokens": 100, "speed": "fast"}, 200 * 2 / 1e6),
        ({"max_tokens": 0, "tools": [SEARCH, {"name": "Bash", "input_schema": {"url": 1}}]}, 0.08),
        ({"max_tokens": 0, "tools": [{"type": "web_search_20250305"}]}, None),
        ({"messages": []}, None),
        ({"max_tokens": 0, "messages": [{"role": "user", "content": [IMAGE]}]}, None),
    ],
)
def test_a_request_says_what_it_can_cost_at_most(body: Any, usd: float | None) -> None:
    """Output, searches and each byte of input count; without a limit the cost has no bound."""
    ask = asked(model="m", **body)
    highest = most(PRICES, "anthropic", ask)
    base = most(PRICES, "anthropic", RequestAsk("m", ask.size, 0, speed=ask.speed))

    assert isinstance(base, float)
    assert base >= ask.size / 1e6
    assert highest == (None if usd is None else pytest.approx(base + usd))


def test_input_that_is_kept_costs_what_writing_it_costs() -> None:
    """The longest time that the request names decides."""
    kept = [
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", **more}} for more in ({}, {"ttl": "1h"})
    ]

    assert [asked(model="m", system=[one]).keeps for one in kept] == ["5m", "1h"]
    assert asked(model="m", system="cache_control for 1h").keeps == ""


@pytest.mark.parametrize(
    ("dialect", "path", "body", "model", "output"),
    [
        ("openai", "/v1/chat/completions", {"model": "m", "max_completion_tokens": 5, "n": 3}, "m", 15),
        ("openai", "/v1/responses", {"model": "m", "max_output_tokens": 5}, "m", 5),
        ("openai", "/v1/responses", {"model": "m"}, "m", None),
        ("openai", "/v1/embeddings", {"model": "m"}, "m", 0),
        ("gemini", "/v1beta/models/g-1:generateContent", {"generationConfig": {"maxOutputTokens": 7}}, "g-1", 7),
        ("vertex", "/projects/p/locations/l/publishers/anthropic/models/c@2:rawPredict", {"max_tokens": 7}, "c@2", 7),
    ],
)
def test_other_apis_name_the_model_and_the_limit_elsewhere(
    dialect: DialectName, path: str, body: Any, model: str, output: int | None
) -> None:
    """The model may be in the path; several answers cost several times the output."""
    ask = asked(dialect, path, **body)

    assert (ask.model, ask.output) == (model, output)


def test_a_request_for_a_model_without_a_price_says_so() -> None:
    """Nothing else of it is priced."""
    assert most(PRICES, "anthropic", asked(model="nobody-knows", max_tokens=1)) == Unpriced(
        "The price of the model nobody-knows is unknown.", "nobody-knows"
    )


def test_only_the_begin_of_a_models_name_is_kept() -> None:
    """An agent cannot fill the record or the cache of prices with names."""
    assert asked(model="m" * 1_000_000, max_tokens=1).model == "m" * 200


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b'{"model": "\xff"}'])
def test_a_body_that_is_no_object_cannot_be_read(body: bytes) -> None:
    """Nothing is raised."""
    assert read_request("anthropic", "/v1/messages", body) is None


# ---------------------------------------------------------------- leases


def test_a_broker_keeps_its_own_figure_of_a_budget() -> None:
    """A session's leases share it; it is forgotten a minute after nothing refers to it any more."""
    now, reported = [0.0], [True]
    leases = LeaseTable(lambda: now[0], lambda session: reported[0])

    def put(name: str, usd: float, session: str = "s-1") -> float | None:
        lease = link.Lease(
            id=name, token_hash="", session=session, executor="x", owner=0, account="a", provider="anthropic",
            dialect="anthropic", credential="k", uid=0, pid=1, start_time=1,
        )  # fmt: skip
        leases.put(link.LeaseState(lease=lease, expires_in=1e9, requests=1, usd=usd))
        held = leases.get(name)
        assert held is not None
        assert held.budget is not None
        return held.budget.usd

    assert [put("l-1", 1.0), put("l-2", 0.5), put("l-3", 0.5, "s-2")] == [1.0, 1.0, 0.5]
    leases.end(["l-1", "l-2"])
    reported[0] = False
    leases.end_expired()
    now[0] = 61.0
    assert put("l-4", 0.25) == 1.0
    leases.end(["l-4"])
    reported[0] = True
    leases.end_expired()
    now[0] = 120.0
    assert put("l-5", 0.25) == 1.0
    leases.end(["l-5"])
    leases.end_expired()
    now[0] = 181.0
    assert put("l-6", 0.25) == 0.25


# ---------------------------------------------------------------- random runs


def check_runs(count: int) -> None:
    random = Random(f"{seed()} budgets")
    outcomes = [run(random.randrange(1 << 32)) for _ in range(count)]

    assert [wrong for outcome in outcomes for wrong in outcome.wrong] == []
    assert sum(outcome.cut for outcome in outcomes) > 0
    assert sum(outcome.hung_up for outcome in outcomes) > 0
    assert sum(outcome.refused_at_end for outcome in outcomes) > 0


def test_budgets_hold_in_random_runs() -> None:
    """No budget is exceeded by more than one step of one request, and no request is refused while it is alone."""
    check_runs(6)


@pytest.mark.full
def test_budgets_hold_in_a_thousand_random_runs() -> None:
    """The same, a thousand times."""
    check_runs(1000)


# ---------------------------------------------------------------- a real broker


PRICED = {"claude-sonnet-4-5": Price(input=0, output=20)}


async def test_parallel_requests_do_not_exceed_a_budget() -> None:
    """Twelve agents at once, of which some hang up, against one dollar: what remains is never refused to one alone."""
    text = "x" * 40_000  # 20,000 tokens as it streams ($0.4), 10,000 in the provider's report ($0.2)
    random = Random(f"{seed()} agents")
    async with (
        serve(key=KEY, script=lambda _: (Usage(10, 10_000), Say(text, chunks=100))) as model,
        staged(model.url, prices=PRICED) as stage,
    ):
        _, token = await stage.lease(usd=BUDGET)
        outcomes: list[str] = []

        async def agent(hangs_up: bool) -> None:
            stream = await stage.dial()
            try:
                await stream.send(request(token, {**ASK, "max_tokens": 128_000}))
                if hangs_up:
                    await read_until(stream, b"x" * 300)
                    outcomes.append("hung up")
                else:
                    outcomes.append(str(parsed(await read_all(stream))[0]))
            except EOFError:
                outcomes.append("cut")
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                outcomes.append("refused")
            finally:
                await stream.aclose()

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for _ in range(12):
                    tasks.start_soon(agent, random.random() < 0.3)
        records = await stage.recorded(sum(one != "402" for one in outcomes if one != "refused"))
        left = (await stage.peer.call("get_status", None, 30)).leases[0].usd

    spent = sum(record.usd or 0.0 for record in records)
    step = 65_536 / 2 * 20 / 1e6  # what the broker reads at once
    assert outcomes.count("200") >= 1
    assert "402" in outcomes or "refused" in outcomes
    assert left <= 0
    assert spent == pytest.approx(BUDGET - left)
    assert BUDGET <= spent <= BUDGET + step


async def test_an_agent_that_hangs_up_pays_for_what_was_streamed() -> None:
    """A stream of 50,000 tokens that ends before its report counts at least as many."""
    text = "word" * 50_000
    async with (
        serve(key=KEY, script=lambda _: [Say(text, chunks=50), Say("end"), Stall()]) as model,
        staged(model.url) as stage,
    ):
        _, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token))
        await read_until(stream, b'"text":"end"')
        await stream.aclose()
        (record,) = await stage.recorded(1)

    assert record.output >= 50_000
    assert record.usd is not None
    assert record.usd >= 50_000 * 15 / 1e6


async def test_searches_are_money() -> None:
    """Eight searches a request at $0.01 each: a budget of $0.10 ends after the second request."""
    usage = {"input_tokens": 100, "output_tokens": 20, "server_tool_use": {"web_search_requests": 8}}
    answer = json.dumps({"model": "claude-sonnet-4-5", "usage": usage}).encode()
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
    async with upstream(raw + answer) as provider, staged(provider.url) as stage:
        _, token = await stage.lease(usd=0.1)
        body = {**ASK, "stream": False, "tools": [SEARCH]}
        statuses = [(await stage.ask(token, body))[0] for _ in range(5)]
        records = await stage.recorded(2)

    assert statuses == [200, 200, 402, 402, 402]
    assert [record.usd for record in records[:2]] == [pytest.approx(0.0806)] * 2
    assert [record.searches for record in records[:2]] == [8, 8]


async def test_a_budget_needs_a_price() -> None:
    """A model without a known price is refused with the lines that set it, and nothing is forwarded."""
    async with serve(key=KEY, script=lambda _: Say("one")) as model, staged(model.url) as stage:
        _, token = await stage.lease(usd=1.0)
        known, _, _ = await stage.ask(token)
        unknown, _, body = await stage.ask(token, {**ASK, "model": "no-such-model"})
        await stage.peer.call("set_prices", link.Prices({"no-such-model": Price(input=1, output=1)}), 30)
        priced, _, _ = await stage.ask(token, {**ASK, "model": "no-such-model"})
        found = [
            (await stage.peer.call("find_price", link.FindPrice("anthropic", "anthropic", model), 30)).trouble
            for model in ("no-such-model", "claude-sonnet-4-5", "another-model")
        ]
        requests = len(model.requests)

    assert (known, unknown, priced, requests) == (200, 402, 200, 2)
    assert found[:2] == ["", ""]
    assert '[providers.anthropic.prices."another-model"]\ninput = ' in found[2]
    assert '[providers.anthropic.prices."no-such-model"]\ninput = ' in json.loads(body)["error"]["message"]


async def test_a_request_is_paid_at_the_prices_of_its_begin() -> None:
    """Settings that no longer price its model make neither its price nor the session's budget unknown."""
    price = {"no-such-model": Price(input=1, output=1)}
    async with (
        serve(key=KEY, script=lambda _: [Say("begin"), Say("end"), Stall()]) as model,
        staged(model.url, prices=price) as stage,
    ):
        _, token = await stage.lease(usd=1.0)
        stream = await stage.dial()
        await stream.send(request(token, {**ASK, "model": "no-such-model"}))
        await read_until(stream, b'"text":"end"')
        await stage.peer.call("set_prices", link.Prices({}), 30)
        await stream.aclose()
        (record,) = await stage.recorded(1)
        left = (await stage.peer.call("get_status", None, 30)).leases[0].usd

    assert record.usd is not None
    assert left == pytest.approx(1.0 - record.usd)


async def test_what_cannot_be_counted_is_refused_with_a_budget() -> None:
    """A request that is not readable, and an API whose answers Hutch cannot count, are not forwarded."""
    async with staged("http://127.0.0.1:1") as stage:
        _, token = await stage.lease(usd=1.0)
        _, other = await stage.lease(usd=1.0, provider="bedrock", dialect="bedrock", session="s-2")
        unreadable = await stage.ask(token, b"{")
        uncounted = await stage.ask(other, {}, path="/model/m/invoke", header="authorization")

    assert (unreadable[0], uncounted[0]) == (400, 402)
    assert b"cannot count what bedrock charges" in uncounted[2]
    assert stage.asked == []


async def test_a_request_that_cannot_be_covered_waits_for_the_other(anyio_backend: str) -> None:
    """It is served after the other has ended, or refused after `budget_wait` seconds."""
    pause = Pause()
    async with (
        serve(key=KEY, script=lambda _: (Usage(1, 1), Say("one"), pause)) as model,
        staged(model.url, prices=PRICED, budget_wait=0.2) as stage,
    ):
        _, token = await stage.lease(usd=1.0)
        body = {**ASK, "max_tokens": 128_000}
        first = await stage.dial()
        await first.send(request(token, body))
        await read_until(first, b'"text":"one"')
        late, _, why = await stage.ask(token, body)
        free, _, _ = await stage.ask(token, path="/v1/messages/count_tokens")
        pause.release.set()
        await read_all(first)
        await first.aclose()
        after, _, _ = await stage.ask(token, body)

    assert (late, free, after) == (402, 200, 200)
    assert b"does not cover this request while others run" in why
