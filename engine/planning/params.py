"""What a request asks for: how tokens are chosen, searched for, scored or pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from penstock.engine.text.grammar import Grammar
from penstock.engine.text.thinking import ThinkingBudget
from penstock.engine.text.watermark import Watermark


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
    watermark: Watermark | None = None
    """The watermark of chosen tokens; None if they have none."""

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
