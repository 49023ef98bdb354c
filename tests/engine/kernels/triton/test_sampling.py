"""The sampling kernels against plain torch, on rows of one tile and of several, the last of them cut off."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.hashing import split_mix
from penstock.engine.kernels.triton import sampling
from penstock.engine.kernels.triton.sampling import TritonChoose
from penstock.engine.kernels.triton.sampling_rows import gumbel_noise
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.sampling import reference
from penstock.engine.sampling.noise import gumbel, hashes, noise_keys
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling.tables import Filters
from tests.engine.kernels.sampling_rows import all_allowed, random_masks
from tests.engine.kernels.triton.allowed_tokens import ULPS, checked_sample
from tests.engine.sampling.parts import in_parts
from tests.few import examples

# The interpreter computes with numpy, which warns of what a GPU does in silence: arithmetic modulo 2^64 and on NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.combinations("combinations of what Triton's kernels take"),
]

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
        "num_logprobs": st.sampled_from([None, 0]),
    }
)
SEQUENCES = st.tuples(PARAMS, st.lists(TOKENS, max_size=4), st.lists(TOKENS, max_size=4))
"""Parameters, prompt, output."""


def make_sequence(params: dict[str, Any], prompt: list[int], output: list[int]) -> Sequence:
    sampling = SamplingParams(**{"num_logprobs": 0, **params})
    sequence = Sequence(Request(request_id="r", prompt_token_ids=tuple(prompt), sampling=sampling))
    sequence.token_ids += output
    return sequence


def make_logits(num_rows: int, seed: int, device: torch.device, vocab: int = VOCAB) -> Tensor:
    """Any floats; in every other row in coarse steps, of which many tie."""
    logits = np.random.default_rng(seed).standard_normal((num_rows, vocab)) * 3
    logits[::2] = np.round(logits[::2])
    return torch.from_numpy(logits.astype(np.float32)).to(device)


class SequenceGroup:
    """Sequences that the kernels choose tokens for, each of which the reference must allow."""

    def __init__(
        self, sequences: list[Sequence], device: torch.device, tile: int, vocab: int = VOCAB
    ) -> None:
        self.device, self.sequences = device, sequences
        self.choose = TritonChoose(len(sequences) + 1, vocab, device, tile=tile)
        self.sampler = Sampler(len(sequences), vocab, (EOS,), device, self.choose)
        for seat, sequence in enumerate(sequences):
            self.sampler.assign(seat, sequence)

    def arguments(self, seats: list[int]) -> tuple[Tensor, Tensor]:
        """The seats, and the output tokens of their sequences so far."""
        numbers = [self.sequences[seat].num_output_tokens if seat >= 0 else 0 for seat in seats]
        return self.int32(seats), self.int32(numbers)

    def int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def step(
        self,
        logits: Tensor,
        seats: list[int],
        filters: Filters | None = None,
        masks: Tensor | None = None,
    ) -> list[int]:
        """The token of every row; the sequences have one more."""
        untouched = logits.clone()
        filters = filters or self.sampler.filters(seats)
        token_ids = checked_sample(self.sampler, logits, *self.arguments(seats), filters, masks)
        assert logits.equal(untouched) or logits.isnan().any()
        for seat, token_id in zip(seats, token_ids, strict=True):
            if seat >= 0 and token_id >= 0:
                self.sequences[seat].token_ids.append(token_id)
        return token_ids


def reference_tokens(group: SequenceGroup, logits: Tensor, seats: list[int]) -> list[int]:
    """Returns the tokens that the reference chooses now; it counts none."""
    counts = group.sampler.tables.counts.clone()
    arguments = group.arguments(seats)
    found = reference.choose(logits, group.sampler.tables, *arguments, group.sampler.filters(seats))
    group.sampler.tables.counts.copy_(counts)
    return found.tolist()


@pytest.mark.parametrize(("tile", "num_examples"), [(16, 4), (64, 8)])
def test_same_tokens_as_plain_torch(device: torch.device, tile: int, num_examples: int) -> None:
    """Two steps, so that the second sees what the first counted; the padding stands in the middle."""

    @given(
        rows=st.lists(SEQUENCES, min_size=2, max_size=2),
        seed=st.integers(0, 2**32 - 1),
        share=st.sampled_from([None, 0.05, 0.6]),
    )
    @settings(max_examples=examples(num_examples), deadline=None)
    def check(rows: list[Any], seed: int, share: float | None) -> None:
        group = SequenceGroup([make_sequence(*row) for row in rows], device, tile)
        for step, seats in enumerate(([0, -1, 1], [1])):
            masks = None if share is None else random_masks(len(seats), VOCAB, share, seed + step)
            given = None if masks is None else masks.to(device)
            found = group.step(make_logits(len(seats), seed + step, device), seats, masks=given)
            assert masks is None or all_allowed(torch.tensor(found), masks)

    check()


def test_the_best_of_the_parts_of_ranks_is_the_best_of_all(device: torch.device) -> None:
    """To the bit; parts begin within words of masks and have padding, and a tile goes beyond the end of its part."""

    @given(
        rows=st.lists(SEQUENCES, min_size=2, max_size=2),
        num_parts=st.integers(2, 6),
        seed=st.integers(0, 2**32 - 1),
        share=st.sampled_from([None, 0.05, 0.6]),
    )
    @settings(max_examples=examples(12), deadline=None)
    def check(rows: list[Any], num_parts: int, seed: int, share: float | None) -> None:
        free = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        group = SequenceGroup([make_sequence(params | free, *texts) for params, *texts in rows], device, 16)
        parts = Sampler(2, VOCAB, (EOS,), device, in_parts(group.choose, num_parts))
        for seat, sequence in enumerate(group.sequences):
            parts.assign(seat, sequence)
        for step, seats in enumerate(([0, -1, 1], [1])):
            logits, arguments = make_logits(len(seats), seed + step, device), group.arguments(seats)
            given = None if share is None else random_masks(len(seats), VOCAB, share, seed + step).to(device)
            filters = Filters(top_k=False, top_p=False)
            found = checked_sample(parts, logits, *arguments, filters, given)
            assert found == group.step(logits, seats, filters, given)

    check()


def test_one_sequence_may_have_many_rows(device: torch.device) -> None:
    """As when drafts are verified, with numbers that follow one another."""
    params: dict[str, Any] = {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "seed": 3, "min_tokens": 2}
    rows = [make_sequence(params, [], []), make_sequence({"temperature": 0.7, "seed": 4}, [], [])]
    sampler = Sampler(2, VOCAB, (EOS,), device, TritonChoose(6, VOCAB, device, tile=64))
    for seat, sequence in enumerate(rows):
        sampler.assign(seat, sequence)
    seats, numbers = [0, 0, 0, 1, 1, -1], [1, 2, 3, 0, 1, 0]
    seats_of_rows, before = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (seats, numbers)
    )
    logits = make_logits(1, 5, device).expand(6, VOCAB).contiguous()
    found = checked_sample(sampler, logits, seats_of_rows, before, sampler.filters(seats))
    assert min(found[:5]) >= 0 > found[5]
    assert len(set(found[:3])) > 1, "the noise is another one for each number"


@settings(max_examples=examples(12), deadline=None)
@given(
    vocab=st.integers(1, 200),
    tile=st.sampled_from([64, 128]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    params=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.2, 1.0, 5.0]),
            "top_p": st.sampled_from([0.1, 0.9, 0.999, 1 - 2**-24, 1.0]),
            "top_k": st.sampled_from([0, 1, 7, 40, 200]),
            "seed": st.integers(0, 99),
        }
    ),
)
def test_filters_on_flat_and_on_steep_rows(
    device: torch.device, vocab: int, tile: int, scale: float, params: dict[str, Any]
) -> None:
    """With more and with fewer tokens in the top k than groups, and cuts in the first bin and in the last."""
    group = SequenceGroup([make_sequence(params, [], []) for _ in range(2)], device, tile, vocab)
    group.step(make_logits(2, params["seed"], device, vocab) * scale, [0, 1])


EACH_FILTER: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 3},
    {"top_k": 3, "min_p": 0.2},
    {"top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.2},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.01},
    {"top_p": 0.0},
    {"top_k": 3, "top_p": 0.0},
    {"temperature": 1e-40},
    {"temperature": 1e-40, "top_k": 3, "top_p": 0.9},
]


@pytest.mark.parametrize("params", EACH_FILTER, ids=str)
def test_every_filter_alone(device: torch.device, params: dict[str, Any]) -> None:
    group = SequenceGroup([make_sequence(params | {"seed": seed}, [], []) for seed in range(2)], device, 32)
    logits = make_logits(2, 7, device)
    expected = reference_tokens(group, logits, [0, 1])
    assert group.step(logits, [0, 1]) == expected
    assert min(expected) >= 0


AT_CUTS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_k": 190},
    {"top_p": 0.05},
    {"top_p": 0.99},
    {"top_k": 40, "top_p": 0.5},
    {"top_k": 60, "top_p": 0.999},
    {"min_p": 0.97},
]


@pytest.mark.parametrize("params", AT_CUTS, ids=str)
@pytest.mark.parametrize("spread", [0.02, 1.0])
def test_a_cut_is_neither_early_nor_late(device: torch.device, params: dict[str, Any], spread: float) -> None:
    """Noise under which the last token that is kept wins, and noise under which the next one would win.

    Of 200 tokens, a bin of the first histogram holds dozens, or one.
    """
    vocab, num_seeds = 200, 20_000
    logits = make_logits(2, 5, torch.device("cpu"), vocab)[1:] * spread
    probe = Sampler(1, vocab, (EOS,), torch.device("cpu"), reference.choose)
    probe.assign(0, make_sequence(params | {"temperature": 4.0}, [], []))
    seat = torch.zeros(1, dtype=torch.int32)
    kept = reference.kept(
        logits.max() - logits, reference._Rows(probe.tables, seat, seat).filters, Filters()
    )[0]
    order = logits[0].argsort(descending=True)
    last, following = order[int(kept.sum()) - 1], order[int(kept.sum())]
    states = torch.from_numpy(np.array([split_mix(s, 0) for s in range(num_seeds)], np.uint64).view(np.int64))
    noise = gumbel(hashes(noise_keys(states, torch.zeros(num_seeds)), vocab))
    scores = logits + 4.0 * noise
    winners = scores.masked_fill(~kept, -torch.inf).max(-1)
    early = int((winners.indices == last).nonzero()[0])
    late = int((scores[:, following] > winners.values).nonzero()[0])
    rows = [params | {"temperature": 4.0, "seed": seed} for seed in (early, late)]
    group = SequenceGroup([make_sequence(row, [], []) for row in rows], device, 64, vocab)
    assert group.step(logits.expand(2, -1).to(device), [0, 1]) == [int(last), int(winners.indices[late])]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_logits_in_half_precision_and_not_contiguous(device: torch.device, dtype: torch.dtype) -> None:
    group = SequenceGroup([make_sequence({"top_p": 0.8, "logit_bias": {4: 1.0}}, [], [])], device, 32)
    wide = make_logits(1, 7, device, vocab=2 * VOCAB).to(dtype)
    group.step(wide[:, :VOCAB], [0])
    group.step(wide[:, ::2], [0])


def test_what_ties_with_the_last_kept_is_kept(device: torch.device) -> None:
    """One token above, four that tie across two tiles, among them 0 and -0, the rest below: top-k of 2 keeps five."""
    logits = torch.full((1, VOCAB), -1.0, device=device)
    logits[0, [5, 15, 16, 40]] = torch.tensor([0.0, -0.0, 0.0, -0.0], device=device)
    logits[0, 20] = 1.0
    params = {"top_k": 2, "temperature": 9.0}
    group = SequenceGroup(
        [make_sequence(params | {"seed": seed}, [], []) for seed in (1, 0, 3, 4, 7)], device, 32
    )
    assert group.step(logits.expand(5, -1), [0, 1, 2, 3, 4]) == [5, 15, 16, 20, 40]


@pytest.mark.parametrize("below", [1e-45, 7e-6])
def test_what_shares_a_level_with_the_last_kept_is_kept(device: torch.device, below: float) -> None:
    """The smallest float there is below the largest logit, and nearly a level (2^-17 nat) below."""
    logits = torch.full((1, VOCAB), -1.0, device=device)
    logits[0, [5, 40]] = torch.tensor([0.0, -below], device=device)
    group = SequenceGroup([make_sequence({"top_k": 1, "seed": seed}, [], []) for seed in (0, 3)], device, 64)
    assert group.step(logits.expand(2, -1), [0, 1]) == [5, 40]


def test_the_lowest_of_equal_scores_is_chosen(device: torch.device) -> None:
    """Greedy, within a tile and across two, and where temperature cannot tell penalised logits apart."""
    logits = torch.zeros((3, VOCAB), device=device)
    logits[0, [20, 30, 40]] = 1.0
    logits[1, [10, 30]] = 1.0
    logits[2] = 3e38
    huge = {"repetition_penalty": 1e-3, "top_k": VOCAB - 1}
    params: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.0}, huge]
    prompts = [[], [], [30, 7, 25]]
    group = SequenceGroup(
        [make_sequence(p, prompt, []) for p, prompt in zip(params, prompts, strict=True)], device, 16
    )
    assert group.step(logits, [0, 1, 2]) == [20, 10, 7]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(device: torch.device, bad: float) -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_p": 0.9, "logit_bias": {40: -9.0}},
        {},
        {"top_k": 5, "top_p": 0.9},
        {},
    ]
    group = SequenceGroup([make_sequence(row, [], []) for row in params], device, 32)
    logits = make_logits(5, 1, device)
    logits[:4, 40] = bad
    tokens = group.step(logits, [0, 1, 2, 3, 4])
    assert tokens[:4] == [-1, -1, -1, -1]
    assert tokens[4] >= 0


@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3, "presence_penalty": 0.5}], ids=str)
def test_a_row_with_every_token_banned_fails(device: torch.device, penalties: dict[str, Any]) -> None:
    """A ban outlives the penalties of what was seen."""
    params = {"logit_bias": dict.fromkeys(range(VOCAB), -math.inf), "top_k": 2, **penalties}
    group = SequenceGroup([make_sequence(params, [3, 4], [5])], device, 16)
    assert group.step(make_logits(1, 0, device), [0]) == [-1]


def test_penalties_that_overflow_ban_nothing(device: torch.device) -> None:
    """A penalised logit stays finite: the only token that is not banned is chosen, however it was penalised."""
    banned = dict.fromkeys(set(range(VOCAB)) - {30}, -math.inf)
    for penalty in ({"repetition_penalty": 1e38}, {"repetition_penalty": 1e-38}):
        params = {"logit_bias": banned, "top_k": 3, "top_p": 0.9} | penalty
        for sign in (1e30, -1e30):
            group = SequenceGroup([make_sequence(params, [30, 31], [])], device, 16)
            assert group.step(torch.full((1, VOCAB), sign, device=device), [0]) == [30]


def test_more_biases_than_one_block(device: torch.device) -> None:
    """Bans of all but one of 300 tokens, in three blocks and over two tiles, until there is one token."""
    bans = frozenset(range(300)) - {271}
    params = {"temperature": 0.0, "min_tokens": 1, "stop_token_ids": bans, "repetition_penalty": 2.0}
    group = SequenceGroup([make_sequence(params, [271], [])], device, 256, vocab=300)
    logits = make_logits(1, 0, device, vocab=300)
    assert group.step(logits, [0]) == [271]
    assert group.step(logits, [0]) == [int(logits.argmax())]


def test_a_seat_is_used_again(device: torch.device) -> None:
    first = make_sequence({"frequency_penalty": 5.0, "temperature": 0.0}, [], [])
    group = SequenceGroup([first], device, 64)
    logits = make_logits(1, 3, device)
    assert group.step(logits, [0]) != group.step(logits, [0])
    group.sequences[0] = make_sequence({"presence_penalty": 5.0, "temperature": 0.0}, [], [])
    group.sampler.release(0)
    group.sampler.assign(0, group.sequences[0])
    assert group.step(logits, [0]) == [int(logits.argmax())]


def test_a_row_does_not_depend_on_the_rows_around_it(device: torch.device) -> None:
    params: list[dict[str, Any]] = [{"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.0}, {"min_p": 0.1}, {}]
    logits = make_logits(5, 11, device)
    together = SequenceGroup([make_sequence(row, [], []) for row in params], device, 32).step(
        logits, list(range(5))
    )
    for row, alone in enumerate(params):
        assert SequenceGroup([make_sequence(alone, [], [])], device, 32).step(logits[row : row + 1], [0]) == [
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
    group = SequenceGroup([make_sequence(row, [], [7, 7]) for row in params], device, 16)
    values = group.choose._values.fill_(math.nan)
    assert all(token_id >= 0 for token_id in group.step(make_logits(4, 2, device), [0, 1, 2, 3]))
    assert values[:4, :VOCAB].isnan().all(1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.3}, {"top_k": 3, "top_p": 0.5}], ids=str)
def test_tiles_with_nothing_that_is_kept(device: torch.device, params: dict[str, Any]) -> None:
    """All that may be chosen lies in the middle one of five tiles, whose neighbours are far below or not allowed."""
    logits = make_logits(1, 4, device, vocab=80) - 20
    logits[0, 32:48] += 20
    banned = {"logit_bias": dict.fromkeys(range(64, 80), -math.inf)}
    group = SequenceGroup([make_sequence(params | banned | {"seed": 5}, [], [])], device, 16, vocab=80)
    assert 32 <= group.step(logits, [0])[0] < 48


def test_filters_that_no_row_asks_for_change_no_token(device: torch.device) -> None:
    logits = make_logits(3, 5, device)
    least, most = (
        SequenceGroup([make_sequence({"seed": seed}, [], []) for seed in range(3)], device, 64).step(
            logits, [0, 1, 2], filters
        )
        for filters in (Filters(top_k=False, top_p=False), Filters())
    )
    assert least == most


@pytest.mark.parametrize(
    "params", [{}, {"min_p": 0.05}, {"top_k": 3}, {"top_k": 9, "top_p": 0.7}, {"top_p": 0.5}], ids=str
)
def test_nothing_is_left_over_from_the_step_before(device: torch.device, params: dict[str, Any]) -> None:
    """As when a graph is replayed: whatever the workspace holds, a step gives the same tokens."""
    params = params | {"logit_bias": {2: 1.0}}
    logits = make_logits(1, 13, device)
    tokens = []
    for garbage in (0, 1, -77):
        group = SequenceGroup([make_sequence(params, [], [])], device, 32)
        for tensor in vars(group.choose).values():
            if isinstance(tensor, Tensor):
                tensor.fill_(garbage)
        tokens.append([group.step(rows, [0]) for rows in (logits, -logits)])
    assert tokens[0] == tokens[1] == tokens[2]


class Reading:
    """Launches of the kernels; a row that a launch is not supposed to read is NaN to it.

    Args:
        passes: by row, the launches that may read it, in the order in which launches that read logits come.
    """

    def __init__(self, patch: pytest.MonkeyPatch, passes: list[set[int]]) -> None:
        self.num_launches, self._passes = 0, passes
        for name in ("prepare_kernel", "bound_kernel", "histogram_kernel", "choose_kernel", "finish_kernel"):
            patch.setattr(sampling, name, self._wrapped(getattr(sampling, name)))

    def _wrapped(self, kernel: Any) -> Any:
        names = kernel.arg_names

        class Launches:
            def __getitem__(_, grid: tuple[int, ...]) -> Any:
                def launch(*arguments: Any, **named: Any) -> None:
                    if names[0] == "logits":
                        arguments = (self._poisoned(arguments[0]), *arguments[1:])
                        self.num_launches += 1
                    kernel[grid](*arguments, **named)

                return launch

        return Launches()

    def _poisoned(self, logits: Tensor) -> Tensor:
        poisoned = logits.clone()
        for row, passes in enumerate(self._passes):
            if self.num_launches not in passes:
                poisoned[row] = math.nan
        return poisoned


@pytest.mark.parametrize(
    ("filters", "rows", "passes"),
    [
        (Filters(False, False), [{}, {"temperature": 0.0}], [{0}, {0}]),
        (Filters(True, False), [{}, {"top_k": 5}], [{0}, {0, 1, 2, 3}]),
        (Filters(False, True), [{}, {"min_p": 0.1}, {"top_p": 0.8}], [{0}, {0, 3}, {0, 1, 2, 3}]),
        (
            Filters(True, True),
            [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}],
            [{0}, {0, 1, 2, 5}, {0, 3, 4, 5}, {0, 5}, {0, 1, 2, 3, 4, 5}],
        ),
    ],
    ids=str,
)
def test_a_row_is_read_as_often_as_its_filters_need(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    filters: Filters,
    rows: list[dict[str, Any]],
    passes: list[set[int]],
) -> None:
    """Once without filters, six times with top-k and top-p."""
    group = SequenceGroup([make_sequence(row, [], []) for row in rows], device, 16)
    seats = list(range(len(rows)))
    assert group.sampler.filters(seats) == Filters(filters.top_k, filters.top_p)
    logits = make_logits(len(rows), 21, device)
    expected = reference_tokens(group, logits, seats)
    reading = Reading(monkeypatch, passes)
    assert group.sampler.sample(logits, *group.arguments(seats), filters).tolist() == expected
    assert reading.num_launches == max(map(len, passes)) <= 6


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(words: tl.tensor, numbers: tl.tensor, noise: tl.tensor, SIZE: tl.constexpr) -> None:
    ids = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(noise + ids, gumbel_noise(words, tl.load(numbers), ids))


def test_noise_is_exact_where_it_is_large(device: torch.device) -> None:
    """In a million tokens the smallest random numbers are so small that 1 - u loses most of their bits."""
    size = 1 << 20
    state = torch.tensor([-7], dtype=torch.int64, device=device)
    number = torch.tensor([5], dtype=torch.int32, device=device)
    found = torch.empty(size, dtype=torch.float32, device=device)
    noise_kernel[(16,)](state.view(torch.int32), number, found, SIZE=size // 16, enable_fp_fusion=False)
    expected = gumbel(hashes(noise_keys(state, number), size))[0]
    assert expected.max() > 13
    error = (found - expected).abs() / expected.abs().clamp(min=1)
    assert error.max() <= ULPS * torch.finfo(torch.float32).eps


def test_more_rows_than_there_is_room_for_are_refused(device: torch.device) -> None:
    choose = TritonChoose(1, VOCAB, device)
    sampler = Sampler(2, VOCAB, (), device, choose)
    seats = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="2 rows of logits; there is room for 1"):
        sampler.sample(make_logits(2, 0, device), seats, seats, Filters())


def test_no_rows(device: torch.device) -> None:
    sampler = Sampler(1, VOCAB, (), device, TritonChoose(1, VOCAB, device))
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    assert sampler.sample(make_logits(0, 0, device), nothing, nothing, Filters()).shape == (0,)
