"""The engine's steps and the event loop's delays, kept only while somebody watches."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator

from penstock.engine.planning.report import StepReport

MAX_STEPS = 256
"""Steps that one event shows: of more, the last ones."""
_SUMS = (
    *("prefill_tokens", "decode_tokens", "draft_tokens", "accepted_tokens"),
    *("prefix_query_tokens", "prefix_hit_tokens", "preemptions", "experts_touched", "expert_layers"),
)
_COLUMNS = ("started_ms", "duration_ms", "prefill", "decode", "drafts", "accepted")


class StepWatch:
    """The events since one listener last looked."""

    def __init__(self, now: float, num_output_tokens: int) -> None:
        """`num_output_tokens` is the count, of all time, of tokens brought to clients."""
        self._began_s = now
        self._num_output_tokens = num_output_tokens
        self._clear()

    def _clear(self) -> None:
        self._steps: deque[tuple[float, float, int, int, int, int]] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._busy_s = self._lag_s = self._spent_s = self._saved_s = 0.0
        self._sums = Counter(dict.fromkeys(_SUMS, 0))

    def note(self, report: StepReport) -> None:
        num_drafts = sum(count.num_drafted for count in report.drafts.values())
        num_accepted = sum(count.num_accepted for count in report.drafts.values())
        tokens = (report.num_prefill_tokens, report.num_decode_tokens, num_drafts, num_accepted)
        others = (report.num_prefix_query_tokens, report.num_prefix_hit_tokens, report.num_preemptions)
        use = report.experts
        experts = (0, 0) if use is None else (use.num_touched, use.num_layers)
        self._sums.update(dict(zip(_SUMS, (*tokens, *others, *experts), strict=True)))
        self._spent_s += report.draft_seconds.spent_s
        self._saved_s += report.draft_seconds.saved_s
        if any(tokens[:2]):  # else it reports what happened between steps
            self._num_steps += 1
            self._busy_s += report.duration_s
            self._steps.append((report.started_s, report.duration_s, *tokens))

    def note_lag(self, lag_s: float) -> None:
        self._lag_s = max(self._lag_s, lag_s)

    def take(self, now: float, num_output_tokens: int) -> dict[str, object]:
        """The data of an event `steps`; what happens from here on is in the next one."""
        rows = [
            (_ms(started_s - self._began_s), _ms(duration_s), *numbers)
            for started_s, duration_s, *numbers in self._steps
        ]
        event: dict[str, object] = {
            "at_ms": _ms(now - self._began_s),
            "num_steps": self._num_steps,
            "busy_ms": _ms(self._busy_s),
            "draft_spent_ms": _ms(self._spent_s),
            "draft_saved_ms": _ms(self._saved_s),
            "loop_lag_ms": _ms(self._lag_s),
            "output_tokens": num_output_tokens - self._num_output_tokens,
            **self._sums,
            "steps": {name: [row[i] for row in rows] for i, name in enumerate(_COLUMNS)},
        }
        self._num_output_tokens = num_output_tokens
        self._clear()
        return event


class Watches:
    """All listeners."""

    def __init__(self, clock: Callable[[], float], num_output_tokens: Callable[[], int]) -> None:
        self._clock = clock
        self._num_output_tokens = num_output_tokens
        self._watches: dict[StepWatch, None] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[], dict[str, object]]]:
        """Gives a function that returns the work of the steps since its last call."""
        watch = StepWatch(self._clock(), self._num_output_tokens())
        self._watches[watch] = None
        try:
            yield lambda: watch.take(self._clock(), self._num_output_tokens())
        finally:
            del self._watches[watch]

    def note(self, report: StepReport) -> None:
        """Called with every report."""
        for watch in self._watches:
            watch.note(report)

    def note_lag(self, lag_s: float) -> None:
        """Notes how late the event loop ran a timer."""
        for watch in self._watches:
            watch.note_lag(lag_s)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
