"""A trace on a server that answers by the clock, and the same in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.app.bench.replay import body_of, delay, prompts, served_of
from penstock.app.reader import TimedAnswer
from penstock.priority.lanes import DEFAULT_POLICIES
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.summary import is_kept
from penstock.priority.simulator.trace import BLOCK_TOKENS, Arrival

ARRIVAL = Arrival(5.0, 100, 3)


def test_equal_hash_ids_are_equal_prefixes() -> None:
    arrivals = [
        Arrival(0, 1_100, 1, hash_ids=(1, 2, 3)),
        Arrival(0, 1_200, 1, hash_ids=(1, 2, 4)),
        Arrival(0, 700, 1, hash_ids=(9,)),
    ]
    first, second, third = prompts(arrivals, range(1_000))
    assert [len(first), len(second), len(third)] == [1_100, 1_200, 700]
    assert first[: 2 * BLOCK_TOKENS] == second[: 2 * BLOCK_TOKENS]
    assert first[2 * BLOCK_TOKENS :] != second[2 * BLOCK_TOKENS : 1_100]
    assert first[:BLOCK_TOKENS] != third[:BLOCK_TOKENS]


def test_a_request_that_allows_itself_more_samples_until_it_ends() -> None:
    plain = body_of(ARRIVAL, [5])
    assert (plain["max_tokens"], plain["temperature"], "n" in plain, "logit_bias" in plain) == (
        3,
        0,
        False,
        False,
    )
    free = body_of(replace(ARRIVAL, max_tokens=900, n=4), [5])
    assert (free["max_tokens"], free["temperature"], free["n"], free["ignore_eos"]) == (900, 1, 4, False)
    biases = [
        body_of(replace(ARRIVAL, max_tokens=900, num_output=num), [5])["logit_bias"] for num in (10, 100)
    ]
    short, long = (next(iter(bias.values())) for bias in biases)  # type: ignore[attr-defined]
    assert short == pytest.approx(long + math.log(10)), "an end ten times as likely"


def test_prompts_without_hash_ids_share_nothing() -> None:
    first, second = prompts([ARRIVAL, ARRIVAL], range(1_000))
    assert first[:16] != second[:16]


@pytest.mark.parametrize(("status", "refused"), [(429, "HTTP 429"), (503, "HTTP 503"), (500, None)])
def test_what_was_refused_or_failed_kept_nothing(status: int, refused: str | None) -> None:
    served = served_of(ARRIVAL, TimedAnswer(100.0, 100.1, error="no", status=status), 5.0)
    assert (served.refused, served.finished_s, served.ttft_s) == (refused, None, None)


def test_a_stream_that_broke_keeps_no_promise() -> None:
    served = served_of(
        ARRIVAL, TimedAnswer(0.0, 0.1, [0.1], num_output_tokens=1, error="cut", status=200), 5.0
    )
    assert not is_kept(served, DEFAULT_POLICIES)


def test_what_a_client_waits_for_beside_the_engine_delays_every_token_and_no_pace() -> None:
    machine = Machine(coefficients={"alpha_s": 0.01, "beta_s": 1e-4, "gamma_s": 1e-3, "delta_s": 0.0})
    arrivals = [Arrival(0.0, 100, 10), Arrival(0.5, 100, 1), Arrival(0.6, 10**6, 1)]
    before, after = simulate(arrivals, machine), simulate(arrivals, machine)
    delay(after, 0.25)
    for early, late in zip(before.served[:2], after.served[:2], strict=True):
        assert early.ttft_s is not None
        assert late.ttft_s == pytest.approx(early.ttft_s + 0.25)
        assert late.tpot_s == pytest.approx(early.tpot_s)
        assert early.finished_s is not None
        assert late.finished_s == pytest.approx(early.finished_s + 0.25)
    assert after.served[2] == before.served[2]
    assert after.served[2].refused
