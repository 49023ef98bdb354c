"""Every operation of the decoder in plain torch, on any device: the specification that faster kernels agree with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import LARGEST_NUMBER, KVFormat, KVShape, is_quantized
from penstock.engine.quant.rotation import block_size, rotated, rotated_back

MAX_QUERIES = 128
"""Queries of one sequence that attention scores at a time."""
MAX_TILE_ELEMENTS = 1 << 25
"""The most elements that attention gathers and scores at a time; a single piece of a sequence may be larger."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 up to the multiplication.

    A float32 weight multiplies in float32, too, for any type of x.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def cap(logits: Tensor, scale: float, softcap: float) -> Tensor:
    """Multiplies logits by `scale`, in place; with a softcap c > 0, a scaled logit x becomes c tanh(x / c)."""
    logits.mul_(scale)
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of x less its mean, in float32 throughout: LayerNorm without a bias."""
    wide = x.float()
    return rms_norm(wide - wide.mean(-1, keepdim=True), weight.float(), eps).to(x.dtype)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(hidden + delta, `rms_norm` of it): the sum is rounded to its dtype before its norm is taken."""
    total = hidden + delta
    return total, rms_norm(total, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates dimension i of each head with dimension i + head_dim / 2.

    In x's dtype throughout: cos, sin, both products and their sum are each rounded to it.

    Args:
        x: [T, heads, head_dim]
        cos, sin: [T, head_dim / 2]
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def glu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """[..., 2 n] -> activation(first half) * second half, [..., n]; the first is rounded to the dtype first.

    Args:
        activation: "silu", "gelu", or "gelu_tanh", its approximation with tanh.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def activated(up: Tensor, activation: str) -> Tensor:  # noqa: ARG001
    """Applies the activation of a feed-forward part without gates: relu(up)^2, the only one so far."""
    return F.relu(up).square()


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where the T tokens of a step stand, which is the same in all layers."""

    positions: Tensor
    """[T] int32"""
    in_cache: Tensor
    """[T] int64, see `kv_places`."""
    cos: Tensor
    """[positions, head_dim / 2] float32: of every position that a token may have."""
    sin: Tensor
    q_scales: Tensor | None = None
    """[positions] float32: rotated queries are multiplied by it."""


def kv_places(batch: Batch, block_size: int) -> Tensor:
    """[T] int64: where each token's key and value go: block * block_size + offset in the block.

    -1 for the rows that pad a batch: rows of no sequence, past query_starts[S], and rows of a negative position.
    """
    rows = torch.arange(batch.positions.numel(), device=batch.positions.device, dtype=torch.int32)
    sequences = torch.searchsorted(batch.query_starts[1:], rows, right=True)
    num_sequences = batch.block_tables.shape[0]
    padding = (sequences == num_sequences) | (batch.positions < 0)
    positions = batch.positions.long().masked_fill(padding, 0)
    blocks = batch.block_tables[sequences.clamp(max=num_sequences - 1), positions // block_size].long()
    return (blocks * block_size + positions % block_size).masked_fill(padding, -1)


def write_kv(layer_kv: Tensor, keys: Tensor, values: Tensor, in_cache: Tensor) -> None:
    """Stores keys and values [T, num_kv_heads, head_dim] of one layer in their places; rows without one are skipped."""
    num_kv_heads, head_dim = keys.shape[1:]
    stored, scales = _split_scales(layer_kv, num_kv_heads, head_dim)
    block_size = stored.shape[3]
    written = in_cache >= 0
    blocks, offsets = in_cache[written] // block_size, in_cache[written] % block_size
    for index, tensor in enumerate((keys[written], values[written])):
        if scales is not None:
            numbers, scale = quantized_form(tensor, KVFormat.of(layer_kv.dtype))
            scales[index][blocks, :, offsets] = scale.view(layer_kv.dtype)
            stored[index][blocks, :, offsets] = numbers
        else:
            stored[index][blocks, :, offsets] = tensor.to(layer_kv.dtype)


def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """The form of keys or values [T, num_kv_heads, head_dim] in a quantized cache.

    Returns:
        Integers in float32, rounded half to even, and the float32 scale [T, num_kv_heads] of each head of a token: its
        largest magnitude / 127.
    """
    wide = x.float()
    own = wide.abs().amax(-1, keepdim=True)
    divisor = torch.full_like(
        own, LARGEST_NUMBER
    )  # by a plain number, CUDA's torch would multiply by its inverse
    scale = own / divisor
    numbers = (wide / scale).clamp_(-LARGEST_NUMBER, LARGEST_NUMBER).nan_to_num_(nan=0.0)
    return numbers.round_(), scale.squeeze(-1)


def quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The form of keys or values [..., head_dim] in a cache of 4 bits.

    Returns:
        Integers from -8 to 7 in float32 [..., head_dim / group, group], rounded half to even, and the float16 scale
        [..., head_dim / group] of each group: its number of the largest magnitude, with its sign, / -8.
    """
    groups = torch.unflatten(x.float(), -1, (-1, group))
    high, low = groups.amax(-1), groups.amin(-1)
    scale = (torch.where(high >= -low, high, low) / -8).to(torch.float16)
    numbers = (groups / scale.float().unsqueeze(-1)).clamp_(-8, 7).nan_to_num_(nan=0.0)
    return numbers.round_(), scale


def quantized_form(x: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """The elements and scales that a cache of this format stores of keys or values [T, num_kv_heads, head_dim]."""
    if not format.is_packed:
        numbers, scale = quantize_kv(x)
        return numbers.to(format.dtype), scale.unsqueeze(-1)
    numbers, scales = quantize_groups(x, format.group_of(x.shape[-1]))
    pairs = torch.unflatten((numbers.flatten(-2) + 8).to(format.dtype), -1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def gather_kv(half: Tensor, blocks: Tensor, shape: KVShape, dtype: torch.dtype) -> Tensor:
    """Returns the keys (or values) of some blocks.

    Args:
        half: [num_blocks, stored elements of a block], one layer's keys or values.
        blocks: [..., P]

    Returns:
        [..., num_kv_heads, P * block_size, head_dim], contiguous; from a quantized cache the products of numbers and
        scales, rounded once.
    """
    stored, scales = _split_scales(half[blocks], shape.num_kv_heads, shape.head_dim)
    stored, format = stored.transpose(-4, -3), KVFormat.of(half.dtype)
    if format.is_packed:
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).to(torch.int8) - 8
    found = stored.new_empty(stored.shape, dtype=dtype)
    found.copy_(stored)
    if scales is not None and format.scale_dtype is not None:
        by = scales.contiguous().view(format.scale_dtype).transpose(-4, -3)
        torch.unflatten(found, -1, (by.shape[-1], -1)).mul_(by.unsqueeze(-1))
    return found.flatten(-3, -2)


def _split_scales(kv: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor | None]:
    """Views of blocks [..., stored elements of a block]: [..., num_kv_heads, block_size, elements of a head], and if
    they are quantized, the bytes of their scales [..., num_kv_heads, block_size, bytes]."""
    format = KVFormat.of(kv.dtype)
    if format.scale_dtype is None:
        return torch.unflatten(kv, -1, (num_kv_heads, -1, head_dim)), None
    elements = head_dim // format.numbers_per_element
    scale_bytes = head_dim // format.group_of(head_dim) * format.scale_dtype.itemsize
    num_elements = kv.shape[-1] // (elements + scale_bytes) * elements
    return (
        torch.unflatten(kv[..., :num_elements], -1, (num_kv_heads, -1, elements)),
        torch.unflatten(kv[..., num_elements:], -1, (num_kv_heads, -1, scale_bytes)),
    )


def rotate_and_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    places: TokenPlaces,
    layer_kv: Tensor | None,
    shape: KVShape,
    *,
    norms_last: bool = False,
    norms_values: bool = False,
    spreads: bool = False,
) -> Tensor:
    """Does all the work on queries, keys and values between their projection and attention.

    Queries and keys go through `rms_norm` over each head, or over all heads as one row (if the model has these norms),
    then `rotary`, or the other way round; keys and values are stored in their places.

    Before keys are rounded to 8 or 4 bits they are spread: both halves of a head go through `quant.rotation.rotated`,
    or else a few large channels would leave few bits to all others. So do queries, divided by the size of a block, and
    the products stay the same. Values are spread before they are rounded to 4 bits, and what is attended to them is
    spread back; 8 bits are enough without.

    Args:
        qkv: [T, (num_heads + 2 num_kv_heads) * head_dim] queries, keys, values.
        q_norm, k_norm: [head_dim] or [heads * head_dim], both or neither.
        norms_last: whether the norms follow the rotation.
        norms_values: whether values go through the norm of each head, too, without weights.
        spreads: whether queries and keys are spread, which a quantized cache wants.
        layer_kv: [2, num_blocks, stored elements of a block], is written. None for a layer that has no keys and values
            of its own: `qkv` is [T, num_heads * head_dim], and there is no `k_norm`.

    Returns:
        Queries [T, num_heads, head_dim], contiguous; queries of rows without a place are of no use.
    """
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // shape.head_dim, shape.head_dim)
    num_kv_heads = 0 if layer_kv is None else shape.num_kv_heads
    sizes = [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    queries, keys, values = torch.split(heads, sizes, dim=1)
    cos, sin = places.cos[places.positions], places.sin[places.positions]
    if norms_last:
        queries, keys = rotary(queries, cos, sin), rotary(keys, cos, sin)
    if q_norm is not None:
        queries = _norm_heads(queries, q_norm, eps)
    if k_norm is not None:
        keys = _norm_heads(keys, k_norm, eps)
    if norms_values:
        values = rms_norm(values, values.new_ones(shape.head_dim), eps)
    if not norms_last:
        queries, keys = rotary(queries, cos, sin), rotary(keys, cos, sin)
    if places.q_scales is not None:
        queries = (queries * places.q_scales[places.positions][:, None, None]).to(queries.dtype)
    if spreads:
        block = block_size(shape.head_dim // 2)
        queries = (rotated(queries.float(), block) / block).to(queries.dtype)
        keys = rotated(keys.float(), block)
        if layer_kv is not None and KVFormat.of(layer_kv.dtype).is_packed:
            values = rotated(values.float(), block)
    if layer_kv is not None:
        write_kv(layer_kv, keys, values, places.in_cache)
    return queries.contiguous()


def _norm_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of each head, or of all as one row if the weight has that length."""
    if weight.numel() == heads.shape[-1]:
        return rms_norm(heads, weight, eps)
    return rms_norm(heads.flatten(1), weight, eps).view(heads.shape)


def spread_back(attended: Tensor) -> Tensor:
    """[T, heads, head_dim], attended to values that were spread, as if they had not been."""
    block = block_size(attended.shape[-1] // 2)
    return (rotated_back(attended.float(), block) / block).to(attended.dtype)


@dataclass(frozen=True, slots=True)
class _Tile:
    """G pieces of sequences, of Q consecutive rows each, that are attended together."""

    rows: Tensor
    """[G, Q]"""
    positions: Tensor
    """[G, Q]"""
    sequences: Tensor
    """[G]"""
    num_blocks: int
    """Any of the sequences has so many at most."""


class PagedAttention:
    """Causal attention of one step over block tables; made once per step, called once per layer.

    Every sequence's tokens see the KV of their own sequence up to themselves, at most `window` of it. Query heads share
    key-value heads in groups (GQA). Softmax is in float32. The rows of a sequence without context become 0.
    """

    def __init__(self, batch: Batch, shape: KVShape) -> None:
        self._shape = shape
        self._block_tables = batch.block_tables
        self._tiles = list(_tiles(batch, shape))

    def __call__(
        self,
        queries: Tensor,
        layer_kv: Tensor,
        window: int,
        scale: float | None = None,
        softcap: float = 0.0,
        block_tables: Tensor | None = None,
        sinks: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """
        Args:
            queries: [T, num_heads, head_dim]
            layer_kv: [2, num_blocks, stored elements of a block], or [1, ...] of latents; the step's own keys are in it
                already.
            window: the tokens that each sees, itself included; 0 sees all, and -c sees its own chunk of c.
            scale: multiplies the scores; None stands for head_dim^-1/2.
            softcap: c > 0 makes c tanh(s / c) of a scaled score s.
            block_tables: [S, max blocks], the layer's own; None stands for the batch's.
            sinks: [num_heads] float32, one more score of the softmax of each head, as it is: it takes its part of the
                weights, and adds nothing.
            first: no token sees those before this position, except itself.

        Returns:
            [T, num_heads * head_dim], of latents [T, num_heads * latent_size]
        """
        attended = queries.new_zeros(*queries.shape[:2], self._shape.latent_size or self._shape.head_dim)
        tables = self._block_tables if block_tables is None else block_tables
        for tile in self._tiles:
            blocks = tables[tile.sequences, : tile.num_blocks].long()
            attended[tile.rows] = self._attend(
                queries[tile.rows], layer_kv, blocks, tile.positions, window, scale, softcap, sinks, first
            )
        if KVFormat.of(layer_kv.dtype).is_packed:
            attended = spread_back(attended)
        return attended.flatten(1)

    def _attend(
        self,
        queries: Tensor,
        layer_kv: Tensor,
        blocks: Tensor,
        positions: Tensor,
        window: int,
        scale: float | None,
        softcap: float,
        sinks: Tensor | None,
        first: int,
    ) -> Tensor:
        """[G, Q, heads, d] -> [G, Q, heads, d of values]; query heads of one key-value head become more queries."""
        num_sequences, num_queries, num_heads, head_dim = queries.shape
        num_kv_heads = self._shape.num_kv_heads
        dtype = queries.dtype
        if not is_quantized(layer_kv.dtype):
            dtype = torch.promote_types(dtype, layer_kv.dtype)
        keys, values = self._gather(layer_kv, blocks, dtype)
        stacked = queries.view(num_sequences, num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        scores = (stacked.flatten(2, 3).to(dtype) @ keys.mT).float()
        scores.mul_(head_dim**-0.5 if scale is None else scale)
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        hidden = ~_visible(positions, keys.shape[2], window, first)[:, None, None]
        scores = scores.view(*scores.shape[:2], -1, num_queries, scores.shape[3])
        scores.masked_fill_(hidden, -torch.inf)
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            of_heads = sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, of_heads), -1).softmax(-1)[..., :-1]
        attended: Tensor = weights.flatten(2, 3).to(dtype) @ values
        attended = attended.view(num_sequences, num_heads, num_queries, -1).transpose(1, 2)
        return attended.to(queries.dtype)

    def _gather(self, layer_kv: Tensor, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = (gather_kv(half, blocks, self._shape, dtype) for half in layer_kv.unbind())
        return keys, values


def _visible(positions: Tensor, num_keys: int, window: int, first: int) -> Tensor:
    """[G, Q, keys] which keys each query sees."""
    keys = torch.arange(num_keys, device=positions.device)
    queries = positions.unsqueeze(-1)
    causal = keys <= queries
    if first:
        causal &= (keys >= first) | (keys == queries)
    if window < 0:
        return causal & (keys >= queries // -window * -window)
    return causal & (keys > queries - window) if window else causal


def _tiles(batch: Batch, shape: KVShape) -> Iterator[_Tile]:
    """Pieces of equal length and similar contexts together, as many as fit the bound."""
    group: list[tuple[int, int, int, int]] = []
    for piece in sorted(_pieces(batch)):
        num_queries, context, *_ = piece
        size = 4 * context * shape.num_kv_heads * (shape.head_dim + num_queries)
        if group and (group[0][0] != num_queries or size * (len(group) + 1) > MAX_TILE_ELEMENTS):
            yield _tile(batch, shape.block_size, group)
            group = []
        group.append(piece)
    if group:
        yield _tile(batch, shape.block_size, group)


def _pieces(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """(queries, tokens up to the last of them, sequence, first row) of pieces of at most MAX_QUERIES queries."""
    starts = batch.query_starts.tolist()
    for sequence, context in enumerate(batch.context_lens.tolist()):
        for first in range(starts[sequence], starts[sequence + 1] if context else 0, MAX_QUERIES):
            last = min(first + MAX_QUERIES, starts[sequence + 1])
            yield last - first, context - (starts[sequence + 1] - last), sequence, first


def _tile(batch: Batch, block_size: int, pieces: list[tuple[int, int, int, int]]) -> _Tile:
    num_queries, context, *_ = pieces[-1]
    sequences, first_rows = torch.tensor(
        [piece[2:] for piece in pieces], device=batch.positions.device
    ).unbind(1)
    rows = first_rows[:, None] + torch.arange(num_queries, device=batch.positions.device)
    return _Tile(rows, batch.positions[rows], sequences, -(-context // block_size))
