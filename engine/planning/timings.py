"""What is remembered of a sequence: the times of what happened to it, and counts of drafts and experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple


@dataclass(slots=True)
class DraftCount:
    """Drafts of one proposer, by position: whether one is right is only known if those before it are."""

    drafted: list[int] = field(default_factory=list)
    """The drafts that were verified."""
    accepted: list[int] = field(default_factory=list)
    """The verified drafts that were right."""

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Adds drafts of one sequence in one step, of which the first `num_accepted` were right."""
        self.add(DraftCount([1] * num_drafted, [int(i < num_accepted) for i in range(num_drafted)]))

    def add(self, other: DraftCount) -> None:
        self.drafted = _sums(self.drafted, other.drafted)
        self.accepted = _sums(self.accepted, other.accepted)


def _sums(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


class ExpertSums(NamedTuple):
    """The experts that tokens chose, summed over layers and steps."""

    num_touched: int
    num_layers: int
    """The layers that this is summed over."""

    def since(self, before: ExpertSums) -> ExpertSums:
        return ExpertSums(self.num_touched - before.num_touched, self.num_layers - before.num_layers)


NO_EXPERTS = ExpertSums(0, 0)


MAX_MARKS = 256
"""Steps of one kind whose instants a sequence remembers."""


@dataclass(slots=True, kw_only=True)
class Timings:
    """The times of what happens to a sequence, in seconds on the engine's clock; -1 if it has not happened."""

    arrival_s: float
    num_prompt_tokens: int
    scheduled_s: float = -1.0
    first_token_s: float = -1.0
    finished_s: float = -1.0
    num_cached_tokens: int = -1
    """Prompt tokens whose KV was found in the prefix cache when the request was first scheduled."""
    num_fetched_tokens: int = 0
    """Those of them whose KV was brought back from outside of the device's memory, see engine/tiers."""
    num_output_tokens: int = 0
    preempted_s: list[float] = field(default_factory=list)
    """The times at which it gave way to others."""
    resumed_s: list[float] = field(default_factory=list)
    """The times at which it was scheduled again."""
    prefills: list[tuple[float, int]] = field(default_factory=list)
    """The first MAX_MARKS steps that computed prompt tokens: when each ended, and how many they were."""
    draft_steps: list[tuple[float, int, int]] = field(default_factory=list)
    """The first MAX_MARKS steps with drafts: when each ended, how many drafts it had, and how many were right."""
    drafts: dict[str, DraftCount] = field(default_factory=dict)
    """The counts of drafts by proposer."""
    num_kv_dropped: int = 0
    """Tokens whose keys and values were dropped, so that no later token attends to them."""
    experts_before: ExpertSums | None = None
    """The engine's sums when the first token came."""
    experts: ExpertSums = NO_EXPERTS
    """The experts of the steps after that one, whichever sequence's tokens chose them."""

    @property
    def num_preemptions(self) -> int:
        return len(self.preempted_s)

    def note_prefill(self, num_tokens: int, now: float) -> None:
        """Remembers a step that computed prompt tokens."""
        if len(self.prefills) < MAX_MARKS:
            self.prefills.append((now, num_tokens))

    def note_drafts(self, proposer: str, num_drafted: int, num_accepted: int, now: float) -> None:
        """Remembers a step with drafts: the right ones are among the tokens that it brought, and one more."""
        self.drafts.setdefault(proposer, DraftCount()).note(num_drafted, num_accepted)
        if len(self.draft_steps) < MAX_MARKS:
            self.draft_steps.append((now, num_drafted, num_accepted))

    def note_first_token(self, now: float, experts: ExpertSums) -> bool:
        """Returns whether this token is the first one."""
        is_first = self.first_token_s < 0
        if is_first:
            self.first_token_s, self.experts_before = now, experts
        return is_first

    def note_end(self, num_output_tokens: int, now: float, experts: ExpertSums = NO_EXPERTS) -> None:
        """Completes the timings; what the sequence did not live to see counts as happening now."""
        if self.experts_before is not None:
            self.experts = experts.since(self.experts_before)
        self.finished_s, self.num_output_tokens = now, num_output_tokens
        self.scheduled_s = self.scheduled_s if self.scheduled_s >= 0 else now
        self.first_token_s = self.first_token_s if self.first_token_s >= 0 else now
        self.num_cached_tokens = max(0, self.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class DraftSeconds:
    """The effect of drafts on the time of steps."""

    spent_s: float
    """Time beyond that of the same steps without drafts: looking for them, making and verifying them."""
    saved_s: float
    """The time that the tokens which they brought would have taken in steps without drafts."""


NO_SECONDS = DraftSeconds(0.0, 0.0)
