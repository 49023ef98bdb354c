"""The small kernels of a layer, as models of common sizes launch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.kernels.triton import activation, inputs, norms, rotary
from tests.engine.kernels.triton.compiling import Case

OPTIONS = {"enable_fp_fusion": False}


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model's layers."""

    name: str
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    dtype: str = "bf16"


SIZES = [
    Size(name="llama-8b", hidden=4096, inner=14336, num_heads=32, num_kv_heads=8, head_dim=128),
    Size(
        name="qwen3-0.6b",
        hidden=1024,
        inner=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
    ),
    Size(
        name="qwen2-0.5b, fp16",
        hidden=896,
        inner=4864,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        dtype="fp16",
    ),
    Size(
        name="odd, fp32",
        hidden=2560,
        inner=6911,
        num_heads=20,
        num_kv_heads=20,
        head_dim=80,
        qk_norm=True,
        dtype="fp32",
    ),
    Size(
        name="wide",
        hidden=16384,
        inner=53248,
        num_heads=128,
        num_kv_heads=8,
        head_dim=256,
        qk_norm=True,
    ),
]


def power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def norm(size: Size, adds: bool) -> Case:
    pointer, block = f"*{size.dtype}", power_of_2(size.hidden)
    constants: dict[str, Any] = {"ADDS": adds, "SIZE": size.hidden, "BLOCK": block}
    arguments = {"x": pointer, "weight": pointer, "normed": pointer, "eps": "fp32"}
    if adds:
        arguments |= {"delta": pointer, "total": pointer}
    else:
        constants |= {"delta": None, "total": None}
    return Case(
        name=f"{'add_' if adds else ''}rms_norm, {size.name}",
        kernel=norms.rms_norm_kernel,
        arguments=arguments,
        constexprs=constants,
        num_warps=norms.num_warps(block),
        options=OPTIONS,
    )


def rotate_and_write(size: Size, kv_dtype: str | None = None) -> Case:
    pointer = f"*{size.dtype}"
    arguments = {"qkv": pointer, "queries": pointer, "cos": "*fp32", "sin": "*fp32"}
    arguments["layer_kv"] = f"*{kv_dtype or size.dtype}"
    arguments |= {"positions": "*i32", "slots": "*i64", "values_offset": "i64", "eps": "fp32"}
    constants: dict[str, Any] = {
        "NORMS": size.qk_norm,
        "NUM_HEADS": size.num_heads,
        "NUM_KV_HEADS": size.num_kv_heads,
        "HEAD_DIM": size.head_dim,
        "BLOCK_SIZE": 16,
        "GROUP": rotary.HEADS_PER_PROGRAM,
        "PAIRS": power_of_2(size.head_dim // 2),
    }
    if kv_dtype is None:
        constants["layer_scales"] = None
    else:
        arguments["layer_scales"] = "*fp32"
    if size.qk_norm:
        arguments |= {"q_norm": pointer, "k_norm": pointer}
    else:
        constants |= {"q_norm": None, "k_norm": None}
    return Case(
        name=f"rotate_and_write, {size.name}{f', to {kv_dtype}' if kv_dtype else ''}",
        kernel=rotary.rotate_and_write_kernel,
        arguments=arguments,
        constexprs=constants,
        aligned=("values_offset",),
        options=rotary.OPTIONS,
    )


def silu_mul(size: Size) -> Case:
    pointer = f"*{size.dtype}"
    return Case(
        name=f"silu_mul, {size.name}",
        kernel=activation.silu_mul_kernel,
        arguments={"gate_up": pointer, "out": pointer},
        constexprs={"SIZE": size.inner, "BLOCK": activation.BLOCK},
        options=OPTIONS,
    )


SLOTS = Case(
    name="slot_mapping",
    kernel=rotary.slot_mapping_kernel,
    arguments={
        "positions": "*i32",
        "query_starts": "*i32",
        "block_tables": "*i32",
        "slots": "*i64",
        "num_tokens": "i32",
        "num_sequences": "i32",
        "num_halvings": "i32",
        "table_width": "i32",
    },
    constexprs={"BLOCK_SIZE": 16, "ROWS": rotary.SLOTS_PER_PROGRAM},
    options=OPTIONS,
)


def gather(entries: int) -> Case:
    tensors = ["slots", "query_starts", "tokens", "lengths", "prompt_lens", "last_tokens", "table_blocks"]
    tensors += ["token_ids", "positions", "context_lens", "block_tables", "sample_rows", "numbers"]
    numbers = dict.fromkeys(["num_sequences", "num_tokens", "num_blocks"], "i32")
    return Case(
        name=f"gather, {entries} at a time",
        kernel=inputs.gather_kernel,
        arguments=dict.fromkeys(tensors, "*i32") | numbers,
        constexprs={"LAST_ROW": 256, "MAX_BLOCKS": 2560, "BLOCK_SIZE": 16, "ENTRIES": entries},
        num_warps=1 if entries == inputs.FEW else 4,
    )


CASES = [
    SLOTS,
    gather(inputs.FEW),
    gather(inputs.MANY),
    *(norm(size, adds) for size in SIZES for adds in (False, True)),
    *(rotate_and_write(size) for size in SIZES),
    *(rotate_and_write(size, kv_dtype) for size in SIZES[:2] for kv_dtype in ("i8", "u8")),
    *(silu_mul(size) for size in SIZES),
]
