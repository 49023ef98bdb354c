"""The noise, number by number against Python integers, and as a whole against what independent numbers would do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.hashing import split_mix
from penstock.engine.sampling.noise import gumbel, hashes, noise_keys
from tests.engine.ranges import FUNCTION, gamma
from tests.engine.sampling import numpy_reference
from tests.engine.sampling.cases import states
from tests.engine.sampling.frequencies import assert_frequencies, assert_independent

STATES = st.integers(0, 2**64 - 1)
NUMBERS = st.integers(0, 2**31 - 1)
EDGES = [0, 1, 2, 2**22, 2**23 - 1, 2**23, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
DISTANCES = [1, 2, 3, 4, 8, 64, 256, 1024]


def as_int64(values: NDArray[np.uint64]) -> Tensor:
    return torch.from_numpy(values.view(np.int64))


def keys_of(state: NDArray[np.uint64], number: int = 0) -> Tensor:
    return noise_keys(as_int64(state), torch.full((len(state),), number, dtype=torch.int32))


def bits_of(key: int, token_id: int) -> int:
    """In Python's integers, the bits of one token."""
    return int(numpy_reference.finalized(numpy_reference.finalized(token_id ^ key % 2**32) ^ key // 2**32))


def top(bits: Tensor, num_bits: int) -> NDArray[np.int64]:
    return (bits >> (32 - num_bits)).numpy()


def test_split_mix_is_the_published_generator() -> None:
    """First outputs for seed 1234567, from the reference implementation's test vector."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [split_mix(1234567, number) for number in range(4)] == published


def test_a_seed_counts_modulo_2_to_the_64() -> None:
    assert split_mix(-1, 5) == split_mix(2**64 - 1, 5)
    assert split_mix(2**64 + 7, 0) == split_mix(7, 0)


def test_the_finalizer_is_the_published_one() -> None:
    """MurmurHash3_x86_32 of no bytes is the finalizer of its seed; test vectors of its author's test suite."""
    assert [numpy_reference.finalized(seed) for seed in (0, 1, 0xFFFFFFFF)] == [0, 0x514E28B7, 0x81F16F39]


@given(st.lists(st.tuples(STATES, NUMBERS), min_size=1, max_size=5))
def test_noise_keys_are_outputs_of_the_generator(pairs: list[tuple[int, int]]) -> None:
    state, numbers = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    found = noise_keys(as_int64(state), torch.from_numpy(numbers.astype(np.int32)))
    assert [key % 2**64 for key in found.tolist()] == [split_mix(*pair) for pair in pairs]


@given(st.lists(STATES | st.sampled_from([0, 2**32 - 1, 2**32, 2**63, 2**64 - 1]), min_size=1, max_size=4))
def test_the_bits_of_a_token_are_its_id_finalized_under_each_half_of_the_key(keys: list[int]) -> None:
    found = hashes(as_int64(np.array(keys, np.uint64)), 50)
    expected = [[bits_of(key, token_id) for token_id in range(50)] for key in keys]
    assert found.tolist() == expected
    assert [numpy_reference.noise_bits(key, 50).tolist() for key in keys] == expected


def test_the_bits_of_a_large_vocabulary() -> None:
    key, vocab_size = 0xFEDCBA9876543210, 262_144
    (found,) = hashes(torch.tensor([key - 2**64]), vocab_size)
    for token_id in (0, 65_535, 65_536, 151_643, vocab_size - 1):
        assert found[token_id] == bits_of(key, token_id)


def test_no_two_tokens_of_a_row_have_the_same_bits() -> None:
    for bits in hashes(keys_of(states(5)), 262_144):
        assert bits.unique().numel() == 262_144


def test_the_noise_is_that_of_float64() -> None:
    bits = EDGES + np.random.default_rng(0).integers(0, 2**32, 100_000).tolist()
    bits += [split_mix(3, n) >> shift for n in range(50) for shift in range(32, 64)]
    found = gumbel(torch.tensor(bits))
    assert found.dtype == torch.float32
    # What the inner logarithm is off, relatively, is what the outer one is off beside its own error.
    atol, rtol = gamma(FUNCTION + 1), gamma(FUNCTION)
    np.testing.assert_allclose(found.numpy(), numpy_reference.gumbel(np.array(bits)), atol=atol, rtol=rtol)


def test_the_noise_lies_within_its_bounds_and_falls_as_the_bits_rise() -> None:
    noise = gumbel(torch.tensor(EDGES))
    assert noise.min() >= -3.14
    assert noise.max() <= 22.88
    assert (noise.diff() <= 0).all()


def test_the_noise_of_a_token_does_not_depend_on_where_it_stands() -> None:
    """As vectorised logarithms of some libraries do, in what is left over beside full vectors."""
    bits = torch.randint(0, 2**32, (5, 1003), generator=torch.Generator().manual_seed(0))
    together = gumbel(bits)
    for start, end in ((0, 1), (1, 8), (3, 19), (17, 1003)):
        assert gumbel(bits[:, start:end]).equal(together[:, start:end])
        assert gumbel(bits[3, start:end].clone()).equal(together[3, start:end])


def test_all_bits_are_uniform_in_every_token_of_many_keys() -> None:
    bits = hashes(keys_of(states(20_000)), 24)
    for shift in (24, 16, 8, 0):
        for token_id in (0, 1, 23):
            found = np.bincount((bits[:, token_id] >> shift & 255).numpy(), minlength=256)
            assert_frequencies(found, np.full(256, 1 / 256))


@pytest.mark.parametrize("seed", range(4))
def test_all_bits_are_uniform_over_the_tokens_of_one_key(seed: int) -> None:
    (bits,) = hashes(keys_of(states(4)[seed : seed + 1]), 150_000)
    for shift in (24, 16, 8, 0):
        found = np.bincount((bits >> shift & 255).numpy(), minlength=256)
        # The tokens of a key are no two alike, so they can only be more even than independent numbers.
        assert_frequencies(found, np.full(256, 1 / 256))


@pytest.mark.parametrize("distance", DISTANCES)
def test_tokens_of_a_vocabulary_are_independent_of_each_other(distance: int) -> None:
    bits = hashes(keys_of(states(64)), 1024 + distance)
    assert_independent(top(bits[:, :1024], 4).ravel(), top(bits[:, distance:], 4).ravel(), 16)


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (7, 8), (5, 21)])
def test_two_tokens_are_independent_over_all_keys(pair: tuple[int, int]) -> None:
    bits = hashes(keys_of(states(20_000)), 22)
    assert_independent(top(bits[:, pair[0]], 4), top(bits[:, pair[1]], 4), 16)


@pytest.mark.parametrize("distance", DISTANCES)
def test_output_tokens_are_independent_of_each_other(distance: int) -> None:
    """The tokens are of one sequence, `distance` steps apart."""
    num = 20_000
    state = as_int64(np.full(num + distance, states(1)[0]))
    bits = hashes(noise_keys(state, torch.arange(num + distance, dtype=torch.int32)), 2)[:, 1]
    assert_independent(top(bits[:num], 4), top(bits[distance:], 4), 16)


@pytest.mark.parametrize("distance", DISTANCES)
def test_seeds_are_independent_of_each_other(distance: int) -> None:
    num = 20_000
    bits = hashes(keys_of(states(num + 1024)), 2)[:, 1]
    assert_independent(top(bits[:num], 4), top(bits[distance : num + distance], 4), 16)


@pytest.mark.parametrize("index", [1, 2, 7])
def test_choices_are_independent_of_each_other(index: int) -> None:
    first, other = (hashes(keys_of(states(20_000, i)), 2)[:, 1] for i in (0, index))
    assert_independent(top(first, 4), top(other, 4), 16)


def test_choices_and_output_tokens_have_keys_of_their_own() -> None:
    keys = {numpy_reference.noise_key(7, index, number) for index in range(20) for number in range(20)}
    assert len(keys) == 400


def test_every_bit_of_the_key_turns_every_bit_of_the_noise_half_of_the_time() -> None:
    keys = keys_of(states(4096))
    before = hashes(keys, 4)
    for key_bit in range(64):
        turned = before ^ hashes(keys ^ (1 << key_bit if key_bit < 63 else -(1 << 63)), 4)
        shares = torch.stack([(turned >> bit & 1).float().mean() for bit in range(32)])
        assert (shares - 0.5).abs().max() < 6 * 0.5 / turned.numel() ** 0.5


def test_the_largest_noise_of_a_row_falls_on_every_token_alike() -> None:
    vocab = 100
    winners = [gumbel(hashes(keys, vocab)).argmax(-1) for keys in keys_of(states(40_000)).view(8, -1)]
    assert_frequencies(np.bincount(torch.cat(winners).numpy(), minlength=vocab), np.full(vocab, 1 / vocab))
