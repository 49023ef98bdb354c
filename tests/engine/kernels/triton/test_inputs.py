"""The inputs of a step from the table of sequences: the same that plain torch makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels import sequence_table
from penstock.engine.kernels.sequence_table import FROM_TABLE, SequenceTable, StepInputs, StepTokens
from penstock.engine.kernels.triton import inputs
from tests.few import examples

BLOCK_SIZE = 4
CPU = torch.device("cpu")
LENGTHS = st.one_of(st.integers(0, 3), st.sampled_from([1, 1, 127, 128, 129, 300]))
"""Tokens of a sequence in the step: as many as a program moves at a time, and more."""


@st.composite
def steps(draw: st.DrawFn) -> tuple[SequenceTable, StepTokens]:
    """A table in use, and the tokens of a step: padding of both kinds among the sequences, and rows of no sequence."""
    num_seats, width = draw(st.integers(1, 6)), draw(st.sampled_from([90, 260]))
    table = SequenceTable(num_seats, width, BLOCK_SIZE, CPU)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    table.prompt_lens[:-1] = random(1, 9, num_seats)
    table.last_tokens[:-1] = random(-1, 1000, num_seats)
    table.dropped[:-1] = random(0, 3, num_seats) * 64
    table.block_tables[:-1] = random(1, 1000, num_seats, width)
    order = draw(st.permutations([*range(num_seats), -1, -1]))[: draw(st.integers(1, num_seats + 2))]
    queries = [draw(LENGTHS) for _ in order]
    token_ids = [random(0, 1000, query) for query in queries]
    for seat, tokens in zip(order, token_ids, strict=True):
        table.lengths[seat] = int(random(0, 4 * 90 - 300 + 1, 1)) if seat >= 0 else 0
        if len(tokens) and draw(st.booleans()):
            tokens[-1] = FROM_TABLE
    longest = max(int(table.lengths[seat]) + query for seat, query in zip(order, queries, strict=True))
    step = StepTokens(
        seats=torch.tensor(order, dtype=torch.int32),
        query_starts=torch.tensor([0, *queries]).cumsum(0).int(),
        token_ids=torch.cat([*token_ids, random(-1, 1000, draw(st.sampled_from([0, 1, 200])))]),
        num_blocks=draw(st.integers(min(-(-longest // BLOCK_SIZE), width), width)),
        max_query_len=max(*queries, 1, draw(st.sampled_from([0, 200]))),
    )
    return table, step


def assert_agree(found: StepInputs, expected: StepInputs) -> None:
    """But for entries of the block tables that no context reaches."""
    assert found.numbers.equal(expected.numbers)
    assert found.batch.max_query_len == expected.batch.max_query_len
    for name, theirs in expected.batch.tensors().items():
        mine = found.batch.tensors()[name]
        assert (mine.dtype, mine.shape) == (torch.int32, theirs.shape)
        assert mine.is_contiguous()
        if name == "block_tables":
            for row, context in enumerate(expected.batch.context_lens.tolist()):
                used = -(-context // BLOCK_SIZE)
                assert mine[row, :used].equal(theirs[row, :used])
        else:
            assert mine.equal(theirs), name


def moved(table: SequenceTable, step: StepTokens, device: torch.device) -> tuple[SequenceTable, StepTokens]:
    copy = SequenceTable(table.num_rows - 1, table.max_blocks, table.block_size, device)
    copy.words.copy_(table.words)
    tensors = (step.seats, step.query_starts, step.token_ids)
    seats, starts, token_ids = (tensor.to(device, copy=True) for tensor in tensors)
    return copy, StepTokens(seats, starts, token_ids, step.num_blocks, step.max_query_len)


@settings(max_examples=examples(60), deadline=None)
@given(drawn=steps())
def test_the_kernel_says_what_plain_torch_says(
    device: torch.device, drawn: tuple[SequenceTable, StepTokens]
) -> None:
    """The inputs of a step, and what is left in the table."""
    table, step = drawn
    copy, same = moved(table, step, device)
    found = inputs.gather(copy, same)
    assert_agree(StepInputs(found.batch.to(CPU), found.numbers.cpu()), sequence_table.gather(table, step))
    assert copy.words.cpu().equal(table.words)


def test_a_replay_goes_on_where_the_step_before_it_ended(device: torch.device) -> None:
    """The tensors are reused as in a graph: a prompt, then tokens that only the device knows."""
    table = SequenceTable(2, 4, BLOCK_SIZE, CPU)
    table.block_tables[:-1] = torch.arange(1, 9).view(2, 4)
    table.prompt_lens[:-1] = 3
    step = StepTokens(
        seats=torch.tensor([1, -1, 0], dtype=torch.int32),
        query_starts=torch.tensor([0, 3, 3, 5], dtype=torch.int32),
        token_ids=torch.tensor([7, 8, 9, 5, 6, 0, 0], dtype=torch.int32),
        num_blocks=4,
        max_query_len=3,
    )
    copy, same = moved(table, step, device)
    for queries, tokens in (([0, 3, 3, 5], [7, 8, 9, 5, 6, 0, 0]), ([0, 1, 1, 2], [-1, -1, 4, 4, 4, 4, 4])):
        for one in (step, same):
            one.query_starts.copy_(torch.tensor(queries))
            one.token_ids.copy_(torch.tensor(tokens))
        table.last_tokens[:2] = copy.last_tokens[:2] = torch.tensor([11, -1])
        expected = sequence_table.gather(table, step)
        found = inputs.gather(copy, same)
        assert_agree(StepInputs(found.batch.to(CPU), found.numbers.cpu()), expected)
    assert found.batch.token_ids.tolist() == [0, 11, 0, 0, 0, 0, 0]
    assert found.batch.positions.tolist() == [3, 2, -1, -1, -1, -1, -1]
    assert copy.lengths.tolist() == [3, 4, 0]


@pytest.mark.parametrize("num_tokens", [1, 8192])
def test_a_step_of_padding_alone(device: torch.device, num_tokens: int) -> None:
    table = SequenceTable(2, 4, BLOCK_SIZE, device)
    step = StepTokens(
        seats=torch.full((2,), -1, dtype=torch.int32, device=device),
        query_starts=torch.zeros(3, dtype=torch.int32, device=device),
        token_ids=torch.full((num_tokens,), 5, dtype=torch.int32, device=device),
        num_blocks=4,
        max_query_len=num_tokens,
    )
    found = inputs.gather(table, step)
    assert found.batch.positions.eq(-1).all()
    assert found.batch.token_ids.eq(0).all()
    assert found.batch.context_lens.tolist() == found.batch.sample_rows.tolist() == [0, 0]
    assert table.words.eq(0).all()
