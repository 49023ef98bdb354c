"""Attention as it is served: the shapes of Llama 8B and Qwen3, wide and odd heads, windows, drafts, and float32."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.kv_cache import KVShape
from engine.kernels.triton import attention
from engine.kernels.triton.attention import Chip, Workspace
from tests.engine.kernels.triton.compiling import ARCHITECTURES, Case

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_LENGTHS = ("query_starts", "context_lens", "item_sequences", "first_items", "block_tables")
_OPTIONS = {"enable_fp_fusion": True}
_AMPERE, _HOPPER, _BLACKWELL, _ANY = (80,), (90,), (100,), ARCHITECTURES


def _cases(
    name: str,
    *,
    group: int = 4,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    windowed: bool = False,
    softcap: float = 0.0,
    max_queries: int = 1,
    num_tokens: int = 8192,
    architectures: tuple[int, ...] = _ANY,
) -> dict[str, Case]:
    shape = KVShape(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16)
    workspace = Workspace(
        shape,
        dtype,
        num_kv_heads * group,
        8,
        torch.device("cpu"),
        max_few_queries=max_queries,
        chip=Chip(132, has_wgmma=architectures[0] >= 90, has_tensor_memory=architectures[0] >= 100),
    )
    few, many = workspace.few_tiling(max_queries), workspace.many_tiling(num_tokens)
    heads = {
        "GROUP": group,
        "FEW": few.block_m // group,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": workspace.block_d,
    }
    scoring = {
        "SCALE": head_dim**-0.5,
        "SOFTCAP": softcap,
        "BLOCK_SIZE": 16,
        "WINDOWED": windowed,
    }
    arguments = dict.fromkeys(_LENGTHS, "*i32")
    arguments |= dict.fromkeys(("attended", "queries", "layer_kv"), f"*{_TYPES[dtype]}")
    arguments |= dict.fromkeys(("partial_sums", "partial_scales"), "*fp32")
    arguments |= dict.fromkeys(("query_stride", "table_stride", "num_sequences", "num_tokens"), "i32")
    arguments |= {"values_offset": "i64", "window": "i32"}

    def attend(kernel: Any, tiling: attention.Tiling, suffix: str) -> Case:
        tiles = {"BLOCK_M": tiling.block_m, "TILE": tiling.tile}
        return Case(
            name=f"attend_{suffix}-{name}",
            kernel=kernel,
            arguments=_known(kernel, arguments),
            constexprs=heads | scoring | tiles,
            aligned=("query_stride", "values_offset"),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            options=_OPTIONS,
            has_dot=dtype != torch.float32,
            has_large_dot=dtype != torch.float32 and tiling.block_m >= 64,
            architectures=architectures,
        )

    merge = attention.merge_segments_kernel
    return {
        "few": attend(attention.attend_few_kernel, few, "few"),
        "many": attend(attention.attend_many_kernel, many, "many"),
        "merge": Case(
            name=f"merge_segments-{name}",
            kernel=merge,
            arguments=_known(merge, arguments),
            constexprs=heads | {"SEGMENTS": attention.MERGED_SEGMENTS},
            options=_OPTIONS,
        ),
    }


def _known(kernel: Any, arguments: dict[str, str]) -> dict[str, str]:
    return {name: arguments[name] for name in kernel.arg_names if name in arguments}


_PLAN = Case(
    name="plan_segments",
    kernel=attention.plan_segments_kernel,
    arguments=dict.fromkeys(("query_starts", "context_lens", "item_sequences", "first_items"), "*i32")
    | dict.fromkeys(("num_sequences", "num_items", "window"), "i32"),
    constexprs={
        "FEW": 4,
        "TILE": 64,
        "MIN_TILES": attention.MIN_SEGMENT_TILES,
        "FIXED_TILES": 0,
        "MAX_FIXED": attention.MAX_FIXED_SEGMENTS,
        "BLOCK_S": 512,
        "ITEMS": attention.PLANNED_ITEMS,
    },
)

_LLAMA = _cases("llama")
_AMPERE_LLAMA = _cases("llama-ampere", architectures=_AMPERE)
_HOPPER_LLAMA = _cases("llama-hopper", architectures=_HOPPER)
_BLACKWELL_LLAMA = _cases("llama-blackwell", architectures=_BLACKWELL)
_SHORT = _cases("llama-short", num_tokens=100, architectures=_HOPPER)
_HALVED = _cases("llama-64", head_dim=64, architectures=_HOPPER)
_ODD = _cases("phi-hopper", group=1, num_kv_heads=32, head_dim=96, dtype=torch.float16, architectures=_HOPPER)
_EXACT_GEMMA = _cases("exact-256", head_dim=256, group=2, dtype=torch.float32, architectures=_HOPPER)
_QWEN = _cases("qwen-drafts", group=7, num_kv_heads=4, max_queries=5, architectures=_AMPERE)
_GEMMA = _cases("gemma", group=2, head_dim=256, windowed=True, softcap=50.0, architectures=(90,))
_PHI = _cases("phi", group=1, num_kv_heads=32, head_dim=96, dtype=torch.float16, architectures=_AMPERE)
_SMALL = _cases("small", group=2, head_dim=64, max_queries=16, windowed=True, architectures=_AMPERE)
_WIDE = _cases("wide-drafts", group=8, max_queries=16, architectures=_AMPERE)
_EXACT = _cases("exact", dtype=torch.float32, architectures=_AMPERE)

CASES = [
    _PLAN,
    _LLAMA["few"],
    _LLAMA["merge"],
    _AMPERE_LLAMA["many"],
    _HOPPER_LLAMA["many"],
    _BLACKWELL_LLAMA["many"],
    _SHORT["many"],
    _HALVED["many"],
    _ODD["many"],
    _EXACT_GEMMA["few"],
    _QWEN["few"],
    _GEMMA["few"],
    _GEMMA["many"],
    _PHI["many"],
    _SMALL["few"],
    _WIDE["few"],
    _EXACT["few"],
]
