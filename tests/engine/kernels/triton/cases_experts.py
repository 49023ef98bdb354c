"""Routing and the products of experts, in the formats that they have, as the rule cuts them for each kind of card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.engine.kernels.packed import Code
from penstock.engine.kernels.triton import expert_kernels, routing
from penstock.engine.kernels.triton.experts import SORT_BLOCK, SUM_BLOCK
from penstock.engine.kernels.triton.packed_linear import ONE_GROUP
from penstock.engine.kernels.triton.tiles import ROW_CLASSES, shared_bytes
from penstock.engine.spec import Activation, Router
from tests.engine.kernels.triton.cases_packed import OPTIONS, TYPES, card
from tests.engine.kernels.triton.compiling import Case

_SPILLED = 152
"""By MXFP4 with many rows on Hopper, which is 1.2 times as fast so as with tiles that spill nothing."""
QWEN3 = Router(num_experts=128, top_k=8, renormalizes=True)
DEEPSEEK = Router(
    num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, group_best=2, renormalizes=True,
    choice_bias="bias",
)  # fmt: skip
SILU = Activation()
SWIGLU = Activation(limit=7.0, alpha=1.702, shift=1.0)
RELU2 = Activation(kind="relu2", is_gated=False)
SIZES = ("num_outputs", "num_rows", "out_features", "in_features", "row_bytes")
POINTERS = {
    "scale": "*fp16",
    "zero": "*i8",
    "offset": "*fp16",
    "permutation": "*i32",
    "pair_weights": "*fp32",
    "order": "*i32",
    "tile_experts": "*i32",
}


def product(
    architecture: int,
    most_rows: int,
    code: Code | None,
    scales: str,
    activation: Activation | None = SILU,
    *,
    having: tuple[str, ...] = (),
    is_sorted: bool = True,
    group_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """The first product has an activation; the second one has none, and the weights of pairs."""
    tiling = card(architecture).expert_tiling(code, dtype, most_rows)
    step = min(tiling.block_k, group_size) if scales == "groups" else tiling.block_k
    kind, shape = TYPES[dtype], activation or SILU
    codes = f"*{kind}" if code is None else "*i8" if code is Code.INT8 else "*u8"
    there = {*having} | ({"scale"} if code else set()) | (set() if activation else {"pair_weights"})
    there |= {"order", "tile_experts"} if is_sorted else set()
    pointers = POINTERS | {"bias": f"*{kind}"} | ({"scale": "*bf16"} if scales == "units" else {})
    words = [code.value if code else kind, scales, *having, shape.kind if activation else "down"]
    rows = f"{most_rows} rows" if is_sorted else "a single row"
    options = tiling.options
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    return Case(
        name=f"expert_linear, {', '.join(words)}, {rows}, {kind}, for sm_{architecture}",
        kernel=expert_kernels.expert_linear_kernel,
        arguments={
            **{"out": f"*{kind}", "x": f"*{kind}", "codes": codes, "ids": "*i32"},
            **dict.fromkeys(("num_tiles", "num_steps", *SIZES), "i32"),
            **{name: pointers[name] for name in there},
        },
        constexprs={
            **{name: None for name in pointers if name not in there},
            **options,
            "NUM_EXPERTS": 128,
            "NUM_READERS": 8 if activation else 1,
            "CODE": code.value if code else "float",
            "SCALES": scales,
            "GROUP_SIZE": ONE_GROUP if scales in ("rows", "none") else group_size,
            "KIND": activation.kind if activation else "",
            "IS_GATED": activation is not None and activation.is_gated,
            "LIMIT": shape.limit,
            "ALPHA": shape.alpha,
            "SHIFT": shape.shift,
            "BLOCK_K": step,
        },
        aligned=SIZES,
        num_warps=warps,
        num_stages=stages,
        options=OPTIONS,
        has_dot=dtype != torch.float32,
        most_spilled=_SPILLED if (architecture, code, most_rows) == (90, Code.FLOAT4, ROW_CLASSES[-1]) else 0,
        has_large_dot=dtype != torch.float32 and step >= 64,
        shared_bound=shared_bytes(tiling, code, dtype, card(architecture).chip.tensor_cores),
        architectures=(architecture,),
    )


def products() -> Iterator[Case]:
    """Every format on every card, in the classes of rows that differ most; a few variants beside them."""
    few, some, many = ROW_CLASSES
    for architecture in (80, 90, 100):
        for rows in (few, many):
            yield product(architecture, rows, None, "none")
            yield product(architecture, rows, None, "none", None)
            yield product(architecture, rows, Code.UINT4, "groups", having=("zero",))
            yield product(architecture, rows, Code.FLOAT8, "groups")
            yield product(architecture, rows, Code.INT8, "rows")
            for activation in (SWIGLU, None):
                yield product(
                    architecture, rows, Code.FLOAT4, "units", activation, having=("bias",), group_size=32
                )
        yield product(architecture, few, None, "none", is_sorted=False)
        yield product(architecture, some, Code.INT4, "groups", None)
    yield product(90, some, None, "none", RELU2)
    yield product(90, some, None, "none", Activation(kind="gelu_tanh"))
    yield product(90, few, Code.INT4, "groups", having=("permutation",), is_sorted=False)
    yield product(80, many, Code.UINT4, "groups", having=("permutation", "zero"))
    yield product(80, some, Code.UINT4, "weights", having=("offset",), group_size=32)
    yield product(80, many, None, "none", dtype=torch.float32)
    yield product(90, many, Code.INT8, "groups", dtype=torch.float16)
    yield product(120, many, Code.UINT4, "groups", having=("zero",))
    yield product(120, many, None, "none")


def sort_pairs(num_experts: int, block_m: int) -> Case:
    return Case(
        name=f"sort_pairs, {num_experts} experts, tiles of {block_m}",
        kernel=expert_kernels.sort_pairs_kernel,
        arguments=dict.fromkeys(("ids", "order", "tile_experts"), "*i32")
        | dict.fromkeys(("num_pairs", "num_tiles"), "i32"),
        constexprs={"NUM_EXPERTS": num_experts, "BINS": num_experts, "BLOCK": SORT_BLOCK, "BLOCK_M": block_m},
        options=OPTIONS,
    )


def sum_choices(num_choices: int) -> Case:
    return Case(
        name=f"sum_choices, {num_choices}",
        kernel=expert_kernels.sum_choices_kernel,
        arguments={"out": "*bf16", "made": "*bf16", "ids": "*i32"},
        constexprs={"NUM_EXPERTS": 128, "NUM_CHOICES": num_choices, "SIZE": 2048, "BLOCK": SUM_BLOCK},
        options=OPTIONS,
    )


def route(name: str, router: Router) -> Case:
    arguments = {"ids": "*i32", "weights": "*fp32", "logits": "*bf16", "epsilon": "fp32", "factor": "fp32"}
    constants: dict[str, Any] = {"expert_scale": None}
    if router.choice_bias:
        arguments["choice_bias"] = "*fp32"
    else:
        constants["choice_bias"] = None
    group_size = router.num_experts // router.num_groups
    return Case(
        name=f"route, {name}",
        kernel=routing.route_kernel,
        arguments=arguments,
        constexprs={
            **constants,
            "SCORING": router.scoring,
            "RENORMALIZES": router.renormalizes,
            "TOP_K": router.top_k,
            "NUM_GROUPS": router.num_groups,
            "TOP_GROUPS": router.top_groups,
            "GROUP_BEST": router.group_best,
            "GROUP_SIZE": group_size,
            "BLOCK_K": router.top_k,
            "BLOCK_G": router.num_groups,
            "BLOCK_S": group_size,
        },
        num_warps=1,
        options=OPTIONS,
    )


CASES = [
    *products(),
    sort_pairs(128, 16),
    sort_pairs(256, 128),
    sum_choices(8),
    route("Qwen 3", QWEN3),
    route("DeepSeek V3", DEEPSEEK),
]
