"""Writes the texts by which `penstock quantize` calibrates and measures the demo model: `python -m lab.demo.texts`."""

from __future__ import annotations

import json
from itertools import accumulate, takewhile
from random import Random
from typing import Any

from tokenizers import Tokenizer

from lab.demo.batches import encode
from lab.demo.corpus import sample
from lab.demo.held_out import Talk, held_out
from penstock.app.checkpoint import DEMO_MODEL

TEXTS = DEMO_MODEL.parent / "texts.json"
SEED = "calibration"  # training seeds are numbers, and what is held out has a word of its own
PIECE_TOKENS = 512
CALIBRATION_TOKENS, HELD_OUT_TOKENS = 32_768, 8_192


def make_texts(tokenizer: Tokenizer) -> dict[str, list[dict[str, Any]]]:
    """Conversations that the model may have learnt the like of, and those that it is measured with."""
    rng = Random(SEED)
    learnt = [encode(tokenizer, sample(rng, PIECE_TOKENS)) for _ in range(CALIBRATION_TOKENS // 64)]
    unseen = held_out(tokenizer, HELD_OUT_TOKENS // 64)
    return {"calibration": _pieces(learnt, CALIBRATION_TOKENS), "held_out": _pieces(unseen, HELD_OUT_TOKENS)}


def as_json(texts: dict[str, list[dict[str, Any]]]) -> str:
    """A line for each piece."""
    parts = []
    for name, pieces in texts.items():
        lines = ",\n".join(json.dumps(piece, separators=(",", ":")) for piece in pieces)
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{" + ",\n".join(parts) + "}\n"


def _pieces(talks: list[Talk], num_tokens: int) -> list[dict[str, Any]]:
    """As many talks as have `num_tokens`; `counted` marks with 1 the tokens that the assistant says."""
    totals = accumulate(len(ids) for ids, _ in talks)
    whole = takewhile(lambda pair: pair[1] <= num_tokens, zip(talks, totals, strict=True))
    return [
        {"token_ids": ids, "counted": "".join("01"[is_said] for is_said in said)} for (ids, said), _ in whole
    ]


def main() -> None:
    TEXTS.write_text(as_json(make_texts(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))))


if __name__ == "__main__":
    main()
