"""What passes between planning and execution: a StepPlan goes in, a StepResult comes out."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from penstock.engine.planning.keeping import num_attended
from penstock.engine.planning.params import Pooling
from penstock.engine.planning.price import Price
from penstock.engine.planning.request import Sequence, TokenLogprobs
from penstock.engine.planning.state_records import ChunkState

OPEN = -1
"""A draft that the draft model is yet to make."""


def before_open(drafts: list[int]) -> list[int]:
    """The drafts before the first that a draft model could not make, for want of a finite logit."""
    return drafts[: drafts.index(OPEN)] if OPEN in drafts else drafts


@dataclass(slots=True)
class Chunk:
    """The tokens `[start, start + num_tokens)` of one sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """True if the chunk reaches the last known token, so that its logits choose the next one."""
    incarnation: int = 0
    """The number of times that the sequence had been preempted when the chunk was planned."""
    drafts: ListLike[int] = ()
    """The last tokens of the chunk: guesses of what follows the last token there is. All of them sample. Those that the
    draft model is to make are all OPEN until `Runner.draft` has made them."""
    proposer: str = ""
    """The name of the proposer of the drafts."""
    num_accepted: int = 0
    """The number of right drafts, once the step has come back."""
    state: ChunkState | None = None
    """The slots of its sequence's states; None where the model has none."""

    @property
    def is_stale(self) -> bool:
        """Whether its sequence gave way since: the blocks that it writes are no longer the sequence's."""
        return self.incarnation != self.sequence.num_preemptions

    @property
    def depth(self) -> int:
        """The tokens before it that its sequence has keys and values of."""
        return self.start - self.sequence.num_dropped

    @property
    def is_open(self) -> bool:
        """Whether the draft model is yet to make its drafts."""
        return OPEN in self.drafts[:1]

    @property
    def num_logprobs(self) -> int | None:
        """The log probabilities that are wanted of the tokens it brings, as in SamplingParams."""
        return self.sequence.request.num_logprobs

    @property
    def candidates(self) -> ListLike[int]:
        """The tokens whose log probabilities are wanted after its last one."""
        branch = self.sequence.branch
        return branch.candidates if branch is not None and self.samples else ()

    @property
    def scored(self) -> range:
        """Positions of the prompt tokens whose wanted log probabilities follow from the chunk's logits.

        Each of these tokens comes after one of the chunk.
        """
        sequence = self.sequence
        if not sequence.is_scored:
            return range(0)
        return range(self.start + 1, min(self.start + self.num_tokens + 1, sequence.num_prompt_tokens))

    @property
    def pooled(self) -> range:
        """Positions of the prompt tokens whose hidden states it adds to an embedding."""
        pooling, num_prompt = self.sequence.request.pooling, self.sequence.num_prompt_tokens
        if pooling is None:
            return range(0)
        first = num_prompt - 1 if pooling is Pooling.LAST else 0
        end = 1 if pooling is Pooling.FIRST else num_prompt
        return range(max(first, self.start), min(end, self.start + self.num_tokens))


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that grammars allow in the rows of a step that are sampled."""

    bits: bytearray
    """[rows][num_words] little-endian words of 32 bits, one for each token; those beyond the words are not allowed."""
    num_words: int
    first: list[int]
    """The row of each chunk's first choice, after which the rows of its drafts follow; -1 if it may bring any token."""


@dataclass(slots=True)
class StepPlan:
    """One step: what to compute, after which block copies."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, target block), to be copied before anything is written: copy-on-write."""
    num_tokens: int = 0
    number: int = 0
    """Steps are numbered in the order in which they are planned; 0 has no number."""
    drafting_s: float = 0.0
    """The part of its time that went into making drafts."""
    masks: Masks | None = None
    """Limits the choice of its tokens; known when `StepInFlight.choose` is called."""
    turn: int = -1
    """The turn of its `Pace` in which it was planned; -1 if its time says nothing about that."""
    price: Price | None = None
    """The expected time with drafts and without; None if it was not computed, or too little was measured."""
    is_behind: bool = False
    """Whether a proposer still has to read the tokens that it proposes from."""
    experts: ExpertUse | None = None
    """The experts that its tokens chose, once the step has come back."""
    is_beside: bool = False
    """Whether the host plans the next step while this one runs."""
    rows: tuple[int, ...] = ()
    """The tokens that each rank computes in it, where each has sequences of its own: all go through the experts
    together."""

    @property
    def num_drafts(self) -> int:
        return sum(len(chunk.drafts) for chunk in self.chunks)

    @property
    def num_prefill(self) -> int:
        """Tokens of chunks that begin within a prompt."""
        return sum(
            chunk.num_tokens - len(chunk.drafts)
            for chunk in self.chunks
            if chunk.start < chunk.sequence.num_prompt_tokens
        )

    @property
    def num_attended(self) -> int:
        """Pairs of a token of such a chunk and a token that it attends to, itself included."""
        return sum(
            num_attended(chunk.depth, chunk.depth + chunk.num_tokens)
            for chunk in self.chunks
            if chunk.start < chunk.sequence.num_prompt_tokens
        )

    @property
    def num_context(self) -> int:
        """Tokens whose KV the step reads, over all its sequences."""
        return sum(chunk.depth + chunk.num_tokens for chunk in self.chunks)


@dataclass(slots=True)
class Sampled:
    """The tokens that one sampling chunk brought."""

    token_ids: list[int]
    """One token; with drafts, also those after the drafts that turned out right, in order."""
    logprobs: list[TokenLogprobs] | None = None
    scores: list[float] | None = None
    """The log probabilities of the chunk's candidates."""
    error: str | None = None
    """This sequence alone failed (its logits were not finite, say)."""
    is_finite: bool = True
    """If False, the content of the sequence's blocks may be the reason."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How unevenly recent tokens chose among a layer's experts; 1 is even."""

    experts: float
    """The tokens of the most chosen expert, in units of the mean."""
    ranks: float
    """The same for ranks that have whole experts; 1 if each rank has a part of every expert."""
    rows: float = 1.0
    """The tokens of the rank with the most of a step, in units of the mean, where ranks have sequences of their own."""


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """The experts that the tokens of a step chose."""

    num_touched: int
    """The experts that some token chose, summed over layers."""
    num_layers: int
    """The layers with experts that the step went through."""
    load: ExpertLoad | None = None
    """None if it was not made up in this step."""


@dataclass(slots=True)
class StepResult:
    """The results of a step.

    `sampled[i]` belongs to the i-th chunk of the plan that samples, `scored[i]` to the i-th one that scores tokens,
    `pooled[i]` to the i-th one that pools hidden states: it is their sum.
    """

    sampled: list[Sampled]
    scored: ListLike[list[TokenLogprobs]] = ()
    pooled: ListLike[list[float]] = ()
    experts: ExpertUse | None = None
    """None if they were not counted in this step."""
    made: ListLike[list[int]] = ()
    """By open chunk, the drafts that were made of it on the device: as many as were open, -1 where there is none."""
    drafting_s: float = 0.0
    """The time that these took."""
