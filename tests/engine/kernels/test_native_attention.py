"""The native attention alone: within what its formats round, and the same bits in any batch, on any level."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from penstock.engine.kernels.cpu.native import BLOCK_SIZE, Team
from penstock.engine.kernels.kv_cache import KVFormat
from tests.engine.kernels.attention_layers import (
    LONG,
    SEGMENT,
    VOCAB,
    Latents,
    Layer,
    Shape,
    expected,
    made_up,
)
from tests.engine.kernels.levels import (
    ARM_LEVELS,
    DOTPROD,
    LEVELS,
    SHAPE_LEVELS,
    build_levels,
    library_of,
    params,
)
from tests.engine.kernels.random_model import WITH_TILES, Prompts, ints
from tests.engine.ranges import assert_within, concatenated

pytestmark = pytest.mark.combinations("combinations of what the native kernels take")

KV_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
MANY_BLOCKS = 1 + -(-LONG // BLOCK_SIZE)

SHAPES = [
    Shape(8, 2, 1),
    Shape(8, 1, 53, 40),
    Shape(24, 1, 4, 7),
    Shape(40, 2, 3, 20),
    Shape(64, 3, 3),
    Shape(80, 1, 4, 130),
    Shape(96, 2, 2),
    Shape(128, 2, 7),
    Shape(128, 1, 1, 16),
    Shape(64, 1, 8, 40, has_sinks=True),
    Shape(24, 2, 1, has_sinks=True),
    Shape(32, 1, 5, -40),
]
LATENTS = [
    Latents(4, 48, 16, 24, 32),
    Latents(20, 64, 8, 16, 8, has_temperature=True),
    Latents(53, 8, 8, 8, 8),
    Latents(1, 24, 8, 40, 16),
    Latents(7, 128, 64, 32, 24, has_temperature=True),
]
ALL_SHAPES: list[Shape | Latents] = [*SHAPES, *LATENTS]
OF_NARROW_MAPS = Latents(5, 32, 16, 40, 24, maps=torch.bfloat16)
"""Levels have orders of their own for the sums of such maps."""


def is_served(shape: Shape | Latents, dtype: torch.dtype) -> bool:
    format = KVFormat.of(dtype)
    return not format.is_packed or (isinstance(shape, Shape) and format.takes(shape.head_dim))


def served(*shapes: Shape | Latents) -> pytest.MarkDecorator:
    """All shapes with caches of all types that are served for them."""
    cases = [(shape, dtype) for dtype in KV_DTYPES for shape in shapes if is_served(shape, dtype)]
    return pytest.mark.parametrize(("shape", "dtype"), cases, ids=str)


@pytest.fixture(scope="module", params=params(SHAPE_LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@served(*ALL_SHAPES, OF_NARROW_MAPS)
def test_attention_is_within_what_its_formats_round(
    team: Team, shape: Shape | Latents, dtype: torch.dtype
) -> None:
    layer, prompts = Layer(shape, team, dtype), Prompts(VOCAB, [150, 17, 1])
    has_tiles = team.library.level in WITH_TILES
    wanted = [expected(layer, tokens, dtype, has_tiles=has_tiles) for tokens in prompts.tokens]
    done = [0, 0, 0]
    for ends in ([63, 16, 0], [149, 17, 1], [150, 17, 1]):
        cut = {i: (done[i], end) for i, end in enumerate(ends) if done[i] < end}
        parts = [wanted[i][start:end] for i, (start, end) in cut.items()]
        assert_within(layer(prompts.batch(cut)), concatenated(parts, 0), "attention")
        done = ends


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_weights_are_exponentials(team: Team, dtype: torch.dtype) -> None:
    """Tokens all have the score 0 and the value 1, so what a row attends to tells the weight of each beside its sink's.

    With weights w that are stored as v, it is nv / (1 + nw) after n tokens.
    """
    shape, length = Shape(32 if KVFormat.of(dtype).is_packed else 8, 1, 53, has_sinks=True), 128
    embedding = torch.zeros(VOCAB, shape.row_size)
    embedding[:, -shape.head_dim :] = 1
    layer = Layer(shape, team, dtype, embedding=embedding)
    attended = layer(Prompts(VOCAB, [length]).batch({0: (0, length)}))[..., 0].double()
    assert shape.sinks is not None
    sinks = shape.sinks.double()
    is_seen = (sinks > 0) & (sinks < 4)  # of less weight, too little is left in 24 bits
    share = attended[-1] / (length * attended[0])
    error = ((1 - share) / (length * share - 1) * sinks.exp() - 1)[is_seen].abs().max()
    assert error < (1.1e-4 if shape.is_tiled(dtype) and team.library.level in WITH_TILES else 1e-5)


# The same bits


@served(*ALL_SHAPES, OF_NARROW_MAPS)
def test_a_decoded_token_has_the_bits_of_one_in_a_prompt(
    team: Team, shape: Shape | Latents, dtype: torch.dtype
) -> None:
    assert_cuts_change_no_bit(shape, team, dtype, made_up(shape))


def test_denormal_sums_are_the_same_in_a_prompt_and_decoded(team: Team) -> None:
    """Real tiles flush denormal numbers, so the vectors that stand in for them have to."""
    shape = SHAPES[4]
    embedding = made_up(shape)
    embedding[:, -shape.num_kv_heads * shape.head_dim :] *= 2.0**-124
    attended = assert_cuts_change_no_bit(shape, team, torch.bfloat16, embedding)
    assert 0 < attended.abs().max() < 2.0**-120


def assert_cuts_change_no_bit(
    shape: Shape | Latents, team: Team, dtype: torch.dtype, embedding: Tensor
) -> Tensor:
    """Computes a sequence as one prompt and in parts, some of them one token; returns its attention."""
    prompts = Prompts(VOCAB, [300])
    whole = Layer(shape, team, dtype, embedding=embedding)(prompts.batch({0: (0, 300)}))
    layer, cuts = Layer(shape, team, dtype, embedding=embedding), [0, 1, 2, 4, 33, 34, 37, 129, 250, 299, 300]
    parts = [layer(prompts.batch({0: cut})) for cut in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)
    return whole


@served(SHAPES[3], SHAPES[4], LATENTS[1])
def test_neither_company_nor_threads_change_a_bit(
    team: Team, shape: Shape | Latents, dtype: torch.dtype
) -> None:
    lengths = [64, 130, 31, 31, 5, 257, 1, 77]
    prompts = Prompts(VOCAB, lengths)
    alone = [Layer(shape, team, dtype)(prompts.batch({i: (0, n)})) for i, n in enumerate(lengths)]
    for num_threads in (1, 2, 64):
        many = team.library.start_team(num_threads)
        layer = Layer(shape, many, dtype)
        first = layer(prompts.batch({i: (0, n - 1) for i, n in enumerate(lengths) if n > 1}))
        last = layer(prompts.batch({i: (n - 1, n) for i, n in enumerate(lengths)}))
        assert torch.equal(first, torch.cat([rows[:-1] for rows in alone]))
        assert torch.equal(last, torch.cat([rows[-1:] for rows in alone]))
        many.close()


@pytest.mark.parametrize("shape", [SHAPES[4], LATENTS[0]], ids=str)
def test_a_row_may_be_sampled_twice(team: Team, shape: Shape | Latents) -> None:
    prompts, rows = Prompts(VOCAB, [40]), [20, 3, 4, 20, 39, 3]
    batch = prompts.batch({0: (0, 40)})
    whole = Layer(shape, team, torch.float32)(batch)
    few = Layer(shape, team, torch.float32)(replace(batch, sample_rows=ints(rows)))
    assert torch.equal(few, whole[rows])


@served(
    Shape(8, 1, 1),
    Shape(8, 2, 1, 2500, has_sinks=True),
    Shape(32, 1, 1, has_sinks=True),
    Latents(14, 8, 8, 8, 8),
)
def test_who_computes_the_segments_of_a_long_context_changes_no_bit(
    team: Team, shape: Shape | Latents, dtype: torch.dtype
) -> None:
    """The segments of a few rows are left to several threads, those of many rows are not."""
    prompts = Prompts(VOCAB, [LONG, 1], num_blocks=MANY_BLOCKS + 1)
    prompt = Layer(shape, team, dtype, num_blocks=MANY_BLOCKS + 1)
    whole = prompt(prompts.batch({0: (0, LONG)}))
    for num_threads in (1, 2, 64):
        many = team.library.start_team(num_threads)
        layer = Layer(shape, many, dtype, num_blocks=MANY_BLOCKS + 1)
        layer.kv.data.copy_(prompt.kv.data)
        for start, end in ((SEGMENT - 1, SEGMENT + 1), (2 * SEGMENT - 90, LONG - 1), (LONG - 7, LONG)):
            rows = layer(prompts.batch({0: (start, end), 1: (0, 1)}))
            assert torch.equal(rows[: end - start], whole[start:end]), (num_threads, start)
        assert torch.equal(layer(prompts.batch({0: (LONG - 1, LONG)})), whole[-1:])
        many.close()


@served(Shape(24, 1, 1, has_sinks=True), Shape(32, 1, 1), Latents(2, 16, 8, 8, 8))
def test_a_long_context_is_within_what_its_formats_round(
    team: Team, shape: Shape | Latents, dtype: torch.dtype
) -> None:
    """Of the rows that are in one segment, as those of short contexts are, it looks at the last ones."""
    first, length = SEGMENT - 60, SEGMENT + 60
    prompts, has_tiles = Prompts(VOCAB, [length], num_blocks=MANY_BLOCKS), team.library.level in WITH_TILES
    layer = Layer(shape, team, dtype, num_blocks=MANY_BLOCKS)
    attended = layer(prompts.batch({0: (0, length)}))[first:]
    wanted = expected(layer, prompts.tokens[0], dtype, has_tiles=has_tiles, first=first)
    assert_within(attended, wanted, "attention")


@pytest.mark.long("other instruction sets")
@served(*ALL_SHAPES)
def test_levels_with_the_same_order_of_sums_have_the_same_bits(
    shape: Shape | Latents, dtype: torch.dtype
) -> None:
    """Emulated tiles have the bits of real ones, and wide registers those of narrow ones.

    An emulated processor takes the first rows and the last, of each more than a task has, and reads what another level
    wrote of those between. No attention has products of integers, which are all that ARM's last level has to itself.
    """
    levels = [level for level in LEVELS if level != DOTPROD]
    build_levels(levels)
    prompts, num_rows = Prompts(VOCAB, [200]), 60 // (shape.num_heads // shape.kv_shape.num_kv_heads) + 1
    tiled = [level for level in levels if level in WITH_TILES and shape.is_tiled(dtype)]
    fused = [level for level in levels if level != "portable" and level not in tiled]
    for one, *others in filter(None, (tiled, fused)):
        team = library_of(one).start_team(1)
        whole = Layer(shape, team, dtype)
        expected = whole(prompts.batch({0: (0, 200)}))
        team.close()
        for other in others:
            team = library_of(other).start_team(1)
            layer = Layer(shape, team, dtype)
            for start, end in [(0, num_rows), (200 - num_rows, 200)] if other in ARM_LEVELS else [(0, 200)]:
                found = layer(prompts.batch({0: (start, end)}))
                assert torch.equal(found, expected[start:end]), (one, other)
                layer.kv.data.copy_(whole.kv.data)
            team.close()


@pytest.mark.parametrize("shape", [SHAPES[4], LATENTS[0]], ids=str)
def test_what_a_block_held_before_is_not_read(team: Team, shape: Shape | Latents) -> None:
    """Infinities and NaN that an earlier sequence left in a block stay without effect."""
    prompts = Prompts(VOCAB, [21])
    for dtype in (each for each in KV_DTYPES if is_served(shape, each)):
        clean, used = Layer(shape, team, dtype), Layer(shape, team, dtype)
        clean.kv.data.fill_(0)
        assert torch.equal(*(layer(prompts.batch({0: (0, 21)})) for layer in (clean, used)))
