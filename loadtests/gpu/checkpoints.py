"""Random weights as a checkpoint of any size, written as fast as the disk takes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from loadtests.gpu.sizes import VOCABULARY, ModelShape
from penstock.app.bench import checkpoint as bench
from penstock.engine.config import LoadOptions
from penstock.engine.model.parse import read_config
from penstock.engine.model.tensors import expected_tensors, make_recipe
from penstock.engine.quant.float8 import FLOAT8
from penstock.engine.quant.storage import StoredTensor

_DTYPES = {"BF16": torch.bfloat16, "F8_E4M3": FLOAT8, "I32": torch.int32, "I64": torch.int64}
"""As safetensors names them."""
_DEVIATION = 0.02
_DEVIATION_OF_4_BITS = 4.6
"""The deviation of integers from -8 to 7."""
_STRIDE = 7_919
"""Elements by which each tensor starts further on in the random numbers that they all share."""

_TOKENS = bench.Shape("tokens", 8, 1, 1, 1, 8, VOCABULARY)


def write_checkpoint(shape: ModelShape, folder: Path, num_random: int = 1 << 26) -> Path:
    """Weights with a standard deviation of 0.02, in bfloat16 or as the shape's quantization says; norms are 1.

    The rows of tokens that are no text of their own are twenty times smaller, so that none of them is ever chosen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bench.write_checkpoint(_TOKENS, folder)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=1), encoding="utf-8")
    noise = _Noise.of(num_random)
    config = read_config(folder)
    tensors = {
        name: tensor
        for name, tensor in expected_tensors(config, make_recipe(config, LoadOptions()))
        if not tensor.optional
    }
    with (folder / "model.safetensors").open("wb") as file:
        file.write(_header(tensors))
        for number, name in enumerate(tensors):
            for piece in _pieces(name, tensors, noise, number * _STRIDE):
                file.write(piece.view(torch.uint8).numpy().data)
    return folder


def token_ids() -> range:
    """Tokens that are text, for prompts."""
    return bench.letter_token_ids(_TOKENS)


@dataclass(frozen=True, slots=True)
class _Noise:
    """Random numbers that all tensors share."""

    floats: Tensor
    """bfloat16, with the deviation of weights."""
    bits: Tensor
    """int32"""

    @classmethod
    def of(cls, count: int) -> _Noise:
        generator = torch.Generator().manual_seed(0)
        floats = torch.randn(count, generator=generator).mul_(_DEVIATION).to(torch.bfloat16)
        bits = torch.randint(-(1 << 31), 1 << 31, (count // 4,), generator=generator)
        return cls(floats, bits.to(torch.int32))


def _dtype(tensor: StoredTensor) -> str:
    return next(name for name in tensor.dtypes if name in _DTYPES)


def _size(tensor: StoredTensor) -> tuple[int, ...]:
    return tuple(size for size in tensor.shape if size is not None)


def _header(tensors: dict[str, StoredTensor]) -> bytes:
    """See https://github.com/huggingface/safetensors#format"""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        size, dtype = _size(tensor), _dtype(tensor)
        start, end = end, end + prod(size) * _DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _pieces(name: str, tensors: dict[str, StoredTensor], noise: _Noise, offset: int) -> Iterator[Tensor]:
    """The tensor in pieces, one after another."""
    tensor = tensors[name]
    size = _size(tensor)
    match tensor.suffix, _dtype(tensor):
        case "weight", "F8_E4M3":
            for piece in _repeated(prod(size), noise.floats, offset):
                yield (piece.float() / _DEVIATION).to(FLOAT8)
        case "weight_packed", "I32":
            yield from _repeated(prod(size), noise.bits, offset)
        case "weight_scale", _:
            of_group = len(size) > 1 and size[1] > 1
            yield torch.full(size, _DEVIATION / (_DEVIATION_OF_4_BITS if of_group else 1)).to(torch.bfloat16)
        case "weight_shape", "I64":
            out_features, words = _size(tensors[name.removesuffix("shape") + "packed"])
            yield torch.tensor([out_features, 8 * words])
        case _:
            yield from _floats(name, size, noise.floats, offset)


def _floats(name: str, size: tuple[int, ...], noise: Tensor, offset: int) -> Iterator[Tensor]:
    if len(size) == 1:
        yield torch.ones(size, dtype=torch.bfloat16)
        return
    if name not in ("model.embed_tokens.weight", "lm_head.weight"):
        yield from _repeated(prod(size), noise, offset)
        return
    text = token_ids()
    for rows, is_text in ((text.start, False), (len(text), True), (size[0] - text.stop, False)):
        for piece in _repeated(rows * size[1], noise, offset):
            yield piece if is_text else piece * 0.05


def _repeated(num: int, noise: Tensor, offset: int) -> Iterator[Tensor]:
    start = offset % noise.numel()
    while num:
        piece = noise[start : start + num]
        yield piece
        num -= piece.numel()
        start = 0
