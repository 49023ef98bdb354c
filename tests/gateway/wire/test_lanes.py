"""The urgency of a request: its tier, its headers, and what its key allows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.wire.lanes import TPOT_HEADER, TTFT_HEADER, slo_of, urgency_of
from penstock.priority.lanes import Lane, Tenant, Urgency

INTERACTIVE, STANDARD, BATCH = Lane
EITHER = Urgency(STANDARD, tried=INTERACTIVE)


def urgency(
    tier: str | None, *, streams: bool = True, ttft: str = "", tpot: str = "", **key: Lane
) -> Urgency:
    """The urgency of a request with that tier and these headers, whose key has these attributes."""
    headers = {name: text for name, text in ((TTFT_HEADER, ttft), (TPOT_HEADER, tpot)) if text}
    return urgency_of(tier, Tenant(name="t", **key), streams=streams, slo=slo_of(headers))


@pytest.mark.parametrize("tier", [None, "auto"])
def test_a_stream_that_names_no_lane_tries_the_interactive_one(tier: str | None) -> None:
    assert urgency(tier) == EITHER
    assert urgency(tier, streams=False) == Urgency(STANDARD)


@pytest.mark.parametrize(
    ("tier", "lane"),
    [
        *((tier, INTERACTIVE) for tier in ("priority", "fast", "ultrafast", "scale")),
        ("default", STANDARD),
        ("flex", BATCH),
    ],
)
@pytest.mark.parametrize("streams", [True, False])
def test_a_tier_is_one_lane(tier: str, lane: Lane, streams: bool) -> None:
    assert urgency(tier, streams=streams) == urgency(tier, default_lane=BATCH) == Urgency(lane)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ({"default_lane": BATCH}, Urgency(BATCH)),
        ({"default_lane": INTERACTIVE}, Urgency(INTERACTIVE)),
        ({"top_lane": STANDARD}, Urgency(STANDARD)),
        ({"top_lane": BATCH}, Urgency(BATCH)),
        ({"default_lane": BATCH, "top_lane": STANDARD}, Urgency(BATCH)),
    ],
)
def test_a_key_fixes_the_lane_or_lowers_it(key: Mapping[str, Lane], expected: Urgency) -> None:
    tenant = Tenant(name="t", **key)
    for tier in ("auto", None):
        assert urgency_of(tier, tenant, streams=True) == expected


@pytest.mark.parametrize(
    ("ttft", "tpot", "lane"),
    [
        ("500", "", INTERACTIVE),
        ("1000", "", INTERACTIVE),
        ("29999.5", "", INTERACTIVE),
        ("30000", "", STANDARD),
        ("900000000", "", STANDARD),
        ("", "100", INTERACTIVE),
        ("", "200", STANDARD),
        ("40000", "150", INTERACTIVE),
        ("5000", "900", INTERACTIVE),
    ],
)
def test_headers_choose_the_least_urgent_lane_that_promises_enough(ttft: str, tpot: str, lane: Lane) -> None:
    expected = Urgency(lane, ttft_s=float(ttft) / 1000 if ttft else None)
    assert urgency(None, ttft=ttft, tpot=tpot) == expected
    assert urgency("auto", streams=False, ttft=ttft, tpot=tpot, default_lane=BATCH) == expected


def test_a_tier_keeps_its_lane_and_gets_the_promise() -> None:
    assert urgency("priority", ttft="40000") == Urgency(INTERACTIVE, ttft_s=40.0)
    assert urgency("flex", ttft="700") == Urgency(BATCH, ttft_s=0.7)
    assert urgency(None, ttft="30000", top_lane=STANDARD) == Urgency(STANDARD, ttft_s=30.0)


@pytest.mark.parametrize("text", ["0", "0.0", "-5", "fast", "1e3", "nan", "inf", "1,5", " ", "1" * 10, "²"])
@pytest.mark.parametrize("header", [TTFT_HEADER, TPOT_HEADER])
def test_a_header_that_is_no_positive_number_is_named(header: str, text: str) -> None:
    with pytest.raises(ApiError, match=f"'{header}' must be a positive number") as caught:
        slo_of({header: text})
    assert (caught.value.status, caught.value.param) == (400, header)


@pytest.mark.parametrize(
    ("tier", "asked", "key", "header", "shortest"),
    [
        (None, {"ttft": "29999"}, {"top_lane": STANDARD}, TTFT_HEADER, "30000 ms or more"),
        ("flex", {"ttft": "5"}, {"top_lane": STANDARD}, TTFT_HEADER, "30000 ms or more"),
        (None, {"ttft": "900000"}, {"top_lane": BATCH}, TTFT_HEADER, "no such promise"),
        (None, {"tpot": "99"}, {}, TPOT_HEADER, "100 ms or more"),
        (None, {"tpot": "150"}, {"top_lane": STANDARD}, TPOT_HEADER, "200 ms or more"),
        ("default", {"tpot": "150"}, {}, TPOT_HEADER, "200 ms or more"),
        ("flex", {"tpot": "150"}, {}, TPOT_HEADER, "no such promise"),
    ],
)
def test_a_header_that_asks_for_more_than_the_request_may_have_is_named(
    tier: str | None, asked: Mapping[str, str], key: Mapping[str, Lane], header: str, shortest: str
) -> None:
    with pytest.raises(ApiError, match=f"'{header}' asks for too much: .*{shortest}") as caught:
        urgency(tier, **asked, **key)  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.param) == (400, header)


def test_a_tier_above_the_key_is_forbidden() -> None:
    with pytest.raises(ApiError, match="does not allow the service_tier 'fast'") as caught:
        urgency("fast", top_lane=STANDARD)
    assert (caught.value.status, caught.value.param) == (403, "service_tier")
