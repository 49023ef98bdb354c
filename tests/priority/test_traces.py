"""Traces: what cannot be used is refused by line and field, files come back, generators keep their word."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.priority.lanes import Lane
from penstock.priority.simulator.trace import (
    BLOCK_TOKENS,
    KINDS,
    SCENARIOS,
    Arrival,
    Demand,
    TraceError,
    read_trace,
    sessions,
    write_trace,
)

GOOD = {"timestamp": 1_500, "input_length": 700, "output_length": 20, "hash_ids": [1, 2]}
DEMAND = Demand(rate=40.0, duration_s=120.0, seed=1)


def line(**fields: object) -> str:
    return json.dumps({**GOOD, **fields})


def without(name: str) -> str:
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


# Reading


def test_a_line_of_mooncake_is_read_as_it_stands() -> None:
    assert read_trace([json.dumps(GOOD)]) == [Arrival(1.5, 700, 20, Lane.INTERACTIVE, "default", (1, 2))]


def test_lane_and_tenant_may_be_added() -> None:
    (arrival,) = read_trace([line(lane="batch", tenant="t7")])
    assert (arrival.lane, arrival.tenant) == (Lane.BATCH, "t7")
    (arrival,) = read_trace([line(lane="auto")])
    assert arrival.lane is None


def test_without_hash_ids_nothing_is_shared() -> None:
    (arrival,) = read_trace([without("hash_ids")])
    assert arrival.hash_ids == ()


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("{", "not JSON"),
        ("timestamp=3", "not JSON"),
        ("[1, 2]", "not an object"),
        ("3", "not an object"),
        ("null", "not an object"),
        (without("timestamp"), "timestamp is missing"),
        (without("input_length"), "input_length is missing"),
        (without("output_length"), "output_length is missing"),
        (line(timestamp=None), "timestamp is missing"),
        (line(timestamp=-1), "timestamp must be a number of at least 0, not -1"),
        (line(timestamp=float("nan")), "timestamp must be a number"),
        (line(timestamp="soon"), "timestamp must be a number of at least 0, not 'soon'"),
        (line(timestamp=True), "timestamp must be a number"),
        (line(input_length=0), "input_length must be a number of at least 1, not 0"),
        (line(input_length=[]), "input_length must be a number"),
        (line(input_length=1.5), "input_length must be a whole number, not 1.5"),
        (line(tenant=7), "tenant must be a string, not 7"),
        (line(output_length=0), "output_length must be a number of at least 1, not 0"),
        (line(output_length="7"), "output_length must be a number of at least 1, not '7'"),
        (line(output_length={}), "output_length must be a number"),
        (line(hash_ids=7), "hash_ids must be a list of whole numbers"),
        (line(hash_ids=["a"]), "hash_ids must be a list of whole numbers"),
        (line(hash_ids=[1.5]), "hash_ids must be a list of whole numbers"),
        (line(hash_ids=None), "hash_ids must be a list of whole numbers"),
        (line(lane="urgent"), "lane 'urgent'"),
        (line(lane=0), "lane 0"),
        (line(lane=["batch"]), "lane"),
        (line(timestamp=1_499), "timestamp goes back in time"),
    ],
)
def test_a_malformed_line_is_refused_by_number_and_field(bad: str, complaint: str) -> None:
    with pytest.raises(TraceError) as error:
        read_trace([json.dumps(GOOD), bad])
    assert str(error.value).startswith("line 2: ")
    assert complaint in str(error.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from([*GOOD, "lane", "tenant"]), value=json_values)
def test_whatever_a_field_holds_it_is_used_or_refused(name: str, value: object) -> None:
    """Never another error than the one that callers show."""
    complaint, trace = None, []
    try:
        trace = read_trace([line(**{name: value})])
    except TraceError as error:
        complaint = str(error)
    if complaint is not None:
        assert complaint.startswith("line 1: ")
        assert name in complaint
    else:
        assert trace[0].at_s >= 0
        assert trace[0].num_prompt >= 1
        assert trace[0].num_output >= 1


@given(st.text(max_size=30).filter(lambda text: text.strip()))
def test_any_text_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(TraceError, match=r"^line 1: "):
        read_trace([text])


@pytest.mark.parametrize("lines", [[], ["", "  \n"]])
def test_an_empty_trace_is_refused(lines: list[str]) -> None:
    with pytest.raises(TraceError, match="empty"):
        read_trace(lines)


def test_blank_lines_do_not_count_as_requests() -> None:
    assert len(read_trace([json.dumps(GOOD), "\n", json.dumps(GOOD)])) == 2


# Writing

arrivals = st.builds(
    Arrival,
    at_s=st.integers(0, 10**10).map(lambda us: us / 1e6),
    num_prompt=st.integers(1, 10**6),
    num_output=st.integers(1, 10**6),
    lane=st.sampled_from([None, *Lane]),
    tenant=st.text(max_size=10),
    hash_ids=st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
)


@given(st.lists(arrivals, min_size=1, max_size=10))
def test_what_is_written_is_read_again(trace: list[Arrival]) -> None:
    trace.sort(key=lambda arrival: arrival.at_s)
    again = read_trace(write_trace(trace))
    assert [replace(a, at_s=0.0) for a in again] == [replace(a, at_s=0.0) for a in trace]
    for a, b in zip(trace, again, strict=True):
        assert b.at_s == pytest.approx(a.at_s, abs=1e-6)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_can_be_written_and_read(name: str) -> None:
    trace = SCENARIOS[name](replace(DEMAND, duration_s=20.0))
    text = "".join(write_trace(trace))
    assert "".join(write_trace(read_trace(text.splitlines()))) == text


# Generating


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_comes_from_its_seed(name: str) -> None:
    """Invariant 14."""
    scenario = SCENARIOS[name]
    assert scenario(DEMAND) == scenario(DEMAND)
    assert scenario(DEMAND) != scenario(replace(DEMAND, seed=2))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_in_order_of_time_and_within_its_duration(name: str) -> None:
    trace = SCENARIOS[name](DEMAND)
    assert all(a.at_s <= b.at_s for a, b in pairwise(trace))
    assert trace[0].at_s >= 0
    assert trace[-1].at_s < DEMAND.duration_s
    assert all(a.num_prompt >= 1 and a.num_output >= 1 for a in trace)


@pytest.mark.parametrize(("name", "factor"), [("steady", 1.0), ("mixed", 1.0), ("sessions", 1.0)])
def test_the_rate_is_what_was_asked_for(name: str, factor: float) -> None:
    demand = replace(DEMAND, duration_s=1_000.0)
    assert len(SCENARIOS[name](demand)) / 1_000 == pytest.approx(factor * demand.rate, rel=0.15)


def test_five_quiet_tenants_share_the_steady_rate() -> None:
    trace = SCENARIOS["steady"](replace(DEMAND, duration_s=1_000.0))
    count = Counter(arrival.tenant for arrival in trace)
    assert sorted(count) == [f"quiet-{i}" for i in range(5)]
    assert max(count.values()) < 1.3 * min(count.values())
    assert {arrival.lane for arrival in trace} == {Lane.INTERACTIVE}


def test_the_noisy_tenant_starts_after_a_sixth_and_sends_five_sevenths() -> None:
    demand = replace(DEMAND, duration_s=1_200.0)
    trace = SCENARIOS["noisy-tenant"](demand)
    noisy = [arrival for arrival in trace if arrival.tenant == "noisy"]
    assert noisy[0].at_s == pytest.approx(200.0, abs=2.0)
    assert len(noisy) / 1_000 == pytest.approx(demand.rate * 5 / 7, rel=0.15)
    assert (len(trace) - len(noisy)) / 1_200 == pytest.approx(demand.rate * 2 / 7, rel=0.15)


def test_a_flash_crowd_is_ten_times_as_many_for_a_fifth_of_the_time() -> None:
    demand = replace(DEMAND, duration_s=1_000.0)
    times = [arrival.at_s for arrival in SCENARIOS["flash-crowd"](demand)]
    crowd = sum(200.0 <= at_s < 400.0 for at_s in times)
    assert crowd / 200 == pytest.approx(demand.rate, rel=0.15)
    assert (len(times) - crowd) / 800 == pytest.approx(demand.rate / 10, rel=0.2)


@pytest.mark.parametrize("name", ["noisy-burst", "batch-flood"])
def test_two_bursts_of_long_batch_requests_come_at_once(name: str) -> None:
    trace = SCENARIOS[name](DEMAND)
    batch = [arrival for arrival in trace if arrival.lane is Lane.BATCH]
    assert len(batch) == 2 * int(DEMAND.rate * DEMAND.duration_s / 10)
    assert {arrival.tenant for arrival in batch} == {"batch"}
    first, second = batch[: len(batch) // 2], batch[len(batch) // 2 :]
    for burst, at_s in ((first, 24.0), (second, 66.0)):
        assert burst[0].at_s == pytest.approx(at_s)
        assert burst[-1].at_s - burst[0].at_s < 10.0
    urgent = [arrival for arrival in trace if arrival.lane is Lane.INTERACTIVE]
    assert mean(a.num_prompt for a in batch) > 2 * mean(a.num_prompt for a in urgent)


@pytest.mark.parametrize("name", ["long-prompts", "long-first", "long-tenants"])
def test_18_long_and_11_short_prompts_come_within_191_ms_and_again_at_the_rate(name: str) -> None:
    trace = SCENARIOS[name](replace(DEMAND, rate=2.9, duration_s=20.0))
    assert len(trace) == 58
    for begin_s, burst in ((0.0, trace[:29]), (10.0, trace[29:])):
        assert Counter(arrival.num_prompt for arrival in burst) == {24_000: 18, 2_000: 11}
        assert all(begin_s <= arrival.at_s <= begin_s + 0.191 for arrival in burst)
        lengths = [arrival.num_prompt for arrival in burst]
        assert (lengths == sorted(lengths, reverse=True)) == (name != "long-prompts")
    assert len({arrival.tenant for arrival in trace}) == (10 if name == "long-tenants" else 1)
    assert {arrival.lane for arrival in trace} == {Lane.STANDARD}


def test_three_quarters_of_what_default_clients_send_is_sixty_four_streams_at_a_time() -> None:
    trace = SCENARIOS["default-clients"](replace(DEMAND, duration_s=1_000.0))
    assert {arrival.lane for arrival in trace} == {None}
    noisy = [arrival.at_s for arrival in trace if arrival.tenant == "noisy"]
    assert len(noisy) / len(trace) == pytest.approx(0.75, abs=0.05)
    assert {*Counter(noisy).values()} == {64, len(noisy) % 64} - {0}
    quiet = Counter(arrival.tenant for arrival in trace if arrival.tenant != "noisy")
    assert sorted(quiet) == ["quiet-0", "quiet-1", "quiet-2"]
    assert max(quiet.values()) < 1.3 * min(quiet.values())


def test_the_mix_is_seven_two_one_and_tenants_follow_zipf() -> None:
    trace = SCENARIOS["mixed"](replace(DEMAND, duration_s=500.0))
    lanes = Counter(arrival.lane for arrival in trace)
    parts = [lanes[lane] / len(trace) for lane in Lane]
    assert parts == pytest.approx([0.7, 0.2, 0.1], abs=0.03)
    tenants = Counter(arrival.tenant for arrival in trace)
    ranked = [tenants[f"tenant-{i}"] for i in range(10)]
    assert ranked[0] / ranked[1] == pytest.approx(2**1.1, rel=0.15)
    assert ranked[0] / ranked[9] == pytest.approx(10**1.1, rel=0.4)


@pytest.mark.parametrize("name", KINDS)
def test_lengths_are_those_of_their_kind(name: str) -> None:
    kind = KINDS[name]
    trace = SCENARIOS["steady"](Demand(rate=50.0, duration_s=400.0, kind=name, seed=3))
    prompts = [arrival.num_prompt for arrival in trace]
    assert max(prompts) <= kind.prompt.most
    assert max(arrival.num_output for arrival in trace) <= kind.output.most
    assert median(prompts) == pytest.approx(2.718281828**kind.prompt.mu, rel=0.1)


def test_scale_makes_all_lengths_longer_and_nothing_else() -> None:
    short = SCENARIOS["batch-flood"](DEMAND)
    double = SCENARIOS["batch-flood"](replace(DEMAND, scale=2.0))
    assert [(a.at_s, a.tenant, a.lane) for a in short] == [(a.at_s, a.tenant, a.lane) for a in double]
    assert sum(a.num_output for a in double) == pytest.approx(2 * sum(a.num_output for a in short), rel=0.01)


def test_code_is_burstier_than_conversation() -> None:
    def dispersion(kind: str) -> float:
        trace = SCENARIOS["steady"](Demand(rate=15.0, duration_s=1_000.0, kind=kind))
        count = Counter(int(a.at_s / 10) for a in trace if a.tenant == "quiet-0")
        windows = [count[i] for i in range(100)]
        return sum((n - mean(windows)) ** 2 for n in windows) / sum(windows)

    assert dispersion("code") > 5 * dispersion("conversation") > 5


def test_a_session_says_all_again_and_adds_to_it() -> None:
    """So that the prefix cache has what there is to find."""
    trace = sessions(replace(DEMAND, rate=5.0, duration_s=400.0))
    by_last: dict[tuple[int, ...], Arrival] = {}
    followed = 0
    for arrival in trace:
        assert len(arrival.hash_ids) == -(-arrival.num_prompt // BLOCK_TOKENS)
        assert arrival.hash_ids[0] < 20, "one of twenty system prompts"
        for length in range(len(arrival.hash_ids), 1, -1):
            before = by_last.get(arrival.hash_ids[:length])
            if before is not None:
                assert before.tenant == arrival.tenant
                assert arrival.num_prompt > before.num_prompt + before.num_output
                followed += 1
                break
        by_last[arrival.hash_ids] = arrival
    assert 0.4 < followed / len(trace) < 0.75
