"""The native gather of a step's inputs against the specification in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels.cpu.native import NativeGather, NativeLibrary
from penstock.engine.kernels.sequence_table import FROM_TABLE, SequenceTable, StepInputs, StepTokens, gather
from tests.engine.kernels.levels import FEW_LEVELS, params
from tests.few import examples

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_BLOCKS = 16, 7


@pytest.fixture(scope="module", params=params(FEW_LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled_table(num_seats: int, seed: int) -> SequenceTable:
    """A table with something in every row; the row of the padding has length 0."""
    table = SequenceTable(num_seats, MAX_BLOCKS, BLOCK_SIZE, CPU)
    generator = torch.Generator().manual_seed(seed)
    table.words.copy_(torch.randint(0, 50, table.words.shape, generator=generator))
    table.last_tokens.sub_(1)
    for field in (table.lengths, table.prompt_lens, table.last_tokens, table.block_tables):
        field[-1] = 0
    return table


@dataclass(frozen=True)
class Case:
    num_seats: int
    seed: int
    steps: list[StepTokens]


@st.composite
def step_tokens(draw: st.DrawFn, num_seats: int) -> StepTokens:
    real = draw(st.lists(st.integers(0, num_seats - 1), unique=True, max_size=num_seats))
    num_padding = draw(st.integers(0 if real else 1, 3))
    seats: list[int] = draw(st.permutations(real + [-1] * num_padding))
    counts = [draw(st.integers(0, 5)) for _ in seats]
    token_ids: list[int] = []
    for count in counts:
        ids = [draw(st.integers(0, 99)) for _ in range(count)]
        is_last_known: bool = draw(st.booleans())
        if ids and not is_last_known:
            ids[-1] = FROM_TABLE
        token_ids += ids
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    token_ids += [0] * draw(st.integers(0, 3))  # rows of no sequence
    return StepTokens(
        ints(seats), starts, ints(token_ids), draw(st.integers(0, MAX_BLOCKS)), max(counts, default=0)
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_seats = draw(st.integers(1, 6))
    steps = draw(st.lists(step_tokens(num_seats), min_size=1, max_size=3))
    return Case(num_seats, draw(st.integers(0, 1000)), steps)


def assert_same(found: StepInputs, expected: StepInputs) -> None:
    named = {**found.batch.tensors(), "numbers": found.numbers}
    for name, tensor in {**expected.batch.tensors(), "numbers": expected.numbers}.items():
        assert torch.equal(named[name], tensor), name
        assert named[name].dtype == torch.int32
        assert named[name].is_contiguous()
    assert found.batch.max_query_len == expected.batch.max_query_len


@settings(max_examples=examples(200), deadline=None)
@given(cases())
def test_inputs_are_those_of_the_specification(library: NativeLibrary, case: Case) -> None:
    native = NativeGather(library)
    ours, theirs = filled_table(case.num_seats, case.seed), filled_table(case.num_seats, case.seed)
    made = []
    for step in case.steps:
        made.append((native(ours, step), gather(theirs, step)))
        assert torch.equal(ours.words, theirs.words)
    for found, expected in made:  # those of earlier steps are still valid
        assert_same(found, expected)


def test_one_gather_serves_several_tables(library: NativeLibrary) -> None:
    native = NativeGather(library)
    step = StepTokens(ints([1]), ints([0, 2]), ints([5, 6]), 3, 2)
    for seed in range(3):
        assert_same(native(filled_table(2, seed), step), gather(filled_table(2, seed), step))


def test_what_does_not_fit_is_refused_and_changes_nothing(library: NativeLibrary) -> None:
    native, table = NativeGather(library), filled_table(2, 0)
    before = table.words.clone()
    good = StepTokens(ints([0, 1]), ints([0, 1, 2]), ints([5, 6]), 3, 1)
    for seats in ([0, 2], [0, -2]):
        with pytest.raises(ValueError, match="seat"):
            native(table, replace(good, seats=ints(seats)))
    for starts in ([0, 1, 3], [0, 2, 1], [-1, 1, 2]):
        with pytest.raises(ValueError, match="query_starts"):
            native(table, replace(good, query_starts=ints(starts)))
    with pytest.raises(ValueError, match="query_starts"):
        native(table, replace(good, query_starts=ints([0, 1])))
    with pytest.raises(ValueError, match="token_ids"):
        native(table, replace(good, token_ids=ints([5, 6]).long()))
    with pytest.raises(ValueError, match="blocks"):
        native(table, replace(good, num_blocks=MAX_BLOCKS + 1))
    assert torch.equal(table.words, before)
