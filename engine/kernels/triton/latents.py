"""Queries and latents between their projection and attention, in one launch: norm, rotation, cache.

Latents lie in a block of the cache as in the reference, [block_size, latent + rotated], and so do the scales of a
quantized cache after them, [block_size, scales].
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.kv_cache import KVShape, numbers_and_scales
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.triton.rotary import HEADS_PER_PROGRAM, rounded_by, scale_of

OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def rotate_and_write_latents(
    queries: Tensor,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    places: TokenPlaces,
    layer_kv: Tensor,
    shape: KVShape,
) -> Tensor:
    """Equals `latents.rotate_and_write_latents`; it allocates nothing but the queries.

    A row with place -1 pads the batch: nothing is written to the cache for it, and its queries are of no use.
    """
    num_tokens, num_heads, query_size = queries.shape
    rotated = shape.head_dim - shape.latent_size
    made = queries.new_empty(queries.shape)
    if num_tokens:
        numbers, scales = numbers_and_scales(layer_kv)
        rotate_and_write_latents_kernel[num_tokens, 1 + triton.cdiv(num_heads, HEADS_PER_PROGRAM)](
            queries.contiguous(),
            latents.contiguous(),
            norm,
            places.positions,
            places.in_cache,
            places.cos,
            places.sin,
            places.q_scales,
            made,
            numbers,
            scales,
            eps,
            NUM_HEADS=num_heads,
            PLAIN=query_size - rotated,
            LATENT=shape.latent_size,
            ROTATED=rotated,
            BLOCK_SIZE=shape.block_size,
            BLOCK_STRIDE=numbers.stride(1),
            GROUP=HEADS_PER_PROGRAM,
            BLOCK_P=triton.next_power_of_2(query_size - rotated),
            PAIRS=triton.next_power_of_2(rotated // 2),
            GROUPS=triton.next_power_of_2(triton.cdiv(shape.head_dim, rotated)),
            **OPTIONS,
        )
    return made


@triton.jit
def rotate_and_write_latents_kernel(
    queries: tl.tensor,
    latents: tl.tensor,
    norm: tl.tensor,
    positions: tl.tensor,
    in_cache: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_scales: tl.tensor,
    made: tl.tensor,
    layer_kv: tl.tensor,
    layer_scales: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Stores the latent of one token, or makes GROUP of its queries.

    As in the reference, all but the norm's scale is computed in the dtype of the rows, and rounded at each step.
    """
    dtype: tl.constexpr = queries.dtype.element_ty
    half: tl.constexpr = ROTATED // 2
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, PAIRS)[None, :]
    # A row that pads a batch may have any position; its angle is of no use, but must be read from somewhere.
    position = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
    cosine = tl.load(cos + position * half + pairs, mask=pairs < half, other=0.0).to(dtype)
    sine = tl.load(sin + position * half + pairs, mask=pairs < half, other=0.0).to(dtype)
    if part == 0:
        _write_latent(
            latents + row * (LATENT + ROTATED),
            norm,
            cosine,
            sine,
            tl.load(in_cache + row),
            layer_kv,
            layer_scales,
            eps,
            LATENT,
            ROTATED,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            GROUPS,
            PAIRS,
        )
    else:
        heads, dims = (part - 1) * GROUP + tl.arange(0, GROUP)[:, None], tl.arange(0, BLOCK_P)[None, :]
        places = (row * NUM_HEADS + heads) * (PLAIN + ROTATED)
        is_plain, is_turned = (heads < NUM_HEADS) & (dims < PLAIN), (heads < NUM_HEADS) & (pairs < half)
        plain = tl.load(queries + places + dims, mask=is_plain, other=0.0)
        first = tl.load(queries + places + PLAIN + pairs, mask=is_turned, other=0.0)
        second = tl.load(queries + places + PLAIN + half + pairs, mask=is_turned, other=0.0)
        turned_first, turned_second = first * cosine - second * sine, second * cosine + first * sine
        if q_scales is not None:
            by = tl.load(q_scales + position)
            plain = (plain.to(tl.float32) * by).to(dtype)
            turned_first = (turned_first.to(tl.float32) * by).to(dtype)
            turned_second = (turned_second.to(tl.float32) * by).to(dtype)
        tl.store(made + places + dims, plain, mask=is_plain)
        tl.store(made + places + PLAIN + pairs, turned_first, mask=is_turned)
        tl.store(made + places + PLAIN + half + pairs, turned_second, mask=is_turned)


@triton.jit
def _write_latent(
    latent: tl.tensor,
    norm: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    stored_at: tl.tensor,
    layer_kv: tl.tensor,
    layer_scales: tl.tensor,
    eps: tl.tensor,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Norms and rotates the latent of one token, and stores it if it has a place.

    It lies in registers as groups of ROTATED numbers, which have a scale each in a quantized cache; the rotated key is
    the last. Both halves of a group are apart.
    """
    dtype: tl.constexpr = latent.dtype.element_ty
    kv_dtype: tl.constexpr = layer_kv.dtype.element_ty
    half: tl.constexpr = ROTATED // 2
    KEY: tl.constexpr = tl.cdiv(LATENT, ROTATED)
    groups, pairs = tl.arange(0, GROUPS)[:, None], tl.arange(0, PAIRS)[None, :]
    is_key = groups == KEY
    places = tl.where(is_key, LATENT, groups * ROTATED) + pairs
    end = tl.where(is_key, LATENT + ROTATED, LATENT)
    in_first = (groups <= KEY) & (pairs < half) & (places < end)
    in_second = (groups <= KEY) & (pairs < half) & (places + half < end)
    first = tl.load(latent + places, mask=in_first, other=0.0)
    second = tl.load(latent + half + places, mask=in_second, other=0.0)
    of_first = tl.load(norm + places, mask=in_first & (groups < KEY), other=0.0)
    of_second = tl.load(norm + half + places, mask=in_second & (groups < KEY), other=0.0)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.where(is_key, 0.0, wide_first * wide_first + wide_second * wide_second)
    scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / LATENT + eps)
    normed_first = (of_first * (wide_first * scale).to(of_first.dtype)).to(dtype)
    normed_second = (of_second * (wide_second * scale).to(of_second.dtype)).to(dtype)
    first, second = (
        tl.where(is_key, first * cosine - second * sine, normed_first),
        tl.where(is_key, second * cosine + first * sine, normed_second),
    )
    is_stored = groups < tl.where(stored_at >= 0, KEY + 1, 0)
    block, token = stored_at // BLOCK_SIZE, stored_at % BLOCK_SIZE
    if layer_scales is not None:
        first, second = first.to(tl.float32), second.to(tl.float32)
        of_groups = scale_of(first, second)
        first, second = rounded_by(first, of_groups), rounded_by(second, of_groups)
        scales = BLOCK_SIZE * (LATENT + ROTATED) // 4 + token * (KEY + 1) + groups
        tl.store(layer_scales + block * (BLOCK_STRIDE // 4) + scales, of_groups, mask=is_stored)
    stored = layer_kv + block * BLOCK_STRIDE + token * (LATENT + ROTATED) + places
    tl.store(stored, first.to(kv_dtype), mask=is_stored & in_first)
    tl.store(stored + half, second.to(kv_dtype), mask=is_stored & in_second)
