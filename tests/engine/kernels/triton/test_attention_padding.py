"""Padded batches, as graphs have them: sequences without queries, and rows behind those of the last sequence.

What real rows get has the same bits as without padding, rows of nobody become 0, and nothing is written for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels import reference
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.triton import attention_segments as segmenting
from penstock.engine.kernels.triton import attention_tiling as tilings
from penstock.engine.kernels.triton.attention import TritonAttention, Workspace
from penstock.engine.kernels.triton.attention_tiling import Chip
from penstock.engine.kernels.triton.rotary import kv_places, rotate_and_write
from tests.engine import ranges
from tests.engine.kernels.random_inputs import Lengths, int32
from tests.engine.ranges import assert_within, exactly
from tests.few import examples

pytestmark = pytest.mark.combinations("combinations of what Triton's kernels take")

BLOCK_SIZE, WIDTH = 16, 4
SHAPE = KVShape(num_kv_heads=1, head_dim=16, block_size=BLOCK_SIZE)
NUM_HEADS, MAX_SEQUENCES = 2, 12


@pytest.fixture(scope="module", autouse=True)
def _small_tiles() -> Iterator[None]:
    """Tiles of 16 tokens and rows; what torch allocates and nobody fills is not a number."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilings, "TILE_BYTES", 1)
        patch.setattr(tilings, "PREFILL_ROWS", 32)
        patch.setattr(segmenting, "MIN_SEGMENT_TILES", 1)
        patch.setattr(segmenting, "REDUCED_ELEMENTS", 1)
        torch.use_deterministic_algorithms(True)
        yield
    torch.use_deterministic_algorithms(deterministic)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The output and the cache of a layer after a step."""

    slots: Tensor
    queries: Tensor
    attended: Tensor
    kv: Tensor
    """The cache after the step."""


@dataclass(kw_only=True)
class Step:
    """A batch, the projections of its tokens, and the cache before it."""

    batch: Batch
    qkv: Tensor
    kv: Tensor

    def run(self, max_query_len: int | None, max_decode_queries: int, window: int) -> Found:
        device = self.qkv.device
        batch, kv = replace(self.batch, max_query_len=max_query_len), self.kv.clone()
        slots = kv_places(batch, BLOCK_SIZE)
        places = TokenPlaces(batch.positions, slots, *rotary_tables(device))
        queries = rotate_and_write(self.qkv, None, None, 1e-6, places, kv, SHAPE)
        workspace = Workspace(
            SHAPE,
            torch.float32,
            NUM_HEADS,
            MAX_SEQUENCES,
            device,
            windows=(window,),
            max_decode_queries=max_decode_queries,
            chip=Chip(2),
        )
        attended = TritonAttention(batch, SHAPE, workspace)(queries, kv, window)
        return Found(slots=slots, queries=queries, attended=attended, kv=kv)


def rotary_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(WIDTH * BLOCK_SIZE), torch.rand(8, generator=seeded(1)))
    return angles.cos().to(device), angles.sin().to(device)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def step_of(lengths: Lengths, device: torch.device) -> Step:
    """A step without padding; blocks of the cache that no real sequence has are not a number."""
    num_tokens = sum(new for _, new in lengths)
    starts = [sum(new for _, new in lengths[:row]) for row in range(len(lengths) + 1)]
    tables = 1 + torch.arange(len(lengths) * WIDTH, dtype=torch.int32).view(-1, WIDTH)
    kv = torch.full((2, 1 + MAX_SEQUENCES * WIDTH, SHAPE.block_elements), torch.nan)
    kv[:, 1 : 1 + tables.numel()] = torch.randn(2, tables.numel(), SHAPE.block_elements, generator=seeded(2))
    positions = int32([done + i for done, new in lengths for i in range(new)])
    batch = Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        query_starts=int32(starts),
        context_lens=int32([done + new for done, new in lengths]),
        block_tables=tables,
        sample_rows=int32([]),
    )
    qkv = torch.randn(num_tokens, (NUM_HEADS + 2) * SHAPE.head_dim, generator=seeded(3))
    return Step(batch=batch.to(device), qkv=qkv.to(device), kv=kv.to(device))


def padded(step: Step, places: list[int], num_rows: int) -> Step:
    """The step with sequences without queries before the real ones of these places, and with rows of nobody behind.

    Projections of the rows are not a number, and tables of the sequences are those of a block that somebody else has.
    """
    batch = step.batch
    starts, ends = batch.query_starts.tolist(), batch.context_lens.tolist()
    tables = batch.block_tables.cpu()
    for place in sorted(places, reverse=True):
        starts.insert(place, starts[place])
        ends.insert(place, 0)
        tables = torch.cat((tables[:place], torch.ones(1, WIDTH, dtype=torch.int32), tables[place:]))
    device = step.qkv.device
    more = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    return Step(
        batch=Batch(
            token_ids=torch.cat((batch.token_ids, more + 1)),
            positions=torch.cat((batch.positions, more)),
            query_starts=int32(starts).to(device),
            context_lens=int32(ends).to(device),
            block_tables=tables.to(device),
            sample_rows=batch.sample_rows,
        ),
        qkv=torch.cat((step.qkv, step.qkv.new_full((num_rows, step.qkv.shape[1]), torch.nan))),
        kv=step.kv,
    )


def check(
    lengths: Lengths,
    places: list[int],
    num_rows: int,
    device: torch.device,
    *,
    max_query_len: int | None = None,
    max_decode_queries: int = 1,
    window: int = 0,
) -> None:
    """Arithmetic says what is right without padding; with padding, the step without it says so bit by bit."""
    plain = step_of(lengths, device)
    longest = max_query_len or plain.qkv.shape[0]
    expected = plain.run(longest, max_decode_queries, window)
    found = padded(plain, places, num_rows).run(max_query_len, max_decode_queries, window)
    num_tokens = len(expected.slots)
    assert found.slots[:num_tokens].tolist() == expected.slots.tolist()
    assert found.slots[num_tokens:].eq(-1).all()
    assert torch.equal(found.attended[:num_tokens], expected.attended)
    assert not found.attended[num_tokens:].any()  # not a number counts as something
    assert torch.equal(found.kv.view(torch.int32), expected.kv.view(torch.int32))
    check_layer(plain, expected, window)


def check_layer(step: Step, found: Found, window: int) -> None:
    """The slots are the reference's, queries and keys are rotated, and attention sees what is in the cache by now."""
    slots = found.slots
    assert slots.tolist() == reference.kv_places(step.batch, BLOCK_SIZE).tolist()
    if not len(slots):
        return
    cos, sin = (table[step.batch.positions] for table in rotary_tables(slots.device))
    queries, keys, values = torch.split(step.qkv.view(len(slots), -1, SHAPE.head_dim), [NUM_HEADS, 1, 1], 1)
    assert_within(found.queries, ranges.rotary(exactly(queries), cos, sin), "queries")
    stored, before = by_slot(found.kv), by_slot(step.kv)
    assert_within(stored[0, slots], ranges.rotary(exactly(keys), cos, sin)[:, 0], "keys")
    assert torch.equal(stored[1, slots], values[:, 0])
    stored[:, slots] = before[:, slots]
    assert torch.equal(stored.view(torch.int32), before.view(torch.int32)), "nothing else is written"
    check_attention(step, found, window)


def check_attention(step: Step, found: Found, window: int) -> None:
    starts, stored = step.batch.query_starts.tolist(), by_slot(found.kv)
    for row, context in enumerate(step.batch.context_lens.tolist()):
        rows = slice(starts[row], starts[row + 1])
        places = torch.arange(context, device=stored.device)
        slots = step.batch.block_tables[row][places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        keys, values = stored[:, slots.long(), None]
        assert_within(found.attended[rows], ranges.attention(found.queries[rows], keys, values, window))


def by_slot(kv: Tensor) -> Tensor:
    """[2, slots, head_dim] A copy of the keys and values of the one head."""
    return kv.view(2, -1, SHAPE.head_dim).clone()


MIXED: Lengths = [(37, 1), (0, 13), (30, 3), (5, 12)]


@pytest.mark.parametrize(
    ("places", "num_rows"),
    [([0], 0), ([2, 2], 1), ([4, 4, 4], 19), ([0, 1, 2, 3, 4, 4], 35)],
    ids=["before", "two in the middle", "behind", "everywhere"],
)
def test_a_mixed_step(places: list[int], num_rows: int, device: torch.device) -> None:
    check(MIXED, places, num_rows, device, max_query_len=13, max_decode_queries=3)


@pytest.mark.parametrize("max_query_len", [None, 50])
def test_a_mixed_step_of_which_only_the_device_knows_the_longest(
    max_query_len: int | None, device: torch.device
) -> None:
    check(MIXED, [1, 4, 4], 9, device, max_query_len=max_query_len, max_decode_queries=3)


def test_one_sequence_may_have_all_rows_of_a_batch_that_nobody_counted(device: torch.device) -> None:
    """It has as many rows as there are sequences, and more than decode takes."""
    check([(5, 12)], [0] * 6 + [1] * 5, 0, device)


@pytest.mark.parametrize("max_query_len", [1, 3, None])
def test_decodes_alone(max_query_len: int | None, device: torch.device) -> None:
    check([(50, 1), (3, 1), (31, 1)], [1, 3, 3], 4, device, max_query_len=max_query_len, max_decode_queries=2)


@pytest.mark.parametrize("lengths", [[(40, 1)], [(0, 1)]], ids=["after context", "the first"])
def test_one_real_row(lengths: Lengths, device: torch.device) -> None:
    check(lengths, [0, 0, 1], 15, device)


@pytest.mark.parametrize("lengths", [[(40, 20)], [(0, 1)]], ids=["prefill", "decode"])
def test_one_sequence_in_the_last_place(lengths: Lengths, device: torch.device) -> None:
    check(lengths, [0] * 11, 9, device)


def test_nothing_but_padding(device: torch.device) -> None:
    """As when a graph is captured; there are more rows than all programs of decode make 0 at once."""
    check([], [0] * 5, 133, device, max_query_len=33)


@settings(max_examples=examples(10))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 3), max_size=4),
    num_rows=st.integers(0, 20),
    more_queries=st.one_of(st.none(), st.integers(0, 9)),
    max_decode_queries=st.integers(1, 8),
    window=st.sampled_from([0, 0, 7]),
)
def test_any_padded_step(
    lengths: Lengths,
    places: list[int],
    num_rows: int,
    more_queries: int | None,
    max_decode_queries: int,
    window: int,
    device: torch.device,
) -> None:
    longest = max(new for _, new in lengths)
    check(
        lengths,
        [min(place, len(lengths)) for place in places],
        num_rows,
        device,
        max_query_len=None if more_queries is None else longest + more_queries,
        max_decode_queries=max_decode_queries,
        window=window,
    )
