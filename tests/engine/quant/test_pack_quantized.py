"""Packed weights against the compressed-tensors library, and against what Penstock reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig

from penstock.engine.fields import Fields
from penstock.engine.quant.checkpoints import storages_of
from penstock.engine.quant.grid import Grid, round_to_nearest
from penstock.engine.quant.pack_quantized import pack, quantization_config, stored_tensors

GRIDS = [
    Grid(bits, group_size, symmetric, dtype)
    for bits in (4, 8)
    for symmetric in (True, False)
    for group_size, dtype in ((16, torch.bfloat16), (None, torch.float16), (32, torch.float32))
]
NAME = "model.layers.0.mlp.up_proj"


def config_of(grid: Grid, by_activation: bool = False) -> dict[str, Any]:
    return quantization_config([(["Linear"], grid, by_activation)], ["lm_head"])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("out_features", [16, 13])
def test_the_library_and_penstock_read_what_was_meant(grid: Grid, out_features: int) -> None:
    weight = torch.randn(out_features, 96, generator=torch.Generator().manual_seed(1)) + 0.3
    rounded = round_to_nearest(weight, torch.empty(0), grid)
    tensors = dict(pack(rounded, grid))
    scheme = QuantizationConfig.model_validate(config_of(grid)).config_groups["group_0"]
    theirs = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    assert torch.equal(theirs, rounded.weight().to(grid.scale_dtype))

    storage = storages_of(Fields("config", config_of(grid)))(NAME)
    wanted = {tensor.suffix: tensors[tensor.suffix] for tensor in storage.tensors(out_features, 96)}
    ours = storage.format(out_features, 96).unpack(storage.repack(wanted))
    torch.testing.assert_close(ours, rounded.weight(), rtol=1e-6, atol=1e-6)
    assert set(wanted) == set(tensors)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_tensors_are_as_announced(grid: Grid) -> None:
    tensors = pack(grid.nearest(torch.randn(13, 96)), grid)
    announced = {suffix: (shape, dtype) for suffix, shape, dtype in stored_tensors(grid, 13, 96)}
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == announced


def test_the_library_writes_the_config_alike() -> None:
    """The config that we write means to the library what it means to us."""
    ours = quantization_config(
        [(["re:.*layers\\.(0)\\..*"], Grid(8, None, True, torch.float16), False),
         (["re:.*layers\\.(1|2)\\..*"], Grid(4, 64, False, torch.float16), True)],
        ["lm_head"],
    )  # fmt: skip
    theirs = QuantizationConfig.model_validate(ours).model_dump()
    assert theirs["format"] == ours["format"]
    assert theirs["ignore"] == ours["ignore"]
    assert theirs["quantization_status"] == "compressed"
    weights = [group["weights"] for group in theirs["config_groups"].values()]
    assert [(w["num_bits"], w["symmetric"], w["strategy"], w["group_size"]) for w in weights] == [
        (8, True, "channel", None),
        (4, False, "group", 64),
    ]
    assert weights[1]["actorder"] == "weight"
    assert all(w["type"] == "int" and w["dynamic"] is False for w in weights)
