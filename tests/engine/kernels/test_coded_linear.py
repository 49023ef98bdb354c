"""Native products of e4m3 and of places in a table: those of the weight that the code stands for, at every level."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels.cpu.native import NativeLibrary, NativeLinear, Team
from penstock.engine.quant.codebook import NF4, UNIT, Codebook
from penstock.engine.quant.float8 import BLOCK, Float8, Scaling
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.storages.bitsandbytes import TABLES
from tests.few import examples

pytestmark = pytest.mark.combinations("combinations of what the native kernels take")

Format = Float8 | Codebook


@st.composite
def formats(draw: st.DrawFn) -> tuple[Format, int]:
    """A format, and a number of inputs for it, which only groups of places make a multiple of something."""
    any_inputs = draw(
        st.one_of(st.integers(1, 300), st.sampled_from([127, 128, 129, 1023, 1024, 1025, 2100]))
    )
    if draw(st.booleans()):
        return Float8(draw(st.sampled_from(Scaling))), any_inputs
    name = draw(st.sampled_from(["nf4", "fp4"]))
    if draw(st.booleans()):
        return Codebook(name, TABLES[name], any_inputs), any_inputs
    size = UNIT * draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    return Codebook(name, TABLES[name], size), size * draw(st.integers(2, 20))


def random_tensors(format: Format, rows: int, in_features: int, seed: int) -> NamedTensors:
    """Any numbers that the format can have, those of e4m3 below 2^-6 included."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(format.shapes(rows, in_features))
    scale = torch.rand(shapes["scale"], generator=generator) + 0.5
    if isinstance(format, Codebook):
        return {
            "weight": torch.randint(16, shapes["weight"], generator=generator).to(torch.uint8),
            "scale": scale,
        }
    magnitudes = torch.randint(0x7F, shapes["weight"], generator=generator)
    signs = torch.randint(2, shapes["weight"], generator=generator) << 7
    return {"weight": (signs | magnitudes).to(torch.uint8).view(torch.float8_e4m3fn), "scale": scale}


def product_in_floats(
    team: Team, x: Tensor, tensors: NamedTensors, format: Format, bias: Tensor | None, rounded: torch.dtype
) -> Tensor:
    """By the product of floats: of the numbers, where every row has one scale, or else of the unpacked weight."""
    if isinstance(format, Codebook) or format.row_scales(tensors).shape[1] > 1:
        return NativeLinear(team, format.unpack(tensors), bias, rounded)(x)
    sums = NativeLinear(team, tensors["weight"].float(), None, rounded)(x) * format.row_scales(tensors).T
    return sums if bias is None else sums + bias


@settings(max_examples=examples(50))
@given(formats(), st.integers(1, 70), st.integers(1, 70), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_the_product_has_the_bits_of_the_product_of_floats(
    team: Team,
    chosen: tuple[Format, int],
    rows: int,
    num_tokens: int,
    biased: bool,
    is_exact: bool,
    seed: int,
) -> None:
    format, in_features = chosen
    generator = torch.Generator().manual_seed(seed)
    tensors = random_tensors(format, rows, in_features, seed)
    bias = torch.randn(rows, generator=generator) if biased else None
    x = torch.randn(num_tokens, in_features, generator=generator)
    linear = NativeLinear.of(team, tensors, format, bias, is_exact=is_exact)
    rounded = linear.activation_dtype
    assert rounded == torch.float32 or not is_exact
    assert torch.equal(linear.dense(), format.unpack(tensors))
    assert torch.equal(linear(x), product_in_floats(team, x, tensors, format, bias, rounded))


@settings(max_examples=examples(20))
@given(formats(), st.integers(1, 40), st.integers(1, 20), st.integers(0, 1000))
def test_the_product_is_near_that_in_float64(
    team: Team, chosen: tuple[Format, int], rows: int, num_tokens: int, seed: int
) -> None:
    """A sum of n products in float32 is off by n * 2^-24 of the sum of their magnitudes at most, and by less than 1.01
    times as much for the roundings after it; with factors rounded to bfloat16, by 2^-9 more for each of both."""
    format, in_features = chosen
    tensors = random_tensors(format, rows, in_features, seed)
    x = torch.randn(num_tokens, in_features, generator=torch.Generator().manual_seed(seed))
    linear = NativeLinear.of(team, tensors, format, None)
    weight = format.unpack(tensors).double()
    magnitude = x.double().abs() @ weight.abs().T
    factors = 2.01 * 2.0**-8 if linear.activation_dtype == torch.bfloat16 else 0.0
    bound = (1.01 * (in_features + 4) * 2.0**-24 + factors) * magnitude
    assert bool(((linear(x) - x.double() @ weight.T).abs() <= bound + 1e-30).all())


MANY = (1, 5, 6, 7, 15, 16, 17, 31, 32, 33, 64, 97, 256, 257, 530)
"""Numbers of rows at the edges of tiles, of pairs of tiles, and of what one thread takes up at once."""


@pytest.mark.parametrize("format", [Float8(), Float8(Scaling.BLOCK), Codebook("nf4", NF4, 64)], ids=str)
@pytest.mark.parametrize(("gated", "in_features"), [(False, 1152), (True, 192)])
def test_a_row_has_the_same_bits_alone_and_among_many_for_any_number_of_threads(
    library: NativeLibrary, format: Format, gated: bool, in_features: int
) -> None:
    tensors = random_tensors(format, 2 * 88, in_features, seed=1)
    bias = torch.randn(2 * 88, generator=torch.Generator().manual_seed(1))
    x = torch.randn(max(MANY), in_features, generator=torch.Generator().manual_seed(2)) / 8
    alone = None
    for num_threads in (1, 2, 3):
        linear = NativeLinear.of(library.start_team(num_threads), tensors, format, bias, gated)
        if alone is None:
            alone = torch.cat([linear(row[None]) for row in x])
        for rows in MANY:
            assert torch.equal(linear(x[:rows]), alone[:rows])


def test_weights_stay_packed(team: Team) -> None:
    """With the scales of a group or a row, and nothing else."""
    for format in (Float8(), Codebook("nf4", NF4, 64)):
        linear = NativeLinear.of(team, random_tensors(format, 64, 256, seed=0), format, None)
        assert linear.num_bytes == format.num_bytes(64, 256, torch.float32)
    blocks = Float8(Scaling.BLOCK)
    tensors = random_tensors(blocks, 64, 2 * BLOCK, seed=0)
    assert NativeLinear.of(team, tensors, blocks, None).num_bytes == blocks.num_bytes(64, 2 * BLOCK)


def test_numbers_that_are_not_finite_stay_where_they_are(team: Team) -> None:
    for format in (Float8(), Codebook("nf4", NF4, 64)):
        linear = NativeLinear.of(team, random_tensors(format, 20, 128, seed=0), format, None)
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
        expected = linear(x)
        x[3, 5] = torch.nan
        found = linear(x)
        assert bool(found[3].isnan().all())
        others = [0, 1, 2, 4]
        assert torch.equal(found[others], expected[others])
