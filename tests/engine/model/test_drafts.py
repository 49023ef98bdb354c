from __future__ import annotations

import json

import pytest
import tokenizers

from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_config, read_tokenizer
from penstock.engine.model.drafts import check_draft, shared_tokens
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import byte_level_tokenizer, metaspace_tokenizer
from tests.engine.configs import with_windows

CONFIG = read_config(DEMO_MODEL)


def tokenizer_of(made: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(made.to_str())


OURS = tokenizer_of(byte_level_tokenizer())


def test_a_model_can_draft_for_itself() -> None:
    check_draft(CONFIG, CONFIG, 2048)
    assert shared_tokens(read_tokenizer(DEMO_MODEL), read_tokenizer(DEMO_MODEL)) is None


def test_a_draft_needs_as_many_positions_as_sequences_have_tokens() -> None:
    with pytest.raises(CheckpointError, match="2048 positions, fewer than the 2049 tokens"):
        check_draft(CONFIG, CONFIG, 2049)


def test_a_target_that_gives_blocks_back_has_no_draft() -> None:
    target = with_windows(CONFIG, (64,) * CONFIG.num_layers)
    with pytest.raises(CheckpointError, match="forgets all but 64 tokens"):
        check_draft(target, CONFIG, 2048)


@pytest.mark.parametrize("kind", ["smaller", "SentencePiece"])
def test_tokens_of_the_same_bytes_are_shared(kind: str) -> None:
    theirs = tokenizer_of(metaspace_tokenizer()) if kind == "SentencePiece" else changed(OURS, keep=330)
    found = shared_tokens(OURS, theirs)
    assert found is not None
    spelled = {theirs.token_bytes(i) for i in theirs.vocabulary}
    for token_id in OURS.vocabulary:
        same, ours = found.same[token_id], OURS.token_bytes(token_id)
        assert (same >= 0) == (ours in spelled)
        assert same < 0 or theirs.token_bytes(same) == ours
        assert same in (-1, found.context[token_id])
        assert found.context[token_id] in theirs.vocabulary
    unknown = next(i for i, same in enumerate(found.same) if same < 0 and OURS.token_bytes(i).isascii())
    assert OURS.token_bytes(unknown).endswith(theirs.token_bytes(found.context[unknown]).lstrip())


def changed(tokenizer: Tokenizer, keep: int = 1 << 30, special: bool = True) -> Tokenizer:
    """A tokenizer with the first of the tokens only, or whose special tokens are none."""
    content = json.loads(tokenizer._parsing.to_str())
    for added in content["added_tokens"]:
        added["special"] = special
    model = content["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < keep}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    return Tokenizer(json.dumps(content))


def test_a_draft_of_other_special_tokens_is_refused() -> None:
    for ours, theirs, told in (
        (OURS, changed(OURS, special=False), "the model only"),
        (changed(OURS, special=False), OURS, "the draft model only"),
    ):
        with pytest.raises(CheckpointError, match=f"other special tokens: .* is one in {told}"):
            shared_tokens(ours, theirs)


def test_a_draft_of_too_few_shared_tokens_is_refused() -> None:
    theirs = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])).to_str())
    with pytest.raises(CheckpointError, match="another vocabulary: 2 of the model's 365 tokens"):
        shared_tokens(OURS, theirs)
