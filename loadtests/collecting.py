"""Outcomes on their way: to locust's own statistics as they come, from workers to the master, and into the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from locust.env import Environment
from locust.event import EventHook
from locust.runners import WorkerRunner

from loadtests.figures import figures
from loadtests.outcomes import Outcome
from loadtests.report import print_report, write_report
from loadtests.settings import read_lanes


class Collector:
    """All outcomes of one run; a worker's until it reports them."""

    def __init__(self, environment: Environment) -> None:
        self.outcomes: list[Outcome] = []
        self._environment = environment
        events = environment.events
        events.request_outcome = EventHook()
        events.request_outcome.add_listener(self.note)
        events.test_start.add_listener(self.begin)
        events.report_to_master.add_listener(self.to_master)
        events.worker_report.add_listener(self.from_worker)
        events.test_stop.add_listener(self.finish)
        events.quit.add_listener(self.quit)

    def note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._tell_locust(outcome)

    def begin(self, **_: Any) -> None:
        self.outcomes.clear()

    def to_master(self, data: dict[str, Any], **_: Any) -> None:
        data["outcomes"] = [outcome.as_json() for outcome in self.outcomes]
        self.outcomes.clear()

    def from_worker(self, data: dict[str, Any], **_: Any) -> None:
        self.outcomes += map(Outcome.from_json, data.get("outcomes", ()))

    def finish(self, **_: Any) -> None:
        """From the web page there may be many runs."""
        if not self._environment.parsed_options.headless:
            self._report()

    def quit(self, **_: Any) -> None:
        """Without it there is one; only now the last worker has said all, and locust has printed its tables."""
        if self._environment.parsed_options.headless:
            self._report()

    def _report(self) -> None:
        if isinstance(self._environment.runner, WorkerRunner):
            return
        options = self._environment.parsed_options
        found = figures(self.outcomes, read_lanes(options))
        print_report(found)
        if options.report:
            write_report(Path(options.report), found)

    def _tell_locust(self, outcome: Outcome) -> None:
        """A row for each kind of time, user, lane and tenant; a request that failed is a failure of `e2e`."""
        if outcome.ending in ("refused", "left"):
            self._fire(outcome.ending, outcome, outcome.e2e_ms)
            return
        if outcome.ending == "failed":
            self._fire("e2e", outcome, outcome.e2e_ms, RuntimeError(outcome.answer.error))
            return
        queue_s = outcome.answer.queue_s
        times = {
            "ttft": outcome.ttft_ms,
            "tpot": outcome.tpot_ms,
            "longest itl": max(outcome.gaps_ms, default=None),
            "queue": None if queue_s is None else 1000 * queue_s,
            "e2e": outcome.e2e_ms,
        }
        for name, value in times.items():
            if value is not None:
                self._fire(name, outcome, value)

    def _fire(self, what: str, outcome: Outcome, ms: float, error: Exception | None = None) -> None:
        self._environment.events.request.fire(
            request_type=what,
            name=f"{outcome.kind}, {outcome.lane}, {outcome.tenant}",
            response_time=ms,
            response_length=outcome.answer.num_output_tokens,
            exception=error,
            context={},
        )
