"""The products with packed weights, in every class of rows, as the rule cuts them for each kind of card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from penstock.engine.kernels.packed import Code
from penstock.engine.kernels.triton import packed_kernels, row_kernels
from penstock.engine.kernels.triton.attention_tiling import Chip, TensorCores
from penstock.engine.kernels.triton.packed_linear import ADD_BLOCK, ONE_GROUP, ROUND_BLOCK, UNPACK_BLOCK
from penstock.engine.kernels.triton.tiles import ROW_CLASSES, Card, shared_bytes
from tests.engine.kernels.triton.compiling import ARCHITECTURES, SHARED_LIMIT, Case

OPTIONS = {"enable_fp_fusion": False}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8"}
SIZES = ("out_features", "in_features", "row_bytes")


def card(architecture: int) -> Card:
    cores = TensorCores.of_capability(architecture // 10)
    return Card(Chip(132, cores, SHARED_LIMIT[architecture]), capability=f"sm_{architecture}")


def product(
    architecture: int,
    most_rows: int,
    code: Code,
    scales: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    zero: bool = False,
    offset: bool = False,
    group_size: int = 128,
    is_part: bool = True,
    factors: str = "*fp16",
) -> Case:
    tiling = card(architecture).tiling(code, dtype, most_rows)
    if scales == "weights" and factors == "*fp32":
        tiling = replace(tiling, num_stages=1)
    step = min(tiling.block_k, group_size) if scales == "groups" else tiling.block_k
    rounded = dtype == torch.int8
    of_part = "*i32" if rounded else "*fp32"
    arguments = {
        "out": of_part if is_part else "*bf16",
        "x": f"*{TYPES[dtype]}",
        "codes": "*i8" if code is Code.INT8 else "*u8",
        "scale": "*bf16" if scales == "units" else factors,
        **dict.fromkeys(("num_rows", "num_steps", "steps_per_part", *SIZES), "i32"),
    }
    constants: dict[str, Any] = {"zero": None, "offset": None, "row_scale": None, "bias": None}
    if zero:
        constants.pop("zero")
        arguments["zero"] = "*i8"
    if offset:
        constants.pop("offset")
        arguments["offset"] = factors
    if rounded and not is_part:
        constants.pop("row_scale")
        arguments["row_scale"] = "*fp32"
    options = tiling.options
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    kind = [code.value, scales, TYPES[dtype], *(["whole"] if not is_part else [])]
    kind += ["wide factors"] * (factors == "*fp32") + ["zeros"] * zero + ["offsets"] * offset
    kind += [f"groups of {group_size}"] * (scales != "rows")
    return Case(
        name=f"packed_linear, {', '.join(kind)}, {most_rows} rows, for sm_{architecture}",
        kernel=packed_kernels.packed_linear_kernel,
        arguments=arguments,
        constexprs={
            **constants,
            **options,
            "CODE": code.value,
            "SCALES": scales,
            "GROUP_SIZE": ONE_GROUP if scales == "rows" else group_size,
            "BLOCK_K": step,
            "IS_PART": is_part,
        },
        aligned=SIZES,
        num_warps=warps,
        num_stages=stages,
        options=OPTIONS,
        has_dot=dtype != torch.float32,
        has_large_dot=dtype != torch.float32 and step >= 64,
        shared_bound=shared_bytes(tiling, code, dtype, card(architecture).chip.tensor_cores),
        architectures=(architecture,),
    )


def products() -> Iterator[Case]:
    """The usual kinds on every card, in those classes of rows that differ most; a few of the others."""
    few, some, many = ROW_CLASSES
    for architecture in (80, 90, 100):
        for rows in ROW_CLASSES:
            yield product(architecture, rows, Code.UINT4, "groups", zero=True)
        yield product(architecture, few, Code.INT8, "rows", torch.int8)
        yield product(architecture, many, Code.INT8, "rows", torch.int8, is_part=False)
        yield product(architecture, some, Code.FLOAT8, "rows", is_part=False)
        yield product(architecture, many, Code.INT8, "groups", torch.float16)
        for rows in (few, many):
            yield product(architecture, rows, Code.FLOAT4, "units", group_size=32)
    yield product(80, few, Code.FLOAT8, "rows")
    yield product(80, many, Code.UINT4, "groups", torch.float32, zero=True)
    yield product(90, few, Code.INT4, "groups", torch.float16, group_size=32)
    yield product(90, some, Code.UINT4, "weights", offset=True, group_size=32)
    for architecture in ARCHITECTURES:
        yield product(architecture, some, Code.UINT4, "weights", offset=True, group_size=32, factors="*fp32")
    yield product(120, few, Code.INT8, "rows", torch.int8)
    yield product(120, many, Code.UINT4, "groups", zero=True)


def quantize_rows(size: int, dtype: str, rotation: int = 0) -> Case:
    return Case(
        name=f"quantize_rows, {size}, {dtype}{', rotated' if rotation else ''}",
        kernel=row_kernels.quantize_rows_kernel,
        arguments={"x": "*bf16", "numbers": f"*{dtype}", "row_scale": "*fp32"},
        constexprs={
            "SIZE": size,
            "BLOCK": ROUND_BLOCK,
            "LARGEST": 127.0 if dtype == "i8" else 448.0,
            "ROTATION": rotation,
        },
        num_warps=8,
        options=OPTIONS,
        architectures=(80,),
    )


def rotate_rows(size: int) -> Case:
    return Case(
        name=f"rotate_rows, {size}",
        kernel=row_kernels.rotate_rows_kernel,
        arguments={"x": "*bf16", "out": "*bf16"},
        constexprs={"SIZE": size, "BLOCK": ROUND_BLOCK, "ROTATION": 128},
        num_warps=8,
        options=OPTIONS,
        architectures=ARCHITECTURES,
    )


def unpack(code: Code, zero: bool, offset: bool) -> Case:
    arguments = {
        "weights": "*bf16",
        "codes": "*i8" if code is Code.INT8 else "*u8",
        "scale": "*fp16",
        **dict.fromkeys(("first_output", *SIZES), "i32"),
    }
    constants: dict[str, Any] = {"CODE": code.value, "GROUP_SIZE": 128, "BLOCK_K": UNPACK_BLOCK}
    for name, pointer, is_there in (("zero", "*i8", zero), ("offset", "*fp16", offset)):
        if is_there:
            arguments[name] = pointer
        else:
            constants[name] = None
    return Case(
        name=f"unpack, {code.value}",
        kernel=packed_kernels.unpack_kernel,
        arguments=arguments,
        constexprs=constants,
        aligned=SIZES,
        options=OPTIONS,
        architectures=ARCHITECTURES if zero else (90,),
    )


def add_parts(of: str) -> Case:
    pointers = {"out": "*bf16", "parts": f"*{of}", "scale": "*fp16", "bias": "*bf16"}
    return Case(
        name=f"add_parts, {of}",
        kernel=packed_kernels.add_parts_kernel,
        arguments=pointers
        | {"row_scale": "*fp32"}
        | dict.fromkeys(("num_rows", "num_parts", "out_features"), "i32"),
        constexprs={"BLOCK": ADD_BLOCK},
        aligned=("out_features",),
        options=OPTIONS,
        architectures=ARCHITECTURES if of == "fp32" else (80,),
    )


CASES = [
    *products(),
    quantize_rows(14_336, "i8"),
    quantize_rows(14_336, "i8", 128),
    rotate_rows(4096),
    quantize_rows(53_248, "u8"),
    unpack(Code.UINT4, zero=True, offset=False),
    unpack(Code.INT8, zero=False, offset=True),
    unpack(Code.FLOAT8, zero=False, offset=False),
    add_parts("i32"),
    add_parts("fp32"),
]
