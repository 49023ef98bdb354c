"""The products with packed weights, in every class of rows, as the rule cuts them for each kind of card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.engine.kernels.packed import Code, PackedWeight
from penstock.engine.kernels.triton import packed_kernels
from penstock.engine.kernels.triton.attention_tiling import Chip, TensorCores
from penstock.engine.kernels.triton.few_rows import MOST_ROWS, multiply_few
from penstock.engine.kernels.triton.packed_linear import (
    BlockLinear,
    RoundedLinear,
    TritonLinear,
    in_stages,
    quantize_rows,
    rotate_rows,
    scales_of,
    unpack,
)
from penstock.engine.kernels.triton.tiles import ROW_CLASSES, Card, ProductTiling, shared_bytes
from penstock.engine.quant.float8 import FLOAT8
from tests.engine.kernels.triton.compiling import ARCHITECTURES, SHARED_LIMIT, Case, empty, recorded

WHOLE = 16_384
"""So many outputs are programs enough without parts of the inputs."""


def card(architecture: int) -> Card:
    cores = TensorCores.of_capability(architecture // 10)
    return Card(Chip(132, cores, SHARED_LIMIT[architecture]), capability=f"sm_{architecture}")


def weight(
    code: Code,
    group_size: int | None = None,
    *,
    zero: bool = False,
    offset: bool = False,
    factors: torch.dtype = torch.float16,
    outputs: int = 4096,
    inputs: int = 4096,
) -> PackedWeight:
    """A group size of None is a scale for each row."""

    def of_groups(dtype: torch.dtype) -> Tensor:
        return empty(1 if group_size is None else inputs // group_size, outputs, dtype=dtype)

    return PackedWeight(
        code=code,
        codes=empty(outputs, inputs * code.bits // 8, dtype=torch.int8 if code is Code.INT8 else torch.uint8),
        scale=of_groups(factors),
        zero=of_groups(torch.int8) if zero else None,
        offset=of_groups(factors) if offset else None,
        in_features=inputs,
        group_size=group_size or inputs,
        permutation=None,
        rounds_inputs=False,
    )


def name_of(own: PackedWeight) -> str:
    words = [own.code.value, scales_of(own), f"groups of {own.group_size}", str(own.scale.dtype)]
    words += ["zeros"] * (own.zero is not None) + ["offsets"] * (own.offset is not None)
    return ", ".join([*words, f"{own.out_features} outputs"])


def expected(
    case: Case, architecture: int, tiling: ProductTiling, code: Code | None, dtype: torch.dtype
) -> Case:
    """The product of x of this type, with what it has to be on this card."""
    has_dot = dtype != torch.float32
    return replace(
        case,
        has_dot=has_dot,
        has_large_dot=has_dot and case.constexprs["BLOCK_K"] >= 64,
        shared_bound=shared_bytes(tiling, code, dtype, card(architecture).chip.tensor_cores),
        architectures=(architecture,),
    )


def product(
    architecture: int,
    rows: int,
    own: PackedWeight,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rounds: bool = False,
) -> Iterator[Case]:
    """The product itself and, where inputs are cut into parts, their sum."""
    on, factor_type = card(architecture), torch.int8 if rounds else dtype
    bias = empty(own.out_features, dtype=dtype) if own.is_per_row else None
    linear = (RoundedLinear if rounds else TritonLinear)(own, bias, on)
    name = f"{name_of(own)}, {factor_type}, {rows} rows, for sm_{architecture}"
    for case in recorded(name, lambda: linear(empty(rows, own.in_features, dtype=dtype))):
        if case.kernel is packed_kernels.packed_linear_kernel:
            tiling = in_stages(on.tiling(own.code, factor_type, rows), own)
            yield expected(case, architecture, tiling, own.code, factor_type)
        elif case.kernel is packed_kernels.add_parts_kernel:
            yield case


def products() -> Iterator[Case]:
    """The usual kinds on every card, in those classes of rows that differ most; a few of the others."""
    few, some, many = ROW_CLASSES
    zeros = weight(Code.UINT4, 128, zero=True)
    offsets = weight(Code.UINT4, 32, offset=True)
    mxfp4 = weight(Code.FLOAT4, 32, factors=torch.bfloat16)
    int8, float8 = weight(Code.INT8), weight(Code.FLOAT8)
    for architecture in (80, 90, 100):
        for rows in ROW_CLASSES:
            yield from product(architecture, rows, zeros)
        yield from product(architecture, few, int8, rounds=True)
        yield from product(architecture, many, weight(Code.INT8, outputs=WHOLE), rounds=True)
        yield from product(architecture, some, weight(Code.FLOAT8, outputs=WHOLE))
        yield from product(architecture, many, weight(Code.INT8, 128), torch.float16)
        for rows in (few, many):
            yield from product(architecture, rows, mxfp4)
    yield from product(80, few, float8)
    yield from product(80, many, zeros, torch.float32)
    yield from product(90, few, weight(Code.INT4, 32), torch.float16)
    yield from product(90, some, offsets)
    for architecture in ARCHITECTURES:
        wide = weight(Code.UINT4, 32, offset=True, factors=torch.float32)
        yield from product(architecture, some, wide)
    yield from product(120, few, int8, rounds=True)
    yield from product(120, many, zeros)


def in_blocks(architecture: int, rows: int) -> Iterator[Case]:
    """The products of x that is rounded to e4m3 in the blocks of its weight, and its rounding."""
    own, on = weight(Code.FLOAT8, 128), card(architecture)
    linear = BlockLinear(own, None, on)
    for case in recorded(
        f"{rows} rows in blocks, for sm_{architecture}",
        lambda: linear.rounded(empty(rows, own.in_features, dtype=torch.bfloat16)),
    ):
        if case.kernel is packed_kernels.packed_linear_kernel:
            yield expected(case, architecture, on.tiling(own.code, FLOAT8, rows), own.code, FLOAT8)
        else:
            yield replace(case, architectures=(architecture,))


def few(dtype: torch.dtype) -> Iterator[Case]:
    """The products of up to eight rows with weights in the type of x."""
    for rows in (1, 2, 3, MOST_ROWS):
        x, own = empty(rows, 4096, dtype=dtype), empty(1024, 4096, dtype=dtype)
        bias = empty(1024, dtype=dtype) if rows == 1 else None
        name = f"{rows} rows of {dtype}"
        yield from recorded(
            name, partial(multiply_few, x, own, bias), ARCHITECTURES if rows == 1 else (80, 90, 100)
        )


def unpacked(own: PackedWeight) -> list[Case]:
    return recorded(name_of(own), lambda: unpack(own, 0, own.out_features, torch.bfloat16))


def on_rows(size: int, dtype: torch.dtype, rotation: int = 0) -> list[Case]:
    x = empty(5, size, dtype=torch.bfloat16)
    return recorded(
        f"{size} to {dtype}, rotation {rotation}", lambda: quantize_rows(x, dtype, rotation), (80,)
    )


CASES = [
    *products(),
    *(case for architecture in (89, 90, 100, 120) for case in in_blocks(architecture, ROW_CLASSES[-1])),
    *in_blocks(90, ROW_CLASSES[1]),
    *few(torch.bfloat16),
    *on_rows(14_336, torch.int8),
    *on_rows(14_336, torch.int8, 128),
    *on_rows(53_248, FLOAT8),
    *recorded("4096", lambda: rotate_rows(empty(5, 4096, dtype=torch.bfloat16), 128)),
    *unpacked(weight(Code.UINT4, 128, zero=True)),
    *unpacked(weight(Code.INT8, 128, offset=True)),
    *unpacked(weight(Code.FLOAT8, 128)),
]
