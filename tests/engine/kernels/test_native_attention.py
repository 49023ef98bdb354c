"""The native attention alone: within what its formats round, and the same bits in any batch, on any level."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import BLOCK_SIZE, NativeLinear, Team
from penstock.engine.kernels.kv_cache import KVCache, KVLayout, KVShape
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.ops import Heads, Op, Program
from penstock.engine.program.parameters import AttentionWeights
from penstock.engine.quant.rotation import block_size, rotated
from penstock.engine.spec import Attention
from tests.engine import ranges
from tests.engine.kernels.levels import ARM_LEVELS, LEVELS, SHAPE_LEVELS, build_levels, library_of, params
from tests.engine.kernels.random_model import CPU, NUM_BLOCKS, WITH_TILES, Prompts
from tests.engine.ranges import UNIT, Range, assert_within, concatenated, dot, exactly

pytestmark = pytest.mark.combinations("combinations of what the native kernels take")

KV_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
TILED = {torch.bfloat16, torch.int8}
VOCAB = 300
SEGMENT = 2048
"""Tokens of a context whose softmax is one of its own, until it is merged with those of others."""
LONG = 2 * SEGMENT + 54
MAX_POSITION, MANY_BLOCKS = LONG, 1 + -(-LONG // BLOCK_SIZE)
EXACT = 2.0**20
"""With a weight of this and its square as epsilon, RMSNorm returns what it is given, bit for bit."""


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
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


SHAPES = [
    Shape(8, 2, 1),
    Shape(8, 1, 53, 40),
    Shape(24, 1, 4, 7),
    Shape(40, 2, 3, 20),
    Shape(64, 3, 3),
    Shape(80, 1, 4, 130),
    Shape(128, 2, 7),
    Shape(128, 1, 1, 16),
    Shape(64, 1, 8, 40, has_sinks=True),
    Shape(24, 2, 1, has_sinks=True),
    Shape(32, 1, 5, -40),
]
COS, SIN = (
    getattr(torch.outer(torch.arange(MAX_POSITION).float(), torch.linspace(1, 0.01, 64)), name)()
    for name in ("cos", "sin")
)


@pytest.fixture(scope="module", params=params(SHAPE_LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Layer:
    """A decoder of one layer that returns what its attention makes of given queries, keys and values.

    The embedding has queries, keys and values of each token, and zeros. Norms and linear maps copy them; the output of
    attention is added to the zeros. The cache starts as NaN, so nothing may be read that was not written.
    """

    def __init__(
        self,
        shape: Shape,
        team: Team,
        dtype: torch.dtype,
        *,
        embedding: Tensor | None = None,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.shape = shape
        self.embedding = made_up(shape) if embedding is None else embedding
        hidden = shape.qkv_size + shape.q_size
        kv_shape = KVShape(num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, block_size=BLOCK_SIZE)
        self.kv = KVCache(KVLayout.even(kv_shape, 1), num_blocks, dtype, CPU)
        self.kv.data.fill_(-1 if dtype == torch.int8 else torch.nan)  # four bytes of -1 are a NaN

        def linear(weight: Tensor) -> NativeLinear:
            return NativeLinear(team, weight, None, torch.float32)

        norm = torch.full((hidden,), EXACT)
        half = shape.head_dim // 2
        spec = Attention(
            hidden_size=hidden,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            window=abs(shape.window),
            is_chunked=shape.window < 0,
        )
        eye = torch.eye(hidden)
        own = AttentionWeights(
            qkv=linear(torch.eye(shape.qkv_size, hidden)),
            o=linear(eye.narrow(1, shape.qkv_size, shape.q_size)),
            sinks=shape.sinks,
        )
        cos, sin = COS[:, :half].contiguous(), SIN[:, :half].contiguous()
        heads = Heads(spec=spec, own=own, cos=cos, sin=sin)
        ops = (
            Op(kind="embed", time="embed"),
            Op(kind="linear", time="qkv", target="qkv", linear=own.qkv, norm=norm),
            Op(kind="attend", time="attention", heads=heads),
            Op(kind="gather", time="gather"),
            Op(kind="linear", time="o", source="attended", linear=own.o, adds=True),
            Op(kind="finish", time="norm", norm=norm),
        )
        self.decoder = NativeDecoder(
            team,
            self.kv,
            Program(
                ops=ops,
                hidden_size=hidden,
                eps=EXACT**2,
                embedding=torch.nn.functional.pad(self.embedding, (0, shape.q_size)),
                max_position=MAX_POSITION,
            ),
        )

    def __call__(self, batch: Batch) -> Tensor:
        """[tokens, heads, head_dim]"""
        attended = self.decoder(batch)[:, self.shape.qkv_size :]
        return attended.view(len(attended), -1, self.shape.head_dim)


def made_up(shape: Shape, seed: int = 0) -> Tensor:
    """Queries, keys and values of every token, of many magnitudes; one token's are all 0."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(VOCAB, shape.qkv_size, generator=generator)
    numbers *= torch.exp2(torch.randint(-3, 2, (VOCAB, 1), generator=generator))
    numbers[7] = 0
    return numbers


# What the formats allow


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


def stored(x: Range, dtype: torch.dtype) -> Range:
    return quantized(x) if dtype == torch.int8 else x.rounded(dtype)


def spread(x: Range, dtype: torch.dtype) -> Range:
    """Queries, times the size of a block, or keys as a cache of a type wants them."""
    if dtype != torch.int8:
        return x
    head_dim = x.low.shape[-1]
    return dot(x, exactly(rotated(torch.eye(head_dim), block_size(head_dim // 2))))


def expected(layer: Layer, tokens: list[int], dtype: torch.dtype, *, tiles: bool) -> Range:
    """The attention of a whole sequence, [tokens, heads, head_dim]."""
    shape, half = layer.shape, layer.shape.head_dim // 2
    heads = layer.embedding[tokens].view(len(tokens), -1, shape.head_dim)
    queries, *written = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    cos, sin = COS[: len(tokens), :half], SIN[: len(tokens), :half]
    turned = ranges.rotary(exactly(queries), cos, sin).scaled(math.log2(math.e) * shape.head_dim**-0.5)
    turned = spread(turned.widened(2 * UNIT), dtype)
    if dtype == torch.int8:
        turned = turned.scaled(1 / block_size(half))
    is_integer = dtype == torch.int8 and not tiles
    if tiles:
        turned = turned.rounded(torch.bfloat16)
    elif is_integer:
        turned = quantized(turned, 2**15 - 1)
    keys = stored(spread(ranges.rotary(exactly(written[0]), cos, sin), dtype), dtype)
    values = stored(exactly(written[1]), dtype)
    value_scales = scales_of(exactly(written[1]), 127).high[..., 0]
    places = torch.arange(len(tokens))
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (shape.window if shape.window > 0 else MAX_POSITION))
    if shape.window < 0:
        hidden |= places // -shape.window != places[:, None] // -shape.window
    by_head = []
    for head in range(shape.num_heads):
        k, v = keys[:, head // shape.group], values[:, head // shape.group]
        scores = dot(turned[:, head], k.mT).widened(2 * UNIT).scaled(math.log(2)).masked(hidden)
        narrow = torch.bfloat16 if tiles else torch.float32
        sink = None if shape.sinks is None else shape.sinks[head]
        seen = ranges.with_sinks(scores, v, sink)
        scales = torch.zeros(len(seen[1].low), dtype=torch.float64)
        scales[: len(tokens)] = value_scales[:, head // shape.group]
        attended = ranges.attend(*seen, weights_dtype=narrow, scales=scales if is_integer else None)
        by_head.append(attended[:, None])
    return concatenated(by_head, 1)


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_within_what_its_formats_round(team: Team, shape: Shape, dtype: torch.dtype) -> None:
    layer, prompts = Layer(shape, team, dtype), Prompts(VOCAB, [150, 17, 1])
    tiles = dtype in TILED and team.library.level in WITH_TILES
    wanted = [expected(layer, tokens, dtype, tiles=tiles) for tokens in prompts.tokens]
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
    shape, length = Shape(8, 1, 53, has_sinks=True), 128
    embedding = torch.zeros(VOCAB, shape.qkv_size)
    embedding[:, -shape.head_dim :] = 1
    layer = Layer(shape, team, dtype, embedding=embedding)
    attended = layer(Prompts(VOCAB, [length]).batch({0: (0, length)}))[..., 0].double()
    assert shape.sinks is not None
    sinks = shape.sinks.double()
    is_seen = (sinks > 0) & (sinks < 4)  # of less weight, too little is left in 24 bits
    share = attended[-1] / (length * attended[0])
    error = ((1 - share) / (length * share - 1) * sinks.exp() - 1)[is_seen].abs().max()
    assert error < (1.1e-4 if dtype in TILED and team.library.level in WITH_TILES else 1e-5)


# The same bits


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_decoded_token_has_the_bits_of_one_in_a_prompt(
    team: Team, shape: Shape, dtype: torch.dtype
) -> None:
    assert_cuts_change_no_bit(shape, team, dtype, made_up(shape))


def test_denormal_sums_are_the_same_in_a_prompt_and_decoded(team: Team) -> None:
    """Real tiles flush denormal numbers, so the vectors that stand in for them have to."""
    shape = SHAPES[4]
    embedding = made_up(shape)
    embedding[:, -shape.num_kv_heads * shape.head_dim :] *= 2.0**-124
    attended = assert_cuts_change_no_bit(shape, team, torch.bfloat16, embedding)
    assert 0 < attended.abs().max() < 2.0**-120


def assert_cuts_change_no_bit(shape: Shape, team: Team, dtype: torch.dtype, embedding: Tensor) -> Tensor:
    """Computes a sequence as one prompt and in parts, some of them one token; returns its attention."""
    prompts = Prompts(VOCAB, [300])
    whole = Layer(shape, team, dtype, embedding=embedding)(prompts.batch({0: (0, 300)}))
    layer, cuts = Layer(shape, team, dtype, embedding=embedding), [0, 1, 2, 4, 33, 34, 37, 129, 250, 299, 300]
    parts = [layer(prompts.batch({0: cut})) for cut in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)
    return whole


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[4]], ids=str)
def test_neither_company_nor_threads_change_a_bit(team: Team, shape: Shape, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [Shape(8, 1, 1), Shape(8, 2, 1, 2500, has_sinks=True)], ids=str)
def test_who_computes_the_segments_of_a_long_context_changes_no_bit(
    team: Team, shape: Shape, dtype: torch.dtype
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


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_a_long_context_is_within_what_its_formats_round(team: Team, dtype: torch.dtype) -> None:
    length, shape = SEGMENT + 60, Shape(24, 1, 1, has_sinks=True)
    prompts, tiles = Prompts(VOCAB, [length], num_blocks=MANY_BLOCKS), team.library.level in WITH_TILES
    layer = Layer(shape, team, dtype, num_blocks=MANY_BLOCKS)
    attended = layer(prompts.batch({0: (0, length)}))
    wanted = expected(layer, prompts.tokens[0], dtype, tiles=tiles and dtype in TILED)
    assert_within(attended, wanted, "attention")


@pytest.mark.long("other instruction sets")
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_levels_with_the_same_order_of_sums_have_the_same_bits(shape: Shape, dtype: torch.dtype) -> None:
    """Emulated tiles have the bits of real ones, and wide registers those of narrow ones.

    An emulated processor takes the first rows and the last, of each more than a task has, and reads what another level
    wrote of those between.
    """
    build_levels(LEVELS)
    prompts, num_rows = Prompts(VOCAB, [200]), 60 // shape.group + 1
    tiled = [level for level in LEVELS if level in WITH_TILES and dtype in TILED]
    fused = [level for level in LEVELS if level != "portable" and level not in tiled]
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


def test_what_a_block_held_before_is_not_read(team: Team) -> None:
    """Infinities and NaN that an earlier sequence left in a block stay without effect."""
    shape, prompts = SHAPES[4], Prompts(VOCAB, [21])
    for dtype in KV_DTYPES:
        clean, used = Layer(shape, team, dtype), Layer(shape, team, dtype)
        clean.kv.data.fill_(0)
        assert torch.equal(*(layer(prompts.batch({0: (0, 21)})) for layer in (clean, used)))
