"""Attention as it is served: the shapes of Llama 8B and Qwen3, wide and odd heads, windows, drafts, and float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.triton import attention_kernels as kernels
from penstock.engine.kernels.triton.attention import TritonAttention, Workspace
from penstock.engine.kernels.triton.attention_tiling import Chip, KVHead, TensorCores, shared_bytes
from tests.engine.kernels.triton.compiling import ARCHITECTURES, META, SHARED_LIMIT, Case, empty, recorded

_A100, _A10, _ADA, _HOPPER, _BLACKWELL, _RTX50 = 80, 86, 89, 90, 100, 120
SEQUENCES, BLOCKS = 8, 1 << 22
"""With so many blocks, places in the cache have more than 32 bits."""
DECODE, PREFILL = kernels.decode_attention_kernel, kernels.prefill_attention_kernel
_SPILLED = 16
"""The bytes of a decode that may be spilled: the compiler does so to stay at 128 registers, for one more block."""


def chip(architecture: int) -> Chip:
    """A chip of the architecture, as large as an H100."""
    return Chip(132, TensorCores.of_capability(architecture // 10), SHARED_LIMIT[architecture])


def step(
    name: str,
    architecture: int,
    *,
    group: int = 4,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    first: int = 0,
    max_query_len: int = 1,
    num_tokens: int = 8192,
) -> Iterator[Case]:
    """What a step with prompts and streams launches in a layer."""
    shape = KVShape(num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16)
    num_heads, stored, on = num_kv_heads * group, kv_dtype or dtype, chip(architecture)
    workspace = Workspace(
        shape,
        dtype,
        num_heads,
        512,
        META,
        windows=(window,),
        max_decode_queries=max_query_len,
        chip=on,
        is_quantized=kv_dtype is not None,
    )
    tokens, sequences = empty(num_tokens), empty(SEQUENCES)
    batch = Batch(tokens, tokens, empty(SEQUENCES + 1), sequences, empty(SEQUENCES, 99), sequences)

    def attend() -> None:
        TritonAttention(batch, shape, workspace)(
            empty(num_tokens, num_heads, head_dim, dtype=dtype),
            empty(2, BLOCKS, shape.stored_elements(stored), dtype=stored, device=META),
            window,
            softcap=softcap,
            sinks=empty(num_heads, dtype=torch.float32) if has_sinks else None,
            first=first,
        )

    head = KVHead(group, workspace.block_d, dtype.itemsize)
    for case in recorded(f"{name}-{architecture}", attend):
        if case.kernel in (DECODE, PREFILL):
            block_m, tile = case.constexprs["BLOCK_M"], case.constexprs["TILE"]
            case = replace(
                case,
                has_dot=dtype != torch.float32,
                has_large_dot=dtype != torch.float32 and block_m >= 64,
                shared_bound=shared_bytes(head, block_m, tile, on.tensor_cores),
                architectures=(architecture,),
                most_spilled=_SPILLED if case.kernel is DECODE else 0,
            )
        yield case


def attention(name: str, *architectures: int, only: Any = None, **sizes: Any) -> Iterator[Case]:
    """The two kernels of attention, or one of them, on these cards."""
    for architecture in architectures:
        for case in step(name, architecture, **sizes):
            if case.kernel in ((DECODE, PREFILL) if only is None else (only,)):
                yield case


def around(name: str, architecture: int, **sizes: Any) -> Iterator[Case]:
    """The kernel that plans the segments."""
    return (case for case in step(name, architecture, **sizes) if case.kernel not in (DECODE, PREFILL))


_EACH_KIND = (_A100, _HOPPER, _BLACKWELL)
_decode, _prefill = partial(attention, only=DECODE), partial(attention, only=PREFILL)
_PHI: dict[str, Any] = {"group": 1, "num_kv_heads": 32, "head_dim": 96, "dtype": torch.float16}
_GEMMA: dict[str, Any] = {"group": 2, "head_dim": 256, "window": 1024}
_EXACT_GEMMA: dict[str, Any] = {"group": 2, "head_dim": 256, "dtype": torch.float32}
_QWEN: dict[str, Any] = {"group": 7, "num_kv_heads": 4, "max_query_len": 5}
_WIDE: dict[str, Any] = {"group": 8, "max_query_len": 16}
_SINKS: dict[str, Any] = {"group": 8, "head_dim": 64, "has_sinks": True}

CASES = [
    *around("llama", _HOPPER),
    *around("qwen-drafts", _A100, **_QWEN),
    *around("exact-256", _HOPPER, **_EXACT_GEMMA),
    *around("llama-int4", _HOPPER, kv_dtype=torch.uint8),
    *attention("llama", *ARCHITECTURES, _A10, _ADA),
    *_prefill("llama-short", _HOPPER, num_tokens=100),
    *_prefill("llama-64", _HOPPER, head_dim=64),
    *_prefill("phi", _A100, _HOPPER, **_PHI),
    *_decode("qwen-drafts", _A100, **_QWEN),
    *attention("gemma", _A10, _HOPPER, _RTX50, **_GEMMA),
    *attention("capped", *_EACH_KIND, group=2, softcap=50.0),
    *attention("gpt-oss", _A100, _BLACKWELL, **_SINKS),
    *attention("gpt-oss-windowed", _HOPPER, window=128, **_SINKS),
    *attention("llama4", *_EACH_KIND, group=5, window=-8192),
    *attention("head", *_EACH_KIND, first=1),
    *_prefill("fifths", _HOPPER, group=5),
    *_decode("small", _A100, group=2, head_dim=64, max_query_len=16, window=512),
    *_decode("llama-drafts", *_EACH_KIND, max_query_len=9),
    *_decode("wide-drafts", _A100, _A10, **_WIDE),
    *_decode("exact", _A100, _RTX50, dtype=torch.float32),
    *attention("llama-int8", *_EACH_KIND, kv_dtype=torch.int8),
    *attention("gemma-int8", _RTX50, kv_dtype=torch.int8, **_GEMMA),
    *attention("phi-int8", _A10, kv_dtype=torch.int8, **_PHI),
    *_decode("wide-drafts-int8", _A100, _HOPPER, kv_dtype=torch.int8, **_WIDE),
    *attention("llama-int4", *_EACH_KIND, kv_dtype=torch.uint8),
    *attention("gemma-int4", _RTX50, kv_dtype=torch.uint8, **_GEMMA),
    *attention("phi-int4", _A10, kv_dtype=torch.uint8, **_PHI),
    *_decode("wide-drafts-int4", _A100, _HOPPER, kv_dtype=torch.uint8, **_WIDE),
    *_decode("exact-256", _HOPPER, **_EXACT_GEMMA),
    *attention("exact-256", _RTX50, **_EXACT_GEMMA),
]
