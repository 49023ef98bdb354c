"""What was asked (Request), how far it is (Sequence), what came out (Output).

Plain data of the planning side: no torch, no clock, no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Already validated: the engine does not check it again."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Token t of choice i depends on (seed, i, t) and its logits, on nothing else."""
    max_tokens: int = 16
    min_tokens: int = 0
    """No end-of-sequence, stop token or stop string before so many output tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """None: none are computed. k: those of the chosen token and of the k most likely, before any processing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it came in; immutable."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    """Choices wanted; each becomes a Sequence, and all of them share the prompt's blocks."""
    arrival_s: float = 0.0
    lane: int = 1
    """0 is the most urgent. The engine preempts higher numbers first and knows nothing else about lanes."""
    tenant: str = ""
    salt: bytes = b""
    """Starts the hash chain of the prompt's blocks: requests with different salts never share a block."""
    output_token_ids: tuple[int, ...] = ()
    """Output that is known already: the one choice goes on after it, as after a preemption."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one output token: the chosen one and the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a finished sequence's time went. Seconds on the engine's clock."""

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache when the request was first scheduled."""
    num_output_tokens: int
    num_preemptions: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Output:
    """What one step brought for one choice of one request.

    `text` is only ever whole characters and never part of a stop string; it can be empty while a character or a
    possible stop string is incomplete. Exactly one Output per choice carries a `finish_reason`, and it is the last.
    """

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Set with FinishReason.FAILED: what to tell the client."""
    timings: Timings | None = None
    """Set with every finish_reason."""


NO_LIMIT = 1 << 62


class Sequence:
    """One choice of one request on its way through the engine.

    `token_ids` is what is known (prompt and output); the KV of the first `num_computed` of them is in `block_table` or
    is being written by a step that was already planned. Work to do is the difference, whatever its cause: a fresh
    prompt, a chunk of one, a decode, a resume after preemption.

    A step that samples brings a token whose value is on the device only until the step has come back. It counts as
    work to do at once: the next step may compute it and take its value there.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "finish_reason",
        "first_token_s",
        "index",
        "max_len",
        "num_cached_tokens",
        "num_committed",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "request",
        "scheduled_s",
        "text",
        "token_ids",
    )

    def __init__(self, request: Request, index: int = 0, order: int = 0, max_len: int = NO_LIMIT) -> None:
        """`max_len`: prompt and output tokens that any sequence can have, whatever its request asks for."""
        self.request = request
        self.index = index
        self.order = order
        """Place in the engine's order of arrival; a preempted sequence keeps it."""
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_len = max(
            min(self.num_prompt_tokens + request.sampling.max_tokens, max_len), len(self.token_ids) + 1
        )
        """With so many tokens it ends; the KV of the last one is never needed."""
        self.num_pending = 0
        """Tokens that steps in flight bring: they follow `token_ids`, and nobody here knows them yet."""
        self.num_computed = 0
        self.num_committed = 0
        """Of those computed, the ones whose step has come back: only their blocks may be hashed."""
        self.num_cached_tokens = -1
        """-1 until first scheduled."""
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.text: object = None
        """The text side's state (a sampling.stopping.TextStream); planning never looks inside."""
        self.scheduled_s = -1.0
        self.first_token_s = -1.0
        self.finish_reason: FinishReason | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.index

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens, pending ones included, whose KV is needed and neither computed nor on its way."""
        known, last = len(self.token_ids) + self.num_pending, self.max_len - 1
        return (known if known < last else last) - self.num_computed  # not min(): several times a token

    def __repr__(self) -> str:
        name = f"{self.request.request_id}/{self.index}"
        return f"Sequence({name}, computed={self.num_computed}, known={len(self.token_ids)})"
