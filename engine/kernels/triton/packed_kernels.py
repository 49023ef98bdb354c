"""The products with packed weights: by tiles of weights and rows, in parts of the inputs, which a second kernel adds.

A tile of weights is the left operand, [outputs, inputs], and rows of x are the columns of the right one: there are at
least 64 outputs, which the large matrix instructions want on the left, and often few rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.kernels.triton.numbers import of_4_bits, of_e2m1, of_e4m3, of_int8


@triton.jit(do_not_specialize=["num_rows", "num_steps", "steps_per_part"])
def packed_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    offset: tl.tensor,
    row_scale: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    num_steps: tl.tensor,
    steps_per_part: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    row_bytes: tl.tensor,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_PART: tl.constexpr,
) -> None:
    """Multiplies BLOCK_M rows of x with BLOCK_N rows of weights, over one part of the inputs.

    Integers x give sums in int32, which are exact. If the sum is one of several parts, it is stored as it is, and the
    work on whole rows is left to `add_parts_kernel`.

    SCALES says where scales are multiplied: with the sums of whole "rows", with the sums of "groups", of which one
    holds a step of BLOCK_K inputs, or with the "weights", in any groups; in groups of 32, with all "units" of a step at
    once. In "blocks", x has a scale for each group of its inputs, too: `row_scale` is [rows, groups] then.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    part = tl.program_id(2)
    read = tl.minimum(outputs, out_features - 1)
    summed = add_products(
        x + rows.to(tl.int64) * in_features,
        rows < num_rows,
        codes,
        scale,
        zero,
        offset,
        None,
        row_scale + rows * tl.cdiv(in_features, GROUP_SIZE) if SCALES == "blocks" else None,
        read,
        out_features,
        part * steps_per_part,
        tl.minimum((part + 1) * steps_per_part, num_steps),
        in_features,
        row_bytes,
        CODE,
        SCALES,
        GROUP_SIZE,
        BLOCK_N,
        BLOCK_M,
        BLOCK_K,
    )
    kept = (rows < num_rows) & (outputs < out_features)
    target = out + (part * num_rows + rows).to(tl.int64) * out_features + outputs
    if not IS_PART:
        output_scale = scale if SCALES == "rows" else None
        of_row = None if SCALES == "blocks" else row_scale
        summed = finished(summed, output_scale, of_row, bias, read, rows, rows < num_rows)
    tl.store(target, summed.to(out.dtype.element_ty), mask=kept)


@triton.jit
def add_products(
    rows: tl.tensor,
    is_row: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    offset: tl.tensor,
    permutation: tl.tensor,
    row_scales: tl.tensor,
    read: tl.tensor,
    num_outputs: tl.tensor,
    first_step: tl.tensor,
    end_step: tl.tensor,
    in_features: tl.tensor,
    row_bytes: tl.tensor,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The sums [BLOCK_N, BLOCK_M] over some steps of BLOCK_K inputs.

    Args:
        rows: [1, BLOCK_M] pointers to the first inputs.
        permutation: see `PackedWeight`; None if the inputs have the order of x.
        row_scales: [1, BLOCK_M] pointers to the scales of the rows' first groups; None unless SCALES is "blocks".
        read: [BLOCK_N, 1] outputs of the weight, of which there are num_outputs.
        SCALES: see `packed_linear_kernel`; "none" if the weights have the type of x.
    """
    NIBBLES: tl.constexpr = 2 if CODE == "int4" or CODE == "uint4" or CODE == "float4" else 1
    IN_GROUPS: tl.constexpr = SCALES == "groups" or SCALES == "blocks"
    DEPTH: tl.constexpr = BLOCK_K // NIBBLES
    dtype: tl.constexpr = rows.dtype.element_ty
    sum_dtype: tl.constexpr = tl.int32 if dtype == tl.int8 else tl.float32
    places = tl.arange(0, DEPTH)
    inputs = places // 16 * 32 + places % 16 if NIBBLES == 2 else places
    row_codes = codes + read.to(tl.int64) * row_bytes + places[None, :]
    row_x = rows + inputs[:, None]
    summed = tl.zeros([BLOCK_N, BLOCK_M], sum_dtype)
    for step in range(first_step, end_step):
        packed = tl.load(row_codes + step * DEPTH)
        first = step * BLOCK_K
        if IN_GROUPS:
            of_group = first // GROUP_SIZE * num_outputs + read
            products = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            factor = tl.load(scale + of_group).to(tl.float32)
        if SCALES == "units":
            units = first // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
            factors = tl.load(scale + units * num_outputs + read)
        for nibble in tl.static_range(NIBBLES):
            start = first + nibble * 16
            inside = is_row & (inputs[:, None] < in_features - start)
            if permutation is None:
                columns = tl.load(row_x + start, mask=inside, other=0.0)
            else:
                is_input = inputs < in_features - start
                read_inputs = tl.load(permutation + start + inputs, mask=is_input, other=0)
                columns = tl.load(rows + read_inputs[:, None], mask=inside, other=0)
            numbers = _numbers(packed, nibble, CODE, dtype)
            if IN_GROUPS:
                if zero is not None:
                    numbers -= tl.load(zero + of_group).to(dtype)
                products = tl.dot(numbers, columns, products, input_precision="ieee")
            elif SCALES == "units":
                weights = _scaled_units(numbers, factors, BLOCK_N, BLOCK_K // 32, DEPTH)
                summed = tl.dot(weights, columns, summed, input_precision="ieee")
            elif SCALES == "weights":
                k = tl.minimum(start + inputs, in_features - 1)[None, :]
                weights = _weights(numbers, scale, zero, offset, read, k, num_outputs, GROUP_SIZE)
                summed = tl.dot(weights.to(dtype), columns, summed, input_precision="ieee")
            else:
                summed = tl.dot(numbers, columns, summed, input_precision="ieee", out_dtype=sum_dtype)
        if IN_GROUPS:
            if row_scales is not None:
                factor *= tl.load(row_scales + first // GROUP_SIZE, mask=is_row, other=0.0)
            summed = tl.fma(products, tl.broadcast_to(factor, [BLOCK_N, BLOCK_M]), summed)
    return summed


@triton.jit
def _scaled_units(
    numbers: tl.tensor, factors: tl.tensor, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, DEPTH: tl.constexpr
) -> tl.tensor:
    """Numbers [BLOCK_N, DEPTH] times the scales [BLOCK_N, UNITS] of their units, rounded once to their type."""
    in_units = numbers.reshape(BLOCK_N, UNITS, DEPTH // UNITS)
    if factors.dtype == numbers.dtype:
        scaled = in_units * factors[:, :, None]
    else:
        scaled = (in_units.to(tl.float32) * factors.to(tl.float32)[:, :, None]).to(numbers.dtype)
    return scaled.reshape(BLOCK_N, DEPTH)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def add_parts_kernel(
    out: tl.tensor,
    parts: tl.tensor,
    scale: tl.tensor,
    row_scale: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    num_parts: tl.tensor,
    out_features: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Adds the sums of the parts, the first one first."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = outputs < out_features
    place = parts + row * out_features + outputs
    summed = tl.load(place, mask=inside, other=0)
    for _ in range(1, num_parts):
        place += num_rows.to(tl.int64) * out_features
        summed += tl.load(place, mask=inside, other=0)
    read = tl.minimum(outputs, out_features - 1)
    whole = finished(summed, scale, row_scale, bias, read, row, True)
    tl.store(out + row * out_features + outputs, whole.to(out.dtype.element_ty), mask=inside)


@triton.jit
def unpack_kernel(
    weights: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    offset: tl.tensor,
    first_output: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    row_bytes: tl.tensor,
    CODE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Writes BLOCK_K weights of one row, from `first_output` on, in the type of `weights`."""
    NIBBLES: tl.constexpr = 2 if CODE == "int4" or CODE == "uint4" or CODE == "float4" else 1
    DEPTH: tl.constexpr = BLOCK_K // NIBBLES
    row = tl.program_id(1).to(tl.int64)
    output = first_output + row
    places = tl.arange(0, DEPTH)
    inputs = tl.program_id(0) * BLOCK_K + (places // 16 * 32 + places % 16 if NIBBLES == 2 else places)
    within = tl.program_id(0) * DEPTH + places
    packed = tl.load(codes + output * row_bytes + within, mask=within < row_bytes, other=0)
    for nibble in tl.static_range(NIBBLES):
        k = inputs + nibble * 16
        numbers = _numbers(packed, nibble, CODE, tl.float32)
        read = tl.minimum(k, in_features - 1)
        full = _weights(numbers, scale, zero, offset, output, read, out_features, GROUP_SIZE)
        tl.store(weights + row * in_features + k, full.to(weights.dtype.element_ty), mask=k < in_features)


@triton.jit
def _numbers(packed: tl.tensor, nibble: tl.constexpr, CODE: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """The numbers that codes stand for, which `dtype` holds without rounding."""
    if CODE == "float":
        numbers = packed.to(dtype)
    elif CODE == "float8" and dtype == tl.float8e4nv:
        numbers = packed.to(dtype, bitcast=True)
    elif CODE == "float8":
        numbers = of_e4m3(packed, dtype)
    elif CODE == "float4":
        numbers = of_e2m1((packed >> (4 * nibble)) & 15, dtype)
    elif CODE == "int8":
        numbers = of_int8(packed, dtype)
    else:
        numbers = of_4_bits((packed >> (4 * nibble)) & 15, -8.0 if CODE == "int4" else 0.0, dtype)
    return numbers


@triton.jit
def _weights(
    numbers: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    offset: tl.tensor,
    output: tl.tensor,
    k: tl.tensor,
    out_features: tl.tensor,
    GROUP_SIZE: tl.constexpr,
) -> tl.tensor:
    """(number - zero) * scale + offset in float32, for inputs k of outputs."""
    of_group = k // GROUP_SIZE * out_features + output
    weights = numbers.to(tl.float32)
    if zero is not None:
        weights -= tl.load(zero + of_group).to(tl.float32)
    weights *= tl.load(scale + of_group).to(tl.float32)
    if offset is not None:
        weights += tl.load(offset + of_group).to(tl.float32)
    return weights


@triton.jit
def finished(
    summed: tl.tensor,
    scale: tl.tensor,
    row_scale: tl.tensor,
    bias: tl.tensor,
    outputs: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
) -> tl.tensor:
    """A sum over all inputs, times the scales of its output and of its row, plus the bias; each may be None."""
    result = summed.to(tl.float32)
    if scale is not None:
        result *= tl.load(scale + outputs).to(tl.float32)
    if row_scale is not None:
        result *= tl.load(row_scale + rows, mask=is_row, other=0.0)
    if bias is not None:
        result += tl.load(bias + outputs).to(tl.float32)
    return result
