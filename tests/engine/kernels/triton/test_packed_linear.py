"""Linear maps with packed weights, against the exact product and against the specification of integer products."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels import linear as specification
from penstock.engine.kernels import packed
from penstock.engine.kernels.linear import IntegerLinear
from penstock.engine.kernels.packed import Code, UnpackedLinear
from penstock.engine.kernels.triton import boundaries, packed_linear, tiles
from penstock.engine.kernels.triton.attention_tiling import Chip, TensorCores
from penstock.engine.kernels.triton.packed_linear import (
    MIN_SCALED_ROWS,
    MIN_UNPACKED_ROWS,
    BlockLinear,
    LinearChooser,
    RoundedLinear,
    ScaledLinear,
    TritonLinear,
    quantize_rows,
    rotate_rows,
    unpack,
)
from penstock.engine.kernels.triton.tiles import ROW_CLASSES, Card
from penstock.engine.quant.float8 import FLOAT8, LARGEST
from penstock.engine.quant.integers import Inputs, Integers
from penstock.engine.quant.rotation import block_size, rotated
from tests.engine.kernels.triton.dtypes import DTYPES
from tests.engine.kernels.triton.packed_weights import Kind
from tests.engine.ranges import UNIT, Range, assert_within, exactly, gamma
from tests.few import examples

pytestmark = pytest.mark.combinations("combinations of what Triton's kernels take")

KINDS = {
    "int4": Kind(code=Code.INT4, group_size=64),
    "int4, rows": Kind(code=Code.INT4),
    "uint4, zeros": Kind(code=Code.UINT4, group_size=32, zero=True),
    "uint4, zeros, small groups": Kind(code=Code.UINT4, group_size=16, zero=True),
    "uint4, zeros, rows": Kind(code=Code.UINT4, zero=True),
    "uint4, offsets, permuted": Kind(code=Code.UINT4, group_size=32, offset=True, permuted=True),
    "int8": Kind(code=Code.INT8, group_size=128),
    "int8, zeros, odd groups": Kind(code=Code.INT8, group_size=48, zero=True),
    "int8, offsets, rows": Kind(code=Code.INT8, offset=True),
    "float4": Kind(code=Code.FLOAT4, group_size=32),
    "float4, small groups": Kind(code=Code.FLOAT4, group_size=16),
    "float4, rows": Kind(code=Code.FLOAT4),
    "float8, rows": Kind(code=Code.FLOAT8),
    "float8": Kind(code=Code.FLOAT8, group_size=128, permuted=True),
}
SOME_ROWS = [ROW_CLASSES[0] + 1, ROW_CLASSES[1] + 1, MIN_UNPACKED_ROWS]


@pytest.fixture(scope="module")
def card(device: torch.device) -> Card:
    return Card.of(device)


def random(*size: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def inputs_of(kind: Kind) -> int:
    """Three groups, or a row that is a multiple of nothing."""
    return 75 if kind.group_size is None else 3 * kind.group_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_product(name: str, dtype: torch.dtype, card: Card, device: torch.device) -> None:
    in_features = inputs_of(KINDS[name])
    example = KINDS[name].random(70, in_features, device)
    x = random(2, 2, in_features, dtype=dtype, device=device)
    bias = random(70, dtype=dtype, device=device, seed=1)
    found = TritonLinear(example.weight, bias, card)(x)
    assert found.dtype == dtype
    assert found.shape == (2, 2, 70)
    assert_within(found.flatten(0, 1), example.product(x.flatten(0, 1), bias))


@pytest.mark.parametrize("rows", SOME_ROWS)
@pytest.mark.parametrize("name", ["uint4, zeros", "uint4, offsets, permuted", "float8, rows"])
def test_it_is_the_product_of_more_rows(name: str, rows: int, card: Card, device: torch.device) -> None:
    in_features = inputs_of(KINDS[name])
    example = KINDS[name].random(33, in_features, device)
    x = random(rows, in_features, dtype=torch.float16, device=device)
    assert_within(TritonLinear(example.weight, None, card)(x), example.product(x, None))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ["int4", "float8, rows"])
def test_parts_of_the_inputs_are_added(name: str, with_bias: bool, card: Card, device: torch.device) -> None:
    example, dtype = KINDS[name].random(10, 1024, device), torch.float16
    tiling = card.tiling(example.weight.code, dtype, ROW_CLASSES[0])
    assert tiles.num_parts(10, 1024 // tiling.block_k, tiling, card.chip)[0] > 1
    x = random(3, 1024, dtype=dtype, device=device)
    bias = random(10, dtype=dtype, device=device) if with_bias else None
    assert_within(TritonLinear(example.weight, bias, card)(x), example.product(x, bias))


@pytest.mark.parametrize("with_bias", [False, True])
def test_weights_of_many_rows_are_unpacked_in_slices(
    with_bias: bool, card: Card, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = KINDS["int8"].random(10, 128, device)
    monkeypatch.setattr(packed_linear, "SCRATCH_BYTES", 4 * 128 * 2)
    x = random(MIN_UNPACKED_ROWS, 128, dtype=torch.float16, device=device)
    bias = random(10, dtype=torch.float16, device=device) if with_bias else None
    assert_within(TritonLinear(example.weight, bias, card)(x), example.product(x, bias))


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_unpacked_to_the_bit(name: str, device: torch.device) -> None:
    weight = KINDS[name].random(7, inputs_of(KINDS[name]), device).weight
    for dtype in DTYPES:
        assert torch.equal(unpack(weight, 2, 6, dtype), weight.unpack(dtype)[2:6])


@pytest.mark.parametrize("name", ["int4", "uint4, zeros", "int8, offsets, rows", "float8"])
def test_a_row_does_not_depend_on_the_others_of_its_class(
    name: str, card: Card, device: torch.device
) -> None:
    in_features = inputs_of(KINDS[name])
    linear = TritonLinear(KINDS[name].random(20, in_features, device).weight, None, card)
    x = random(ROW_CLASSES[1], in_features, dtype=torch.float16, device=device)
    for few, many in ((1, 5), (ROW_CLASSES[0] + 1, ROW_CLASSES[1])):
        assert torch.equal(linear(x[:few]), linear(x[:many])[:few])


def test_no_rows_are_no_launch(card: Card, device: torch.device) -> None:
    for name in ("int4", "int8"):
        weight = KINDS[name].random(5, 128, device).weight
        for linear in (TritonLinear(weight, None, card), RoundedLinear(weight, None, card)):
            assert linear(torch.empty(0, 128, device=device)).shape == (0, 5)


@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 90), st.integers(1, 600)),
    with_bias=st.booleans(),
    is_rotated=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=examples(10), deadline=None)
def test_products_of_rounded_rows_are_those_of_the_specification(
    sizes: tuple[int, int, int],
    with_bias: bool,
    is_rotated: bool,
    seed: int,
    card: Card,
    device: torch.device,
) -> None:
    """Bit for bit, whatever the number of rows and the parts of the inputs."""
    rows, out_features, in_features = sizes
    rotation = block_size(in_features) if is_rotated else 0
    weight = Kind(code=Code.INT8).random(out_features, in_features, device, seed).weight
    weight = replace(weight, rotation=rotation, rounds_inputs=True)
    x = random(rows, in_features, dtype=torch.float32, device=device, seed=seed)
    bias = random(out_features, dtype=torch.float32, device=device) if with_bias else None
    tensors = {"weight": weight.codes[:, :in_features], "scale": weight.scale.float().T}
    format = Integers(8, in_features, inputs=Inputs.ROW, rotation=rotation)
    expected = IntegerLinear(tensors, format, bias)(x)
    assert torch.equal(RoundedLinear(weight, bias, card)(x), expected)


def odd_rows(device: torch.device) -> Tensor:
    """Rows over many magnitudes, and of zeros, with an infinity, with a NaN, too small to be scaled."""
    x = random(6, 5000, dtype=torch.float32, device=device) * torch.logspace(-6, 0, 5000).to(device)
    x[1] = 0
    x[2, 5], x[3, 7] = torch.inf, torch.nan
    x[4] *= 1e-40
    return x


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")
def test_rows_are_rounded_to_integers_as_specified(device: torch.device) -> None:
    x = odd_rows(device)
    integers, scale = quantize_rows(x, torch.int8)
    expected, expected_scale = specification.quantize_rows(x)
    assert torch.equal(integers.float(), expected)
    assert torch.equal(scale.nan_to_num(-1), expected_scale[:, 0].nan_to_num(-1))


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")
def test_rows_are_rounded_to_e4m3_as_torch_does(device: torch.device) -> None:
    x = odd_rows(device)[[0, 1, 5]]
    numbers, scale = quantize_rows(x, FLOAT8)
    largest = x.abs().amax(1)
    scaled = (x * (torch.full_like(largest, LARGEST) / largest)[:, None]).nan_to_num(0)
    assert numbers.dtype == FLOAT8
    assert torch.equal(numbers.float(), scaled.to(FLOAT8).float())
    assert torch.equal(scale, largest / torch.full_like(largest, LARGEST))


@pytest.mark.parametrize("in_features", [5, 8, 96, 5120])
def test_rows_are_rotated_as_specified(in_features: int, device: torch.device) -> None:
    x = random(3, in_features, dtype=torch.float32, device=device)
    rotation = block_size(in_features)
    assert torch.equal(rotate_rows(x, rotation), rotated(x, rotation))


def test_the_kind_of_a_weight_chooses_its_product(card: Card, device: torch.device) -> None:
    def chosen(
        kind: Kind,
        out_features: int = 16,
        in_features: int = 64,
        float8: bool = False,
        rounds_inputs: bool = True,
    ) -> type:
        weight = kind.random(out_features, in_features, device).weight
        weight = replace(weight, rounds_inputs=rounds_inputs)
        return type(LinearChooser(card, float8)(weight, None))

    assert chosen(Kind(code=Code.INT8)) is RoundedLinear
    assert chosen(Kind(code=Code.INT8), rounds_inputs=False) is TritonLinear
    assert chosen(Kind(code=Code.INT8, group_size=32)) is TritonLinear
    assert chosen(Kind(code=Code.INT8, zero=True)) is TritonLinear
    assert chosen(Kind(code=Code.FLOAT8)) is TritonLinear
    assert chosen(Kind(code=Code.FLOAT8), float8=True) is ScaledLinear
    assert chosen(Kind(code=Code.FLOAT8, group_size=32)) is TritonLinear
    assert chosen(Kind(code=Code.FLOAT8, group_size=32), float8=True) is BlockLinear
    assert chosen(Kind(code=Code.FLOAT8, group_size=32), in_features=80, float8=True) is TritonLinear
    assert chosen(Kind(code=Code.FLOAT8, group_size=32, permuted=True), float8=True) is TritonLinear
    assert chosen(Kind(code=Code.FLOAT8, group_size=48), in_features=96, float8=True) is TritonLinear
    assert chosen(Kind(code=Code.FLOAT8), out_features=17, float8=True) is TritonLinear
    assert chosen(Kind(code=Code.FLOAT8), in_features=65, float8=True) is TritonLinear


def test_many_rows_of_e4m3_are_multiplied_by_torch(
    card: Card, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its product is specified: scales of rows on the left, of outputs on the right."""
    calls: list[int] = []

    def product(x: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        calls.append(len(x))
        return ((x.double() @ weight.double().T) * row_scale[:, None] * scale).to(dtype)

    monkeypatch.setattr(packed_linear, "scaled_product", product)
    example = Kind(code=Code.FLOAT8).random(16, 64, device)
    bias = random(16, dtype=torch.float32, device=device)
    linear = ScaledLinear(example.weight, bias, card)
    x = random(MIN_SCALED_ROWS, 64, dtype=torch.float32, device=device)
    assert_within(linear(x[:-1]), example.product(x[:-1], bias))
    assert calls == []
    # Half a step of 3 bits, or of the smallest numbers.
    largest = x.double().abs().amax(1, keepdim=True)
    error = (x.double().abs() / 16 + largest / LARGEST / 1024) @ example.magnitude.T
    error += (gamma(64) + 4 * UNIT) * (x.double().abs() @ example.magnitude.T + bias.double().abs())
    off = linear(x).double() - (x.double() @ example.exact.T + bias.double())
    assert calls == [MIN_SCALED_ROWS]
    assert bool((off.abs() <= error).all())


def rounded_to_blocks(x: Tensor, size: int) -> Tensor:
    """x whose groups of so many inputs are rounded to e4m3, in float64."""
    groups = torch.unflatten(x.float(), -1, (-1, size))
    largest = groups.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, LARGEST)
    numbers = (groups * (most / largest)).to(FLOAT8)
    return (numbers.double() * (largest / most).double()).flatten(-2)


@pytest.mark.parametrize("rows", [1, 17, 65])
@pytest.mark.parametrize("sizes", [(33, 384, 128), (10, 1024, 128), (20, 96, 32)], ids=str)
def test_x_is_rounded_in_the_blocks_of_its_weight(
    sizes: tuple[int, int, int], rows: int, card: Card, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the boundary of the card on: exact products of the rounded numbers, in one part of the inputs or several."""
    out_features, in_features, group_size = sizes
    example = Kind(code=Code.FLOAT8, group_size=group_size).random(out_features, in_features, device)
    x = random(rows, in_features, dtype=torch.float16, device=device)
    bias = random(out_features, dtype=torch.float16, device=device)
    table = {card.capability: {"boundaries": {boundaries.ROUND_KEY: 17}}}
    monkeypatch.setattr(tiles, "_table", lambda: table)
    linear = BlockLinear(example.weight, bias, card)
    if rows < 17:
        assert_within(linear(x), example.product(x, bias))
        return
    wide = rounded_to_blocks(x, group_size)
    error = gamma(in_features + 3 * in_features // group_size + 4) * (wide.abs() @ example.magnitude.T)
    product = wide @ example.exact.T
    expected = Range(product - error, product + error).widened(0) + exactly(bias)
    assert_within(linear(x), expected.rounded(x.dtype))


@pytest.mark.parametrize("boundary", [8, 300])
def test_a_card_says_from_which_number_of_rows_weights_are_unpacked(
    boundary: int, card: Card, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = KINDS["int8"].random(10, 128, device).weight
    table = {card.capability: {"boundaries": {boundaries.unpack_key(Code.INT8): boundary}}}
    monkeypatch.setattr(tiles, "_table", lambda: table)
    linear = TritonLinear(weight, None, card)
    x = random(boundary, 128, dtype=torch.float16, device=device)
    assert torch.equal(linear(x), linear.unpacked(x))
    assert torch.equal(linear(x[1:]), linear.tiled(x[1:]))
    assert not torch.equal(linear.unpacked(x), linear.tiled(x)), "nothing could be told from the results"


def test_unpacked_linears_are_the_product(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some outputs at a time."""
    monkeypatch.setattr(packed, "OUTPUTS_AT_A_TIME", 4)
    for kind in KINDS.values():
        in_features = inputs_of(kind)
        example = kind.random(9, in_features, device)
        x = random(MIN_UNPACKED_ROWS, in_features, dtype=torch.float16, device=device)
        bias = random(9, dtype=torch.float16, device=device)
        assert_within(UnpackedLinear(example.weight, bias)(x), example.product(x, bias))


CHIPS = {
    "a small one": Chip(4),
    "A100": Chip(108, shared_bytes=163 << 10),
    "H100": Chip(132, TensorCores.WGMMA, 227 << 10),
    "B200": Chip(148, TensorCores.TCGEN05, 227 << 10),
}


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("code", Code)
def test_tiles_fit_every_card(name: str, dtype: torch.dtype, code: Code) -> None:
    chip = CHIPS[name]
    for most_rows in ROW_CLASSES:
        tiling = tiles.by_rule(code, dtype, most_rows, chip)
        assert tiling.num_stages >= 2
        assert tiles.shared_bytes(tiling, code, dtype, chip.tensor_cores) <= chip.shared_bytes


@given(st.integers(1, 130_000), st.integers(1, 500), st.sampled_from(sorted(CHIPS)))
def test_parts_have_all_steps_and_none_is_empty(out_features: int, num_steps: int, name: str) -> None:
    tiling = tiles.by_rule(Code.INT4, torch.bfloat16, ROW_CLASSES[0], CHIPS[name])
    parts, steps = tiles.num_parts(out_features, num_steps, tiling, CHIPS[name])
    assert (parts - 1) * steps < num_steps <= parts * steps
    assert parts == 1 or steps >= tiles.MIN_STEPS


def test_a_file_of_tiles_goes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the card, or else by what it can do."""
    rule = tiles.by_rule(Code.INT4, torch.bfloat16, 16, CHIPS["H100"])

    def fields(warps: int) -> dict[str, int]:
        return {**asdict(rule), "num_warps": warps}

    key = tiles.tiling_key(Code.INT4, torch.bfloat16)
    assert key == "int4 x bfloat16"
    table = {"sm_90": {key: {"16": fields(1)}}, "A card": {key: {"16": fields(2)}}}
    monkeypatch.setattr(tiles, "_table", lambda: table)

    def warps(card: Card, most_rows: int = 16) -> int:
        return card.tiling(Code.INT4, torch.bfloat16, most_rows).num_warps

    assert warps(Card(CHIPS["H100"], "A card", "sm_90")) == 2
    assert warps(Card(CHIPS["H100"], "Another", "sm_90")) == 1
    assert warps(Card(CHIPS["H100"], "Another", "sm_80")) == rule.num_warps
    assert (
        warps(Card(CHIPS["H100"], "A card", "sm_90"), 64)
        == tiles.by_rule(Code.INT4, torch.bfloat16, 64, CHIPS["H100"]).num_warps
    )


def test_the_file_of_tiles_is_one() -> None:
    for of_card in tiles._table().values():
        for key, of_code in of_card.items():
            if key == "boundaries":
                keys = {boundaries.unpack_key(code) for code in Code} | {boundaries.ROUND_KEY}
                assert of_code.keys() <= keys | {
                    boundaries.few_key(torch.bfloat16),
                    boundaries.few_key(torch.float16),
                }
                continue
            code, _, dtype = key.removeprefix("experts, ").rpartition(" x ")
            own = Code(code) if code else None
            for most_rows, fields in of_code.items():
                assert int(most_rows) in ROW_CLASSES
                tiling = tiles.ProductTiling(**fields)
                cores = TensorCores.WGMMA
                assert tiles.shared_bytes(tiling, own, getattr(torch, dtype), cores) < (227 << 10)
            if key.startswith("experts"):
                assert len({fields["block_k"] for fields in of_code.values()}) == 1, "bits of rows"
                assert all(fields["block_n"] >= 64 for fields in of_code.values()), "by one instruction"
