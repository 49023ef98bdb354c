"""Quantized linear maps on a GPU: every kind of weight in every class of rows, at odd sizes and at real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.engine.kernels.linear import IntegerLinear
from penstock.engine.kernels.packed import Code, UnpackedLinear
from penstock.engine.kernels.triton.packed_linear import (
    MIN_SCALED_ROWS,
    MIN_UNPACKED_ROWS,
    LinearChooser,
    RoundedLinear,
    ScaledLinear,
    TritonLinear,
    multiplies_float8,
    quantize_rows,
    unpack,
)
from penstock.engine.kernels.triton.tiles import ROW_CLASSES, Card
from penstock.engine.quant.float8 import FLOAT8, LARGEST
from penstock.engine.quant.integers import Inputs, Integers
from tests.engine.kernels.triton.packed_weights import Kind
from tests.engine.ranges import assert_within
from tests.gpu.cuda import DEVICE, DTYPES, config_of, needs_cuda, table

pytestmark = needs_cuda

KINDS = {
    "int4": Kind(code=Code.INT4, group_size=128),
    "int4, rows": Kind(code=Code.INT4),
    "uint4, zeros": Kind(code=Code.UINT4, group_size=64, zero=True),
    "uint4, zeros, small groups": Kind(code=Code.UINT4, group_size=16, zero=True),
    "uint4, offsets, permuted": Kind(code=Code.UINT4, group_size=32, offset=True, permuted=True),
    "int8": Kind(code=Code.INT8, group_size=128),
    "int8, offsets": Kind(code=Code.INT8, offset=True),
    "float8, rows": Kind(code=Code.FLOAT8),
    "float8": Kind(code=Code.FLOAT8, group_size=128),
}
ROWS = [1, ROW_CLASSES[0], ROW_CLASSES[0] + 1, ROW_CLASSES[1] + 1, MIN_UNPACKED_ROWS - 1, 300]
SIZES = [(70, 384), (1000, 1152), (4096, 4096)]


@pytest.fixture(autouse=True)
def _torch_adds_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch may add parts of the inputs in 16 bits."""
    for name in ("bf16", "fp16"):
        option = f"allow_{name}_reduced_precision_reduction"
        monkeypatch.setattr(torch.backends.cuda.matmul, option, False)


def random(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_products(name: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    example = KINDS[name].random(*size, DEVICE)
    bias = random(size[0], dtype=dtype, seed=1)
    linear, plain = TritonLinear(example.weight, bias, Card.of(DEVICE)), UnpackedLinear(example.weight, bias)
    for rows in ROWS:
        x = random(rows, size[1], dtype=dtype)
        assert_within(linear(x), example.product(x, bias), f"product of {rows} rows")
    assert torch.equal(unpack(example.weight, 3, 60, dtype), plain.weight.unpack(dtype)[3:60])


@pytest.mark.parametrize("name", ["uint4, zeros", "int8", "float8, rows"])
def test_a_row_does_not_depend_on_the_others_of_its_class(name: str) -> None:
    linear = TritonLinear(KINDS[name].random(1000, 4096, DEVICE).weight, None, Card.of(DEVICE))
    x = random(MIN_UNPACKED_ROWS, 4096, dtype=torch.bfloat16)
    first = 1
    for most in ROW_CLASSES:
        whole = linear(x[:most])
        assert torch.equal(linear(x[:first]), whole[:first])
        assert torch.equal(linear(x[:most]), whole), "and is the same whenever it is computed"
        first = most + 1


@pytest.mark.parametrize("rotation", [0, 128])
@pytest.mark.parametrize("rows", [1, 17, 65, 700])
def test_integer_products_are_those_of_the_specification(rows: int, rotation: int) -> None:
    weight = Kind(code=Code.INT8).random(1000, 1152, DEVICE).weight
    weight = replace(weight, rotation=rotation, rounds_inputs=True)
    x, bias = random(rows, 1152, dtype=torch.float32), random(1000, dtype=torch.float32)
    tensors = {"weight": weight.codes.cpu(), "scale": weight.scale.float().T.cpu()}
    format = Integers(8, 1152, inputs=Inputs.ROW, rotation=rotation)
    expected = IntegerLinear(tensors, format, bias.cpu())(x.cpu())
    assert torch.equal(RoundedLinear(weight, bias, Card.of(DEVICE))(x).cpu(), expected)


def test_rows_in_e4m3_are_those_of_torch() -> None:
    x = random(33, 14_336, dtype=torch.bfloat16)
    numbers, scale = quantize_rows(x, FLOAT8)
    largest = x.float().abs().amax(1)
    scaled = x.float() * (torch.full_like(largest, LARGEST) / largest)[:, None]
    assert torch.equal(numbers.float(), scaled.to(FLOAT8).float())
    assert torch.equal(scale, largest / torch.full_like(largest, LARGEST))


def test_products_in_e4m3() -> None:
    """By torch, where the card multiplies e4m3: sums need not be exact, but nearly are."""
    if not multiplies_float8(DEVICE, torch.bfloat16):
        pytest.skip("torch does not multiply e4m3 by rows and columns on this card")
    example = Kind(code=Code.FLOAT8).random(512, 4096, DEVICE)
    bias = random(512, dtype=torch.bfloat16)
    linear = LinearChooser(Card.of(DEVICE), True)(example.weight, bias)
    assert isinstance(linear, ScaledLinear)
    x = random(MIN_SCALED_ROWS, 4096, dtype=torch.bfloat16)
    numbers, scale = quantize_rows(x, FLOAT8)
    expected = (numbers.double() @ example.exact.T) * scale.double()[:, None] + bias.double()
    off = (linear(x).double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(off) < 2e-2


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_table_packs_what_is_quantized(name: str) -> None:
    format = Integers(8, 256) if name == "int8" else Integers(4, 64, has_offset=True)
    tensors = format.quantize(torch.randn(96, 256))
    linear = table(config_of(), torch.bfloat16).linear(tensors, format, None)
    assert isinstance(linear, TritonLinear)
    x = random(5, 256, dtype=torch.bfloat16)
    expected = x.double() @ format.unpack(tensors).to(DEVICE).double().T
    off = (linear(x).double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(off) < 2e-2


def test_a_graph_holds_them() -> None:
    """In each class of rows, parts of inputs among them."""
    for name in ("uint4, zeros", "float8"):
        linear = TritonLinear(KINDS[name].random(512, 4096, DEVICE).weight, None, Card.of(DEVICE))
        for rows in ROWS:
            x = random(rows, 4096, dtype=torch.bfloat16)
            expected = linear(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = linear(x)
            graph.replay()
            assert torch.equal(found, expected)
