from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.checkpoint import DEMO_DRAFT, DEMO_MODEL
from engine.errors import CheckpointError
from engine.model.checkpoint import read_config, read_tokenizer
from engine.model.drafts import check_draft, check_vocabularies
from engine.planning.tokenizer import Tokenizer

CONFIG = read_config(DEMO_DRAFT)


def changed(change: str) -> Tokenizer:
    """The draft's tokenizer with another token, another special token, or one more."""
    content = json.loads(Path(DEMO_DRAFT / "tokenizer.json").read_text(encoding="utf-8"))
    if change == "special":
        content["added_tokens"][2]["special"] = False
    elif change == "renamed":
        content["added_tokens"][2]["content"] = "<|other|>"
        vocabulary = content["model"]["vocab"]
        name = next(token for token, i in vocabulary.items() if i == content["added_tokens"][2]["id"])
        vocabulary["<|other|>"] = vocabulary.pop(name)
    return Tokenizer(json.dumps(content))


def test_the_demo_pair_fits() -> None:
    check_draft(read_config(DEMO_MODEL), CONFIG, 2048)
    check_vocabularies(read_tokenizer(DEMO_MODEL), read_tokenizer(DEMO_DRAFT))


def test_a_draft_needs_as_many_positions_as_sequences_have_tokens() -> None:
    with pytest.raises(CheckpointError, match="2048 positions, fewer than the 2049 tokens"):
        check_draft(CONFIG, CONFIG, 2049)


def test_a_target_that_gives_blocks_back_has_no_draft() -> None:
    target = replace(CONFIG, sliding_windows=(64,) * CONFIG.num_layers)
    with pytest.raises(CheckpointError, match="forgets all but 64 tokens"):
        check_draft(target, CONFIG, 2048)


@pytest.mark.parametrize(
    ("change", "told"), [("renamed", "another vocabulary: token 2 is"), ("special", "other special")]
)
def test_a_draft_of_other_tokens_is_refused(change: str, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        check_vocabularies(read_tokenizer(DEMO_MODEL), changed(change))
