"""The queue from which the engine takes requests, as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from math import floor, inf, sqrt
from typing import Protocol

from penstock.engine.planning.keeping import num_attended
from penstock.engine.planning.request import Request, Sequence

_ROUNDING = 1e-6
"""The part of a token that may be missing to a whole one by rounding."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The work that the queue grants one step."""

    num_decodes: int
    """Running sequences that may decode; the least urgent ones take turns if these are fewer."""
    num_prefill: int
    """Tokens of prompts, and of what has to be computed again, if they are the first of their prompt: later ones, which
    attend to more, take the place of several."""
    most_s: float = inf
    """No draft is granted a step that is expected to take longer with it."""
    attended_each: float = 0.0
    """The prompt tokens that take as long as attending to one token more."""
    context_each: float = 0.0
    """The prompt tokens that take as long as reading the KV of one token, once in a step."""
    least: int = 0
    """The tokens of a prompt that a step may have, however long they take."""

    @property
    def prefill_work(self) -> float:
        """The work of the prompt tokens that are granted."""
        return self.work(0, self.num_prefill)

    def work(self, start: int, num_tokens: int) -> float:
        """The work of the tokens `[start, start + num_tokens)` of a prompt, in prompt tokens that attend to nothing."""
        end = start + num_tokens
        return num_tokens + self.attended_each * num_attended(start, end) + self.context_each * end

    def tokens_within(self, work: float, start: int) -> int:
        """The most tokens of a prompt from `start` on that are no more than so much work; fewer than 1 if none are."""
        each = 1 + self.attended_each * (start + 0.5) + self.context_each
        left = work - self.context_each * start
        # The positive x that solves each * x + attended_each * x^2 / 2 = left.
        exact = 2 * left / (each + sqrt(each**2 + 2 * self.attended_each * max(0.0, left)))
        return floor(exact + _ROUNDING)


UNLIMITED = Allowance(1 << 30, 1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The work of a step, and the state of the engine after it."""

    num_prefill_tokens: int
    num_decode_tokens: int
    """Drafts included."""
    num_drafts: int = 0
    num_accepted: int = 0
    """Drafts that were right, each of which brought a token more."""
    num_context_tokens: int
    """Tokens whose KV the step read, over all its sequences."""
    num_attended: int = 0
    """Pairs of a prompt token that it computed and a token that this one attends to."""
    duration_s: float
    """The time that the step took, without the time that went into making its drafts."""
    num_running: int
    max_num_seqs: int
    max_batch_tokens: int
    num_free_tokens: int
    """Tokens that there is room for in the KV pool, evictable blocks included."""
    num_kv_tokens: int = 0
    """Tokens that there is room for in all of the KV pool."""
    preempted: ListLike[tuple[int, int]] = ()
    """Lane and known tokens of each sequence that gave way and waits to go on."""


StepSeconds = Callable[[int, int, int, int], float]
"""The time that a step is expected to take, by its prompt tokens, its decoded tokens with their drafts, the tokens
whose KV it reads, and the pairs of `num_attended`; 0 while too little was measured."""


class RequestQueue(Protocol):
    """The queue from which the engine takes a request when it has room for one; `priority` implements it.

    Called from the step thread while the event loop adds and removes; the implementation holds its own lock.
    """

    def allowance(
        self, running: list[Sequence], decodes: list[Sequence], chunked: list[Sequence]
    ) -> Allowance:
        """Returns how much the next step may do. Called once per step, first.

        Args:
            running: all running sequences.
            decodes: those with one token to compute.
            chunked: those with more.
        """

    def take(
        self, fits: Callable[[Request], bool], above: int | None = None, before: Request | None = None
    ) -> Request | None:
        """Removes and returns the next request, or None if none whose turn it is fits.

        Args:
            above: only one that may go before the work of that lane.
            before: a running request of that lane; one that may go before the rest of its prompt counts too.
        """

    def passed_over(self) -> Request | None:
        """Returns the request that has waited too long, if any; others leave it room."""

    def charge(self, work: list[tuple[Request, int, int, int]], now: float) -> None:
        """Charges the work of a step. Called once per step.

        Args:
            work: request, prompt tokens computed, output tokens brought, and the tokens that the sequence has then.
        """

    def observe(self, load: StepLoad) -> None:
        """Takes the measured load of a step. Called once per step, last."""

    def step_seconds(self, num_prefill: int, num_decode: int, num_context: int, num_attended: int) -> float:
        """Returns the expected time of a step, by those that were observed; see `StepSeconds`."""

    def settle(self, request: Request, now: float, sequence: Sequence | None = None) -> None:
        """Notes that one choice of the request has ended; called once for each.

        Args:
            sequence: the choice; None if it never began.
        """

    def victim(self, running: list[Sequence], beneficiary: Sequence) -> Sequence | None:
        """Chooses the running sequence that gives way when `beneficiary`, which runs, has no KV block to go on.

        None stands for `beneficiary` itself.
        """

    def giving_way(self, request: Request, running: list[Sequence]) -> list[Sequence]:
        """The running sequences that may give way to a request whose turn it is and that lacks room, best first."""
