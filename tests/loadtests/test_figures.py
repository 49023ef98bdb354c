"""The figures of a run, against outcomes whose figures are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.bench.reader import Answer
from loadtests.figures import figures
from loadtests.outcomes import Outcome
from loadtests.report import markdown, print_report, write_report


def outcome(
    at_s: float = 0.0, *, tokens_s: tuple[float, ...] = (0.5, 0.55, 0.6), num_output: int = 3, **about: object
) -> Outcome:
    """A chat of the tenant ann that was sent at `at_s` and got its tokens so much later."""
    fields = {
        "error": None,
        "status": 200,
        "was_left": False,
        "tenant": "ann",
        "lane": "interactive",
        **about,
    }
    started_s = 1_000.0
    answer = Answer(
        started_s,
        started_s + (tokens_s[-1] if tokens_s else 0.25),
        token_times_s=[started_s + token_s for token_s in tokens_s],
        num_prompt_tokens=10,
        num_output_tokens=num_output,
        error=fields["error"],  # type: ignore[arg-type]
        status=int(str(fields["status"])),
        queue_s=0.2,
    )
    return Outcome(
        kind="chatter",
        tenant=str(fields["tenant"]),
        lane=str(fields["lane"]),
        at_s=at_s,
        lag_s=0.0,
        answer=answer,
        was_left=bool(fields["was_left"]),
    )


REFUSED = outcome(1.0, tokens_s=(), num_output=0, status=503, error="HTTP/1.1 503")
FAILED = outcome(1.0, tokens_s=(), num_output=0, status=0, error="ConnectionResetError")
LEFT = outcome(1.0, tokens_s=(), num_output=0, error="cut", was_left=True)
LATE = outcome(2.0, tokens_s=(1.5, 2.0))


def test_endings_are_counted_apart() -> None:
    found = figures([outcome(), REFUSED, FAILED, LEFT])
    assert [found[key] for key in ("completed", "rejected", "failed", "cancelled")] == [1, 1, 1, 1]
    assert found["errors"] == {"ConnectionResetError": 1}


def test_times_are_those_of_vllms_bench() -> None:
    found = figures([outcome(), outcome(3.4)])
    assert found["duration"] == pytest.approx(4.0)
    assert found["median_ttft_ms"] == pytest.approx(500)
    assert found["mean_tpot_ms"] == pytest.approx(50)
    assert found["p99_itl_ms"] == pytest.approx(50)
    assert found["mean_e2el_ms"] == pytest.approx(600)
    assert found["output_throughput"] == pytest.approx(6 / 4.0)
    assert found["total_token_throughput"] == pytest.approx(26 / 4.0)
    assert found["max_concurrent_requests"] == 1
    assert found["max_output_tokens_per_s"] == 3


def test_a_frame_of_several_tokens_counts_them_all() -> None:
    found = figures([outcome(tokens_s=(0.5, 0.9), num_output=5)])
    assert found["mean_tpot_ms"] == pytest.approx(100)
    assert found["mean_itl_ms"] == pytest.approx(400)
    assert found["max_output_tokens_per_s"] == 5


def test_promises_are_of_all_offered_and_of_those_let_in() -> None:
    found = figures([outcome(), outcome(0.5), LATE, REFUSED, LEFT])
    assert found["slo_attainment"] == {"interactive": 0.5}
    assert found["slo_attainment_of_admitted"] == {"interactive": pytest.approx(2 / 3)}
    assert found["request_goodput"] == pytest.approx(2 / 4.0)


def test_who_polls_counts_into_no_promise() -> None:
    polled = outcome(lane="standard", tokens_s=())
    assert figures([outcome(), polled])["slo_attainment"] == {"interactive": 1.0}


def test_the_servers_lane_goes_before_the_one_asked_for() -> None:
    answer = Answer(0.0, 1.0, lane="batch")
    assert Outcome(kind="x", tenant="y", lane="interactive", at_s=0, lag_s=0, answer=answer).lane == "batch"


def test_equal_work_is_a_jain_index_of_one() -> None:
    assert figures([outcome(tenant="ann"), outcome(tenant="bob")])["jain_index"] == pytest.approx(1.0)
    assert figures([outcome(tenant="ann"), outcome(tenant="bob", tokens_s=(), error="lost")])[
        "jain_index"
    ] == pytest.approx(0.5)


def test_queue_waits_are_by_lane_and_tenant() -> None:
    bob = outcome(tenant="bob", lane="batch")
    found = figures([outcome(), replace(bob, answer=replace(bob.answer, queue_s=0.7))])["queue_ms"]
    assert {name: waits["p99"] for name, waits in found.items()} == {
        "interactive, ann": pytest.approx(200),
        "batch, bob": pytest.approx(700),
    }


def test_outcomes_travel_as_json() -> None:
    assert Outcome.from_json(json.loads(json.dumps(LATE.as_json()))) == LATE


@pytest.mark.parametrize("outcomes", [[], [LEFT], [REFUSED], [FAILED], [outcome(), LATE, REFUSED]])
def test_a_report_of_anything_is_json_and_a_page(outcomes: list[Outcome], tmp_path: Path) -> None:
    data, page = write_report(tmp_path / "new", figures(outcomes))
    assert json.loads(data.read_text(), parse_constant=pytest.fail)["completed"] == sum(
        one.ending == "done" for one in outcomes
    )
    assert "</html>" in page.read_text()


MIXED = [
    outcome(1_000.0, tokens_s=(0.3, 0.4, 0.9), num_output=7),
    replace(outcome(1_000.5, tokens_s=(1.2, 1.3, 1.6)), lag_s=0.25),
    outcome(1_001.0, tokens_s=(0.1, 0.2), tenant="bob", lane="batch", num_output=2),
    replace(outcome(1_001.5, tokens_s=(), num_output=2, tenant="bob", lane="standard"), kind="background"),
    outcome(1_002.0, tokens_s=(), num_output=0, status=503, error="HTTP/1.1 503"),
    outcome(1_002.5, tokens_s=(), num_output=0, status=0, error="<lost>"),
    outcome(1_002.6, tokens_s=(), num_output=0, status=0, error="<lost>"),
    outcome(1_003.0, tokens_s=(0.5,), num_output=1, error="cut", was_left=True),
]
"""Outcomes of every sort."""


def rounded(value: object) -> object:
    """The value with floats in six digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


FIGURES = 0
REPORT = 0


def test_all_figures_of_a_mixed_run() -> None:
    assert rounded(figures(MIXED)) == FIGURES
