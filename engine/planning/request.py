"""What passes through the engine: a Request as it came in, its Sequences as they are computed, and their Outputs.

Plain data: no torch, no clock, no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.params import BeamParams, Branch, Pooling, SamplingParams
from penstock.engine.planning.state_records import Prefix, SequenceState
from penstock.engine.planning.timings import Timings
from penstock.engine.text.grammar import Guide
from penstock.engine.text.thinking import Thinking


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
    keeping: Keeping | None = None
    """The part of a long sequence's keys and values that is kept; None if all are. A search over beams, and branches,
    keep all."""

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
    as work at once: the next step may compute it and takes its value on the device. Of a step with drafts, the most
    that it may bring counts, and what did not come is taken back when the step has come back.
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
    keeping: Keeping | None = field(init=False, default=None)
    """The part of its keys and values that is kept, if it may become so long that some are dropped."""
    num_dropped: int = field(init=False, default=0)
    """The tokens that were dropped: token p has the entries of `block_table` of place p - num_dropped, or none."""
    drop_at: int = field(init=False, default=NO_LIMIT)
    """Before the token at this position is computed, some are dropped."""
    horizon: int = field(init=False)
    """No step is planned that computes the token with this number, or drafts beyond it: there `max_len` ends the
    sequence, or the chosen token may be replaced by others, which the host has to know first."""
    is_simple: bool = field(init=False)
    """Nothing decides about its tokens but its text: it is an only choice, without a grammar or a bound of reasoning.
    Most are, so that little is done for each of their tokens."""
    timings: Timings = field(init=False)
    num_pending: int = field(init=False, default=0)
    """Tokens that steps in flight bring, if all of their drafts are right. They follow `token_ids`; only the device
    knows them yet."""
    num_unsure: int = field(init=False, default=0)
    """Those drafts: so many of the pending tokens may not come. `num_computed` supposes that they do, until their step
    has come back."""
    num_computed: int = field(init=False, default=0)
    num_committed: int = field(init=False, default=0)
    """The computed tokens whose step has come back: only their blocks may be hashed."""
    num_preemptions: int = field(init=False, default=0)
    rank: int = field(init=False, default=0)
    """The rank that has it, where each has sequences of its own: from its start on, until it gives way."""
    prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    """The log probabilities that have come, of the prompt tokens from the second one on."""
    pooled: list[float] = field(init=False, default_factory=list)
    """The sum of the hidden states that have come and that are pooled."""
    block_table: list[int] = field(init=False, default_factory=list)
    """By block of tokens, the KV blocks of its tables, one after another; see memory.py. The list is empty while
    the sequence does not run."""
    rewritten: list[int] = field(init=False, default_factory=list)
    """The places of `block_table` whose entries were overwritten, in order, for those who keep a copy of the table: see
    followed_table.py. Another table is another list, and its places are none of these."""
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    state: SequenceState | None = field(init=False, default=None)
    """The slots of its states while it runs; None where the model has none."""
    prefix: Prefix | None = field(init=False, default=None)
    """What was found for it when it was looked up last, while it waits."""
    awaited_hash: bytes = field(init=False, default=b"")
    """The hash of the block that it waits for another sequence to compute; empty if it waits for none."""
    fetch_asked: tuple[int, int] = field(init=False, default=(-1, -1))
    """Its preemptions, and its known blocks, when those after them were last asked for outside; see outside.py."""
    text: object = field(init=False, default=None)
    """State of the text side (a stop_strings.TextStream); the scheduler never looks inside."""
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
        is_only = request.n == 1 and request.beams is None and not request.branches
        self.is_simple = is_only and not request.sampling.is_guided and request.sampling.thinking is None
        if request.keeping is not None and self.max_len > request.keeping.most:
            self.keeping, self.drop_at = request.keeping, request.keeping.most
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
    def num_findable(self) -> int:
        """The first tokens whose blocks are those of any sequence of these tokens; later ones attend to fewer."""
        return NO_LIMIT if self.keeping is None else self.keeping.most

    @property
    def segment_end(self) -> int:
        """No step computes tokens before this place and after it, from `num_computed` on: some are dropped here."""
        if self.keeping is None or self.num_computed < self.drop_at:
            return self.drop_at
        return self.drop_at + self.keeping.stride

    def drop(self) -> None:
        """Counts tokens as dropped."""
        assert self.keeping is not None
        self.num_dropped += self.keeping.stride
        self.drop_at += self.keeping.stride
        self.timings.num_kv_dropped = self.num_dropped

    def drop_nothing(self) -> None:
        """Begins anew: no token was dropped."""
        if self.keeping is not None:
            self.num_dropped, self.drop_at = 0, self.keeping.most

    @property
    def num_remaining(self) -> int:
        """Tokens, pending ones included, whose KV is needed and that no step has computed or is computing."""
        known, last = len(self.token_ids) + self.num_pending, self.horizon - 1
        return (known if known < last else last) - self.num_computed  # min() is slower, and this is hot

    def __repr__(self) -> str:
        name = f"{self.request.request_id}/{self.index}"
        return f"Sequence({name}, computed={self.num_computed}, known={len(self.token_ids)})"
