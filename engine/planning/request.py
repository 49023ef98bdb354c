"""The data of planning: a Request as it came in, its Sequences as they are computed, and the Outputs of each step.

Plain data: no torch, no clock, no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, zip_longest
from typing import Literal, NamedTuple

from penstock.engine.planning.states import Prefix, SequenceState
from penstock.engine.text.grammar import Grammar, Guide
from penstock.engine.text.thinking import Thinking, ThinkingBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. The engine does not check the values again."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    typical_p: float = 1.0
    top_a: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Token t of choice i depends on (seed, i, t) and its logits, on nothing else."""
    max_tokens: int = 16
    """The most output tokens; with 0 the prompt is computed, and no token is chosen after it."""
    min_tokens: int = 0
    """The output tokens before which no end-of-sequence, stop token or stop string counts."""
    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    """Whether the text ends with the stop string, or before it."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    shown_special: frozenset[int] = frozenset()
    """Special tokens whose text is shown; that of others is not."""
    num_logprobs: int | None = None
    """The number of likely tokens whose log probabilities are told beside that of the chosen token, before any
    processing; None if no log probabilities are computed."""
    num_prompt_logprobs: int | None = None
    """The likely tokens that are told at every prompt token but the first, likewise. Then all of the prompt is
    computed, whatever is cached."""
    grammar: Grammar | None = None
    """The grammar that the answer has to match. The sequence may end exactly where the grammar accepts."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be chosen; empty if all may."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that are kept out of the output: the last one of a run is banned where those before it stand."""
    thinking: ThinkingBudget | None = None
    """The bound on the reasoning; None if there is none."""

    @property
    def is_guided(self) -> bool:
        """Whether masks limit the tokens that may be chosen."""
        return self.grammar is not None or bool(self.allowed_token_ids or self.bad_words)

    @property
    def num_thinking(self) -> int | None:
        """The output tokens after which reasoning is ended; None if there is no such bound."""
        return None if self.thinking is None else self.thinking.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """The way in which the likeliest answers as a whole are searched for, in place of choosing token by token."""

    length_penalty: float = 1.0
    """An answer's score is the sum of its log probabilities by its number of tokens to the power of this."""
    early_stopping: bool | Literal["never"] = False
    """True: the search is over with as many answers as it has beams. False: when the best beam, as long as it is, has a
    lower score than all of them; "never": when it could get no better score up to the greatest length."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer: those of the model, unless they are ignored, and the request's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Tokens that continue a prompt or another branch of it, and after which log probabilities are reported.

    The branches of a request are numbered level by level, those that go on from the same one side by side. Branch 0 is
    the prompt itself.
    """

    token_ids: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()
    """The possible next tokens, whose log probabilities are reported."""
    parent: int = 0
    """The number of the branch that it goes on from."""
    first_child: int = 0
    num_children: int = 0

    @property
    def children(self) -> range:
        """The numbers of the branches that go on from it."""
        return range(self.first_child, self.first_child + self.num_children)


class Pooling(StrEnum):
    """Which hidden states, after the final norm, become the embedding of a prompt."""

    LAST = "last"
    FIRST = "first"
    MEAN = "mean"
    """The mean over all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it came in. It never changes."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    """The number of choices. Each becomes a Sequence, and all of them share the prompt's blocks."""
    index: int = 0
    """The index of the only choice, on which its tokens depend, if another process makes the other choices."""
    beams: BeamParams | None = None
    """The search over `n` beams whose best answers are the choices, the best one first, and all at the end; None
    without a search. Of the sampling parameters only the lengths and `num_logprobs` count for it."""
    arrival_s: float = 0.0
    lane: int = 1
    """0 is the most urgent. The engine preempts higher numbers first and knows nothing else about lanes."""
    tried_lane: int | None = None
    """A more urgent lane that takes the request instead, if that lane's promise is forecast to be kept."""
    ttft_s: float | None = None
    """The seconds to the first token that are promised to it; None for those of its lane."""
    tenant: str = ""
    salt: bytes = b""
    """Starts the hash chain of the prompt's blocks: requests with different salts never share a block."""
    block_hashes: tuple[bytes, ...] = field(default=(), repr=False)
    """The hashes of the prompt's first blocks, as far as they are known; planning computes the others."""
    output_token_ids: tuple[int, ...] = ()
    """Output tokens that are known already: the one choice continues after them, as it does after a preemption."""
    pooling: Pooling | None = None
    """The way in which the embedding of the prompt is made; None if no embedding is wanted."""
    branches: tuple[Branch, ...] = ()
    """The texts that are scored after the prompt, none of which is chosen. Each is one of the `n` choices."""

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens that are given, those of branches included."""
        if not self.branches:
            return len(self.prompt_token_ids)
        return len(self.prompt_token_ids) + sum(len(branch.token_ids) for branch in self.branches)

    def token_ids_of(self, index: int) -> list[int]:
        """The tokens that one choice begins with."""
        parts: list[tuple[int, ...]] = []
        while self.branches and index:
            parts.append(self.branches[index].token_ids)
            index = self.branches[index].parent
        return [*self.prompt_token_ids, *self.output_token_ids, *chain.from_iterable(reversed(parts))]

    @property
    def num_logprobs(self) -> int | None:
        """The number of likely tokens to report at each position, as in SamplingParams; a search chooses among them."""
        told = self.sampling.num_logprobs
        return told if self.beams is None else max(told or 0, self.n + len(self.beams.end_token_ids))

    @property
    def reads_prompt(self) -> bool:
        """Whether every prompt token is needed, so that all are computed even if they are cached."""
        return self.sampling.num_prompt_logprobs is not None or self.pooling in (Pooling.FIRST, Pooling.MEAN)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one place: of the token that is there, and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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


@dataclass(slots=True)
class Output:  # one for every token: keyword arguments would double the cost of making it
    """The new tokens and text of one choice of one request, after one step.

    `text` is only ever whole characters and never part of a stop string; it can be empty while a character or a
    possible stop string is incomplete. Exactly one Output per choice carries a `finish_reason`, and it is the last.
    """

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """The log probabilities of the prompt tokens from the second one on, with the first output of choice 0."""
    embedding: list[float] | None = None
    """The embedding of the prompt, with the first output, if it is wanted."""
    scores: list[float] | None = None
    """The log probabilities of the candidates of a branch."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """The text for the client, set with FinishReason.FAILED."""
    timings: Timings | None = None
    """The timings of the sequence, set with every finish_reason."""
    stop: str | None = None
    """The stop string that ended it, if one did."""


NO_LIMIT = 1 << 62


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of one request while the engine computes it.

    `token_ids` are its known tokens, prompt and output. The KV of the first `num_computed` of them is in the blocks of
    `block_table`, or is being written by a step that is planned already. The work that is left is the difference,
    whatever its cause: a new prompt, the rest of a chunked one, a decode, a resume after preemption.

    A step that samples brings a token whose value is on the device only, until the step has come back. The token counts
    as work at once: the next step may compute it and takes its value on the device.
    """

    request: Request
    index: int = 0
    order: int = 0
    """The place in the order of arrival; a preempted sequence keeps it."""
    max_len: int = NO_LIMIT
    """The sequence ends when it has so many tokens; the KV of the last one is never needed. The argument bounds prompt
    and output tokens, whatever the request asks for."""
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    horizon: int = field(init=False)
    """No step is planned that computes the token with this number, or drafts beyond it: there `max_len` ends the
    sequence, or the chosen token may be replaced by others, which the host has to know first."""
    timings: Timings = field(init=False)
    num_pending: int = field(init=False, default=0)
    """Tokens that steps in flight bring. They follow `token_ids`; only the device knows them yet."""
    num_computed: int = field(init=False, default=0)
    num_committed: int = field(init=False, default=0)
    """The computed tokens whose step has come back: only their blocks may be hashed."""
    num_preemptions: int = field(init=False, default=0)
    prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    """The log probabilities that have come, of the prompt tokens from the second one on."""
    pooled: list[float] = field(init=False, default_factory=list)
    """The sum of the hidden states that have come and that are pooled."""
    block_table: list[int] = field(init=False, default_factory=list)
    """By block of tokens, the KV blocks of its tables, one after another; see memory.py. The list is empty while
    the sequence does not run."""
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    state: SequenceState | None = field(init=False, default=None)
    """The slots of its states while it runs; None where the model has none."""
    prefix: Prefix | None = field(init=False, default=None)
    """What was found for it when it was looked up last, while it waits."""
    awaited_hash: bytes = field(init=False, default=b"")
    """The hash of the block that it waits for another sequence to compute; empty if it waits for none."""
    text: object = field(init=False, default=None)
    """State of the text side (a stopping.TextStream); the scheduler never looks inside."""
    guide: Guide | None = field(init=False, default=None)
    """The state of the masks of a guided sequence, from its first choice on; it has taken all output tokens."""
    thinking: Thinking | None = field(init=False, default=None)
    """The state of reasoning with a budget, from the first choice on; it has taken all output tokens."""
    stop: str | None = field(init=False, default=None)
    """The stop string that ended it, if one did."""
    followers: range = field(init=False, default=range(0))
    """The branches that begin after this one, which go on from the same branch."""
    finish_reason: FinishReason | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        request = self.request
        self.token_ids = request.token_ids_of(self.index)
        self.num_prompt_tokens = num_prompt = len(self.token_ids) - len(request.output_token_ids)
        longest = min(num_prompt + request.sampling.max_tokens, self.max_len)
        self.horizon = self.max_len = max(longest, len(self.token_ids) + 1)
        if request.sampling.thinking is not None:
            num_free = max(request.sampling.thinking.num_tokens, len(request.output_token_ids))
            self.horizon = min(self.max_len, num_prompt + num_free + 1)
        self.timings = Timings(arrival_s=request.arrival_s, num_prompt_tokens=num_prompt)

    def inherit(self, parent: Sequence) -> None:
        """Takes over what happened to another sequence of its request, which it stands in for from now on."""
        self.timings, self.num_preemptions = replace(parent.timings), parent.num_preemptions
        self.prompt_logprobs = parent.prompt_logprobs

    @property
    def together(self) -> ListLike[Sequence]:
        """The sequences that give way if it does, itself included."""
        return (self,)

    @property
    def num_seats(self) -> int:
        """Seats that there have to be when it starts."""
        return 1

    def give_way(self) -> Sequence:
        """The sequence that is recomputed for a group that gave way together: this one."""
        return self

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.index

    @property
    def branch(self) -> Branch | None:
        """The branch of its request that it computes, if there are branches."""
        return self.request.branches[self.index] if self.request.branches else None

    @property
    def unbegun(self) -> Iterator[int]:
        """The choices that would begin when this one has come further, or has ended."""
        branch, branches = self.branch, self.request.branches
        if branch is None:
            yield from range(1, self.request.n if self.index == self.num_output_tokens == 0 else 1)
            return
        pending = [*branch.children, *self.followers]
        for index in pending:
            yield index
            pending += branches[index].children

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_scored(self) -> bool:
        """Whether this choice reports the prompt's log probabilities, which are reported once for all choices."""
        return self.request.sampling.num_prompt_logprobs is not None and self.index == 0

    @property
    def num_reusable(self) -> int:
        """The known tokens that need not be computed if their KV is there.

        The last one, whose logits choose the next, is not among them, nor are those whose logits or hidden states are
        wanted.
        """
        num_known, num_scored = len(self.token_ids) - 1, len(self.prompt_logprobs)
        if self.index or not self.request.reads_prompt:
            return num_known
        return num_known if self.is_scored and num_scored == self.num_prompt_tokens - 1 else num_scored

    @property
    def num_remaining(self) -> int:
        """Tokens, pending ones included, whose KV is needed and that no step has computed or is computing."""
        known, last = len(self.token_ids) + self.num_pending, self.horizon - 1
        return (known if known < last else last) - self.num_computed  # min() is slower, and this is hot

    def __repr__(self) -> str:
        name = f"{self.request.request_id}/{self.index}"
        return f"Sequence({name}, computed={self.num_computed}, known={len(self.token_ids)})"
