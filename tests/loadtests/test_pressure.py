"""What a run under pressure is judged by: real over forecast time, and what an honest refusal spared."""

from __future__ import annotations

import pytest

from loadtests.pressure import figures, pool_blocks, simulated, traffic
from penstock.app.reader import TimedAnswer
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.trace import Arrival

PROMISE_S = DEFAULT_POLICIES[Lane.STANDARD].ttft_s
SLOW = Machine(
    coefficients={"alpha_s": 0.05, "beta_s": 0.004, "gamma_s": 1e-3, "delta_s": 0.0}, num_kv_tokens=40_000
)


def test_traffic_is_of_many_lengths_and_its_pool_holds_half_of_sixteen_streams() -> None:
    arrivals = traffic(2.0, 300.0)
    assert 450 < len(arrivals) < 750
    assert all(128 <= one.num_prompt <= 8_000 and 8 <= one.num_output <= 800 for one in arrivals)
    assert max(one.num_prompt for one in arrivals) > 3_000
    assert 0.08 < sum(one.n == 4 for one in arrivals) / len(arrivals) < 0.25
    assert 0.4 < sum(one.max_tokens == 2_048 for one in arrivals) / len(arrivals) < 0.6
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)
    some = [Arrival(0.0, 100, 50, n=2), Arrival(1.0, 300, 100)]
    assert pool_blocks(some) == 16 * 300 // 2 // 16


def test_figures_leave_out_what_the_server_learned_from(capsys: pytest.CaptureFixture[str]) -> None:
    arrivals = [Arrival(at_s, 100, 5) for at_s in (0.0, 20.0, 40.0, 60.0, 100.0)]
    answers = [
        TimedAnswer(0.0, 9.0, [8.0], predicted_ttft_s=1.0, status=200),
        TimedAnswer(0.0, 9.0, [2.0], predicted_ttft_s=1.0, status=200),
        TimedAnswer(0.0, PROMISE_S + 9, [PROMISE_S + 2.0], predicted_ttft_s=PROMISE_S + 2.0, status=200),
        TimedAnswer(0.0, 1.0, error="full", status=503),
        TimedAnswer(0.0, 1.0, error="cut", status=200),
    ]
    found = figures(arrivals, answers)
    counts = [found[name] for name in ("requests", "refused", "failed", "late")]
    assert counts == [4, 1, 1, 1]
    assert found["ratio_p50"] == pytest.approx(1.5)
    assert found["ttft_p50_s"] == pytest.approx((PROMISE_S + 4.0) / 2)
    assert capsys.readouterr().err == "pressure: cut\n"


def test_what_is_refused_is_let_in_one_at_a_time() -> None:
    arrivals = [Arrival(0.5 * place, 2_000, 20) for place in range(60)]
    refused = [one for one in simulate(arrivals, SLOW).served if one.refused == "promise_out_of_reach"]
    found = simulated(arrivals, SLOW)
    assert found["refused"] == len(refused) > 0
    assert 0 < int(str(found["tried"])) <= len(refused)
    assert 0 <= int(str(found["at_others_cost"])) <= int(str(found["in_time"])) <= int(str(found["tried"]))
    assert 0 < float(str(found["ratio_p10"])) <= float(str(found["ratio_p90"])) < 3
