from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.kernels import reference
from penstock.engine.kernels.triton.activation import BLOCK, activated, glu
from tests.engine.kernels.random_inputs import check_silu_mul
from tests.engine.kernels.triton.dtypes import DTYPES
from tests.few import examples

# exp(100) is infinite in float32, as it should be: the gate is closed.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    num_rows=st.integers(0, 4),
    size=st.one_of(st.integers(1, 40), st.integers(BLOCK - 2, BLOCK + 2)),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(20), deadline=None)
def test_it_is_the_reference(
    dtype: torch.dtype, num_rows: int, size: int, scale: float, seed: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = (scale * torch.randn(num_rows, 2 * size, generator=generator)).to(device, dtype)
    for function in (glu, reference.glu):
        check_silu_mul(function, gate_up)


@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu"])
def test_other_activations_are_the_references(kind: str, device: torch.device) -> None:
    gate_up = 4 * torch.randn(3, 2 * 70, generator=torch.Generator().manual_seed(0)).to(device)
    torch.testing.assert_close(glu(gate_up, kind), reference.glu(gate_up, kind), rtol=1e-5, atol=1e-5)


def test_closed_and_open_gates(device: torch.device) -> None:
    gates = torch.tensor([-60000.0, -100.0, 0.0, 100.0, 60000.0], dtype=torch.float16, device=device)
    found = glu(torch.cat((gates, torch.ones_like(gates)))[None])
    assert found.tolist() == [[0.0, 0.0, 0.0, 100.0, 60000.0]]


def test_other_dimensions_are_kept(device: torch.device) -> None:
    gate_up = torch.randn(2, 3, 10, device=device)
    check_silu_mul(glu, gate_up)


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_ups_alone_have_the_bits_of_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    """Those that are infinite once they are squared, and no numbers, too."""
    generator = torch.Generator().manual_seed(0)
    up = (300 * torch.randn(3, 2 * BLOCK + 7, generator=generator)).to(device, dtype)
    up[0, :3] = torch.tensor([float("nan"), float("-inf"), float("inf")])
    for rows in (up, up[:, 1:4], up[:0]):
        expected = reference.activated(rows, "relu2")
        assert torch.equal(activated(rows, "relu2").nan_to_num(-1.0), expected.nan_to_num(-1.0))
