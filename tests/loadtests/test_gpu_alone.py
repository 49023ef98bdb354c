"""The pace of steps, of an engine whose every step takes a known time."""

from __future__ import annotations

from loadtests.gpu import alone
from penstock.engine.planning.report import StepReport


def test_only_steps_of_all_streams_that_prefill_nothing_are_a_pace() -> None:
    def report(num_decode_tokens: int, num_prefill_tokens: int = 0) -> StepReport:
        return StepReport(
            outputs=[],
            started_s=0.0,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=num_prefill_tokens,
        )

    reports = [
        (0.0, report(3)),
        (1.0, report(2)),
        (3.0, report(2)),
        (7.0, report(2, 5)),
        (15.0, report(2)),
        (31.0, report(2)),
        (63.0, report(1)),
    ]
    assert alone._steady(reports, 2) == [2.0, 16.0]
