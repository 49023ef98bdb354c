"""The kernels between the linear maps on a GPU, in every dtype, at the sizes of real models and at odd ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.kv_cache import KVCache, KVShape
from engine.kernels.reference import TokenPlaces
from engine.model.config import ModelConfig, RopeConfig
from tests.gpu.cuda import DEVICE, DTYPES, assert_close, both, needs_cuda

pytestmark = [*needs_cuda, pytest.mark.parametrize("dtype", DTYPES, ids=str)]


def config_of(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 64, window: int = 0) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=64,
        rms_norm_eps=1e-5,
        max_position=4096,
        rope=RopeConfig(),
        sliding_windows=(window,),
    )


def random(*size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(size))
    return (scale * torch.randn(size, device=DEVICE, generator=generator)).to(dtype)


def widened(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


@pytest.mark.parametrize("rows", [1, 7, 4099])
@pytest.mark.parametrize("size", [64, 576, 4096, 5120])
def test_norms(dtype: torch.dtype, rows: int, size: int) -> None:
    kernels, reference = both(config_of(), dtype)
    hidden, delta = random(rows, size, dtype=dtype, scale=3), random(rows, size, dtype=dtype)
    weight = random(size, dtype=dtype)
    wide = hidden.float(), delta.float(), weight.float()
    assert_close(kernels.rms_norm(hidden, weight, 1e-5), reference.rms_norm(wide[0], wide[2], 1e-5), dtype)
    total, normed = kernels.add_rms_norm(hidden, delta, weight, 1e-5)
    expected_total, expected = reference.add_rms_norm(*wide, 1e-5)
    assert_close(total, expected_total, dtype)
    assert_close(normed, expected, dtype)


@pytest.mark.parametrize("rows", [1, 33, 2048])
@pytest.mark.parametrize("size", [96, 3072, 14_336, 18_944])
def test_activation(dtype: torch.dtype, rows: int, size: int) -> None:
    kernels, reference = both(config_of(), dtype)
    gate_up = random(rows, 2 * size, dtype=dtype, scale=2)
    assert_close(kernels.silu_mul(gate_up), reference.silu_mul(gate_up.float()), dtype)


@pytest.mark.parametrize("num_tokens", [1, 19, 3000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (4, 4, 80)])
@pytest.mark.parametrize("norms", [False, True])
def test_rotation_and_cache(
    dtype: torch.dtype, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, norms: bool
) -> None:
    kernels, reference = both(config_of(num_heads, num_kv_heads, head_dim), dtype)
    shape = KVShape(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16)
    num_blocks = 2 + num_tokens // 8
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q_norm = random(head_dim, dtype=dtype) if norms else None
    k_norm = random(head_dim, dtype=dtype, scale=2) if norms else None
    angles = torch.rand(4096, head_dim // 2, device=DEVICE) * 6.3
    slots = torch.randperm(num_blocks * 16, device=DEVICE)[:num_tokens]
    slots[::5] = -1
    positions = torch.randint(4096, (num_tokens,), device=DEVICE, dtype=torch.int32)
    places = TokenPlaces(positions, slots, angles.cos(), angles.sin())
    found_kv = KVCache(shape, num_blocks, dtype, DEVICE).layer(0)
    expected_kv = KVCache(shape, num_blocks, torch.float32, DEVICE).layer(0)
    found = kernels.rotate_and_write(qkv, q_norm, k_norm, 1e-5, places, found_kv, shape)
    expected = reference.rotate_and_write(
        qkv.float(), widened(q_norm), widened(k_norm), 1e-5, places, expected_kv, shape
    )
    has_slot = slots >= 0
    if has_slot.any():
        assert_close(found[has_slot], expected[has_slot], dtype, times=2)
        assert_close(found_kv, expected_kv, dtype, times=2)
    assert not found_kv[expected_kv == 0].any(), "nothing is written where nothing belongs"
