"""The native decoder against the decoder in plain torch, and its promise that a row never depends on its company."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import NativeLibrary, Team
from penstock.engine.kernels.kv_cache import KVFormat
from tests.engine.kernels.random_model import (
    DTYPES,
    NUM_BLOCKS,
    Checkpoint,
    NativeModel,
    Prompts,
    Types,
    config,
    ints,
)
from tests.engine.rounding_noise import allowed, largest

pytestmark = pytest.mark.combinations("combinations of what the native kernels take")


def assert_equals_plain(checkpoint: Checkpoint, native: NativeModel, steps: list[Batch]) -> None:
    """A native model computes in float32; what its cache and its linear maps round is let pass."""
    plain, read_as = checkpoint.plain(), native.lm_head.activation_dtype
    kv_dtype = native.kv.data.dtype
    errors = allowed(checkpoint.decoder, steps, kv_dtype, read_as=read_as, attends_in=native.attends_in)
    for batch, error in zip(steps, errors, strict=True):
        found, expected = native(batch), plain(batch)
        assert found.shape == expected.shape
        assert largest(found - expected) <= error


def steps_of(checkpoint: Checkpoint) -> list[Batch]:
    prompts = Prompts(checkpoint.config.vocab_size, [40, 150, 1, 17])
    steps = (
        {0: (0, 40), 1: (0, 63)},
        {1: (63, 149), 2: (0, 1), 3: (0, 16)},
        {3: (16, 17), 1: (149, 150)},
    )
    return [prompts.batch(step) for step in steps]


VARIANTS = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk norm": {"qk_norm": True},
    "windows": {"sliding_windows": (0, 20, 50)},
    "no groups": {"num_heads": 2},
    "groups of 4, head_dim 8": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8},
    "groups of 7, head_dim 24": {"num_heads": 14, "head_dim": 24},
    "head_dim 80": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 80},
    "head_dim 96": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 96},
    "one head for 53": {"num_heads": 53, "num_kv_heads": 1, "head_dim": 8},
    "nothing is a multiple": {"hidden_size": 37, "intermediate_size": 61, "vocab_size": 101},
    "wide": {"hidden_size": 256, "intermediate_size": 600, "num_layers": 1},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_are_those_of_plain_torch(team: Team, changes: dict[str, object]) -> None:
    checkpoint = Checkpoint(config(**changes), torch.float32)
    assert_equals_plain(checkpoint, checkpoint.native(team), steps_of(checkpoint))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights(team: Team, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint(config(), dtype)
    assert_equals_plain(checkpoint, checkpoint.native(team), steps_of(checkpoint))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{}, {"sliding_windows": (0, 20, 50), "qk_norm": True, "num_heads": 14}])
def test_chunks_change_nothing(team: Team, dtype: torch.dtype, changes: dict[str, object]) -> None:
    checkpoint = Checkpoint(config(**changes), dtype)
    prompts = Prompts(checkpoint.config.vocab_size, [300])
    whole = checkpoint.native(team)(prompts.batch({0: (0, 300)}))
    decoder = checkpoint.native(team)
    cuts = [0, 1, 2, 33, 34, 129, 250, 300]
    parts = [decoder(prompts.batch({0: cut})) for cut in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_changes_nothing(team: Team, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint(config(), dtype)
    prompts = Prompts(checkpoint.config.vocab_size, [64, 200, 31, 31, 5, 130, 1, 77])
    ranges = {i: (0, len(tokens)) for i, tokens in enumerate(prompts.tokens)}
    together = checkpoint.native(team)(prompts.batch(ranges, all_rows=False))
    for i, cut in ranges.items():
        alone = checkpoint.native(team)(prompts.batch({i: cut}, all_rows=False))
        assert torch.equal(alone[0], together[i])


def test_the_number_of_threads_changes_nothing(team: Team, library: NativeLibrary) -> None:
    checkpoint = Checkpoint(config(), torch.float16)
    batch = Prompts(checkpoint.config.vocab_size, [64, 150]).batch({0: (0, 64), 1: (0, 150)})
    expected = checkpoint.native(team)(batch)
    for threads in (1, 5):
        other = library.start_team(threads)
        assert torch.equal(checkpoint.native(other)(batch), expected)
        other.close()


def test_where_blocks_lie_changes_nothing(team: Team) -> None:
    checkpoint = Checkpoint(config(), torch.float32)
    a, b = Prompts(83, [120], seed=1), Prompts(83, [120], seed=1)
    b.tables = [list(range(NUM_BLOCKS - 8, NUM_BLOCKS))]
    first, second = (checkpoint.native(team)(p.batch({0: (0, 120)})) for p in (a, b))
    assert torch.equal(first, second)


def test_only_the_sampled_rows_are_answered(team: Team) -> None:
    checkpoint = Checkpoint(config(), torch.float32)
    prompts = Prompts(83, [50, 20])
    batch = prompts.batch({0: (0, 50), 1: (0, 20)})
    every = checkpoint.native(team)(batch)
    wanted = [69, 3, 4, 5, 49, 50, 3]
    some = checkpoint.native(team)(replace(batch, sample_rows=ints(wanted)))
    assert torch.equal(some, every[wanted])


def test_a_step_that_samples_nothing_still_fills_the_cache(team: Team) -> None:
    checkpoint = Checkpoint(config(), torch.float16)
    prompts = Prompts(83, [50])
    whole = checkpoint.native(team)(prompts.batch({0: (0, 50)}))
    decoder = checkpoint.native(team)
    none = decoder(replace(prompts.batch({0: (0, 40)}), sample_rows=ints([])))
    assert none.shape == (0, 83)
    assert torch.equal(decoder(prompts.batch({0: (40, 50)})), whole[40:])


BROKEN = {
    "token outside the vocabulary": ("token_ids", [0, 83, 1, 2]),
    "negative token": ("token_ids", [0, -1, 1, 2]),
    "position past the context": ("positions", [0, 1, 2, 4]),
    "context past the table": ("context_lens", [17]),
    "block that does not exist": ("block_tables", [[NUM_BLOCKS]]),
    "starts that do not divide": ("query_starts", [0, 3]),
    "sample row outside": ("sample_rows", [4]),
}


@pytest.mark.parametrize(("field", "value"), BROKEN.values(), ids=BROKEN.keys())
def test_an_impossible_batch_is_refused(team: Team, field: str, value: list[int]) -> None:
    decoder = Checkpoint(config(), torch.float32).native(team)
    batch = Prompts(83, [4]).batch({0: (0, 4)})
    setattr(batch, field, ints(value))
    with pytest.raises(ValueError, match=r"outside|does not|not a token"):
        decoder(batch)


def test_tensors_of_another_type_are_refused(team: Team) -> None:
    decoder = Checkpoint(config(), torch.float32).native(team)
    batch = Prompts(83, [4]).batch({0: (0, 4)})
    with pytest.raises(ValueError, match="positions"):
        decoder(replace(batch, positions=batch.positions.long()))
    with pytest.raises(ValueError, match="block_tables"):
        decoder(replace(batch, block_tables=ints([[1, 0, 0, 0]])[:, ::2]))


def test_weights_that_do_not_fit_are_refused(team: Team) -> None:
    checkpoint = Checkpoint(config(), torch.float32)
    checkpoint.layers[1]["gate_up"] = torch.zeros(2 * 101, 48), None
    with pytest.raises(ValueError, match="layer 1: down"):
        checkpoint.native(team)
    checkpoint = Checkpoint(config(), torch.float32)
    checkpoint.layers[0]["qkv"] = torch.zeros(6 * 16 + 16, 48), None
    with pytest.raises(ValueError, match="layer 0: qkv"):
        checkpoint.native(team)
    checkpoint = Checkpoint(config(num_layers=2), torch.float32)
    checkpoint.config = config(num_layers=3)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        checkpoint.native(team)


def test_an_embedding_that_does_not_fit_is_refused(team: Team) -> None:
    checkpoint = Checkpoint(config(tie_word_embeddings=False), torch.float32)
    checkpoint.embedding = torch.zeros(83, 47)
    with pytest.raises(ValueError, match="embedding"):
        checkpoint.native(team)
    checkpoint = Checkpoint(config(), torch.float32)
    checkpoint.lm_head = torch.zeros(83, 47)
    with pytest.raises(ValueError, match="embedding"):
        checkpoint.native(team)


MIXED = [
    Types(linear=torch.float32, embedding=torch.float16, kv=torch.bfloat16),
    Types(linear=torch.float16, embedding=torch.float32, kv=torch.float32),
    Types(linear=torch.bfloat16, embedding=None, kv=torch.float16),
    Types(linear=torch.float32, embedding=None, kv=torch.float16),
    Types(linear=torch.float16, embedding=torch.bfloat16, kv=torch.bfloat16),
    Types(linear=torch.float32, embedding=None, kv=torch.int8),
    Types(linear=torch.bfloat16, embedding=torch.bfloat16, kv=torch.int8),
    Types(linear=torch.float32, embedding=None, kv=torch.uint8),
]


@pytest.mark.parametrize("types", MIXED, ids=str)
def test_every_part_has_a_type_of_its_own(team: Team, types: Types) -> None:
    """Weights that bfloat16 holds exactly are the same in every type; what is left is the rounding of the cache."""
    head_dim = 32 if KVFormat.of(types.kv).is_packed else 16
    sizes = config(tie_word_embeddings=types.embedding is None, head_dim=head_dim)
    checkpoint = Checkpoint(sizes, torch.bfloat16)
    assert_equals_plain(checkpoint, checkpoint.native(team, types), steps_of(checkpoint))


def test_an_embedding_may_have_another_precision_than_the_weights(team: Team) -> None:
    """An embedding rounded to float16 brings exactly the logits of one that float16 holds."""
    rounded = Checkpoint(config(tie_word_embeddings=False), torch.float32)
    batch = Prompts(83, [40]).batch({0: (0, 40)})
    kept = rounded.native(team, Types(linear=torch.float32, embedding=torch.float16, kv=torch.float32))(batch)
    full = rounded.native(team)(batch)
    rounded.embedding = rounded.embedding.half().float()
    assert torch.equal(rounded.native(team)(batch), kept)
    assert not torch.equal(full, kept)


def test_hidden_states_are_those_before_the_output_head(team: Team) -> None:
    checkpoint = Checkpoint(config(), torch.float32)
    batch = Prompts(83, [40]).batch({0: (0, 40)}, all_rows=False)
    hidden = checkpoint.native(team).decoder(batch)
    assert (hidden.shape, hidden.dtype) == ((1, 48), torch.float32)
    [error] = allowed(checkpoint.decoder, [batch], torch.float32)
    assert largest(hidden @ checkpoint.lm_head.T - checkpoint.plain()(batch)) <= error
