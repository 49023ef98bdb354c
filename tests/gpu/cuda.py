"""What the tests of this folder share: they need CUDA, and say so where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.ops import Kernels, reference_kernels
from engine.kernels.select import triton_kernels
from engine.model.config import LoadOptions, ModelConfig

DEVICE = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU and a torch with CUDA",
    ),
]

_ERRORS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-5}
"""Allowed in the mean, relative to the expected values: a few units in the last place."""


def both(
    config: ModelConfig, dtype: torch.dtype, block_size: int = 16, max_num_seqs: int = 256
) -> tuple[Kernels, Kernels]:
    """The table under test, and the reference's on the same device in float32."""
    options = LoadOptions(block_size=block_size, max_num_seqs=max_num_seqs)
    kernels = triton_kernels(config, DEVICE, dtype, options)
    return kernels, reference_kernels(DEVICE, torch.float32)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1) -> None:
    """By the root of the mean square of the error, and with no element far off.

    Args:
        times: more than the usual error is fine, where more is rounded on the way.
    """
    allowed = times * _ERRORS[dtype]
    found, expected = found.float(), expected.float()
    assert found.shape == expected.shape
    assert found.isfinite().all()
    scale = expected.square().mean().sqrt().clamp(min=1e-9)
    error = (found - expected).square().mean().sqrt() / scale
    assert error.item() < allowed, f"error of {error:.2e}"
    worst = ((found - expected).abs() / (scale + expected.abs())).max()
    assert worst.item() < 12 * allowed, f"an error of {worst:.2e} in one element"
