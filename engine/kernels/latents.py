"""Latent attention in plain torch, the specification that faster kernels agree with."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVFormat, KVShape
from penstock.engine.kernels.reference import PagedAttention, TokenPlaces, quantize_kv, rms_norm, rotary


def rotate_and_write_latents(
    queries: Tensor,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    places: TokenPlaces,
    layer_kv: Tensor,
    shape: KVShape,
) -> Tensor:
    """Rotates the last numbers of queries and of latents, norms the first of latents, and stores latents.

    Args:
        queries: [T, num_heads, plain + rotated]
        latents: [T, latent + rotated]
        norm: [latent]
        layer_kv: [1, num_blocks, stored elements of a block], is written; rows without a place are skipped.

    Returns:
        Queries [T, num_heads, plain + rotated], contiguous.
    """
    size = shape.head_dim - shape.latent_size
    cos, sin = places.cos[places.positions], places.sin[places.positions]
    plain, turned = torch.split(queries, [queries.shape[-1] - size, size], dim=-1)
    latent, key = torch.split(latents, [shape.latent_size, size], dim=-1)
    key = rotary(key.unsqueeze(1), cos, sin).squeeze(1)
    _write(layer_kv, torch.cat((rms_norm(latent, norm, eps), key), dim=-1), places.in_cache, shape)
    made = torch.cat((plain, rotary(turned, cos, sin)), dim=-1)
    if places.q_scales is not None:
        made = (made * places.q_scales[places.positions][:, None, None]).to(made.dtype)
    return made


def _write(layer_kv: Tensor, latents: Tensor, in_cache: Tensor, shape: KVShape) -> None:
    written = in_cache >= 0
    latents, places = latents[written], in_cache[written]
    blocks, offsets = places // shape.block_size, places % shape.block_size
    stored, scales = _split_scales(layer_kv[0], shape)
    if scales is None:
        stored[blocks, offsets] = latents.to(stored.dtype)
        return
    group = shape.group(KVFormat.of(stored.dtype))
    numbers, scale = quantize_kv(torch.unflatten(latents, -1, (-1, group)))
    stored[blocks, offsets] = numbers.flatten(1).to(torch.int8)
    scales[blocks, offsets] = scale.contiguous().view(torch.int8)


def gather_latents(stored: Tensor, blocks: Tensor, shape: KVShape, dtype: torch.dtype) -> Tensor:
    """Returns the latents and rotated keys of some blocks.

    Args:
        stored: [num_blocks, stored elements of a block], one layer's.
        blocks: [..., P]

    Returns:
        [..., 1, P * block_size, head_dim]; from a quantized cache the products of numbers and scales, rounded once.
    """
    numbers, scales = _split_scales(stored[blocks], shape)
    if scales is not None:
        by = scales.contiguous().view(torch.float32)
        numbers = torch.unflatten(numbers, -1, (by.shape[-1], -1)) * by.unsqueeze(-1)
        numbers = numbers.flatten(-2)
    return numbers.to(dtype).flatten(-3, -2).unsqueeze(-3)


def _split_scales(stored: Tensor, shape: KVShape) -> tuple[Tensor, Tensor | None]:
    """Views of blocks [..., stored elements of a block]: [..., block_size, head_dim], and if they are quantized, the
    bytes of their scales, [..., block_size, bytes]."""
    numbers = torch.unflatten(stored[..., : shape.block_elements], -1, (shape.block_size, -1))
    if not KVFormat.of(stored.dtype).is_quantized:
        return numbers, None
    scales = stored[..., shape.block_elements : shape.stored_elements(stored.dtype)]
    return numbers, torch.unflatten(scales, -1, (shape.block_size, -1))


class PagedLatents(PagedAttention):
    """Attention to latents, as to one key-value head whose values are the first numbers of its keys."""

    def _gather(self, layer_kv: Tensor, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        latents = gather_latents(layer_kv[0], blocks, self._shape, dtype)
        return latents, latents[..., : self._shape.latent_size]


def attention(batch: Batch, shape: KVShape) -> PagedAttention:
    """Returns one step's attention over caches of that shape."""
    return (PagedLatents if shape.latent_size else PagedAttention)(batch, shape)


def absorb(queries: Tensor, up: Tensor, plain_size: int) -> Tensor:
    """Maps queries to the space of latents: [T, num_heads, plain + rotated] -> [T, num_heads, latent + rotated].

    Args:
        up: [num_heads, plain + value, latent]
    """
    plain, turned = queries[..., :plain_size], queries[..., plain_size:]
    latent_size = up.shape[2]
    made = queries.new_empty(*queries.shape[:2], latent_size + turned.shape[-1])
    torch.bmm(plain.transpose(0, 1), up[:, :plain_size], out=made[..., :latent_size].transpose(0, 1))
    made[..., latent_size:] = turned
    return made


def values_of(attended: Tensor, up: Tensor, plain_size: int) -> Tensor:
    """Maps attended latents to values: [T, num_heads * latent] -> [T, num_heads * value]."""
    heads = torch.unflatten(attended, -1, (up.shape[0], -1)).transpose(0, 1)
    values = up[:, plain_size:]
    made = attended.new_empty(attended.shape[0], *values.shape[:2])
    torch.bmm(heads, values.mT, out=made.transpose(0, 1))
    return made.flatten(1)
