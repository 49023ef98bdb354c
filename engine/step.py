"""The contract between planning and execution: a Plan goes in, a StepResult comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine.request import Output, Request, Sequence, TokenLogprobs


@dataclass(slots=True)
class Chunk:
    """The tokens `[start, start + num_tokens)` of one sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """True if the chunk reaches the last known token, so that its logits choose the next one."""


@dataclass(slots=True)
class Plan:
    """One step: what to compute, after which block copies."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, target block), to be copied before anything is written: copy-on-write."""
    num_tokens: int = 0


@dataclass(slots=True)
class Sampled:
    """What one sampling chunk brought."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    """This sequence alone failed (its logits were not finite, say)."""


@dataclass(slots=True)
class StepResult:
    """`sampled[i]` belongs to the i-th chunk of the plan that samples."""

    sampled: list[Sampled]


class DeviceError(RuntimeError):
    """The device is lost: nothing that runs on it can be saved."""


class Runner(Protocol):
    """Execution, as the engine's step thread sees it. Every call comes from that one thread."""

    num_blocks: int
    """KV blocks in the pool, known after `load`."""
    block_size: int

    def load(self) -> None:
        """Loads weights, allocates KV, warms up."""

    def execute(self, plan: Plan) -> StepResult:
        """Runs one step.

        Raises:
            DeviceError: the device is lost.
            Exception: this step failed, the next may work.
        """

    def close(self) -> None:
        """Gives everything back."""


class RequestQueue(Protocol):
    """Where the engine takes its next request from, at the moment it has room for one; `priority` implements it.

    Called from the step thread while the event loop adds and removes; the implementation holds its own lock.
    """

    def take(self, fits: Callable[[Request], bool]) -> Request | None:
        """The next request, removed from the queue, or None if there is none whose turn it is and that fits."""

    def charge(self, work: list[tuple[Request, int, int]]) -> None:
        """What a step did: (request, prompt tokens computed for it, output tokens it brought). Called once per step."""

    def victim(self, running: list[Sequence]) -> Sequence | None:
        """Which sequence gives way when KV blocks run out; None if none may."""


@dataclass(slots=True, kw_only=True)
class StepReport:
    """All that one step brought, delivered in one piece."""

    outputs: list[Output]
    started_s: float
    duration_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    """Taken from the queue but not running: preempted, or waiting for a prefix that another sequence computes."""
    num_blocks: int
    num_free_blocks: int
    """Evictable cached blocks included."""
    num_preemptions: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    error: str | None = None
    """The step failed, and with it the sequences whose outputs say so."""
