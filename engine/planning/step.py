"""The contract between planning and execution: a Plan goes in, a StepResult comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from penstock.engine.planning.prefix_events import PrefixEvent
from penstock.engine.planning.price import Price
from penstock.engine.planning.request import (
    NO_LIMIT,
    DraftCount,
    Output,
    Pooling,
    Request,
    Sequence,
    TokenLogprobs,
)
from penstock.engine.planning.states import ChunkState


def num_attended(start: int, end: int) -> int:
    """The pairs of a token of `[start, end)` and a token that it attends to: itself and all before it."""
    return (end * (end + 1) - start * (start + 1)) // 2


OPEN = -1
"""A draft that the draft model is yet to make."""


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
class Plan:
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
            num_attended(chunk.start, chunk.start + chunk.num_tokens)
            for chunk in self.chunks
            if chunk.start < chunk.sequence.num_prompt_tokens
        )

    @property
    def num_context(self) -> int:
        """Tokens whose KV the step reads, over all its sequences."""
        return sum(chunk.start + chunk.num_tokens for chunk in self.chunks)


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


class DeviceError(RuntimeError):
    """The device is lost: nothing that runs on it can be saved."""


class OutOfMemory(RuntimeError):
    """The device had no room for this step; a smaller one may fit."""


class StepInFlight(Protocol):
    """A step whose pass through the model was launched."""

    def choose(self) -> None:
        """Launches the choice of the step's tokens from its logits; whatever limits the choice must be known by now.

        Called once, before the next step is launched.

        Raises:
            OutOfMemory: nothing was chosen; the step may be launched again, as a smaller one.
            DeviceError: the device is lost.
            Exception: this step failed, the next may work.
        """

    def wait(self) -> StepResult:
        """Waits until the step has ended, and returns its results. Called once, in the order of launches.

        Raises:
            DeviceError: the device is lost.
            Exception: this step failed, the next may work.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts:
    """The facts of a runner that planning has to know."""

    num_blocks: int
    """KV blocks in the pool, block 0 included."""
    block_size: int
    """Tokens per block."""
    max_batch_tokens: int
    """Tokens of the largest step."""
    num_ahead: int = 0
    """Steps that may be launched while an earlier one has not been waited for: 0 or 1."""
    plain_ahead_s: float | None = None
    """If given, none but plain steps run beside the host, and none that is expected to take longer: who arrives while
    one runs may have to wait for the next one, too."""
    max_model_len: int = NO_LIMIT
    """Tokens of the longest sequence that it has positions for."""
    windows: tuple[int, ...] = (0,)
    """The tokens that a token sees, by block table of a sequence; 0 if it sees all of them."""
    max_drafts: int = 0
    """Drafts that a chunk may have."""
    max_rows: int = NO_LIMIT
    """Chunks and drafts that a step with drafts may have."""
    max_scored: int = NO_LIMIT
    """Tokens of prompts that a step scores at most while other sequences run."""
    has_draft_model: bool = False
    """Whether there is a model that makes drafts."""
    num_states: int = 0
    """State slots, slot 0 included; 0 if no layer has a state."""
    num_pending: int = 0
    """The pending rows that a state slot has room for."""
    has_experts: bool = False
    """Whether tokens choose among experts, so that each token more of a step adds less time."""


class Runner(Protocol):
    """Execution, as the engine's step thread sees it. Every call comes from that one thread."""

    def load(self) -> RunnerFacts:
        """Loads the weights, allocates the KV cache and warms up."""

    def draft(self, plan: Plan) -> list[list[int]]:
        """Has the draft model make the drafts of a plan that are open; called before the plan is launched.

        Returns when all is done.

        Returns:
            By open chunk, its drafts: at most as many as are open; none while more of the sequence is to be read than
            fits into a pass.

        Raises:
            Exception: there are no drafts; the step itself may work.
        """

    def launch(self, plan: Plan) -> StepInFlight:
        """Launches the pass of one step. It runs after the steps launched before, and sees their writes.

        The plan's sequences may change as soon as the step's tokens are chosen; what the step needs of them was taken
        by then. Block copies that were made are taken off the plan, so that they are made once.

        Raises:
            OutOfMemory: nothing that later steps need was changed.
            DeviceError: the device is lost.
            Exception: this step failed, the next may work.
        """

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Frees the runner's state of these sequences, which ended or were preempted."""

    def close(self) -> None:
        """Frees everything that the runner holds."""


@dataclass(frozen=True, slots=True)
class DraftSeconds:
    """The effect of drafts on the time of steps."""

    spent_s: float
    """Time beyond that of the same steps without drafts: looking for them, making and verifying them."""
    saved_s: float
    """The time that the tokens which they brought would have taken in steps without drafts."""


NO_SECONDS = DraftSeconds(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Allowance:
    """The work that the queue grants one step."""

    num_decodes: int
    """Running sequences that may decode; the least urgent ones take turns if these are fewer."""
    num_prefill: int
    """Tokens of prompts, and of what has to be computed again."""
    most_s: float = inf
    """No draft is granted a step that is expected to take longer with it."""


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


@dataclass(slots=True, kw_only=True)
class StepReport:
    """Everything that one step brought, delivered at once."""

    outputs: list[Output]
    started_s: float
    duration_s: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)
    """The drafts that the step verified, and the right ones, each of which brought one token more, by proposer."""
    draft_seconds: DraftSeconds = NO_SECONDS
    failed_proposers: ListLike[str] = ()
    """The proposers that failed since the report before."""
    num_running: int = 0
    num_waiting: int = 0
    """Sequences that were preempted, or that wait for a prefix that another sequence computes."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    """Evictable cached blocks included."""
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    prefix_events: Iterable[PrefixEvent] = ()
    """The events of cached blocks since the report before."""
    experts: ExpertUse | None = None
    """None if they were not counted in this step."""
    error: str | None = None
    """The step failed, and with it the sequences whose outputs say so."""
