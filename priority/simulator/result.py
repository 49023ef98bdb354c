"""The outcomes of simulated requests, and the making of requests from a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.prefix_index import with_hashes
from penstock.engine.planning.request import Request
from penstock.priority.lanes import Lane, Urgency
from penstock.priority.simulator.trace import BLOCK_TOKENS, Arrival
from penstock.priority.verdict import Refusal

BLOCK_SIZE = 16


@dataclass(slots=True)
class Served:
    """The outcome of one request of the trace. Times are seconds on the virtual clock."""

    arrival: Arrival
    lane: Lane = field(init=False)
    """The lane that it was let into."""
    first_token_s: float | None = None
    finished_s: float | None = None
    num_tokens: int = 0
    longest_gap_s: float = 0.0
    last_token_s: float = 0.0
    predicted_s: float | None = None
    promised_s: float = inf
    """The time to its first token that it was promised when it was let in."""
    refused: str | None = None
    retry_after_s: float = 0.0
    num_preemptions: int = 0
    num_cached: int = 0
    num_ended: int = 0
    """Choices that have all their tokens."""

    def __post_init__(self) -> None:
        self.lane = urgency_of(self.arrival).lane

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival.at_s

    def refuse(self, refusal: Refusal) -> None:
        self.refused, self.retry_after_s = refusal.reason, refusal.retry_after_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for one token."""
        if self.num_tokens < 2 or self.first_token_s is None:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass(slots=True)
class Result:
    """One simulated run."""

    policy: str
    served: list[Served]
    duration_s: float
    num_steps: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    """Over all machines."""
    charged: dict[str, int] = field(default_factory=dict)
    """By tenant, as the queues have it: 2048ths of a prompt token. Not of `fcfs` and `strict`."""
    num_read: int = 0
    """Tokens whose KV came back from a tier."""
    num_pulled: int = 0
    """Tokens whose KV came from another replica, in place of being computed."""


def urgency_of(arrival: Arrival) -> Urgency:
    return Urgency(Lane.STANDARD, Lane.INTERACTIVE) if arrival.lane is None else Urgency(arrival.lane)


def request_of(number: int, arrival: Arrival) -> Request:
    urgency = urgency_of(arrival)
    request = Request(
        request_id=str(number),
        prompt_token_ids=_prompt(number, arrival),
        sampling=SamplingParams(max_tokens=arrival.max_tokens or arrival.num_output),
        n=arrival.n,
        arrival_s=arrival.at_s,
        lane=urgency.lane,
        tried_lane=urgency.tried,
        tenant=arrival.tenant,
    )
    return with_hashes(request, BLOCK_SIZE) if arrival.hash_ids else request


def _prompt(number: int, arrival: Arrival) -> tuple[int, ...]:
    """Token ids that are equal exactly where the trace says that prompts are."""
    if not arrival.hash_ids:
        return (number,) * arrival.num_prompt
    tokens: list[int] = []
    for i in range(-(-arrival.num_prompt // BLOCK_TOKENS)):
        # Past the ids that the trace gives, a prompt is its own.
        block = arrival.hash_ids[i] if i < len(arrival.hash_ids) else -number - 1
        tokens += [block] * BLOCK_TOKENS
    return tuple(tokens[: arrival.num_prompt])
