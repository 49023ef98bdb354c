"""The native decoder at every shape of model and batch: against plain torch, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import BLOCK_SIZE, Team
from tests.engine.configs import with_attention, with_spec
from tests.engine.kernels.levels import SHAPE_LEVELS, params
from tests.engine.kernels.random_model import DTYPES, Checkpoint, Prompts, config, ints
from tests.engine.kernels.test_native_decoder import assert_equals_plain
from tests.few import examples

pytestmark = pytest.mark.combinations("combinations of what the native kernels take")


@pytest.fixture(scope="module", params=params(SHAPE_LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@st.composite
def model_shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Any sizes: vocabulary, hidden and inner size need be multiples of nothing, the head of 8.

    A hidden size of 1 to 3 is left out: its norm is close to a step, which no tolerance fits.
    """
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    layers = draw(st.integers(1, 2))
    window = st.sampled_from([0, 1, 5, 16, 40])
    return {
        "vocab_size": draw(st.integers(2, 150)),
        "hidden_size": draw(st.integers(4, 100)),
        "intermediate_size": draw(st.integers(1, 130)),
        "num_layers": layers,
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * group,
        "head_dim": 8 * draw(st.integers(1, 16)),
        "tie_word_embeddings": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "o_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "sliding_windows": draw(st.just(()) | st.tuples(*[window] * layers)),
    }


STEPS: tuple[dict[int, tuple[int, int]], ...] = (
    {0: (0, 30), 1: (0, 47)},
    {1: (47, 50), 2: (0, 1), 0: (30, 31)},
    {2: (1, 2), 1: (50, 51), 0: (31, 33)},
)


@settings(max_examples=examples(25), deadline=None)
@given(shape=model_shapes(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_logits_of_any_model_are_those_of_plain_torch(
    team: Team, shape: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
    if dtype != torch.float32:  # RMSNorm of very few numbers makes much of a rounding error
        shape["hidden_size"] = max(shape["hidden_size"], 24)
    checkpoint = Checkpoint(config(**shape), dtype, seed)
    prompts = Prompts(shape["vocab_size"], [33, 51, 2], seed)
    assert_equals_plain(checkpoint, checkpoint.native(team), [prompts.batch(step) for step in STEPS])


@pytest.mark.parametrize("head_dim", range(32, 136, 8))
@pytest.mark.parametrize(
    "heads", [(1, 1), (3, 3), (4, 2), (5, 1)], ids=lambda heads: f"{heads[0]}:{heads[1]}"
)
def test_head_sizes_and_ratios(team: Team, head_dim: int, heads: tuple[int, int]) -> None:
    checkpoint = Checkpoint(
        config(num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, num_layers=1), torch.float32
    )
    batch = Prompts(83, [40, 17]).batch({0: (0, 40), 1: (0, 17)})
    assert_equals_plain(checkpoint, checkpoint.native(team), [batch])


# Batches of every size


class SequenceMix:
    """Sequences of which some are prompts, some chunks and some decodes; `warm` brings what was computed before."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, BLOCK_SIZE + 1, (count,), generator=generator).tolist()
        for i in range(0, count, 9):
            lengths[i] += 2 * BLOCK_SIZE if count < 40 else 0
        self.prompts = Prompts(83, lengths, seed)
        kinds = torch.randint(3, (count,), generator=generator).tolist()
        self.computed = [[0, n - 1, n // 2][kind] for kind, n in zip(kinds, lengths, strict=True)]
        self.lengths = lengths

    def warm(self) -> Batch:
        return self.prompts.batch({i: (0, done) for i, done in enumerate(self.computed) if done})

    def step(self) -> Batch:
        both = zip(self.computed, self.lengths, strict=True)
        return self.prompts.batch(dict(enumerate(both)), all_rows=False)

    @property
    def is_cold(self) -> bool:
        return not any(self.computed)


SMALL: dict[str, object] = {"num_layers": 2, "hidden_size": 40, "intermediate_size": 50}


@pytest.mark.parametrize("count", [*range(1, 18), 23, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70])
def test_mixed_batches_of_any_size_are_those_of_plain_torch(team: Team, count: int) -> None:
    checkpoint = Checkpoint(config(**SMALL), torch.float32)
    mix = SequenceMix(count, seed=count)
    steps = [mix.step()] if mix.is_cold else [mix.warm(), mix.step()]
    assert len(steps[-1].sample_rows) == count
    assert_equals_plain(checkpoint, checkpoint.native(team), steps)


@settings(max_examples=examples(15), deadline=None)
@given(
    count=st.integers(2, 70),
    seed=st.integers(0, 1_000),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_row_is_the_same_in_any_part_of_any_batch(
    team: Team, count: int, seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    checkpoint = Checkpoint(config(**SMALL), dtype)
    mix = SequenceMix(count, seed)
    together = checkpoint.native(team)
    if not mix.is_cold:
        together(mix.warm())
    whole = together(mix.step())
    members = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, min(count, 12)))]
    apart = checkpoint.native(team)
    for i in members:
        if mix.computed[i]:
            apart(mix.prompts.batch({i: (0, mix.computed[i])}))
    ranges = {i: (mix.computed[i], mix.lengths[i]) for i in members}
    some = apart(mix.prompts.batch(ranges, all_rows=False))
    assert torch.equal(some, whole[members])


@settings(max_examples=examples(15), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    windows=st.sampled_from([(), (7, 0), (0, 40)]),
    schedule=st.integers(0, 1_000).map(Random),
)
def test_any_schedule_of_chunks_brings_the_same_bits(
    team: Team, lengths: list[int], dtype: torch.dtype, windows: tuple[int, ...], schedule: Random
) -> None:
    """Each step takes some of the sequences and of each as many tokens as it likes."""
    checkpoint = Checkpoint(config(**SMALL, sliding_windows=windows), dtype)
    prompts = Prompts(83, lengths)
    whole = checkpoint.native(team)(prompts.batch({i: (0, n) for i, n in enumerate(lengths)}))
    decoder = checkpoint.native(team)
    rows: list[list[Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    while left := [i for i, n in enumerate(lengths) if done[i] < n]:
        members = schedule.sample(left, schedule.randint(1, len(left)))
        sizes = [schedule.choice([1, 2, 15, 16, 17, 100]) for _ in members]
        ranges = {i: (done[i], min(lengths[i], done[i] + n)) for i, n in zip(members, sizes, strict=True)}
        logits = decoder(prompts.batch(ranges))
        for i, (start, end) in ranges.items():
            rows[i].append(logits[: end - start])
            logits, done[i] = logits[end - start :], end
    assert torch.equal(torch.cat([row for own in rows for row in own]), whole)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.integers(0, 56), max_size=70), st.sampled_from(DTYPES))
def test_any_selection_of_rows_is_answered_in_its_order(
    team: Team, wanted: list[int], dtype: torch.dtype
) -> None:
    checkpoint = Checkpoint(config(**SMALL), dtype)
    batch = Prompts(83, [40, 17]).batch({0: (0, 40), 1: (0, 17)})
    every = checkpoint.native(team)(batch)
    some = checkpoint.native(team)(replace(batch, sample_rows=ints(wanted)))
    assert torch.equal(some, every[wanted])


# One model written in two ways


def logits_of(team: Team, checkpoint: Checkpoint) -> Tensor:
    batch = Prompts(83, [40, 17]).batch({0: (0, 40), 1: (0, 17)})
    return checkpoint.native(team)(batch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_embedding_is_an_untied_one_with_the_same_numbers(team: Team, dtype: torch.dtype) -> None:
    tied = Checkpoint(config(tie_word_embeddings=True), dtype)
    expected = logits_of(team, tied)
    tied.config = with_spec(tied.config, ties_embeddings=False)
    assert torch.equal(logits_of(team, tied), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [2, 3])
def test_shared_heads_are_heads_that_are_the_same(team: Team, dtype: torch.dtype, group: int) -> None:
    """Key-value heads written out for every query head bring the same logits."""
    shared = Checkpoint(config(num_heads=2 * group, num_kv_heads=2, qkv_bias=True), dtype)
    expected = logits_of(team, shared)
    query, kv = shared.config.q_size, shared.config.kv_size
    heads = torch.arange(kv).view(2, -1).repeat_interleave(group, 0).flatten()
    rows = torch.cat([torch.arange(query), query + heads, query + kv + heads])
    for layer in shared.layers:
        weight, bias = layer["qkv"]
        assert bias is not None
        layer["qkv"] = weight[rows], bias[rows]
    shared.config = with_attention(shared.config, num_kv_heads=2 * group)
    assert torch.equal(logits_of(team, shared), expected)


def test_biases_of_zero_are_none(team: Team) -> None:
    plain = Checkpoint(config(), torch.float32)
    expected = logits_of(team, plain)
    for layer in plain.layers:
        for name, (weight, _) in layer.items():
            layer[name] = weight, torch.zeros(weight.shape[0])
    assert torch.equal(logits_of(team, plain), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [1, 15, 16, 17, 64])
def test_a_logit_does_not_depend_on_the_rest_of_the_vocabulary(
    team: Team, dtype: torch.dtype, kept: int
) -> None:
    whole = Checkpoint(config(tie_word_embeddings=False), dtype)
    batch = Prompts(kept, [40]).batch({0: (0, 40)})
    expected = whole.native(team)(batch)
    whole.config = replace(whole.config, vocab_size=kept)
    whole.embedding, whole.lm_head = whole.embedding[:kept], whole.lm_head[:kept].contiguous()
    assert torch.equal(whole.native(team)(batch), expected[:, :kept])
