"""Attention as it is served: the shapes of Llama 8B and Qwen3, wide and odd heads, windows, drafts, and float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.triton import attention_kernels as kernels
from penstock.engine.kernels.triton import attention_segments as segmenting
from penstock.engine.kernels.triton.attention import Workspace
from penstock.engine.kernels.triton.attention_tiling import Chip, KVHead, TensorCores, Tiling, shared_bytes
from tests.engine.kernels.triton.compiling import ARCHITECTURES, SHARED_LIMIT, Case

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
}
_LENGTHS = ("query_starts", "context_lens", "item_sequences", "first_items", "block_tables")
_OPTIONS = {"enable_fp_fusion": True}
_A100, _A10, _ADA, _HOPPER, _BLACKWELL, _RTX50 = 80, 86, 89, 90, 100, 120


def chip(architecture: int) -> Chip:
    """A chip of the architecture, as large as an H100."""
    return Chip(132, TensorCores.of_capability(architecture // 10), SHARED_LIMIT[architecture])


def _cases(
    name: str,
    architecture: int,
    *,
    group: int = 4,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    windowed: bool = False,
    chunk: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    max_query_len: int = 1,
    num_tokens: int = 8192,
) -> dict[str, Case]:
    shape = KVShape(num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16)
    workspace = Workspace(
        shape,
        dtype,
        num_kv_heads * group,
        8,
        torch.device("cpu"),
        max_decode_queries=max_query_len,
        chip=chip(architecture),
        is_quantized=kv_dtype is not None,
    )
    decode = workspace.decode_tiling(max_query_len)
    prefill = workspace.prefill_tiling(num_tokens, is_windowed=windowed or chunk > 0)
    heads = {
        "GROUP": group,
        "MAX_DECODE_QUERIES": decode.block_m // group,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": workspace.block_d,
    }
    scoring = {
        "SCALE": head_dim**-0.5,
        "SOFTCAP": softcap,
        "BLOCK_SIZE": 16,
        "BLOCK_STRIDE": shape.stored_elements(kv_dtype or dtype),
        "WINDOWED": windowed or chunk > 0,
        "CHUNK": chunk,
    }
    arguments = dict.fromkeys(_LENGTHS, "*i32")
    arguments |= dict.fromkeys(("attended", "queries"), f"*{_TYPES[dtype]}")
    arguments["layer_kv"] = f"*{_TYPES[kv_dtype or dtype]}"
    if kv_dtype is not None:
        arguments["layer_scales"] = "*fp32"
    if has_sinks:
        arguments["sinks"] = "*fp32"
    arguments |= dict.fromkeys(("segment_outputs", "segment_scales"), "*fp32")
    arguments |= dict.fromkeys(("query_stride", "table_stride", "num_sequences", "num_tokens"), "i32")
    arguments |= {"values_offset": "i64", "window": "i32"}

    def attend(kernel: Any, tiling: Tiling, kind: str) -> Case:
        return Case(
            name=f"{kind}-{name}",
            kernel=kernel,
            arguments=_known(kernel, arguments),
            constexprs={
                **heads,
                **scoring,
                **({"layer_scales": None} if kv_dtype is None else {}),
                **({} if has_sinks else {"sinks": None}),
                "BLOCK_M": tiling.block_m,
                "TILE": tiling.tile,
            },
            aligned=("query_stride", "values_offset"),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            options=_OPTIONS,
            has_dot=dtype != torch.float32,
            shared_bound=shared_bytes(
                KVHead(group, workspace.block_d, dtype.itemsize),
                tiling.block_m,
                tiling.tile,
                chip(architecture).tensor_cores,
            ),
            has_large_dot=dtype != torch.float32 and tiling.block_m >= 64,
            architectures=(architecture,),
        )

    return {
        "decode": attend(kernels.decode_attention_kernel, decode, "decode"),
        "prefill": attend(kernels.prefill_attention_kernel, prefill, "prefill"),
        "reduce": _reduction(name, group, workspace.block_d, heads, arguments),
    }


def _reduction(
    name: str, group: int, block_d: int, heads: Mapping[str, int], arguments: dict[str, str]
) -> Case:
    kernel = segmenting.reduce_segments_kernel
    constants = {
        "BLOCK_G": triton.next_power_of_2(group),
        "SEGMENTS": segmenting.reduced_segments(group, block_d),
        "ZEROS": segmenting.ZEROED_ELEMENTS,
    }
    return Case(
        name=f"reduce_segments-{name}",
        kernel=kernel,
        arguments=_known(kernel, arguments),
        constexprs=dict(heads) | constants,
        num_warps=segmenting.REDUCTION_WARPS,
        options=_OPTIONS,
    )


def _known(kernel: Any, arguments: dict[str, str]) -> dict[str, str]:
    return {name: arguments[name] for name in kernel.arg_names if name in arguments}


_PLAN = Case(
    name="plan_segments",
    kernel=segmenting.plan_segments_kernel,
    arguments=dict.fromkeys(("query_starts", "context_lens", "item_sequences", "first_items"), "*i32")
    | dict.fromkeys(("num_sequences", "num_items", "window"), "i32"),
    constexprs={
        "MAX_DECODE_QUERIES": 4,
        "TILE": 64,
        "MIN_TILES": segmenting.MIN_SEGMENT_TILES,
        "BLOCK_S": 512,
        "ITEMS": segmenting.PLANNED_ITEMS,
    },
)

_LLAMA = {
    architecture: _cases(f"llama-{architecture}", architecture)
    for architecture in (*ARCHITECTURES, _A10, _ADA)
}
_SHORT = _cases("llama-short", _HOPPER, num_tokens=100)
_HALVED = _cases("llama-64", _HOPPER, head_dim=64)
_ODD = _cases("phi-hopper", _HOPPER, group=1, num_kv_heads=32, head_dim=96, dtype=torch.float16)
_EXACT_GEMMA = _cases("exact-256", _HOPPER, head_dim=256, group=2, dtype=torch.float32)
_DRAFTS = {
    architecture: _cases(f"llama-drafts-{architecture}", architecture, max_query_len=9)
    for architecture in (_A100, _HOPPER, _BLACKWELL)
}
_QWEN = _cases("qwen-drafts", _A100, group=7, num_kv_heads=4, max_query_len=5)
_GEMMA = {
    architecture: _cases(f"gemma-{architecture}", architecture, group=2, head_dim=256, windowed=True)
    for architecture in (_A10, _HOPPER, _RTX50)
}
_SINKS = {
    architecture: _cases(
        f"gpt-oss-{architecture}", architecture, group=8, head_dim=64, windowed=windowed, has_sinks=True
    )
    for windowed, architecture in ((False, _A100), (True, _HOPPER), (False, _BLACKWELL))
}
_CHUNKED = {
    architecture: _cases(f"llama4-{architecture}", architecture, group=5, chunk=8192)
    for architecture in (_A100, _HOPPER, _BLACKWELL)
}
_FIFTHS = _cases("fifths-hopper", _HOPPER, group=5)
_CAPPED = {
    architecture: _cases(f"capped-{architecture}", architecture, group=2, softcap=50.0)
    for architecture in (_A100, _HOPPER, _BLACKWELL)
}
_PHI = _cases("phi", _A100, group=1, num_kv_heads=32, head_dim=96, dtype=torch.float16)
_SMALL = _cases("small", _A100, group=2, head_dim=64, max_query_len=16, windowed=True)
_WIDE = {
    architecture: _cases(f"wide-drafts-{architecture}", architecture, group=8, max_query_len=16)
    for architecture in (_A100, _A10)
}
_EXACT = {
    architecture: _cases(f"exact-{architecture}", architecture, dtype=torch.float32)
    for architecture in (_A100, _RTX50)
}
_QUANTIZED = {
    architecture: _cases(f"llama-int8-{architecture}", architecture, kv_dtype=torch.int8)
    for architecture in (_A100, _HOPPER, _BLACKWELL)
}
_QUANTIZED_GEMMA = _cases("gemma-int8", _RTX50, group=2, head_dim=256, windowed=True, kv_dtype=torch.int8)
_QUANTIZED_PHI = _cases(
    "phi-int8", _A10, group=1, num_kv_heads=32, head_dim=96, dtype=torch.float16, kv_dtype=torch.int8
)
_QUANTIZED_WIDE = {
    architecture: _cases(
        f"wide-drafts-int8-{architecture}", architecture, group=8, max_query_len=16, kv_dtype=torch.int8
    )
    for architecture in (_A100, _HOPPER)
}
_EXACT_GEMMA_RTX50 = _cases("exact-256-120", _RTX50, head_dim=256, group=2, dtype=torch.float32)

CASES = [
    _PLAN,
    _LLAMA[_HOPPER]["reduce"],
    _QWEN["reduce"],
    _EXACT_GEMMA["reduce"],
    *(cases["decode"] for cases in _LLAMA.values()),
    *(cases["prefill"] for cases in _LLAMA.values()),
    _SHORT["prefill"],
    _HALVED["prefill"],
    _ODD["prefill"],
    _EXACT_GEMMA["decode"],
    _QWEN["decode"],
    *(cases["decode"] for cases in _GEMMA.values()),
    *(cases["prefill"] for cases in _GEMMA.values()),
    *(
        cases[kind]
        for cases in (*_CAPPED.values(), *_SINKS.values(), *_CHUNKED.values())
        for kind in ("decode", "prefill")
    ),
    _PHI["prefill"],
    _FIFTHS["prefill"],
    _SMALL["decode"],
    *(cases["decode"] for cases in _DRAFTS.values()),
    *(cases["decode"] for cases in _WIDE.values()),
    *(cases["decode"] for cases in _EXACT.values()),
    *(cases[kind] for cases in _QUANTIZED.values() for kind in ("decode", "prefill")),
    *(cases[kind] for cases in (_QUANTIZED_GEMMA, _QUANTIZED_PHI) for kind in ("decode", "prefill")),
    *(cases["decode"] for cases in _QUANTIZED_WIDE.values()),
    _EXACT_GEMMA_RTX50["decode"],
    _EXACT_GEMMA_RTX50["prefill"],
]
