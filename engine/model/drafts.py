"""Whether one model can draft for another."""

from __future__ import annotations

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.planning.tokenizer import Tokenizer


def check_draft(target: ModelConfig, draft: ModelConfig, max_model_len: int) -> None:
    """Checks that a draft model can follow its target wherever that goes.

    Args:
        max_model_len: tokens of the longest sequence that is served.

    Raises:
        CheckpointError: it cannot; the message says why.
    """
    if draft.max_position < max_model_len:
        raise CheckpointError(
            f"the draft model has {draft.max_position} positions, fewer than the {max_model_len} tokens that a "
            f"sequence may have; --max-model-len {draft.max_position} would do"
        )
    if target.context_window:
        raise CheckpointError(
            f"the model forgets all but {target.context_window} tokens, and a draft model would need them"
        )


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """Checks that every token of a draft model is the same token of its target.

    Raises:
        CheckpointError: naming what differs.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    for token_id in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(token_id), theirs.get(token_id)
        if one != other:
            raise CheckpointError(
                f"the draft model has another vocabulary: token {token_id} is {_told(other)}, "
                f"and {_told(one)} in the model"
            )
    differing = sorted(target.special_ids ^ draft.special_ids)
    if differing:
        text, is_ours = ours.get(differing[0]), differing[0] in target.special_ids
        which = "the model only" if is_ours else "the draft model only"
        raise CheckpointError(
            f"the draft model has other special tokens: {text!r} ({differing[0]}) is one in {which}"
        )


def _told(token: str | None) -> str:
    return "missing" if token is None else repr(token)
