"""Checks whether one model can draft for another, and finds the tokens that they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.text.tokenizer import Tokenizer

_LEAST_SHARED = 0.25
"""The share of the model's tokens that a draft model has to have."""


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The tokens of a draft model of another vocabulary that stand for a target's, by their ids in the target."""

    same: list[int]
    """The same token, the only one that is drafted; -1 if there is none."""
    context: list[int]
    """The token that the draft reads in its place: without the same one, the last of the tokens that spell it."""


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model's checkpoint."""

    folder: Path
    tokens: SharedTokens | None = None
    """None if it has its target's vocabulary."""


def check_draft(target: ModelConfig, draft: ModelConfig, max_model_len: int) -> None:
    """Checks that a draft model can follow its target wherever that goes.

    Args:
        max_model_len: tokens of the longest sequence that is served.

    Raises:
        CheckpointError: it cannot; the message says why.
    """
    if draft.spec.states:
        raise CheckpointError(
            f"{draft.architecture} has layers with a state, and a draft model may have none: it goes back where its "
            "drafts are wrong, and a state does not"
        )
    if draft.max_position < max_model_len:
        raise CheckpointError(
            f"the draft model has {draft.max_position} positions, fewer than the {max_model_len} tokens that a "
            f"sequence may have; --max-model-len {draft.max_position} would do"
        )
    if target.context_window:
        raise CheckpointError(
            f"the model forgets all but {target.context_window} tokens, and a draft model would need them"
        )


def shared_tokens(target: Tokenizer, draft: Tokenizer) -> SharedTokens | None:
    """The tokens of the same bytes that a draft model shares with its target; None if the two have the same vocabulary.

    Timor et al., "Accelerating LLM inference with lossless speculative decoding algorithms for heterogeneous
    vocabularies", 2025, draft from this intersection, too.

    Raises:
        CheckpointError: they are too few, or one is a special token in one of the models only.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    if ours == theirs and target.special_ids == draft.special_ids:
        return None
    by_bytes = {draft.token_bytes(i): i for i in sorted(theirs, key=lambda i: (not draft.is_byte(i), -i))}
    same, context, num_shared = [], [], 0
    for token_id in range(max(ours, default=-1) + 1):
        spelled = target.token_bytes(token_id)
        found = by_bytes.get(spelled, -1) if spelled else -1
        if found >= 0:
            num_shared += 1
            _check_special(target, token_id, draft, found)
        same.append(found)
        context.append(found if found >= 0 else _last_token(draft, spelled))
    if num_shared < _LEAST_SHARED * len(ours):
        raise CheckpointError(
            f"the draft model has another vocabulary: {num_shared} of the model's {len(ours)} tokens are among its "
            f"tokens, and fewer than {_LEAST_SHARED:.0%} are too few to draft with"
        )
    return SharedTokens(same, context)


def _check_special(target: Tokenizer, token_id: int, draft: Tokenizer, found: int) -> None:
    is_special = token_id in target.special_ids
    if is_special != (found in draft.special_ids):
        which = "the model only" if is_special else "the draft model only"
        text = target.vocabulary[token_id]
        raise CheckpointError(
            f"the draft model has other special tokens: {text!r} ({token_id}) is one in {which}"
        )


def _last_token(draft: Tokenizer, spelled: bytes) -> int:
    """The last of the draft's tokens that spell a token that it does not have."""
    token_ids = draft.encode(spelled.decode(errors="ignore"))
    return token_ids[-1] if token_ids else 0
