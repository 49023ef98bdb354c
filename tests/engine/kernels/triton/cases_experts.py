"""Routing and the products of experts, in the formats that they have, as the rule cuts them for each kind of card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from penstock.engine.kernels.packed import Code
from penstock.engine.kernels.triton import expert_kernels, routing
from penstock.engine.kernels.triton.expert_weights import PackedExperts
from penstock.engine.kernels.triton.experts import SortedPairs, TritonExperts
from penstock.engine.kernels.triton.tiles import ROW_CLASSES, expert_rows
from penstock.engine.spec import Activation, Router
from tests.engine.kernels.triton.cases_packed import card, expected, weight
from tests.engine.kernels.triton.compiling import Case, empty, recorded

_SPILLED = 152
"""By MXFP4 with many rows on Hopper, which is 1.2 times as fast so as with tiles that spill nothing."""
QWEN3 = Router(num_experts=128, top_k=8, renormalizes=True)
DEEPSEEK = Router(
    num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, group_best=2, renormalizes=True,
    choice_bias="bias",
)  # fmt: skip
HIDDEN, INNER, EXPERTS, CHOICES = 2048, 768, QWEN3.num_experts, QWEN3.top_k
SILU = Activation()
SWIGLU = Activation(limit=7.0, alpha=1.702, shift=1.0)
RELU2 = Activation(kind="relu2", is_gated=False)
_BOTH = (None, Code.INT4, Code.FLOAT4)
"""The codes that are tried in the second product, too; the first has an activation, and needs more registers."""
FEW, SOME, MANY = 16, 512, 2048
"""Rows of a step: those of each expert are in the three classes."""


def layer(
    architecture: int,
    rows: int,
    code: Code | None = None,
    group_size: int | None = None,
    activation: Activation = SILU,
    *,
    bias: bool = False,
    permuted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **factors: Any,
) -> Iterator[Case]:
    """All that the experts of a layer launch; a code of None is weights in the type of x."""

    def experts(outputs: int, inputs: int, is_gated: bool) -> PackedExperts:
        size = EXPERTS * outputs
        return PackedExperts(
            num_experts=EXPERTS,
            out_features=outputs,
            in_features=inputs,
            weight=weight(code, group_size, outputs=size, inputs=inputs, **factors)
            if code
            else empty(size, inputs, dtype=dtype),
            bias=empty(size, dtype=dtype) if bias else None,
            permutation=empty(EXPERTS, inputs) if permuted else None,
            is_gated=is_gated,
        )

    on = TritonExperts(card(architecture))
    first = experts((1 + activation.is_gated) * INNER, HIDDEN, activation.is_gated)
    second = experts(HIDDEN, INNER, is_gated=False)
    x, ids = empty(rows, HIDDEN, dtype=dtype), empty(rows, CHOICES)
    weights = empty(rows, CHOICES, dtype=torch.float32)
    words = [code.value if code else "float", f"groups of {group_size}", str(dtype), activation.kind]
    words += ["bias"] * bias + ["permuted"] * permuted + [f"{rows} rows", f"for sm_{architecture}"]
    is_large = (architecture, code, expert_rows(rows * CHOICES, EXPERTS)) == (
        90,
        Code.FLOAT4,
        ROW_CLASSES[-1],
    )
    for case in recorded(", ".join(words), lambda: on(x, ids, weights, first, second, activation)):
        if case.kernel is not expert_kernels.expert_linear_kernel:
            yield case
        elif case.constexprs["KIND"] or code in _BOTH:
            tiling = on.tiling(first, dtype, rows * CHOICES)
            yield replace(
                expected(case, architecture, tiling, code, dtype), most_spilled=_SPILLED if is_large else 0
            )


def layers() -> Iterator[Case]:
    """Every format on every card, in the classes of rows that differ most; a few variants beside them."""
    mxfp4: dict[str, Any] = {"bias": True, "factors": torch.bfloat16}
    for architecture in (80, 90, 100):
        for rows in (FEW, MANY):
            yield from layer(architecture, rows)
            yield from layer(architecture, rows, Code.UINT4, 128, zero=True)
            yield from layer(architecture, rows, Code.FLOAT8, 128)
            yield from layer(architecture, rows, Code.INT8)
            yield from layer(architecture, rows, Code.FLOAT4, 32, SWIGLU, **mxfp4)
        yield from layer(architecture, 1)
        yield from layer(architecture, SOME, Code.INT4, 128)
    yield from layer(90, SOME, activation=RELU2)
    yield from layer(90, SOME, activation=Activation(kind="gelu_tanh"))
    yield from layer(90, 1, Code.INT4, 128, permuted=True)
    yield from layer(80, MANY, Code.UINT4, 128, permuted=True, zero=True)
    yield from layer(80, SOME, Code.UINT4, 32, offset=True)
    yield from layer(80, MANY, dtype=torch.float32)
    yield from layer(90, MANY, Code.INT8, 128, dtype=torch.float16)
    yield from layer(120, MANY, Code.UINT4, 128, zero=True)
    yield from layer(120, MANY)


def route(name: str, router: Router) -> list[Case]:
    logits = empty(5, router.num_experts, dtype=torch.bfloat16)
    bias = empty(router.num_experts, dtype=torch.float32) if router.choice_bias else None
    return recorded(name, lambda: routing.route(logits, router, bias))


CASES = [
    *layers(),
    *recorded("DeepSeek V3", lambda: SortedPairs.of(empty(MANY, CHOICES), DEEPSEEK.num_experts, 128)),
    *route("Qwen 3", QWEN3),
    *route("DeepSeek V3", DEEPSEEK),
]
