"""tekken.json: pieces are those that ranks make of a text, found here by merging bytes one pair after another."""

from __future__ import annotations

import base64
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import CheckpointError
from penstock.engine.text.tokenizer import Tokenizer, eos_token_id

PATTERN = r"\s?\w+|\s+|[^\s\w]+"
PIECES = [bytes([byte]) for byte in range(256)]
PIECES += [
    text.encode() for text in ("th", "he", " t", "the", " the", "in", "ing", "ngs", "thing", "é", " é", "ll")
]
NUM_SPECIAL = 30


def tekken(**more: Any) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate([*PIECES, b"beyond the end"])
    ]
    config = {
        "pattern": PATTERN,
        "default_vocab_size": len(PIECES) + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v3",
    }
    return {"config": config, "vocab": vocab, **more}


def load(folder: Path, content: object) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tekken"), tekken())


def ids_of(text: str) -> list[int]:
    """The pair whose piece has the least rank becomes that piece, until there is none."""
    ranks = {piece: rank for rank, piece in enumerate(PIECES)}
    found: list[int] = []
    for part in re.findall(PATTERN, text):
        pieces = [part.encode()] if part.encode() in ranks else [bytes([byte]) for byte in part.encode()]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        found += [NUM_SPECIAL + ranks[piece] for piece in pieces]
    return found


@given(st.lists(st.sampled_from([*"thingslé .!\n", "the", " thing", "ß", "🎉"]), max_size=20).map("".join))
def test_pieces_are_those_of_the_ranks(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == ids_of(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_come_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.vocab_size == NUM_SPECIAL + len(PIECES)
    assert tokenizer.special_ids == frozenset(range(NUM_SPECIAL))
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert [tokenizer.id_of(text) for text in ("<unk>", "<s>", "</s>", "[INST]", "<SPECIAL_29>")] == [
        0,
        1,
        2,
        3,
        29,
    ]
    assert tokenizer.encode("he", add_special=True) == [1, *ids_of("he")]
    assert tokenizer.encode("[INST]", parse_special=True) == [3]
    assert tokenizer.encode("[INST]") == ids_of("[INST]")
    listed = [
        {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(["<unk>", "</s>", "<s>"])
    ]
    other = load(tmp_path, tekken(special_tokens=listed[::-1]))
    assert [other.id_of(text) for text in ("</s>", "<s>", "<SPECIAL_3>")] == [1, 2, 3]
    assert eos_token_id(tmp_path) == 1


@pytest.mark.parametrize("content", [{}, {**tekken(), "vocab": [{}]}, {**tekken(), "config": {}}, "no", 3])
def test_a_broken_file_is_named(content: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(tmp_path))}/tekken.json cannot be read: "):
        load(tmp_path, content)


def test_a_tokenizer_json_goes_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer._parsing.to_str(), encoding="utf-8")
    assert load(tmp_path, {}).encode("thing") == ids_of("thing")
