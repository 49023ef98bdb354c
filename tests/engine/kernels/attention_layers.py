"""Layers whose attention the native kernels do, alone, and what it may make of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import BLOCK_SIZE, NativeLatentMaps, NativeLinear, Team
from penstock.engine.kernels.kv_cache import KVCache, KVFormat, KVLayout, KVShape, is_quantized
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.ops import Heads, LatentHeads, Op, Program
from penstock.engine.program.parameters import AttentionWeights, LatentWeights
from penstock.engine.quant.rotation import block_size, rotated, rotated_back
from penstock.engine.spec import Attention, LatentAttention
from tests.engine import ranges
from tests.engine.kernels.random_model import CPU, NUM_BLOCKS
from tests.engine.ranges import UNIT, Range, concatenated, dot, exactly

TILED = {torch.bfloat16, torch.int8}
VOCAB = 300
SEGMENT = 2048
"""Tokens of a context whose softmax is one of its own, until it is merged with those of others."""
LONG = 2 * SEGMENT + 54
MAX_POSITION = LONG
EXACT = 2.0**20
"""With a weight of this and its square as epsilon, RMSNorm returns what it is given, bit for bit."""
COS, SIN = (
    getattr(torch.outer(torch.arange(MAX_POSITION).float(), torch.linspace(1, 0.01, 64)), name)()
    for name in ("cos", "sin")
)
ToLinear = Callable[[Tensor], NativeLinear]


@dataclass(frozen=True)
class Shape:
    """The heads of a layer, and how many tokens a token sees (0: all before it, -c: its own chunk of c)."""

    head_dim: int
    num_kv_heads: int
    group: int
    window: int = 0
    has_sinks: bool = False

    @property
    def sinks(self) -> Tensor | None:
        """Some of them have nearly all of the weights, some have nearly nothing."""
        return torch.linspace(-6, 9, self.num_heads) if self.has_sinks else None

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def attended_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def row_size(self) -> int:
        """The numbers that a token's queries, keys and values are."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, block_size=BLOCK_SIZE)

    def is_tiled(self, dtype: torch.dtype) -> bool:
        """Whether tiles multiply a cache of this type where there are any."""
        return dtype in TILED

    def ops(self, team: Team, hidden: int, norm: Tensor) -> list[Op]:
        """The operations from the norm of rows to what is attended to."""
        half = self.head_dim // 2
        spec = Attention(
            hidden_size=hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=abs(self.window),
            is_chunked=self.window < 0,
        )
        qkv = linear_of(team, torch.eye(self.row_size, hidden))
        own = AttentionWeights(qkv=qkv, o=qkv, sinks=self.sinks)
        cos, sin = COS[:, :half].contiguous(), SIN[:, :half].contiguous()
        return [
            Op(kind="linear", time="qkv", target="qkv", linear=qkv, norm=norm),
            Op(kind="attend", time="attention", heads=Heads(spec=spec, own=own, cos=cos, sin=sin)),
        ]


@dataclass(frozen=True)
class Latents:
    """The sizes of a layer's attention to latents; with a temperature, queries grow every 32 tokens."""

    num_heads: int
    latent: int
    rotated: int
    plain: int
    value: int
    has_temperature: bool = False
    maps: torch.dtype = torch.float32
    """The type of the matrices K and V."""

    @property
    def head_dim(self) -> int:
        return self.latent + self.rotated

    @property
    def query_size(self) -> int:
        return self.plain + self.rotated

    @property
    def attended_size(self) -> int:
        return self.num_heads * self.value

    @property
    def row_size(self) -> int:
        """The numbers that a token's queries and latent are."""
        return self.num_heads * self.query_size + self.head_dim

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(num_kv_heads=1, head_dim=self.head_dim, block_size=BLOCK_SIZE, latent_size=self.latent)

    @property
    def norm(self) -> Tensor:
        """Powers of 2, by which numbers are multiplied exactly."""
        return torch.exp2(torch.arange(self.latent) % 3 - 1.0)

    @property
    def up(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.num_heads)
        size = (self.num_heads, self.plain + self.value, self.latent)
        numbers = torch.randn(size, generator=generator) * float(self.latent**-0.5)
        return numbers.to(self.maps).float()

    @property
    def q_scales(self) -> Tensor:
        return 1 + self.has_temperature * 0.3 * torch.log1p((torch.arange(MAX_POSITION) // 32).float())

    def is_tiled(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    def ops(self, team: Team, hidden: int, norm: Tensor) -> list[Op]:
        half, split = self.rotated // 2, self.num_heads * self.query_size
        spec = LatentAttention(
            hidden_size=hidden,
            num_heads=self.num_heads,
            query_rank=0,
            latent_size=self.latent,
            plain_size=self.plain,
            rotated_size=self.rotated,
            value_size=self.value,
            scale=self.query_size**-0.5,
        )
        rows = torch.eye(self.row_size, hidden)
        q, latent = linear_of(team, rows[:split]), linear_of(team, rows[split:])
        up = NativeLatentMaps(team, self.up, self.plain, self.maps)
        own = LatentWeights(q=q, latent=latent, up=up, o=q, latent_norm=EXACT * self.norm)
        heads = LatentHeads(
            spec=spec,
            own=own,
            cos=COS[:, :half].contiguous(),
            sin=SIN[:, :half].contiguous(),
            q_scales=self.q_scales if self.has_temperature else None,
        )
        return [
            Op(kind="linear", time="qkv", target="qkv", linear=q, norm=norm),
            Op(kind="linear", time="qkv", target="latents", linear=latent, norm=norm),
            Op(kind="attend_latents", time="attention", latent_heads=heads),
        ]


def linear_of(team: Team, weight: Tensor) -> NativeLinear:
    return NativeLinear(team, weight, None, torch.float32)


class Layer:
    """A decoder of one layer that returns what its attention makes of given queries, keys and values, or latents.

    The embedding has the rows of each token, and zeros. Norms and linear maps copy them; the output of attention is
    added to the zeros. The cache starts as NaN, so nothing may be read that was not written.
    """

    def __init__(
        self,
        shape: Shape | Latents,
        team: Team,
        dtype: torch.dtype,
        *,
        embedding: Tensor | None = None,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.shape = shape
        self.embedding = made_up(shape) if embedding is None else embedding
        hidden = shape.row_size + shape.attended_size
        maps = shape.maps if isinstance(shape, Latents) else torch.float32
        self.maps_read = NativeLinear(team, torch.zeros(1, 1), None, maps).activation_dtype
        """The type to which rows are rounded before K and V multiply them."""
        self.kv = KVCache(KVLayout.even(shape.kv_shape, 1), num_blocks, dtype, CPU)
        self.kv.data.view(torch.uint8).fill_(255)  # a NaN in all types
        norm = torch.full((hidden,), EXACT)
        o = linear_of(team, torch.eye(hidden).narrow(1, shape.row_size, shape.attended_size))
        ops = (
            Op(kind="embed", time="embed"),
            *shape.ops(team, hidden, norm),
            Op(kind="gather", time="gather"),
            Op(kind="linear", time="o", source="attended", linear=o, adds=True),
            Op(kind="finish", time="norm", norm=norm),
        )
        self.decoder = NativeDecoder(
            team,
            self.kv,
            Program(
                ops=ops,
                hidden_size=hidden,
                eps=EXACT**2,
                embedding=torch.nn.functional.pad(self.embedding, (0, shape.attended_size)),
                max_position=MAX_POSITION,
            ),
        )

    def __call__(self, batch: Batch) -> Tensor:
        """[tokens, heads, numbers of a value]"""
        attended = self.decoder(batch)[:, self.shape.row_size :]
        return attended.view(len(attended), self.shape.num_heads, -1)


def made_up(shape: Shape | Latents, seed: int = 0) -> Tensor:
    """The rows of every token, of many magnitudes; one token's are all 0."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(VOCAB, shape.row_size, generator=generator)
    numbers *= torch.exp2(torch.randint(-3, 2, (VOCAB, 1), generator=generator))
    numbers[7] = 0
    return numbers


def scales_of(x: Range, most: int) -> Range:
    largest = torch.maximum(x.low.abs(), x.high.abs()).amax(-1, keepdim=True)
    return Range(largest, largest).widened(4 * UNIT).scaled(1 / most)


def quantized(x: Range, most: int = 127) -> Range:
    """Returns heads [T, heads, head_dim] as integers of which the largest is `most`, times their scales.

    So an int8 cache stores keys and values.
    """
    scale = scales_of(x, most)
    quotients = torch.stack([a / b for a in (x.low, x.high) for b in (scale.low, scale.high)]).nan_to_num(0)
    integers = Range(quotients.amin(0), quotients.amax(0)).widened(2 * UNIT)
    return Range(integers.low.round(), integers.high.round()) * scale


def packed(x: Range) -> Range:
    """Returns heads [T, heads, head_dim] as integers of 4 bits, times the float16 scales of their groups."""
    group = KVFormat.of(torch.uint8).group_of(x.low.shape[-1])
    low, high = (torch.unflatten(end, -1, (-1, group)) for end in (x.low, x.high))
    ends = torch.stack([end.float() for each in (low, high) for end in (each.amax(-1), each.amin(-1))])
    highest, lowest = ends[::2], ends[1::2]
    may_be_highest = (highest.amax(0) >= -lowest.amax(0)), (highest.amin(0) < -lowest.amin(0))
    scales = [
        (end.masked_fill(~sure, torch.nan) / -8).half().double().unsqueeze(-1)
        for ends, sure in zip((highest, lowest), may_be_highest, strict=True)
        for end in ends
    ]
    numbers, found = [low, high], []
    for scale in scales:
        for quotient in (end / scale for end in numbers):
            for nudged in (quotient * (1 - 2 * UNIT), quotient * (1 + 2 * UNIT)):
                integers = nudged.round().clamp(-8, 7).where(scale != 0, torch.zeros(()))
                found.append(integers * scale)
    every = torch.stack(found)
    least = every.nan_to_num(torch.inf).amin(0).flatten(-2)
    return Range(least, every.nan_to_num(-torch.inf).amax(0).flatten(-2)).widened(UNIT)


def stored(x: Range, dtype: torch.dtype) -> Range:
    if KVFormat.of(dtype).is_packed:
        return packed(x)
    return quantized(x) if dtype == torch.int8 else x.rounded(dtype)


def spread(x: Range, dtype: torch.dtype) -> Range:
    """Queries, times the size of a block, or keys as a cache of a type wants them."""
    if not is_quantized(dtype):
        return x
    head_dim = x.low.shape[-1]
    return dot(x, exactly(rotated(torch.eye(head_dim), block_size(head_dim // 2))))


def expected(
    layer: Layer, tokens: list[int], dtype: torch.dtype, *, has_tiles: bool, first: int = 0
) -> Range:
    """The attention of a whole sequence from a first token on, [tokens - first, heads, numbers of a value]."""
    shape, rows = layer.shape, layer.embedding[tokens]
    tiles = has_tiles and shape.is_tiled(dtype)
    if isinstance(shape, Latents):
        return _of_latents(shape, rows, dtype, layer.maps_read, first, tiles=tiles)
    return _of_heads(shape, rows, dtype, first, tiles=tiles)


def _of_latents(
    shape: Latents, rows: Tensor, dtype: torch.dtype, maps_read: torch.dtype, first: int, *, tiles: bool
) -> Range:
    length = len(rows)
    cos, sin = COS[:length, : shape.rotated // 2], SIN[:length, : shape.rotated // 2]
    queries = torch.unflatten(rows[first:, : -shape.head_dim], 1, (shape.num_heads, -1))
    latents = rows[:, -shape.head_dim :]
    factor = math.log2(math.e) * shape.query_size**-0.5

    def scaled(x: Range) -> Range:
        return (x * exactly(shape.q_scales[first:length, None, None])).scaled(factor).widened(2 * UNIT)

    plain = scaled(exactly(queries[..., : shape.plain])).rounded(maps_read)
    turned = scaled(ranges.rotary(exactly(queries[..., shape.plain :]), cos[first:], sin[first:]))
    key = ranges.rotary(exactly(latents[:, None, shape.latent :]), cos, sin)
    keys = concatenated([exactly(latents[:, : shape.latent] * shape.norm), key[:, 0]], -1)
    if dtype == torch.int8:
        groups = [torch.unflatten(end, -1, (-1, shape.rotated)) for end in (keys.low, keys.high)]
        grouped = quantized(Range(*groups))
        keys = Range(grouped.low.flatten(-2), grouped.high.flatten(-2))
    else:
        keys = keys.rounded(dtype)
    places, by_head = torch.arange(length), []
    for head, up in enumerate(exactly(each) for each in shape.up):
        query = concatenated([dot(plain[:, head], up[: shape.plain]), turned[:, head]], -1)
        query = query.rounded(torch.bfloat16) if tiles else query
        scores = (
            dot(query, keys.mT).widened(2 * UNIT).scaled(math.log(2)).masked(places[first:, None] < places)
        )
        narrow = torch.bfloat16 if tiles else torch.float32
        attended = ranges.attend(scores, keys[:, : shape.latent], weights_dtype=narrow)
        attended = attended.rounded(maps_read)
        by_head.append(dot(attended, up[shape.plain :].mT)[:, None])
    return concatenated(by_head, 1)


def _of_heads(shape: Shape, rows: Tensor, dtype: torch.dtype, first: int, *, tiles: bool) -> Range:
    length, half = len(rows), shape.head_dim // 2
    heads = rows.view(length, -1, shape.head_dim)
    queries, *written = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    cos, sin = COS[:length, :half], SIN[:length, :half]
    turned = ranges.rotary(exactly(queries[first:]), cos[first:], sin[first:])
    turned = turned.scaled(math.log2(math.e) * shape.head_dim**-0.5)
    turned = spread(turned.widened(2 * UNIT), dtype)
    if is_quantized(dtype):
        turned = turned.scaled(1 / block_size(half))
    is_integer = dtype == torch.int8 and not tiles
    if tiles:
        turned = turned.rounded(torch.bfloat16)
    elif is_integer:
        turned = quantized(turned, 2**15 - 1)
    keys = stored(spread(ranges.rotary(exactly(written[0]), cos, sin), dtype), dtype)
    is_packed = KVFormat.of(dtype).is_packed
    values = stored(spread(exactly(written[1]), dtype) if is_packed else exactly(written[1]), dtype)
    value_scales = scales_of(exactly(written[1]), 127).high[..., 0]
    places = torch.arange(length)
    distance = places[first:, None] - places
    hidden = (distance < 0) | (distance >= (shape.window if shape.window > 0 else MAX_POSITION))
    if shape.window < 0:
        hidden |= places // -shape.window != places[first:, None] // -shape.window
    by_head = []
    for head in range(shape.num_heads):
        k, v = keys[:, head // shape.group], values[:, head // shape.group]
        scores = dot(turned[:, head], k.mT).widened(2 * UNIT).scaled(math.log(2)).masked(hidden)
        narrow = torch.bfloat16 if tiles else torch.float32
        sink = None if shape.sinks is None else shape.sinks[head]
        seen = ranges.with_sinks(scores, v, sink)
        scales = torch.zeros(len(seen[1].low), dtype=torch.float64)
        scales[:length] = value_scales[:, head // shape.group]
        attended = ranges.attend(*seen, weights_dtype=narrow, scales=scales if is_integer else None)
        if is_packed:
            back = rotated_back(torch.eye(shape.head_dim), block_size(half)) / block_size(half)
            attended = dot(attended, exactly(back))
        by_head.append(attended[:, None])
    return concatenated(by_head, 1)
