"""Every storage against the library of its format: what is read stands for the same weights, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.fields import Fields
from penstock.engine.model.safetensors import DTYPES
from penstock.engine.quant.checkpoints import storages_of
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.storage import Storage
from tests.engine.quant.storages.makers import WAYS, Config, Way

NAME = "model.layers.0.mlp.up_proj"
NAMES = {dtype: name for name, dtype in DTYPES.items()}

ODD = {
    "ct-w4a16-channel": (13, 45),
    "ct-w8a16-asym": (7, 33),
    "fp8-block": (150, 200),
    "ct-fp8-block": (131, 260),
}
ODD |= {
    "bnb-nf4": (5, 7),
    "bnb-nf4-nested": (300, 112),
    "bnb-int8": (9, 11),
    "ct-w8a8": (3, 17),
    "ao-fp8": (5, 19),
}
"""Shapes that do not fill words, blocks and rows."""


def storage_of(config: Config, name: str = NAME) -> Storage:
    return storages_of(Fields("config.json: quantization_config", config))(name)


def repacked(
    storage: Storage, tensors: dict[str, Tensor], out_features: int, in_features: int
) -> NamedTensors:
    """Reads the tensors as the loader does, with all its checks."""
    wanted = {}
    for tensor in storage.tensors(out_features, in_features):
        if tensor.suffix not in tensors:
            assert tensor.optional, tensor.suffix
            continue
        found = tensors[tensor.suffix]
        assert tensor.fits(tuple(found.shape)), (tensor, found.shape)
        assert NAMES[found.dtype] in tensor.dtypes, (tensor, found.dtype)
        wanted[tensor.suffix] = found
    result = storage.repack(wanted)
    shapes = dict(storage.format(out_features, in_features).shapes(out_features, in_features))
    assert {name: tuple(tensor.shape) for name, tensor in result.items()} == shapes
    return result


def random_weight(out_features: int, in_features: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    return weight * (0.2 + torch.rand(out_features, 1, generator=generator))


def check(way: Way, out_features: int, in_features: int) -> None:
    made = way.make(random_weight(out_features, in_features))
    storage = storage_of(way.config)
    tensors = repacked(storage, made.tensors, out_features, in_features)
    weight = storage.format(out_features, in_features).unpack(tensors)
    assert weight.dtype == torch.float32
    if way.tolerance:
        torch.testing.assert_close(weight, made.weight.float(), rtol=way.tolerance, atol=way.tolerance)
    else:
        assert torch.equal(weight.to(made.weight.dtype), made.weight)


@pytest.mark.parametrize("label", WAYS)
def test_what_is_read_is_what_the_library_reads(label: str) -> None:
    check(WAYS[label], 64, 96)


@pytest.mark.parametrize("label", ODD)
def test_odd_shapes(label: str) -> None:
    check(WAYS[label], *ODD[label])
