"""A trace on a server that answers by the clock, and the same in the simulator."""

from __future__ import annotations

import pytest

from penstock.app.bench.replay import delay, print_comparison, prompts, served_of
from penstock.app.reader import Answer
from penstock.priority.lanes import DEFAULT_POLICIES
from penstock.priority.simulator.result import Result
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.summary import is_kept, summarise
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


def test_prompts_without_hash_ids_share_nothing() -> None:
    first, second = prompts([ARRIVAL, ARRIVAL], range(1_000))
    assert first[:16] != second[:16]


def test_an_answer_is_told_on_the_clock_of_the_trace() -> None:
    served = served_of(ARRIVAL, Answer(100.0, 100.6, [100.5, 100.6], num_output_tokens=3, status=200), 5.0)
    assert served.ttft_s == pytest.approx(0.5)
    assert served.tpot_s == pytest.approx(0.05)
    assert served.finished_s == pytest.approx(5.6)


@pytest.mark.parametrize(("status", "refused"), [(429, "HTTP 429"), (503, "HTTP 503"), (500, None)])
def test_what_was_refused_or_failed_kept_nothing(status: int, refused: str | None) -> None:
    served = served_of(ARRIVAL, Answer(100.0, 100.1, error="no", status=status), 5.0)
    assert (served.refused, served.finished_s, served.ttft_s) == (refused, None, None)


def test_a_stream_that_broke_keeps_no_promise() -> None:
    served = served_of(ARRIVAL, Answer(0.0, 0.1, [0.1], num_output_tokens=1, error="cut", status=200), 5.0)
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


def test_both_stand_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(coefficients={"alpha_s": 0.01, "beta_s": 1e-4, "gamma_s": 1e-3, "delta_s": 0.0})
    simulated = simulate([Arrival(0.0, 100, 10), Arrival(0.5, 100, 10)], machine)
    real = Result("served", simulated.served, simulated.duration_s)
    print_comparison("trace", summarise(real), summarise(simulated))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["served", "/", "simulated", "1.00", "1.00", "1.00", "1.00"]
    assert lines[-2].split()[1:] == lines[-3].split()[1:]
