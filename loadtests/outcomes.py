"""The outcome of one request, as users report it and reports count it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isnan
from typing import Any, Literal

from penstock.app.bench.replay import served_of
from penstock.app.reader import Answer
from penstock.priority.lanes import parse_lane
from penstock.priority.simulator.result import Served
from penstock.priority.simulator.trace import Arrival

Ending = Literal["done", "left", "refused", "failed"]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request of a user."""

    kind: str
    """Which sort of user sent it."""
    tenant: str
    lane: str
    """The lane that was asked for; the server's word goes before it."""
    at_s: float
    """When it was to be sent, in seconds since 1970."""
    lag_s: float
    """By how much later it was sent, for the client was late. Times of the answer count from when it was to be sent."""
    answer: Answer
    was_left: bool = False
    """Whether its user went away on purpose."""

    def __post_init__(self) -> None:
        self.lane = self.answer.lane or self.lane

    @property
    def ending(self) -> Ending:
        if self.answer.was_refused:
            return "refused"
        if self.was_left:
            return "left"
        return "failed" if self.answer.error else "done"

    @property
    def ttft_ms(self) -> float | None:
        return self.answer.ttft_s * 1000 if self.answer.token_times_s else None

    @property
    def tpot_ms(self) -> float | None:
        """Per token after the first."""
        tpot_ms = self.answer.tpot_s * 1000
        return None if isnan(tpot_ms) else tpot_ms

    @property
    def e2e_ms(self) -> float:
        return (self.answer.ended_s - self.answer.started_s) * 1000

    @property
    def gaps_ms(self) -> list[float]:
        return [gap * 1000 for gap in self.answer.gaps_s]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Outcome:
        return cls(**{**fields, "answer": Answer(**fields["answer"])})

    def served(self) -> Served:
        """Writes it as the simulator does, on the clock of `at_s`, so that both are counted by one rule."""
        answer = self.answer
        arrival = Arrival(
            self.at_s, answer.num_prompt_tokens, answer.num_output_tokens, parse_lane(self.lane), self.tenant
        )
        return served_of(arrival, answer, self.at_s)
