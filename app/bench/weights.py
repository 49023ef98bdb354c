"""Random weights for any config.json that the engine serves: the speed of a model does not depend on them.

It may be that of an EAGLE-3 head. A layer of multi-token prediction of which it tells is written with its model.

A config.json's quantization_config decides how they are stored. They are written as fast as the disk takes them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.model.eagle import is_eagle, read_eagle
from penstock.engine.model.eagle_weights import eagle_tensors
from penstock.engine.model.parse import read_config
from penstock.engine.model.prediction import prediction_tensors
from penstock.engine.model.safetensors import DTYPES
from penstock.engine.model.tensors import expected_tensors, make_recipe
from penstock.engine.quant.float8 import FLOAT8
from penstock.engine.quant.storage import StoredTensor

_WRITTEN = ("BF16", "F8_E4M3", "I64", "I32", "I8")
_DEVIATION = 0.02
_DEVIATIONS = {4: 4.6, 8: 74.0}
"""The deviation of random integers by their bits."""
_ZEROS = 0x77777777
"""GPTQ's zero points of symmetric weights."""
_MOST_RANDOM = 1 << 26
_STRIDE = 7_919
"""Elements by which each tensor starts further on in the random numbers that they all share."""


def write_weights(folder: Path, text: range) -> None:
    """Writes all tensors that the folder's config.json names: norms are 1, weights have a deviation of 0.02.

    Args:
        text: tokens with a text of their own; the rows of others are twenty times smaller, so that none is ever chosen.
    """
    tensors = {name: tensor for name, tensor in _tensors(folder) if not tensor.optional}
    noise = _Noise.of(min(_MOST_RANDOM, max(prod(tensor.known_shape) for tensor in tensors.values())))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(_header(tensors))
        for number, name in enumerate(tensors):
            for piece in _pieces(name, tensors, noise, number * _STRIDE, text):
                file.write(piece.view(torch.uint8).numpy().data)


def _tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    options = LoadOptions(device="cpu")
    if is_eagle(folder):
        head = read_eagle(folder)
        return eagle_tensors(head, make_recipe(head.layer, options))
    config = read_config(folder)
    recipe = make_recipe(config, options)
    return chain(expected_tensors(config, recipe), prediction_tensors(config, recipe))


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
        bits = torch.randint(-(1 << 31), 1 << 31, (max(count // 4, 8),), generator=generator)
        return cls(floats, bits.to(torch.int32))


def _dtype(tensor: StoredTensor) -> str:
    return next(name for name in _WRITTEN if name in tensor.dtypes)


def _header(tensors: Mapping[str, StoredTensor]) -> bytes:
    """See https://github.com/huggingface/safetensors#format"""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        size, dtype = tensor.known_shape, _dtype(tensor)
        start, end = end, end + prod(size) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _pieces(
    name: str, tensors: Mapping[str, StoredTensor], noise: _Noise, offset: int, text: range
) -> Iterator[Tensor]:
    """The tensor in pieces, one after another."""
    tensor = tensors[name]
    size, dtype = tensor.known_shape, _dtype(tensor)
    if tensor.suffix == "weight_shape":
        out_features, words = tensors[name.removesuffix("shape") + "packed"].known_shape
        yield torch.tensor([out_features, 8 * words])
    elif tensor.suffix == "d2t":  # a head drafts the first tokens
        yield torch.zeros(size, dtype=DTYPES[dtype])
    elif tensor.suffix == "qzeros":
        yield torch.full(size, _ZEROS, dtype=torch.int32)
    elif "scale" in tensor.suffix:
        yield torch.full(size, _DEVIATION / _stored_deviation(name, tensors)).to(torch.bfloat16)
    elif dtype == "F8_E4M3":
        for piece in _repeated(prod(size), noise.floats, offset):
            yield (piece.float() / _DEVIATION).to(FLOAT8)
    elif dtype == "BF16":
        yield from _floats(name, size, noise.floats, offset, text)
    else:
        yield from _repeated(prod(size), noise.bits.view(DTYPES[dtype]), offset)


def _stored_deviation(name: str, tensors: Mapping[str, StoredTensor]) -> float:
    """The deviation of the numbers that a scale is for."""
    weight = tensors.get(f"{name.rpartition('.')[0]}.weight")
    if weight is None:
        return _DEVIATIONS[4]
    return _DEVIATIONS[8] if _dtype(weight) == "I8" else 1.0


def _floats(name: str, size: tuple[int, ...], noise: Tensor, offset: int, text: range) -> Iterator[Tensor]:
    if len(size) == 1:
        yield torch.ones(size, dtype=torch.bfloat16)
        return
    if name not in ("model.embed_tokens.weight", "lm_head.weight"):
        yield from _repeated(prod(size), noise, offset)
        return
    start, stop = min(text.start, size[0]), min(text.stop, size[0])
    for rows, is_text in ((start, False), (stop - start, True), (size[0] - stop, False)):
        for piece in _repeated(rows * size[1], noise, offset):
            yield piece if is_text else piece * 0.05


def _repeated(num: int, noise: Tensor, offset: int) -> Iterator[Tensor]:
    start = offset % noise.numel()
    while num:
        piece = noise[start : start + num]
        yield piece
        num -= piece.numel()
        start = 0
