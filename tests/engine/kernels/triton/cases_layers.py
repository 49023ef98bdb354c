"""The small kernels of a layer, as models of common sizes launch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.engine.kernels.triton import activation, inputs, norms, rotary
from penstock.engine.quant.rotation import block_size
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


def norm(size: Size, adds: bool, *, centered: bool = False, weight: str = "") -> Case:
    pointer, block = f"*{size.dtype}", power_of_2(size.hidden)
    constants: dict[str, Any] = {"ADDS": adds, "CENTERED": centered, "SIZE": size.hidden, "BLOCK": block}
    arguments = {"x": pointer, "weight": f"*{weight or size.dtype}", "normed": pointer, "eps": "fp32"}
    if adds:
        arguments |= {"delta": pointer, "total": pointer}
    else:
        constants |= {"delta": None, "total": None}
    return Case(
        name=f"{'add_' if adds else ''}{'layer' if centered else 'rms'}_norm, {size.name}, {weight or 'own'} weight",
        kernel=norms.rms_norm_kernel,
        arguments=arguments,
        constexprs=constants,
        num_warps=norms.num_warps(block),
        options=OPTIONS,
    )


def rotate_and_write(
    size: Size, kv_dtype: str | None = None, *, norms_last: bool = False, norms_values: bool = False
) -> Case:
    pointer = f"*{size.dtype}"
    arguments = {"qkv": pointer, "queries": pointer, "cos": "*fp32", "sin": "*fp32"}
    arguments["layer_kv"] = f"*{kv_dtype or size.dtype}"
    arguments |= {"positions": "*i32", "in_cache": "*i64", "values_offset": "i64", "eps": "fp32"}
    constants: dict[str, Any] = {
        "NORMS": size.qk_norm,
        "NORMS_LAST": norms_last,
        "NORMS_VALUES": norms_values,
        "NUM_HEADS": size.num_heads,
        "NUM_KV_HEADS": size.num_kv_heads,
        "HEAD_DIM": size.head_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_STRIDE": size.num_kv_heads * 16 * (size.head_dim + (4 if kv_dtype else 0)),
        "GROUP": rotary.HEADS_PER_PROGRAM,
        "PAIRS": power_of_2(size.head_dim // 2),
        "SPREAD": block_size(size.head_dim // 2) if kv_dtype else 0,
    }
    if kv_dtype is None:
        constants["layer_scales"] = None
    else:
        arguments["layer_scales"] = "*fp32"
    if norms_last:  # and queries that are scaled by their position
        arguments["q_scales"] = "*fp32"
    else:
        constants["q_scales"] = None
    if size.qk_norm:
        arguments |= {"q_norm": pointer, "k_norm": pointer}
    else:
        constants |= {"q_norm": None, "k_norm": None}
    more = f"{f', to {kv_dtype}' if kv_dtype else ''}{', then norms' * norms_last}{', norms of values' * norms_values}"
    return Case(
        name=f"rotate_and_write, {size.name}{more}",
        kernel=rotary.rotate_and_write_kernel,
        arguments=arguments,
        constexprs=constants,
        aligned=("values_offset",),
        options=rotary.OPTIONS,
    )


def glu(size: Size, kind: str) -> Case:
    pointer = f"*{size.dtype}"
    return Case(
        name=f"{kind}_mul, {size.name}",
        kernel=activation.glu_kernel,
        arguments={"gate_up": pointer, "out": pointer},
        constexprs={"KIND": kind, "SIZE": size.inner, "BLOCK": activation.BLOCK},
        options=OPTIONS,
    )


def relu2(size: Size) -> Case:
    pointer = f"*{size.dtype}"
    return Case(
        name=f"relu2, {size.name}",
        kernel=activation.relu2_kernel,
        arguments={"up": pointer, "out": pointer, "size": "i32"},
        constexprs={"BLOCK": activation.BLOCK},
    )


SLOTS = Case(
    name="kv_places",
    kernel=rotary.kv_places_kernel,
    arguments={
        "positions": "*i32",
        "query_starts": "*i32",
        "block_tables": "*i32",
        "in_cache": "*i64",
        "num_tokens": "i32",
        "num_sequences": "i32",
        "num_halvings": "i32",
        "table_width": "i32",
    },
    constexprs={"BLOCK_SIZE": 16, "ROWS": rotary.ROWS_PER_PROGRAM},
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
        constexprs={
            "LAST_ROW": 256,
            "MAX_BLOCKS": 2560,
            "BLOCK_SIZE": 16,
            "NUM_TABLES": 3,
            "ENTRIES": entries,
        },
        num_warps=1 if entries == inputs.FEW else 4,
    )


CASES = [
    SLOTS,
    gather(inputs.FEW),
    gather(inputs.MANY),
    *(norm(size, adds) for size in SIZES for adds in (False, True)),
    *(norm(size, adds, weight="fp32") for size in SIZES[:2] for adds in (False, True)),
    *(norm(size, False, centered=True) for size in SIZES[:2]),
    *(rotate_and_write(size) for size in SIZES),
    *(rotate_and_write(size, norms_last=True) for size in SIZES if size.qk_norm),
    *(rotate_and_write(size, norms_values=True) for size in SIZES if size.qk_norm),
    *(rotate_and_write(size, kv_dtype) for size in SIZES[:2] for kv_dtype in ("i8", "u8")),
    *(glu(size, "silu") for size in SIZES),
    *(glu(size, kind) for size in SIZES[:2] for kind in ("gelu_tanh", "gelu")),
    *(relu2(size) for size in SIZES[1:4]),
]
