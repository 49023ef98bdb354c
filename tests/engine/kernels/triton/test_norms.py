from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels import reference
from penstock.engine.kernels.triton.norms import add_rms_norm, rms_norm
from tests.engine import ranges
from tests.engine.kernels.random_inputs import check_norms
from tests.engine.kernels.triton.dtypes import DTYPES
from tests.engine.ranges import assert_within, exactly
from tests.few import examples


def random(
    *shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    num_rows=st.integers(1, 4),
    size=st.integers(1, 300),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    scale=st.sampled_from([1e-4, 1.0, 300.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(30), deadline=None)
def test_it_is_the_reference(
    dtype: torch.dtype, num_rows: int, size: int, eps: float, scale: float, seed: int, device: torch.device
) -> None:
    hidden, delta = random(2, num_rows, size, dtype=dtype, device=device, seed=seed, scale=scale)
    weight = random(size, dtype=dtype, device=device, seed=seed + 1)
    check_norms(rms_norm, add_rms_norm, hidden, delta, weight, eps)
    check_norms(reference.rms_norm, reference.add_rms_norm, hidden, delta, weight, eps)


@pytest.mark.parametrize("size", [4096, 5000])
def test_it_is_the_reference_on_rows_of_a_real_size(size: int, device: torch.device) -> None:
    hidden, delta = random(2, 2, size, dtype=torch.float16, device=device)
    weight = random(size, dtype=torch.float16, device=device, seed=1)
    check_norms(rms_norm, add_rms_norm, hidden, delta, weight, 1e-5)
    check_norms(reference.rms_norm, reference.add_rms_norm, hidden, delta, weight, 1e-5)


def test_a_row_does_not_depend_on_its_company(device: torch.device) -> None:
    hidden, delta = random(2, 7, 100, dtype=torch.float16, device=device)
    weight = random(100, dtype=torch.float16, device=device, seed=1)
    together = add_rms_norm(hidden, delta, weight, 1e-5)
    for row in range(7):
        alone = add_rms_norm(hidden[row : row + 1], delta[row : row + 1], weight, 1e-5)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))


def test_heads_that_are_part_of_wider_rows_are_normed_each(device: torch.device) -> None:
    heads = random(3, 8, 16, dtype=torch.float32, device=device)[:, 2:7]
    weight = random(16, dtype=torch.float32, device=device, seed=1)
    found = rms_norm(heads, weight, 1e-6)
    assert found.is_contiguous()
    assert_within(found, ranges.rms_norm(exactly(heads), weight, 1e-6))


def test_no_rows_are_no_launch(device: torch.device) -> None:
    nothing, weight = torch.empty(0, 16, device=device), torch.ones(16, device=device)
    assert rms_norm(nothing, weight, 1e-6).shape == (0, 16)
    assert [part.shape for part in add_rms_norm(nothing, nothing, weight, 1e-6)] == [(0, 16)] * 2
