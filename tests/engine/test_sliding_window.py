"""Sliding windows at their edges: who sees whom, across chunk borders, block borders, layers and prefix hits.

A token is changed, and the logits that change with it tell exactly who saw it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import NativeUnavailable, Team, load_library
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver
from tests.engine.kernels.random_model import DTYPES, Checkpoint, Prompts, config
from tests.engine.rounding_noise import allowed, largest
from tests.few import examples

LENGTH = 150
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129]
"""Blocks are of 16 tokens, the native kernels fold 128 at a time."""

MakeDecoder = Callable[[Checkpoint], Callable[[Batch], Tensor]]


@pytest.fixture(scope="module")
def team() -> Team:
    try:
        return load_library(lambda _: None).start_team(2)
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["torch", "native"])
def make_decoder(request: pytest.FixtureRequest) -> MakeDecoder:
    if request.param == "torch":
        return Checkpoint.plain
    team: Team = request.getfixturevalue("team")
    return lambda checkpoint: checkpoint.native(team)


def checkpoint(windows: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(
        config(num_layers=len(windows), sliding_windows=windows, num_heads=4, intermediate_size=40), dtype
    )


def prompt() -> Prompts:
    return Prompts(83, [LENGTH])


def all_rows(decoder: Callable[[Batch], Tensor], prompts: Prompts) -> Tensor:
    return decoder(prompts.batch({0: (0, len(prompts.tokens[0]))}))


def who_saw(decoder: Callable[[Batch], Tensor], position: int) -> list[int]:
    """The positions whose logits change when the token at this one does."""
    prompts = prompt()
    before = all_rows(decoder, prompts)
    prompts.tokens[0][position] = (prompts.tokens[0][position] + 1) % 83
    after = all_rows(decoder, prompts)
    return [row for row in range(LENGTH) if not torch.equal(before[row], after[row])]


@pytest.mark.parametrize("window", EDGES)
@pytest.mark.parametrize("position", [0, 14, 15, 16, 100])
def test_a_token_is_seen_by_itself_and_the_next_ones_of_its_window(
    make_decoder: MakeDecoder, window: int, position: int
) -> None:
    seen = who_saw(make_decoder(checkpoint((window,))), position)
    assert seen == list(range(position, min(LENGTH, position + window)))


def test_without_a_window_all_later_tokens_see_it(make_decoder: MakeDecoder) -> None:
    assert who_saw(make_decoder(checkpoint((0,))), 5) == list(range(5, LENGTH))


@pytest.mark.parametrize("windows", [(5, 5), (1, 20), (20, 1), (3, 17, 33), (16, 16, 16)])
def test_each_layer_hands_on_what_it_saw(make_decoder: MakeDecoder, windows: tuple[int, ...]) -> None:
    reach = sum(window - 1 for window in windows) + 1
    assert who_saw(make_decoder(checkpoint(windows)), 40) == list(range(40, 40 + reach))


def test_one_layer_without_a_window_among_others_sees_all(make_decoder: MakeDecoder) -> None:
    assert who_saw(make_decoder(checkpoint((4, 0, 4))), 9) == list(range(9, LENGTH))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [0, 1, 1_000])
def test_a_window_that_nobody_outgrows_is_none(team: Team, dtype: torch.dtype, more: int) -> None:
    plain = all_rows(checkpoint((0, 0), dtype).native(team), prompt())
    wide = all_rows(checkpoint((LENGTH + more, LENGTH + more), dtype).native(team), prompt())
    assert torch.equal(wide, plain)


@pytest.mark.parametrize("window", EDGES)
def test_a_chunk_border_anywhere_near_the_window_changes_no_bit(team: Team, window: int) -> None:
    model = checkpoint((window, window))
    expected = all_rows(model.native(team), prompt())
    for border in {1, window - 1, window, window + 1, 2 * window, LENGTH - window}:
        if 0 < border < LENGTH:
            decoder = model.native(team)
            parts = [decoder(prompt().batch({0: cut})) for cut in pairwise([0, border, LENGTH])]
            assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("window", [1, 16, 17, 33])
def test_a_decode_at_the_edge_is_the_row_of_the_whole(make_decoder: MakeDecoder, window: int) -> None:
    model = checkpoint((window, 0))
    expected = all_rows(make_decoder(model), prompt())
    (error,) = allowed(model.decoder, [prompt().batch({0: (0, LENGTH)})], torch.float32)
    decoder = make_decoder(model)
    first = max(1, window - 2)
    decoder(prompt().batch({0: (0, first)}))
    for position in range(first, window + 3):
        (row,) = decoder(prompt().batch({0: (position, position + 1)}))
        assert largest(row - expected[position]) <= 2 * error  # of each


@settings(max_examples=examples(25), deadline=None)
@given(
    windows=st.lists(st.sampled_from([0, *EDGES]), min_size=1, max_size=3).map(tuple),
    lengths=st.lists(st.integers(1, 145), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_mixed_windows_are_those_of_plain_torch(
    team: Team, windows: tuple[int, ...], lengths: list[int], seed: int
) -> None:
    model = checkpoint(windows)
    prompts = Prompts(83, lengths, seed)
    batch = prompts.batch({i: (0, n) for i, n in enumerate(lengths)})
    (error,) = allowed(model.decoder, [batch], torch.float32)
    assert largest(model.native(team)(batch) - model.plain()(batch)) <= 2 * error  # of each


# With a prefix cache


def request(name: str, prompt: list[int]) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, num_logprobs=3)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


def answers(driver: Driver, *requests: Request) -> list[object]:
    """Tokens and log probabilities, to the last bit, and what was found in the cache."""
    return [[(o.token_ids, o.logprobs) for o in driver.outputs[r.request_id, 0]] for r in requests]


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 40])
def test_a_prefix_hit_brings_the_same_bits_whether_the_window_ends_in_it_or_before(
    tmp_path: Path, window: int
) -> None:
    driver = Driver(make_checkpoint("mistral", tmp_path, sliding_window=window), num_blocks=64)
    shared = [(7 * i) % 300 for i in range(48)]
    lengths = [1, 15, 16, 17, 33, 47, 48]
    requests = [request(f"r{n}", [*shared[:n], 301 + n]) for n in lengths]
    driver.fresh(prefix_cache=False)
    driver.run(*requests)
    expected = answers(driver, *requests)
    driver.fresh()
    driver.run(request("first", [*shared, 300]))
    driver.run(*requests)
    assert answers(driver, *requests) == expected
    cached = [driver.outputs[r.request_id, 0][-1].timings for r in requests]
    assert [t.num_cached_tokens for t in cached if t] == [0, 0, 16, 16, 32, 32, 48]


def test_a_prompt_longer_than_the_pool_is_served_where_all_layers_have_a_window(tmp_path: Path) -> None:
    """Blocks behind the window are given back while the sequence runs, and no answer changes."""
    make_checkpoint("mistral", tmp_path, sliding_window=40)
    roomy, tight = Driver(tmp_path, num_blocks=64, budget=32), Driver(tmp_path, num_blocks=8, budget=32)
    asked = [request(name, [(31 * i + length) % 390 for i in range(length)]) for name, length in LONG]
    for driver in (roomy, tight):
        driver.run(*asked)
        assert driver.facts.windows == (40,)
    assert max(length for _, length in LONG) > 7 * 16
    for name, _ in LONG:
        assert tight.tokens(name) == roomy.tokens(name)


LONG = (("first", 300), ("second", 90), ("third", 133))
