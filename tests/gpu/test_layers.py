"""The kernels between the linear maps on a GPU, in every dtype, at the sizes of real models and at odd ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.random_inputs import Layer, RotationInput, check_norms, check_silu_mul
from tests.gpu.cuda import DEVICE, DTYPES, config_of, needs_cuda, table

pytestmark = [*needs_cuda, pytest.mark.parametrize("dtype", DTYPES, ids=str)]


def random(*size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(size))
    return (scale * torch.randn(size, device=DEVICE, generator=generator)).to(dtype)


@pytest.mark.parametrize("rows", [1, 7, 4099])
@pytest.mark.parametrize("size", [64, 576, 4096, 5120])
def test_norms(dtype: torch.dtype, rows: int, size: int) -> None:
    kernels = table(config_of(), dtype)
    hidden, delta = random(rows, size, dtype=dtype, scale=3), random(rows, size, dtype=dtype)
    check_norms(kernels.rms_norm, kernels.add_rms_norm, hidden, delta, random(size, dtype=dtype), 1e-5)


@pytest.mark.parametrize("rows", [1, 33, 2048])
@pytest.mark.parametrize("size", [96, 3072, 14_336, 18_944])
def test_activation(dtype: torch.dtype, rows: int, size: int) -> None:
    glu = table(config_of(), dtype).glu
    check_silu_mul(lambda x: glu(x, "silu"), random(rows, 2 * size, dtype=dtype, scale=2))


@pytest.mark.parametrize("num_tokens", [1, 19, 3000])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (4, 4, 80)])
@pytest.mark.parametrize("norms", [False, True])
def test_rotation_and_cache(
    dtype: torch.dtype, num_tokens: int, heads: tuple[int, int, int], norms: bool
) -> None:
    """Nothing is written where nothing belongs."""
    layer = Layer(*heads, block_size=16, norms=norms)
    num_blocks = 2 + num_tokens // 8
    rotation = RotationInput(
        layer, num_tokens, dtype, DEVICE, seed=0, num_blocks=num_blocks, num_positions=4096
    )
    rotation.check(table(config_of(*heads), dtype).rotate_and_write, dtype)
