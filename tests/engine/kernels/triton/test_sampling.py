"""The sampling kernels against plain torch, on rows of one tile and of several, the last of them cut off."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.triton.sampling import TritonChoose
from engine.planning.request import Request, SamplingParams, Sequence
from engine.sampling.device import DeviceSampler, Needs, SampledOnDevice

# The interpreter computes with numpy, which warns of what a GPU does in silence: arithmetic modulo 2^64 and on NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB = 41
EOS = 3
TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_p": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, VOCAB - 1, VOCAB]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.3]),
        "repetition_penalty": st.sampled_from([0.6, 1.0, 1.3]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -math.inf, 2.0]), max_size=4),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.frozensets(TOKENS, max_size=2),
    }
)
SEQUENCES = st.tuples(PARAMS, st.lists(TOKENS, max_size=4), st.lists(TOKENS, max_size=4))
"""Parameters, prompt, output."""


def make_sequence(params: dict[str, Any], prompt: list[int], output: list[int]) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=tuple(prompt), sampling=SamplingParams(**params))
    sequence = Sequence(request)
    sequence.token_ids += output
    return sequence


def make_logits(num_rows: int, seed: int, device: torch.device, vocab: int = VOCAB) -> torch.Tensor:
    """Any floats; in every other row in coarse steps, of which many tie."""
    logits = np.random.default_rng(seed).standard_normal((num_rows, vocab)) * 3
    logits[::2] = np.round(logits[::2])
    return torch.from_numpy(logits.astype(np.float32)).to(device)


class Pair:
    """Two samplers that are told the same: the kernels' and the one in plain torch."""

    def __init__(
        self, sequences: list[Sequence], device: torch.device, tile: int, vocab: int = VOCAB
    ) -> None:
        self.device, self.sequences = device, sequences
        choose = TritonChoose(len(sequences) + 1, vocab, device, tile=tile)
        self.kernels = DeviceSampler(len(sequences), vocab, (EOS,), device, choose=choose)
        self.reference = DeviceSampler(len(sequences), vocab, (EOS,), device)
        for slot, sequence in enumerate(sequences):
            self.kernels.assign(slot, sequence)
            self.reference.assign(slot, sequence)

    def step(self, logits: torch.Tensor, slots: list[int]) -> list[int]:
        """The token of every row, the same of both; the sequences have one more."""
        given_slots = torch.tensor(slots, dtype=torch.int32, device=self.device)
        lengths = [self.sequences[slot].num_output_tokens if slot >= 0 else 0 for slot in slots]
        numbers = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        needs = self.reference.needs(slots)
        found = self.kernels.sample(logits, given_slots, numbers, needs)
        expected = self.reference.sample(logits, given_slots, numbers, needs)
        assert_same(found, expected)
        assert torch.equal(self.kernels.tables.counts, self.reference.tables.counts)
        for slot, token_id in zip(slots, found.token_ids.tolist(), strict=True):
            if slot >= 0 and token_id >= 0:
                self.sequences[slot].token_ids.append(token_id)
        return found.token_ids.tolist()


def assert_same(found: SampledOnDevice, expected: SampledOnDevice) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("tile", "num_examples"), [(16, 1), (64, 3)])
def test_same_tokens_as_plain_torch(device: torch.device, tile: int, num_examples: int) -> None:
    """Two steps, so that the second sees what the first counted; the padding stands in the middle."""

    @given(rows=st.lists(SEQUENCES, min_size=2, max_size=2), seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=num_examples, deadline=None)
    def check(rows: list[Any], seed: int) -> None:
        pair = Pair([make_sequence(*row) for row in rows], device, tile)
        for step, slots in enumerate(([0, -1, 1], [1])):
            pair.step(make_logits(len(slots), seed + step, device), slots)

    check()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"min_p": 0.05},
        {"top_k": 3},
        {"top_p": 0.7},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.01},
        {"top_p": 0.0},
        {"temperature": 1e-40},
    ],
    ids=str,
)
def test_every_filter_alone(device: torch.device, params: dict[str, Any]) -> None:
    pair = Pair([make_sequence(params | {"seed": seed}, [], []) for seed in range(2)], device, 32)
    tokens = pair.step(make_logits(2, 7, device), [0, 1])
    assert all(token_id >= 0 for token_id in tokens)


def test_what_ties_with_the_last_kept_is_kept(device: torch.device) -> None:
    """One token above, four that tie across two tiles, among them 0 and -0, the rest below: top-k of 2 keeps five."""
    logits = torch.full((1, VOCAB), -1.0, device=device)
    logits[0, [5, 15, 16, 40]] = torch.tensor([0.0, -0.0, 0.0, -0.0], device=device)
    logits[0, 20] = 1.0
    params = {"top_k": 2, "temperature": 9.0}
    pair = Pair([make_sequence(params | {"seed": seed}, [], []) for seed in (10, 5)], device, 32)
    assert pair.step(logits.expand(2, -1), [0, 1]) == [5, 40]


def test_what_becomes_minus_zero_ties_with_zero(device: torch.device) -> None:
    """The smallest float there is below the largest logit, divided by the temperature, is -0."""
    logits = torch.full((1, VOCAB), -1.0, device=device)
    logits[0, [5, 40]] = torch.tensor([0.0, -1e-45], device=device)
    params = {"top_k": 1, "temperature": 9.0}
    pair = Pair([make_sequence(params | {"seed": seed}, [], []) for seed in (1, 0)], device, 64)
    assert pair.step(logits.expand(2, -1), [0, 1]) == [5, 40]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(device: torch.device, bad: float) -> None:
    params: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.9, "logit_bias": {40: -9.0}}, {}, {}]
    pair = Pair([make_sequence(row, [], []) for row in params], device, 32)
    logits = make_logits(4, 1, device)
    logits[:3, 40] = bad
    tokens = pair.step(logits, [0, 1, 2, 3])
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] >= 0


def test_a_row_with_every_token_banned_fails(device: torch.device) -> None:
    params = {"logit_bias": dict.fromkeys(range(VOCAB), -math.inf), "top_k": 2}
    assert Pair([make_sequence(params, [], [])], device, 16).step(make_logits(1, 0, device), [0]) == [-1]


def test_more_biases_than_one_block(device: torch.device) -> None:
    """Bans of all but one of 300 tokens, in three blocks and over two tiles, until there is one token."""
    bans = frozenset(range(300)) - {271}
    params = {"temperature": 0.0, "min_tokens": 1, "stop_token_ids": bans, "repetition_penalty": 2.0}
    pair = Pair([make_sequence(params, [271], [])], device, 256, vocab=300)
    logits = make_logits(1, 0, device, vocab=300)
    assert pair.step(logits, [0]) == [271]
    assert pair.step(logits, [0]) == [int(logits.argmax())]


def test_a_slot_is_used_again(device: torch.device) -> None:
    first = make_sequence({"frequency_penalty": 5.0, "temperature": 0.0}, [], [])
    pair = Pair([first], device, 64)
    logits = make_logits(1, 3, device)
    assert pair.step(logits, [0]) != pair.step(logits, [0])
    pair.sequences[0] = make_sequence({"presence_penalty": 5.0, "temperature": 0.0}, [], [])
    for sampler in (pair.kernels, pair.reference):
        sampler.release(0)
        sampler.assign(0, pair.sequences[0])
    assert pair.step(logits, [0]) == [int(logits.argmax())]


def test_a_row_does_not_depend_on_the_rows_around_it(device: torch.device) -> None:
    params: list[dict[str, Any]] = [{"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.0}]
    logits = make_logits(3, 11, device)
    together = Pair([make_sequence(row, [], []) for row in params], device, 32).step(logits, [0, 1, 2])
    for row, alone in enumerate(params):
        assert Pair([make_sequence(alone, [], [])], device, 32).step(logits[row : row + 1], [0]) == [
            together[row]
        ]


def test_rows_without_biases_and_penalties_are_read_where_they_are(device: torch.device) -> None:
    """Among rows with either, of which alone there is a copy."""
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"logit_bias": {7: 3.0}},
        {"top_k": 4, "top_p": 0.8},
        {"frequency_penalty": 0.5},
    ]
    choose = TritonChoose(4, VOCAB, device, tile=16)
    choose._values.fill_(math.nan)
    sequences = [make_sequence(row, [], [7, 7]) for row in params]
    pair = Pair(sequences, device, 16)
    pair.kernels._choose = choose
    assert all(token_id >= 0 for token_id in pair.step(make_logits(4, 2, device), [0, 1, 2, 3]))
    assert choose._values[:, :VOCAB].isnan().all(1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.3}, {"top_k": 3, "top_p": 0.5}], ids=str)
def test_tiles_with_nothing_that_is_kept(device: torch.device, params: dict[str, Any]) -> None:
    """All that may be chosen lies in the middle one of five tiles, whose neighbours are far below or not allowed."""
    logits = make_logits(1, 4, device, vocab=80) - 20
    logits[0, 32:48] += 20
    banned = {"logit_bias": dict.fromkeys(range(64, 80), -math.inf)}
    pair = Pair([make_sequence(params | banned | {"seed": 5}, [], [])], device, 16, vocab=80)
    assert 32 <= pair.step(logits, [0])[0] < 48


def test_searches_that_no_row_asks_for_change_no_token(device: torch.device) -> None:
    pair = Pair([make_sequence({"seed": seed}, [], []) for seed in range(3)], device, 64)
    slots, numbers = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 1, 2], [0] * 3)
    )
    logits = make_logits(3, 5, device)
    least = pair.kernels.sample(logits, slots, numbers, Needs(False, False))
    most = pair.kernels.sample(logits, slots, numbers, Needs(True, True))
    assert_same(least, most)


def test_more_rows_than_there_is_room_for_are_refused(device: torch.device) -> None:
    choose = TritonChoose(1, VOCAB, device)
    sampler = DeviceSampler(2, VOCAB, (), device, choose=choose)
    slots = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="2 rows of logits; there is room for 1"):
        sampler.sample(make_logits(2, 0, device), slots, slots)


def test_no_rows(device: torch.device) -> None:
    sampler = DeviceSampler(1, VOCAB, (), device, choose=TritonChoose(1, VOCAB, device))
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    assert sampler.sample(make_logits(0, 0, device), nothing, nothing).token_ids.shape == (0,)
