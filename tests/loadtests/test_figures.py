"""The figures of a run, against outcomes whose figures are known."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtests.figures import figures
from loadtests.outcomes import Outcome
from loadtests.report import markdown, print_report, write_report
from loadtests.settings import add_arguments, read_lanes
from penstock.app.reader import Answer
from penstock.priority.lanes import DEFAULT_POLICIES, Lane


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
    outcome = Outcome(kind="x", tenant="y", lane="interactive", at_s=0, lag_s=0, answer=answer)
    assert (outcome.lane, outcome.ending) == ("batch", "done")


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


def on_another_clock(one: Outcome, later_s: float) -> Outcome:
    answer = one.answer
    times_s = [time_s + later_s for time_s in answer.token_times_s]
    started_s, ended_s = answer.started_s + later_s, answer.ended_s + later_s
    return replace(one, answer=replace(answer, started_s=started_s, ended_s=ended_s, token_times_s=times_s))


MIXED = [
    outcome(1_000.0, tokens_s=(0.3, 0.4, 0.9), num_output=9),
    replace(outcome(1_000.5, tokens_s=(1.2, 1.3, 1.6)), lag_s=0.25),
    on_another_clock(outcome(1_001.0, tokens_s=(0.1, 0.2), tenant="bob", lane="batch", num_output=8), 0.75),
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


FIGURES = {'duration': 3.5,
 'completed': 4,
 'failed': 2,
 'rejected': 1,
 'cancelled': 1,
 'total_input_tokens': 40,
 'total_output_tokens': 22,
 'request_throughput': 1.14286,
 'output_throughput': 6.28571,
 'total_token_throughput': 17.7143,
 'max_output_tokens_per_s': 10.0,
 'max_concurrent_requests': 2,
 'mean_ttft_ms': 533.333,
 'median_ttft_ms': 300.0,
 'std_ttft_ms': 478.423,
 'p50_ttft_ms': 300.0,
 'p90_ttft_ms': 1020.0,
 'p95_ttft_ms': 1110.0,
 'p99_ttft_ms': 1182.0,
 'mean_tpot_ms': 96.4286,
 'median_tpot_ms': 75.0,
 'std_tpot_ms': 77.3168,
 'p50_tpot_ms': 75.0,
 'p90_tpot_ms': 175.0,
 'p95_tpot_ms': 187.5,
 'p99_tpot_ms': 197.5,
 'mean_itl_ms': 220.0,
 'median_itl_ms': 100.0,
 'std_itl_ms': 160.0,
 'p50_itl_ms': 100.0,
 'p90_itl_ms': 420.0,
 'p95_itl_ms': 460.0,
 'p99_itl_ms': 492.0,
 'mean_e2el_ms': 737.5,
 'median_e2el_ms': 575.0,
 'std_e2el_ms': 569.402,
 'p50_e2el_ms': 575.0,
 'p90_e2el_ms': 1390.0,
 'p95_e2el_ms': 1495.0,
 'p99_e2el_ms': 1579.0,
 'request_goodput': 0.285714,
 'slo_attainment': {'interactive': 0.2, 'batch': None},
 'slo_attainment_of_admitted': {'interactive': 0.25, 'batch': None},
 'jain_index': 0.938089,
 'batch_share': 0.37155,
 'refused_p99_ms': 250.0,
 'tenants': {'ann': {'offered': 5,
                     'refused': 1,
                     'kept': 1,
                     'attainment': 0.2,
                     'attainment_of_admitted': 0.25,
                     'ttft_s': {'p50': 0.75, 'p90': 1.11, 'p99': 1.191},
                     'tpot_s': {'p50': 0.1375, 'p90': 0.1875, 'p99': 0.19875},
                     'work': 90454},
             'bob': {'offered': 1,
                     'refused': 0,
                     'kept': 0,
                     'attainment': None,
                     'attainment_of_admitted': None,
                     'ttft_s': {'p50': 0.1, 'p90': 0.1, 'p99': 0.1},
                     'tpot_s': {'p50': 0.0142857, 'p90': 0.0142857, 'p99': 0.0142857},
                     'work': 53478}},
 'queue_ms': {'batch, bob': {'p50': 200.0, 'p90': 200.0, 'p95': 200.0, 'p99': 200.0},
              'interactive, ann': {'p50': 200.0, 'p90': 200.0, 'p95': 200.0, 'p99': 200.0},
              'standard, bob': {'p50': 200.0, 'p90': 200.0, 'p95': 200.0, 'p99': 200.0}},
 'client_lag_p99_ms': 232.5,
 'errors': {'<lost>': 2},
 'kinds': {'background, standard': {'requests': 1,
                                    'done': 1,
                                    'left': 0,
                                    'refused': 0,
                                    'failed': 0,
                                    'ttft_p50_ms': None,
                                    'ttft_p99_ms': None,
                                    'tpot_p50_ms': None,
                                    'tpot_p99_ms': None,
                                    'e2e_p99_ms': 250.0},
           'chatter, batch': {'requests': 1,
                              'done': 1,
                              'left': 0,
                              'refused': 0,
                              'failed': 0,
                              'ttft_p50_ms': 100.0,
                              'ttft_p99_ms': 100.0,
                              'tpot_p50_ms': 14.2857,
                              'tpot_p99_ms': 14.2857,
                              'e2e_p99_ms': 200.0},
           'chatter, interactive': {'requests': 6,
                                    'done': 2,
                                    'left': 1,
                                    'refused': 1,
                                    'failed': 2,
                                    'ttft_p50_ms': 750.0,
                                    'ttft_p99_ms': 1191.0,
                                    'tpot_p50_ms': 137.5,
                                    'tpot_p99_ms': 198.75,
                                    'e2e_p99_ms': 1593.0}}}  # fmt: skip

REPORT = """
the whole run
---------------------------------  -----
seconds                              3.5
completed                              4
failed                                 2
refused                                1
left                                   1
requests/s                          1.14
of them with their promise kept/s  0.286
output tokens/s                     6.29
most requests at once                  2
TTFT P50, ms                         300
TTFT P99, ms                       1,182
ITL P50, ms                          100
ITL P99, ms                          492
refusals took, P99, ms               250
Jain's index of the tenants' work  0.938
client late by, P99, ms              232

users, lane           requests  refused  left  failed  TTFT P50    P99  TPOT P50   P99  whole P99 ms
--------------------  --------  -------  ----  ------  --------  -----  --------  ----  ------------
background, standard         1        0     0       0         -      -         -     -           250
chatter, batch               1        0     0       0       100    100      14.3  14.3           200
chatter, interactive         6        1     1       2       750  1,191       137   199         1,593

promises kept  of all offered  of those let in
-------------  --------------  ---------------
interactive               20%              25%
batch                       -                -

failed 0 times: e0

failed 1 times: e1

failed 2 times: e2

failed 3 times: e3

failed 4 times: e4
"""


def test_all_figures_of_a_mixed_run() -> None:
    assert rounded(figures(MIXED)) == FIGURES


def test_the_report_of_a_mixed_run(capsys: pytest.CaptureFixture[str]) -> None:
    print_report({**figures(MIXED), "errors": {f"e{i}": i for i in range(6)}})
    assert capsys.readouterr().out == REPORT


def test_a_page_is_a_table_for_each_of_the_reports(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    write_report(folder, figures([outcome()]))
    assert figures([]) == {"completed": 0, "failed": 0, "rejected": 0, "cancelled": 0}
    data, page = write_report(folder, figures([]))
    assert data.read_text() == json.dumps(figures([]), indent=1) + "\n"
    rows = "<tr><th>requests</th><th>number</th></tr>\n<tr><td>all</td><td>0</td></tr>"
    assert f"<h1>Penstock under load</h1>\n<table>\n{rows}\n</table>\n</html>\n" in page.read_text()
    assert markdown(["a", "b"], [["1|2", "<"]]) == "| a | b |\n| --- | --- |\n| 1/2 | < |"


def test_flags_have_these_defaults() -> None:
    parser = locust_parser()
    assert vars(parser.parse_args([])) == {
        "model": "penstock-demo", "rate": 0.5, "load_shape": "constant", "tenants": "", "promise_ttft": 1.0,
        "promise_tpot": 0.1, "report": "",
    }  # fmt: skip
    given = (
        "--model m --rate 2.5 --load-shape steps --tenants a=b --promise-ttft 3 --promise-tpot 0.5 --report r"
    )
    options = parser.parse_args(given.split())
    assert (options.model, options.rate, options.load_shape, options.report) == ("m", 2.5, "steps", "r")
    lanes = read_lanes(options)
    assert (lanes[Lane.INTERACTIVE].ttft_s, lanes[Lane.INTERACTIVE].tpot_s) == (3.0, 0.5)
    assert {lane: lanes[lane] for lane in list(Lane)[1:]} == {
        lane: DEFAULT_POLICIES[lane] for lane in list(Lane)[1:]
    }
    assert parser.secrets == {"--tenants"}


class _Parser(argparse.ArgumentParser):
    """Stands for locust's, which cannot be imported here: it replaces the sockets and threads of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: set[str] = set()

    def add_argument(self, *names: str, env_var: str = "", is_secret: bool = False, **more: Any) -> Any:
        assert not env_var or env_var == f"LOADTEST_{names[0].strip('-').upper()}"
        if is_secret:
            self.secrets.update(names)
        return super().add_argument(*names, **more)


def locust_parser() -> _Parser:
    parser = _Parser()
    add_arguments(parser)
    return parser
