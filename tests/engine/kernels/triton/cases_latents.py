"""Attention to latents as it is served: the shapes of DeepSeek V3, GLM-4.7 Flash and Mistral Small 4, and of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.triton import attention_kernels as kernels
from penstock.engine.kernels.triton import latents
from penstock.engine.kernels.triton.attention import TritonAttention, Workspace
from penstock.engine.kernels.triton.attention_tiling import KVHead, shared_bytes
from tests.engine.kernels.triton.cases_attention import BLOCKS, SEQUENCES, chip
from tests.engine.kernels.triton.compiling import META, Case, empty, recorded

_A100, _A10, _HOPPER, _BLACKWELL, _RTX50 = 80, 86, 90, 100, 120
ROTATED, PLAIN, ROWS, POSITIONS = 64, 128, 5, 99


def shape_of(latent_size: int) -> KVShape:
    return KVShape(num_kv_heads=1, head_dim=latent_size + ROTATED, block_size=16, latent_size=latent_size)


def attention(
    name: str,
    *architectures: int,
    num_heads: int = 128,
    latent_size: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    max_query_len: int = 1,
    num_tokens: int = 8192,
) -> Iterator[Case]:
    """What a step with prompts and streams launches in a layer."""
    shape, stored = shape_of(latent_size), kv_dtype or dtype
    options: dict[str, Any] = {"max_decode_queries": max_query_len, "is_quantized": kv_dtype is not None}
    tokens, sequences = empty(num_tokens), empty(SEQUENCES)
    batch = Batch(tokens, tokens, empty(SEQUENCES + 1), sequences, empty(SEQUENCES, 99), sequences)
    for architecture in architectures:
        on = chip(architecture)
        workspace = Workspace(shape, dtype, num_heads, 512, META, chip=on, **options)

        def attend(workspace: Workspace = workspace) -> None:
            TritonAttention(batch, shape, workspace)(
                empty(num_tokens, num_heads, shape.head_dim, dtype=dtype),
                empty(1, BLOCKS, shape.stored_elements(stored), dtype=stored, device=META),
                0,
            )

        head = KVHead(num_heads, workspace.block_d, dtype.itemsize, kv_dtype is not None, ROTATED)
        for case in recorded(f"{name}-{architecture}", attend):
            if case.kernel in (kernels.decode_attention_kernel, kernels.prefill_attention_kernel):
                block_m, tile = case.constexprs["BLOCK_M"], case.constexprs["TILE"]
                case = replace(
                    case,
                    has_dot=dtype != torch.float32,
                    has_large_dot=dtype != torch.float32 and block_m >= 64,
                    shared_bound=shared_bytes(head, block_m, tile, on.tensor_cores),
                )
            yield replace(case, architectures=(architecture,))


def rotate_and_write(
    name: str,
    num_heads: int,
    latent_size: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    *,
    has_scales: bool = False,
) -> list[Case]:
    shape, stored = shape_of(latent_size), kv_dtype or dtype
    angles = empty(POSITIONS, ROTATED // 2, dtype=torch.float32)
    q_scales = empty(POSITIONS, dtype=torch.float32) if has_scales else None
    places = TokenPlaces(empty(ROWS), empty(ROWS, dtype=torch.int64), angles, angles, q_scales)
    return recorded(
        f"{name}, to {stored}",
        lambda: latents.rotate_and_write_latents(
            empty(ROWS, num_heads, PLAIN + ROTATED, dtype=dtype),
            empty(ROWS, shape.head_dim, dtype=dtype),
            empty(latent_size, dtype=dtype),
            1e-6,
            places,
            empty(1, BLOCKS, shape.stored_elements(stored), dtype=stored, device=META),
            shape,
        ),
    )


CASES = [
    *rotate_and_write("deepseek", 128),
    *rotate_and_write("deepseek", 128, kv_dtype=torch.int8),
    *rotate_and_write("mistral 4", 32, 256, has_scales=True),
    *rotate_and_write("glm, fp16", 20, dtype=torch.float16),
    *rotate_and_write("glm, fp32", 20, dtype=torch.float32),
    *attention("deepseek", _A100, _A10, _HOPPER, _BLACKWELL, _RTX50),
    *attention("deepseek-drafts", _A100, _HOPPER, max_query_len=5),
    *attention("deepseek-int8", _A100, _A10, _HOPPER, _BLACKWELL, kv_dtype=torch.int8),
    *attention("rank", _HOPPER, num_heads=16),
    *attention("glm", _A100, _HOPPER, num_heads=20, dtype=torch.float16, max_query_len=3),
    *attention("mistral4", _A100, _HOPPER, _BLACKWELL, num_heads=32, latent_size=256),
    *attention("mistral4-int8", _A100, _HOPPER, num_heads=32, latent_size=256, kv_dtype=torch.int8),
    *attention("exact-latents", _A100, num_heads=20, dtype=torch.float32),
]
