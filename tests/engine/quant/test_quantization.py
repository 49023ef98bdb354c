"""Each quantization changes the linear maps that it is for."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.errors import CheckpointError
from penstock.engine.quant.codebook import NF4, Codebook
from penstock.engine.quant.float8 import Float8, Scaling
from penstock.engine.quant.integers import Factors, Inputs, Integers
from penstock.engine.quant.quantization import Quantization


def rotated_rows(in_features: int, block: int) -> Integers:
    return Integers(8, in_features, inputs=Inputs.ROW, rotation=block)


def int4(group_size: int) -> Integers:
    return Integers(4, group_size, has_offset=True, factors=Factors.HALF)


def test_groups_are_whole_rows_for_8_bits_and_what_divides_for_4() -> None:
    assert Quantization("int8").layer_format(3, 100) == rotated_rows(100, 4)
    assert Quantization("int8", 32).layer_format(0, 96) == Integers(8, 32)
    assert Quantization("int4").layer_format(7, 576) == int4(32)
    assert Quantization("int4").layer_format(6, 576) == int4(64)
    assert Quantization("int4").layer_format(1, 96) == int4(32)
    assert Quantization("int4", 128).layer_format(7, 256) == int4(128)
    assert Quantization("nf4").layer_format(1, 576) == Codebook("nf4", NF4, 64)
    assert Quantization("nf4").layer_format(1, 96) == Codebook("nf4", NF4, 32)
    assert Quantization("nf4", 128).layer_format(1, 256) == Codebook("nf4", NF4, 128)
    assert Quantization("fp8").layer_format(3, 101) == Float8(Scaling.ROW)


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_the_head_and_the_first_layer_have_8_bits(name: str) -> None:
    assert Quantization(name).head_format(640) == rotated_rows(640, 128)
    assert Quantization(name).layer_format(0, 96) == rotated_rows(96, 32)


@pytest.mark.parametrize("in_features", [128, 576, 1024, 1536, 3072])
@pytest.mark.parametrize("num_layers", [8, 28, 30])
def test_int4_has_5_bits_on_the_mean(in_features: int, num_layers: int) -> None:
    """With scales and offsets, but for the rows' own scales of the first layer: SmolLM2 and Qwen3 alike."""
    formats = (Quantization("int4").layer_format(layer, in_features) for layer in range(num_layers))
    num_bytes = sum(format.num_bytes(10, in_features, torch.float32) for format in formats)
    assert 8 * num_bytes <= 5 * 10 * in_features * num_layers + 32 * 10


def test_all_of_fp8_is_fp8() -> None:
    assert Quantization("fp8").layer_format(0, 96) == Quantization("fp8").head_format(96) == Float8()


@pytest.mark.parametrize(
    ("quantization", "in_features", "said"),
    [
        (Quantization("int4"), 100, "--quantize int4: groups of 32 or 64 do not divide .* 100 inputs"),
        (Quantization("int4", 128), 576, "--quantize int4: groups of 128 do not divide .* 576 inputs"),
        (Quantization("int8", 64), 96, "--quantize int8: groups of 64 do not divide .* 96 inputs"),
        (Quantization("nf4"), 100, "--quantize nf4: groups of 32 or 64 do not divide .* 100 inputs"),
    ],
)
def test_groups_that_do_not_divide_are_one_line(
    quantization: Quantization, in_features: int, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        quantization.layer_format(1, in_features)
    assert "\n" not in str(caught.value)
