"""Products of a few rows in the type of their weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.kernels.select import _triton_linear
from penstock.engine.kernels.triton import boundaries, few_rows, tiles
from penstock.engine.kernels.triton.few_rows import MOST_ROWS, FewRowsLinear, multiply_few
from penstock.engine.quant.formats import DENSE
from tests.engine import ranges
from tests.engine.kernels.triton.dtypes import DTYPES
from tests.engine.ranges import assert_within, exactly
from tests.few import examples


def random(*size: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@given(
    sizes=st.tuples(st.integers(1, MOST_ROWS), st.integers(1, 40), st.integers(1, 1100)),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=examples(25), deadline=None)
def test_it_is_the_product(
    sizes: tuple[int, int, int], dtype: torch.dtype, with_bias: bool, seed: int, device: torch.device
) -> None:
    rows, out_features, in_features = sizes
    x = random(rows, in_features, dtype=dtype, device=device, seed=seed)
    weight = random(out_features, in_features, dtype=dtype, device=device, seed=seed + 1)
    bias = random(out_features, dtype=dtype, device=device, seed=seed + 2) if with_bias else None
    found = multiply_few(x, weight, bias)
    assert found.dtype == dtype
    assert_within(found, ranges.linear(exactly(x), weight, bias).rounded(dtype))


def test_a_row_does_not_depend_on_the_others_of_its_class(device: torch.device) -> None:
    x = random(MOST_ROWS, 700, dtype=torch.float16, device=device)
    weight = random(9, 700, dtype=torch.float16, device=device)
    assert torch.equal(multiply_few(x[:5], weight, None), multiply_few(x, weight, None)[:5])


@pytest.mark.parametrize("shape", [(1, 32), (2, 2, 32), (5, 32), (0, 32), (8, 32)], ids=str)
def test_more_rows_than_the_card_says_are_torchs(
    shape: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(x))
        return multiply_few(x, weight, bias)

    monkeypatch.setattr(few_rows, "multiply_few", noted)
    weight = random(7, 32, dtype=torch.float32, device=device)
    x = random(*shape, dtype=torch.float32, device=device)
    found = FewRowsLinear(weight, None, boundary=5)(x)
    assert found.shape == (*shape[:-1], 7)
    assert torch.allclose(found, F.linear(x, weight), atol=1e-5)
    num_rows = x.numel() // 32
    assert calls == ([num_rows] if 0 < num_rows <= 4 else [])


@pytest.mark.parametrize("boundary", [1, 4, 99])
def test_the_file_of_the_card_says_whether_it_serves(
    boundary: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = tiles.Card.of(device).capability
    table = {capability: {"boundaries": {boundaries.few_key(torch.float16): boundary}}}
    monkeypatch.setattr(tiles, "_table", lambda: table)
    said: list[str] = []
    linear = _triton_linear(device, torch.float16, said.append)(
        {"weight": torch.zeros(3, 16)}, DENSE, torch.zeros(3)
    )
    assert isinstance(linear, FewRowsLinear) == (boundary > 1)
    assert said == []
