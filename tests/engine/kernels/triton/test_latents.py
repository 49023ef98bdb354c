"""Latents by Triton against their specification in plain torch, on shapes that fit nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels import latents as specification
from penstock.engine.kernels.batch import Batch, blank_batch
from penstock.engine.kernels.kv_cache import KVCache, KVLayout, KVShape
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.triton import attention_segments as segmenting
from penstock.engine.kernels.triton import attention_tiling as tilings
from penstock.engine.kernels.triton.attention import TritonAttention, Workspace
from penstock.engine.kernels.triton.attention_tiling import Chip
from penstock.engine.kernels.triton.latents import rotate_and_write_latents
from tests.engine import ranges
from tests.engine.kernels.random_inputs import EPS, Lengths
from tests.engine.kernels.triton.dtypes import DTYPES
from tests.engine.ranges import Range, assert_within, concatenated, dot, exactly
from tests.few import examples

pytestmark = pytest.mark.combinations("combinations of what Triton's kernels take")

BLOCK_SIZE, SCALE = 16, 0.3


@pytest.fixture(scope="module", autouse=True)
def _small_tiles() -> Iterator[None]:
    """Tiles of 16 tokens and 16 rows, so that short contexts and few heads have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilings, "TILE_BYTES", 1)
        patch.setattr(tilings, "LATENT_SUMS", 16)
        patch.setattr(segmenting, "MIN_SEGMENT_TILES", 1)
        patch.setattr(segmenting, "REDUCED_ELEMENTS", 1)
        yield


@dataclass(kw_only=True)
class LatentInput:
    """A step of random queries that attend to a random cache; what nobody wrote in it is not a number."""

    lengths: Lengths
    device: torch.device
    num_heads: int = 4
    latent_size: int = 48
    rotated_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    first: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.shape = KVShape(
            num_kv_heads=1,
            head_dim=self.latent_size + self.rotated_size,
            block_size=BLOCK_SIZE,
            latent_size=self.latent_size,
        )
        contexts, counts = [sum(own) for own in self.lengths], [new for _, new in self.lengths]
        width = max(-(-context // BLOCK_SIZE) for context in contexts) + 1
        tables = 1 + torch.randperm(len(contexts) * width, generator=generator).view(-1, width)
        cache = KVCache(
            KVLayout.even(self.shape, 1),
            1 + tables.numel(),
            self.kv_dtype or self.dtype,
            torch.device("cpu"),
        )
        cache.data.view(torch.uint8).fill_(255)  # all of these are NaN, and so are scales
        for table, context in zip(tables, contexts, strict=True):
            places = torch.arange(context)
            slots = table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
            rows = torch.randn(context, self.shape.head_dim, generator=generator).to(self.dtype)
            specification._write(cache.layer(0), rows, slots, self.shape)
        self.layer_kv = cache.layer(0).to(self.device)
        self.batch = blank_batch(counts, contexts, tables.int()).to(self.device)
        queries = torch.randn(sum(counts), self.num_heads, self.shape.head_dim, generator=generator)
        self.queries = queries.to(self.device, self.dtype)

    def workspace(self, max_decode_queries: int = 1, num_sms: int = 8) -> Workspace:
        return Workspace(
            self.shape,
            self.dtype,
            self.num_heads,
            len(self.batch.context_lens),
            self.device,
            max_decode_queries=max_decode_queries,
            chip=Chip(num_sms),
            is_quantized=self.kv_dtype is not None,
        )

    def attend(self, workspace: Workspace, max_query_len: int | None = None) -> Tensor:
        workspace.segment_outputs.fill_(torch.nan)
        batch = replace(self.batch, max_query_len=max_query_len)
        attend = TritonAttention(batch, self.shape, workspace)
        return attend(self.queries, self.layer_kv, 0, SCALE, first=self.first)

    def expected(self) -> Range:
        """[T, num_heads * latent]: softmax(score) c of every query and head, over what each one sees."""
        parts, start = [], 0
        for table, (done, new) in zip(self.batch.block_tables.long(), self.lengths, strict=False):
            known = specification.gather_latents(self.layer_kv[0], table, self.shape, self.dtype)
            keys = exactly(known[0, : done + new])
            positions = torch.arange(done + new, device=self.device)
            own = positions[done:, None]
            hidden = (positions > own) | ((positions < self.first) & (positions != own))
            queries = exactly(self.queries[start : start + new].transpose(0, 1))
            scores = dot(queries, keys.mT).scaled(SCALE).masked(hidden)
            part = ranges.attend(scores, keys[:, : self.latent_size], self.dtype)
            parts.append(Range(part.low.transpose(0, 1).flatten(1), part.high.transpose(0, 1).flatten(1)))
            start += new
        return concatenated(parts, 0)

    def check(self, max_decode_queries: int = 1, num_sms: int = 8, max_query_len: int | None = None) -> None:
        workspace = self.workspace(max_decode_queries, num_sms)
        assert_within(self.attend(workspace, max_query_len), self.expected())


MIXED: Lengths = [(0, 5), (37, 1), (9, 11), (40, 2), (0, 1)]
DECODE: Lengths = [(150, 1), (3, 1), (31, 1)]
SHAPES = [(4, 48, 16), (20, 64, 16), (3, 40, 24), (40, 16, 16)]
"""Heads, numbers of a latent, and of a rotated key."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
def test_all_heads_attend_to_the_same_latents(
    lengths: Lengths, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    num_heads, latent_size, rotated_size = sizes
    LatentInput(
        lengths=lengths,
        num_heads=num_heads,
        latent_size=latent_size,
        rotated_size=rotated_size,
        dtype=dtype,
        device=device,
    ).check()


@pytest.mark.parametrize("latent_size", [256, 512])
def test_latents_of_published_sizes(latent_size: int, device: torch.device) -> None:
    LatentInput(
        lengths=[(37, 1), (3, 7)],
        num_heads=16,
        latent_size=latent_size,
        rotated_size=64,
        dtype=torch.float16,
        device=device,
    ).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
def test_a_quantized_latent_has_several_scales(
    lengths: Lengths, dtype: torch.dtype, device: torch.device
) -> None:
    LatentInput(lengths=lengths, dtype=dtype, kv_dtype=torch.int8, device=device).check()


@pytest.mark.parametrize("num_queries", [1, 2, 5, 16])
def test_drafts_are_verified_in_segments(num_queries: int, device: torch.device) -> None:
    case = LatentInput(lengths=[(75, num_queries), (0, num_queries), (20, 1)], num_heads=20, device=device)
    workspace = case.workspace(num_queries, num_sms=64)
    assert_within(case.attend(workspace, num_queries), case.expected())
    assert workspace.segments[0].first_items[1] > 1


@settings(max_examples=examples(8))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=3),
    num_heads=st.sampled_from([1, 4, 20]),
    kv_dtype=st.sampled_from([None, torch.int8]),
    first=st.sampled_from([0, 0, 1, 20]),
    max_decode_queries=st.integers(1, 16),
    num_sms=st.sampled_from([1, 3, 20]),
    seed=st.integers(0, 99),
)
def test_any_step(
    lengths: Lengths,
    num_heads: int,
    kv_dtype: torch.dtype | None,
    first: int,
    max_decode_queries: int,
    num_sms: int,
    seed: int,
    device: torch.device,
) -> None:
    case = LatentInput(
        lengths=lengths, num_heads=num_heads, kv_dtype=kv_dtype, first=first, seed=seed, device=device
    )
    case.check(max_decode_queries, num_sms)


@pytest.mark.parametrize(("num_heads", "max_decode_queries"), [(4, 1), (4, 16), (20, 3)])
def test_rows_of_unused_seats_and_of_no_sequence_are_0(
    num_heads: int, max_decode_queries: int, device: torch.device
) -> None:
    """A graph's batch: a seat with a row and no context, one with neither, and rows beyond the last sequence."""
    case = LatentInput(lengths=[(40, 1), (11, 3)], num_heads=num_heads, device=device)
    expected, end, num_unused = case.expected(), len(case.queries), 7
    case.queries = torch.cat((case.queries, case.queries.new_ones(num_unused, *case.queries.shape[1:])))
    case.batch = _with_unused(case.batch, num_unused)
    found = case.attend(case.workspace(max_decode_queries), max_query_len=3)
    assert_within(found[:end], expected)
    assert not found[end:].any()


def _with_unused(batch: Batch, num_rows: int) -> Batch:
    def padded(tensor: Tensor, *values: int) -> Tensor:
        return torch.cat((tensor, tensor.new_tensor(values)))

    end = len(batch.positions)
    return replace(
        batch,
        positions=padded(batch.positions, *[0] * num_rows),
        query_starts=padded(batch.query_starts, end + 1, end + 1),
        context_lens=padded(batch.context_lens, 0, 0),
        block_tables=torch.cat((batch.block_tables, torch.zeros_like(batch.block_tables[:2]))),
    )


def test_the_workspace_has_room_for_as_many_segments_as_there_may_be(device: torch.device) -> None:
    """However long one context is beside others, stored segments are at most twice those that the device can use."""
    case = LatentInput(lengths=[(150, 1)] * 5 + [(0, 1)] * 4, device=device)
    workspace = case.workspace(num_sms=4)
    assert_within(case.attend(workspace), case.expected())
    counts, first = workspace.segments[0].first_items.diff(), workspace.segments[0].first_stored
    stored = [place for s in range(9) if counts[s] > 1 for place in range(first[s], first[s] + counts[s])]
    assert stored == list(range(len(stored)))
    assert 4 < 4 * len(stored) <= len(workspace.segment_outputs) < 4 * workspace.num_items(9)


class WrittenInput:
    """The projections of some tokens, at random positions, with random slots; some have none."""

    def __init__(self, shape: KVShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(num_heads)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device, dtype)

        num_tokens, rotated = 9, shape.head_dim - shape.latent_size
        self.shape = shape
        self.queries = random(num_tokens, num_heads, 24 + rotated)
        self.latents, self.norm = random(num_tokens, shape.head_dim), random(shape.latent_size)
        angles = torch.rand(50, rotated // 2, generator=generator).to(device) * 6.3
        slots = torch.randperm(3 * BLOCK_SIZE, generator=generator)[:num_tokens].to(device)
        slots[3] = -1
        positions = torch.randint(50, (num_tokens,), generator=generator, dtype=torch.int32).to(device)
        positions[3] = -1
        scales = torch.rand(50, generator=generator).to(device)
        self.places = TokenPlaces(positions, slots, angles.cos(), angles.sin(), scales)

    def kv(self, dtype: torch.dtype) -> Tensor:
        """A cache full of what others wrote."""
        cache = KVCache(KVLayout.even(self.shape, 1), 3, dtype, self.queries.device)
        cache.data.fill_(77)
        return cache.layer(0)

    def run(self, kv: Tensor, *, has_scales: bool = False) -> Tensor:
        places = self.places if has_scales else replace(self.places, q_scales=None)
        return rotate_and_write_latents(self.queries, self.latents, self.norm, EPS, places, kv, self.shape)


WRITTEN = [
    KVShape(num_kv_heads=1, head_dim=64, block_size=BLOCK_SIZE, latent_size=48),
    KVShape(num_kv_heads=1, head_dim=64, block_size=BLOCK_SIZE, latent_size=40),
    KVShape(num_kv_heads=1, head_dim=576, block_size=BLOCK_SIZE, latent_size=512),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [4, 20])
@pytest.mark.parametrize("shape", WRITTEN, ids=lambda shape: str(shape.latent_size))
def test_queries_are_rotated_and_latents_normed_and_stored(
    shape: KVShape, num_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    step = WrittenInput(shape, num_heads, dtype, device)
    kv, before, size = step.kv(dtype), step.kv(dtype), shape.head_dim - shape.latent_size
    queries, known = step.run(kv), step.places.in_cache >= 0
    turns = step.places.positions[known]
    cos, sin = step.places.cos[turns], step.places.sin[turns]
    plain, turned = queries[known, :, :-size], queries[known, :, -size:]
    assert queries.is_contiguous()
    assert torch.equal(plain, step.queries[known, :, :-size])
    assert_within(turned, ranges.rotary(exactly(step.queries[known, :, -size:]), cos, sin, dtype))
    stored, untouched = (each.view(-1, shape.head_dim) for each in (kv[0].clone(), before[0].clone()))
    rows, slots = step.latents[known], step.places.in_cache[known]
    normed = ranges.rms_norm(exactly(rows[:, :-size]), step.norm, EPS, dtype)
    assert_within(stored[slots, :-size], normed, "latents")
    key = ranges.rotary(exactly(rows[:, None, -size:]), cos, sin, dtype)
    assert_within(stored[slots, None, -size:], key, "rotated keys")
    stored[slots] = untouched[slots]
    assert torch.equal(stored, untouched)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_be_scaled_by_their_position(dtype: torch.dtype, device: torch.device) -> None:
    step = WrittenInput(WRITTEN[0], 4, dtype, device)
    assert step.places.q_scales is not None
    known = step.places.in_cache >= 0
    by = step.places.q_scales[step.places.positions[known], None, None]
    expected = (step.run(step.kv(dtype))[known] * by).to(dtype)
    assert torch.equal(step.run(step.kv(dtype), has_scales=True)[known], expected)


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [WRITTEN[0], WRITTEN[2]], ids=lambda shape: str(shape.latent_size))
def test_latents_are_quantized_in_groups(shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
    """The bits are those of the specification, zeros and what is no number included."""
    step = WrittenInput(shape, 4, dtype, device)
    step.latents[0] = 0.0
    step.latents[1, 5], step.latents[2, -1] = torch.nan, torch.inf
    plain, found, expected = step.kv(dtype), step.kv(torch.int8), step.kv(torch.int8)
    for kv in (plain, found):
        step.run(kv)
    slots = step.places.in_cache
    written = plain[0].reshape(-1, shape.head_dim)[slots.clamp(min=0)]
    specification._write(expected, written, slots, shape)
    assert torch.equal(found[..., : shape.block_elements], expected[..., : shape.block_elements])
    scales, wanted = (kv[..., shape.block_elements :].clone().view(torch.float32) for kv in (found, expected))
    assert torch.equal(scales.nan_to_num(-1.0), wanted.nan_to_num(-1.0))
