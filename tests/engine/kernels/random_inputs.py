"""Random input of the operations between the linear maps, and what each makes of it, whichever table it is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVCache, KVFormat, KVLayout, KVShape
from penstock.engine.kernels.ops import RotateAndWrite
from penstock.engine.kernels.reference import TokenPlaces, quantize_groups, quantize_kv, write_kv
from penstock.engine.quant.rotation import block_size, rotated, rotated_back
from tests.engine import ranges
from tests.engine.ranges import Range, assert_within, concatenated, dot, exactly

EPS = 1e-5
Lengths = list[tuple[int, int]]
"""For each sequence: (tokens computed before, tokens of this step)."""
RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
AddRmsNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check_norms(
    rms_norm: RmsNorm, add_rms_norm: AddRmsNorm, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> None:
    before = hidden.clone(), delta.clone()
    assert_within(rms_norm(hidden, weight, eps), ranges.rms_norm(exactly(hidden), weight, eps, hidden.dtype))
    total, normed = add_rms_norm(hidden, delta, weight, eps)
    assert torch.equal(total, hidden + delta)
    assert_within(normed, ranges.rms_norm(exactly(total), weight, eps, hidden.dtype))
    assert torch.equal(hidden, before[0])
    assert torch.equal(delta, before[1])


def check_silu_mul(silu_mul: Callable[[Tensor], Tensor], gate_up: Tensor) -> None:
    gate, up = map(exactly, gate_up.chunk(2, -1))
    assert_within(silu_mul(gate_up), ranges.silu_mul(gate, up, gate_up.dtype))


@dataclass(frozen=True)
class Layer:
    """The sizes of one layer's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    norms: bool

    @property
    def shape(self) -> KVShape:
        return KVShape(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, block_size=self.block_size)


class RotationInput:
    """The projection of some tokens, at random positions, with random slots; some have none."""

    def __init__(
        self,
        layer: Layer,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        *,
        num_blocks: int = 9,
        num_positions: int = 50,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        self.layer, self.qkv, self.num_blocks = layer, random(num_tokens, width), num_blocks
        self.q_norm, self.k_norm = (random(layer.head_dim) if layer.norms else None for _ in range(2))
        angles = torch.rand(num_positions, layer.head_dim // 2, generator=generator).to(device) * 6.3
        positions = torch.randint(num_positions, (num_tokens,), generator=generator, dtype=torch.int32)
        slots = torch.randperm(num_blocks * layer.block_size, generator=generator)[:num_tokens]
        padding = torch.rand(num_tokens, generator=generator) < 0.2
        self.places = TokenPlaces(
            positions.masked_fill(padding, -1).to(device),
            slots.masked_fill(padding, -1).to(device),
            angles.cos(),
            angles.sin(),
        )

    def kv(self, dtype: torch.dtype) -> Tensor:
        """One layer's cache, full of what others wrote."""
        device = self.qkv.device
        cache = KVCache(KVLayout.even(self.layer.shape, 1), self.num_blocks, dtype, device)
        return cache.data.copy_(torch.arange(cache.data.numel(), device=device).view_as(cache.data) % 251)[0]

    def run(self, function: RotateAndWrite, kv: Tensor, *, spreads: bool = False) -> Tensor:
        """The queries of the rows that have a slot."""
        norms = self.q_norm, self.k_norm
        queries = function(self.qkv, *norms, EPS, self.places, kv, self.layer.shape, spreads=spreads)
        assert queries.is_contiguous()
        return queries[self.places.in_cache >= 0]

    def check(self, function: RotateAndWrite, kv_dtype: torch.dtype) -> None:
        """Queries and keys are normed and rotated, keys and values in their slots, all others as they were."""
        kv, before = self.kv(kv_dtype), self.kv(kv_dtype)
        queries = self.run(function, kv)
        layer, stored = self.layer, self.places.in_cache >= 0
        sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        heads = self.qkv[stored].view(-1, sum(sizes), layer.head_dim)
        q, k, v = torch.split(heads, sizes, 1)
        assert_within(queries, self._turned(q, self.q_norm, stored), "queries")
        view = (2, self.num_blocks, layer.num_kv_heads, layer.block_size, layer.head_dim)
        by_slot, untouched = (each.view(view).transpose(2, 3).flatten(1, 2) for each in (kv, before))
        slots = self.places.in_cache[stored]
        assert_within(by_slot[0, slots], self._turned(k, self.k_norm, stored).rounded(kv_dtype), "keys")
        assert torch.equal(by_slot[1, slots], v.to(kv_dtype))
        others = torch.ones(len(by_slot[0]), dtype=torch.bool, device=slots.device)
        others[slots] = False
        assert torch.equal(by_slot[:, others], untouched[:, others])

    def _turned(self, heads: Tensor, norm: Tensor | None, rows: Tensor) -> Range:
        x, positions = exactly(heads), self.places.positions[rows]
        x = x if norm is None else ranges.rms_norm(x, norm, EPS, heads.dtype)
        return ranges.rotary(x, self.places.cos[positions], self.places.sin[positions], heads.dtype)


@dataclass(kw_only=True)
class AttentionInput:
    """A step of random queries, its KV, and what attention makes of it; what nobody wrote is not a number."""

    lengths: Lengths
    device: torch.device
    group: int = 2
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """The dtype of a quantized cache; None stands for that of queries."""
    window: int = 0
    has_sinks: bool = False
    first: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(self.dtype)

        self.shape = KVShape(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
        )
        num_blocks = 1 + sum(self._num_blocks(row) for row in range(len(self.lengths)))
        free = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
        width = max(self._num_blocks(row) for row in range(len(self.lengths))) + 2
        kv = KVCache(
            KVLayout.even(self.shape, 1), num_blocks, self.kv_dtype or self.dtype, torch.device("cpu")
        )
        kv.data.view(torch.uint8).fill_(255)  # all of these are NaN, and so are scales
        self.keys, self.values = [], []
        starts, tables = [0], torch.zeros(len(self.lengths), width, dtype=torch.int32)
        for row, (done, new) in enumerate(self.lengths):
            keys, values = normal(2, done + new, self.num_kv_heads, self.head_dim)
            blocks = torch.tensor([free.pop() for _ in range(self._num_blocks(row))], dtype=torch.int32)
            tables[row, : len(blocks)] = blocks
            if self._is_packed:
                values = rotated(values.float(), block_size(self.head_dim // 2)).to(self.dtype)
            places = torch.arange(done + new)
            write_kv(kv.layer(0), keys, values, self._slots(tables[row], places))
            if self.window:  # blocks that no query sees any more may be anyone's
                tables[row, : max(0, done - abs(self.window) + 1) // self.block_size] = 0
            self.keys.append(self._stored(keys))
            self.values.append(self._stored(values))
            starts.append(starts[-1] + new)
        self.queries = normal(starts[-1], self.num_kv_heads * self.group, self.head_dim)
        sinks = 3 * torch.randn(self.num_kv_heads * self.group, generator=generator)
        self.sinks = sinks.to(self.device) if self.has_sinks else None
        positions = [done + i for done, new in self.lengths for i in range(new)]
        self.layer_kv = kv.layer(0).to(self.device)
        self.batch = Batch(
            token_ids=int32(positions),
            positions=int32(positions),
            query_starts=int32(starts),
            context_lens=int32([done + new for done, new in self.lengths]),
            block_tables=tables,
            sample_rows=int32([]),
        ).to(self.device)

    def expected(self) -> Range:
        """[T, heads * d]: softmax(score) v of every query and head, over what each one sees.

        Values of 4 bits are spread, and what is attended to them is spread back.
        """
        starts, queries = self.batch.query_starts.tolist(), self.queries.to(self.device)
        attended = concatenated(
            [
                ranges.attention(
                    queries[start : start + new],
                    self.keys[row].to(self.device),
                    self.values[row].to(self.device),
                    self.window,
                    self.sinks,
                    self.first,
                )
                for row, (start, (_, new)) in enumerate(zip(starts, self.lengths, strict=False))
            ],
            0,
        )
        if not self._is_packed:
            return attended
        heads = Range(
            *(torch.unflatten(end, -1, (-1, self.head_dim)) for end in (attended.low, attended.high))
        )
        block = block_size(self.head_dim // 2)
        matrix = rotated_back(torch.eye(self.head_dim, device=self.device), block) / block
        back = dot(heads, exactly(matrix)).rounded(self.dtype)
        return Range(back.low.flatten(1), back.high.flatten(1))

    @property
    def _is_packed(self) -> bool:
        return self.kv_dtype is not None and KVFormat.of(self.kv_dtype).is_packed

    def _stored(self, x: Tensor) -> Tensor:
        """Returns exactly what kernels read of x [tokens, num_kv_heads, head_dim] from the cache."""
        if self.kv_dtype is None:
            return x
        if self._is_packed:
            numbers, scale = quantize_groups(x, KVFormat.of(self.kv_dtype).group_of(self.head_dim))
            return (numbers.double() * scale.double().unsqueeze(-1)).flatten(-2).to(self.dtype)
        numbers, scale = quantize_kv(x)
        return numbers.double() * scale.double().unsqueeze(-1)

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    def _num_blocks(self, row: int) -> int:
        return -(-sum(self.lengths[row]) // self.block_size)

    def _slots(self, table: Tensor, places: Tensor) -> Tensor:
        return table[places // self.block_size].long() * self.block_size + places % self.block_size
