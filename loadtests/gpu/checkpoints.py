"""Random weights as a checkpoint of any size, written as fast as the disk takes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from app.bench import checkpoint as bench
from engine.model.parse import read_config
from engine.model.weights import expected_shapes
from loadtests.gpu.sizes import VOCABULARY, ModelShape

_ITEM_BYTES = 2
_STRIDE = 7_919
"""Elements by which each tensor starts further on in the random numbers that they all share."""

_TOKENS = bench.Shape("tokens", 8, 1, 1, 1, 8, VOCABULARY)


def write_checkpoint(shape: ModelShape, folder: Path, num_random: int = 1 << 26) -> Path:
    """Weights in bfloat16, with a standard deviation of 0.02; norms are 1.

    The rows of tokens that are no text of their own are twenty times smaller, so that none of them is ever chosen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bench.write_checkpoint(_TOKENS, folder)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=1), encoding="utf-8")
    noise = torch.randn(num_random, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    shapes = expected_shapes(read_config(folder))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(_header(shapes))
        for number, (name, size) in enumerate(shapes.items()):
            for piece in _tensor(name, size, noise, number * _STRIDE):
                file.write(piece.view(torch.uint8).numpy().data)
    return folder


def token_ids() -> range:
    """Tokens that are text, for prompts."""
    return bench.letter_token_ids(_TOKENS)


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """See https://github.com/huggingface/safetensors#format"""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in shapes.items():
        start, end = end, end + prod(size) * _ITEM_BYTES
        entries[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _tensor(name: str, size: tuple[int, ...], noise: Tensor, offset: int) -> Iterator[Tensor]:
    """The tensor in pieces, one after another."""
    if len(size) == 1:
        yield torch.ones(size, dtype=torch.bfloat16)
        return
    if name not in ("model.embed_tokens.weight", "lm_head.weight"):
        yield from _noise(prod(size), noise, offset)
        return
    text = token_ids()
    for rows, is_text in ((text.start, False), (len(text), True), (size[0] - text.stop, False)):
        for piece in _noise(rows * size[1], noise, offset):
            yield piece if is_text else piece * 0.05


def _noise(num: int, noise: Tensor, offset: int) -> Iterator[Tensor]:
    start = offset % noise.numel()
    while num:
        piece = noise[start : start + num]
        yield piece
        num -= piece.numel()
        start = 0
