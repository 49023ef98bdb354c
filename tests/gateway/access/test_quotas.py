"""Quotas: what is asked of the store for a request, what it is told afterwards, and what the client is told."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.access.quotas import FIRST_GUESS_TOKENS, HEADERS, QuotaReservation, Quotas, duration
from penstock.gateway.errors import ApiError
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import LEASE_S, Grant, Quota, StoreUnavailable, Window
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.time_budget import TIME_BUDGET, TimeBudget
from penstock.priority.lanes import Tenant
from tests.clock import Clock
from tests.gateway.harness import MODEL, Gateway, chat_body, serving, settled

pytestmark = pytest.mark.anyio

MINUTE_S = 60.0
WALL_S = datetime(2026, 11, 28, 19, tzinfo=UTC).timestamp() - Clock().now


class RecordingStore(MemoryStore):
    """A store that remembers what it was told, and fails if it is `gone`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.calls: list[tuple[Any, ...]] = []
        self.gone = False
        self.answer = asyncio.Event()
        self.answer.set()

    async def reserve(
        self, tenant: str, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window] = ()
    ) -> Grant:
        await self._note("reserve", tenant, num_tokens, lease_id)
        return await super().reserve(tenant, quota, num_tokens, lease_id, windows)

    async def settle(
        self, tenant: str, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window] = ()
    ) -> None:
        await self._note("settle", tenant, num_tokens)
        await super().settle(tenant, quota, num_tokens, lease_id, windows)

    async def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        await self._note("renew", *leases)
        await super().renew(leases)

    async def release(self, tenant: str, lease_id: str) -> None:
        await self._note("release", tenant, lease_id)
        await super().release(tenant, lease_id)

    async def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.gone:
            raise StoreUnavailable
        await self.answer.wait()


class QuotaHarness:
    """Quotas on a store and a clock that are the test's."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = RecordingStore(self.clock)
        self.quotas = Quotas(self.store, self.clock, wall_clock=lambda: WALL_S + self.clock.now)

    async def ask(
        self, client: Client, num_prompt: int = 10, max_output: int = 90, lease_id: str = "a"
    ) -> QuotaReservation:
        return await self.quotas.reserve(client, num_prompt, max_output, lease_id)

    async def refusal(self, client: Client, num_prompt: int = 10, max_output: int = 90) -> ApiError:
        with pytest.raises(ApiError) as caught:
            await self.ask(client, num_prompt, max_output, "refused")
        return caught.value


def ann(
    *,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    max_streams: int | None = None,
    **others: int,
) -> Client:
    quota = Quota(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_streams=max_streams,
        **others,
    )
    return Client(Tenant(name="ann"), quota)


async def test_who_has_no_quota_costs_the_store_nothing() -> None:
    quotas = QuotaHarness()
    async with quotas.quotas.running():
        reservation = await quotas.ask(ann())
        await quotas.quotas.renew()
        reservation.end(100)
    assert reservation.headers == {}
    assert quotas.store.calls == []


async def test_a_request_is_reserved_settled_and_released() -> None:
    quotas, client = QuotaHarness(), ann(tokens_per_minute=1_000)
    async with quotas.quotas.running():
        reservation = await quotas.ask(client)
        reservation.end(30)
    assert quotas.store.calls == [
        ("reserve", "ann", 100, "a"),
        ("settle", "ann", -70),
        ("release", "ann", "a"),
    ]
    assert (await quotas.ask(client, 1, 1)).headers["x-ratelimit-remaining-tokens"] == str(1_000 - 30 - 2)


async def test_more_than_was_guessed_is_charged() -> None:
    quotas = QuotaHarness()
    async with quotas.quotas.running():
        (await quotas.ask(ann(tokens_per_minute=10_000), 10, 4_000)).end(2_010)
    assert quotas.store.calls[0] == ("reserve", "ann", 10 + FIRST_GUESS_TOKENS, "a")
    assert ("settle", "ann", 2_000 - FIRST_GUESS_TOKENS) in quotas.store.calls


async def test_only_the_first_end_counts() -> None:
    quotas = QuotaHarness()
    async with quotas.quotas.running():
        reservation = await quotas.ask(ann(tokens_per_minute=1_000))
        reservation.end(30)
        reservation.end(90)
    assert [call[0] for call in quotas.store.calls] == ["reserve", "settle", "release"]


async def test_the_end_waits_for_nothing() -> None:
    quotas = QuotaHarness()
    reservation = await quotas.ask(ann(tokens_per_minute=1_000, max_streams=1))
    quotas.store.answer.clear()
    reservation.end(30)
    assert quotas.store.calls == [("reserve", "ann", 100, "a")]
    await settled()
    assert {call[0] for call in quotas.store.calls} == {"reserve", "settle", "release"}
    quotas.store.answer.set()


@pytest.mark.parametrize(
    ("client", "message", "retry_after_ms"),
    [
        (ann(requests_per_minute=1), "requests per min (RPM): Limit 1, Used 1, Requested 1. ", 60_000),
        (ann(tokens_per_minute=150), "tokens per min (TPM): Limit 150, Used 100, Requested 100. ", 20_000),
        (ann(max_streams=1), "requests at a time: Limit 1, Used 1, Requested 1. ", 1_000),
    ],
)
async def test_a_refusal_names_the_bound_and_when_to_come_back(
    client: Client, message: str, retry_after_ms: int
) -> None:
    quotas = QuotaHarness()
    held = await quotas.ask(client)
    error = await quotas.refusal(client)
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert error.message == (
        f"Rate limit reached on {message}Please try again in {duration(retry_after_ms / 1000)}."
    )
    headers = error.headers()
    assert retry_after_ms <= int(headers["retry-after-ms"]) <= min(60_000, 1.2 * retry_after_ms)
    assert int(headers["retry-after"]) * 1000 >= int(headers["retry-after-ms"])
    for name in held.headers:
        assert name in headers
    assert "x-should-retry" not in headers


async def test_what_was_refused_is_let_in_when_it_was_told_to_come_back() -> None:
    quotas, client = QuotaHarness(), ann(requests_per_minute=2)
    for name in "ab":
        await quotas.ask(client, lease_id=name)
    assert (await quotas.refusal(client)).retry_after_s == 30.0
    quotas.clock.now += 29.9
    await quotas.refusal(client)
    quotas.clock.now += 0.1
    await quotas.ask(client)


async def test_a_prompt_that_never_fits_is_told_so() -> None:
    quotas, client = QuotaHarness(), ann(tokens_per_minute=100, requests_per_minute=6)
    error = await quotas.refusal(client, num_prompt=100)
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert "Limit 100, Requested 101. It can never fit" in error.message
    headers = error.headers()
    assert "retry-after" not in headers
    assert "retry-after-ms" not in headers
    assert headers["x-should-retry"] == "false"
    assert headers["x-ratelimit-remaining-tokens"] == "100"
    assert headers["x-ratelimit-remaining-requests"] == "6"


async def test_a_guess_is_no_reason_to_refuse_for_ever() -> None:
    quotas = QuotaHarness()
    await quotas.ask(ann(tokens_per_minute=100), num_prompt=99, max_output=4_000)
    assert quotas.store.calls == [("reserve", "ann", 100, "a")]


async def test_where_the_tenant_stands_is_in_the_headers() -> None:
    quotas = QuotaHarness()
    reservation = await quotas.ask(ann(requests_per_minute=60, tokens_per_minute=600))
    assert reservation.headers == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "10s",
    }
    assert (await quotas.ask(ann(max_streams=9), lease_id="b")).headers == {}


async def test_days_and_months_have_headers_of_their_own() -> None:
    quotas = QuotaHarness()
    reservation = await quotas.ask(ann(requests_per_day=5, tokens_per_month=1_000))
    assert reservation.headers == {
        "x-ratelimit-limit-requests-day": "5",
        "x-ratelimit-remaining-requests-day": "4",
        "x-ratelimit-reset-requests-day": "5h0m0s",
        "x-ratelimit-limit-tokens-month": "1000",
        "x-ratelimit-remaining-tokens-month": "900",
        "x-ratelimit-reset-tokens-month": "53h0m0s",
    }
    assert set(reservation.headers) < set(HEADERS)


@pytest.mark.parametrize(
    ("client", "message", "retry_after_s"),
    [
        (
            ann(requests_per_day=1),
            "requests per day (RPD): Limit 1, Used 1, Requested 1. "
            "The day ends at 2026-11-29T00:00:00Z, in 5h0m0s.",
            5 * 3_600,
        ),
        (
            ann(tokens_per_month=150),
            "tokens per month: Limit 150, Used 100, Requested 100. "
            "The month ends at 2026-12-01T00:00:00Z, in 53h0m0s.",
            53 * 3_600,
        ),
    ],
)
async def test_a_refusal_of_a_window_says_when_it_ends_and_that_retries_are_of_no_use(
    client: Client, message: str, retry_after_s: int
) -> None:
    quotas = QuotaHarness()
    await quotas.ask(client)
    error = await quotas.refusal(client)
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.message == f"Rate limit reached on {message}"
    assert error.headers()["retry-after"] == str(retry_after_s)
    assert error.headers()["x-should-retry"] == "false"
    quotas.clock.now += retry_after_s
    await quotas.ask(client, lease_id="later")


async def test_what_a_request_did_not_use_is_given_back_to_the_day_in_which_it_began() -> None:
    quotas, client = QuotaHarness(), ann(tokens_per_day=150)
    late = await quotas.ask(client)
    late.end(40)
    await settled()
    night = await quotas.ask(client, lease_id="b")
    assert night.headers["x-ratelimit-remaining-tokens-day"] == "10"
    quotas.clock.now += 5 * 3_600
    night.end(10)
    await settled()
    morning = await quotas.ask(client, lease_id="c")
    assert morning.headers["x-ratelimit-remaining-tokens-day"] == "50"


async def test_a_guess_is_no_more_than_a_day_has() -> None:
    quotas = QuotaHarness()
    await quotas.ask(ann(tokens_per_day=100, tokens_per_minute=200), num_prompt=20, max_output=4_000)
    assert quotas.store.calls == [("reserve", "ann", 100, "a")]
    error = await quotas.refusal(ann(tokens_per_day=100), num_prompt=100)
    assert error.message == "Request too large for tokens per day (TPD): Limit 100, Requested 101. " + (
        "It can never fit; make it smaller."
    )


async def test_a_clock_that_goes_on_meanwhile_takes_nothing_away() -> None:
    microseconds = count(10**9)
    quotas = Quotas(MemoryStore(lambda: next(microseconds) / 1e6))
    reservation = await quotas.reserve(ann(requests_per_minute=2), 1, 1, "a")
    assert reservation.headers["x-ratelimit-remaining-requests"] == "1"


async def test_the_guess_is_what_three_quarters_of_the_last_answers_keep_within() -> None:
    quotas, client = QuotaHarness(), ann(tokens_per_minute=1_000_000)
    for number, output in enumerate([40, 20, 80, 10, 30, 70, 50, 60]):
        (await quotas.ask(client, 10, 4_000)).end(10 + output)
        assert quotas.store.calls.count(("reserve", "ann", 10 + FIRST_GUESS_TOKENS, "a")) == number + 1
        await settled()
    ninth = await quotas.ask(client, 10, 4_000)
    assert quotas.store.calls[-1] == ("reserve", "ann", 10 + 60, "a")
    ninth.end(10 + 90)
    await settled()
    await quotas.ask(client, 10, 4_000)
    assert quotas.store.calls[-1] == ("reserve", "ann", 10 + 70, "a")
    await quotas.ask(client, 10, 25)
    assert quotas.store.calls[-1] == ("reserve", "ann", 10 + 25, "a")
    quotas.clock.now += 60 * MINUTE_S + 1
    await quotas.ask(client, 10, 4_000)
    assert quotas.store.calls[-1] == ("reserve", "ann", 10 + FIRST_GUESS_TOKENS, "a")


async def test_requests_that_came_to_nothing_do_not_count_as_answers() -> None:
    quotas, client = QuotaHarness(), ann(tokens_per_minute=1_000_000)
    for num_used in [0, 10] * 8:
        (await quotas.ask(client, 10, 4_000)).end(num_used)
    await quotas.ask(client, 10, 4_000)
    assert quotas.store.calls[-1][2] == 10 + FIRST_GUESS_TOKENS
    await settled()


async def test_a_store_in_trouble_refuses_nobody() -> None:
    quotas = QuotaHarness()
    quotas.store.gone = True
    async with quotas.quotas.running():
        reservation = await quotas.ask(ann(requests_per_minute=1, tokens_per_minute=1, max_streams=1))
        assert reservation.headers == {}
        reservation.end(50)
        await quotas.quotas.renew()
    assert [call[0] for call in quotas.store.calls] == ["reserve", "release"]


async def test_a_store_that_goes_away_meanwhile_is_told_what_can_be() -> None:
    quotas = QuotaHarness()
    async with quotas.quotas.running():
        reservation = await quotas.ask(ann(tokens_per_minute=1_000))
        quotas.store.gone = True
        await quotas.quotas.renew()
        reservation.end(50)
    assert [call[0] for call in quotas.store.calls] == ["reserve", "renew", "settle", "release"]


async def test_what_was_used_is_told_although_its_request_has_waited_for_redis_long_enough() -> None:
    seen: list[TimeBudget | None] = []

    class Seeing(RecordingStore):
        async def _note(self, *call: Any) -> None:
            await super()._note(*call)
            seen.append(TIME_BUDGET.get())

    quotas = QuotaHarness()
    quotas.quotas = Quotas(Seeing(quotas.clock), quotas.clock)
    before = TIME_BUDGET.set(spent := TimeBudget(num_checks=0))
    try:
        async with quotas.quotas.running():
            (await quotas.ask(ann(tokens_per_minute=1_000))).end(50)
    finally:
        TIME_BUDGET.reset(before)
    assert seen == [spent, None, None]


async def test_requests_at_work_keep_their_leases() -> None:
    quotas, client = QuotaHarness(), ann(max_streams=1)
    reservation = await quotas.ask(client)
    for _ in range(4):
        quotas.clock.now += LEASE_S / 3
        await quotas.quotas.renew()
    await quotas.refusal(client)
    reservation.end(1)
    await settled()
    num_calls = len(quotas.store.calls)
    await quotas.quotas.renew()
    assert len(quotas.store.calls) == num_calls
    await quotas.ask(client)


async def test_a_reservation_that_was_lost_is_renewed_no_more() -> None:
    quotas, client = QuotaHarness(), ann(max_streams=1)
    reservation = await quotas.ask(client)
    del reservation
    gc.collect()
    await quotas.quotas.renew()
    assert quotas.store.calls == [("reserve", "ann", 10 + 90, "a")]
    quotas.clock.now += LEASE_S + 1
    await quotas.ask(client)


async def test_a_renewal_under_way_does_not_bring_a_released_lease_back() -> None:
    quotas, client = QuotaHarness(), ann(max_streams=1)
    reservation = await quotas.ask(client)
    quotas.store.answer.clear()
    renewing = asyncio.create_task(quotas.quotas.renew())
    await settled()
    reservation.end(1)
    quotas.store.answer.set()
    await renewing
    await settled()
    assert [call[0] for call in quotas.store.calls] == ["reserve", "renew", "release", "release"]
    await quotas.ask(client)


async def test_who_goes_away_while_it_is_asked_for_leaves_no_lease() -> None:
    quotas, client = QuotaHarness(), ann(max_streams=1)
    quotas.store.answer.clear()
    asking = asyncio.create_task(quotas.ask(client))
    await settled()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await settled()
    assert quotas.store.calls[-1] == ("release", "ann", "a")
    quotas.store.answer.set()
    await settled()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (-1, "0s"), (0.012, "12ms"), (0.0001, "1ms"), (0.9999, "1s"), (1, "1s"), (1.5, "1.5s"),
        (7.66, "7.66s"), (10, "10s"), (60, "1m0s"), (90.25, "1m30.25s"), (360, "6m0s"), (3_600, "1h0m0s"),
        (7_325.001, "2h2m5.001s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_go_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.integers(0, 100_000_000))
def test_a_duration_says_all_of_its_milliseconds(milliseconds: int) -> None:
    units = {"h": 3_600_000, "m": 60_000, "s": 1_000}
    text, total = duration(milliseconds / 1000), 0.0
    if text.endswith("ms"):
        total = int(text.removesuffix("ms"))
    else:
        for unit, size in units.items():
            part, found, rest = text.partition(unit)
            if found:
                total, text = total + float(part) * size, rest
    assert round(total) == milliseconds


@pytest.mark.parametrize("begun", [False, True])
async def test_a_prompt_counts_once_the_engine_had_it(begun: bool) -> None:
    """However long it was computed: no token came of it before its client left."""
    client = ann(tokens_per_minute=1000)
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients={digest_of("key"): client}))
    headers = {"authorization": "Bearer key"}
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url, headers=headers) as http:
        asked = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body("Hello")))
        await gateway.queued()
        num_prompt = len((await gateway.taken()).prompt_token_ids) if begun else 0
        asked.cancel()
        await gateway.left()
        await settled()
        grant = await gateway.service.store.reserve("ann", client.quota, 1, "probe")
    assert grant.tokens is not None
    assert grant.tokens.remaining == 1000 - num_prompt - 1
