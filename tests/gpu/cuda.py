"""Constants of the tests of this folder, which are skipped where there is no CUDA."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.select import triton_kernels
from tests.engine.configs import llama_config

DEVICE = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU and a torch with CUDA",
    ),
]


def config_of(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 64, window: int = 0) -> ModelConfig:
    return llama_config(
        vocab_size=512,
        hidden_size=64,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=64,
        rms_norm_eps=1e-5,
        max_position=4096,
        sliding_windows=(window,),
    )


def table(config: ModelConfig, dtype: torch.dtype, block_size: int = 16) -> Kernels:
    """The table under test."""
    return triton_kernels(config, DEVICE, dtype, LoadOptions(block_size=block_size))
