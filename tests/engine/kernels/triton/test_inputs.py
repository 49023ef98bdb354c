"""The inputs of a step out of the slot table: what plain torch makes of it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution import slot_table
from engine.execution.slot_table import NextStep, SlotTable
from engine.kernels.triton import inputs

BLOCK_SIZE = 4


@st.composite
def tables(draw: st.DrawFn) -> tuple[SlotTable, torch.Tensor, int]:
    """A table in use, the slots of a step with some padding, and its tokens by sequence."""
    num_slots, query_len = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    width, max_query_len = draw(st.sampled_from([3, 200])), query_len + draw(st.integers(0, 2))
    table = SlotTable(num_slots, width, max_query_len, torch.device("cpu"))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    table.num_next[:-1] = random(1, query_len + 1, num_slots)
    table.lengths[:-1] = random(0, width * BLOCK_SIZE - query_len, num_slots)
    table.prompt_lens[:-1] = random(1, 9, num_slots)
    table.next_tokens[:-1] = random(-1, 1000, num_slots, max_query_len)
    table.block_tables[:-1] = random(1, 1000, num_slots, width)
    order = torch.randperm(num_slots, generator=generator)[: draw(st.integers(0, num_slots))]
    padding = torch.full((draw(st.integers(0 if len(order) else 1, 3)),), -1)
    return table, torch.cat((order, padding)).int(), query_len


def agree(found: NextStep, expected: NextStep) -> None:
    assert found.numbers.equal(expected.numbers)
    assert found.batch.max_query_len == expected.batch.max_query_len
    for name, theirs in expected.batch.tensors().items():
        mine = found.batch.tensors()[name]
        if name == "block_tables":
            for row, context in enumerate(expected.batch.context_lens.tolist()):
                used = -(-context // BLOCK_SIZE)
                assert mine[row, :used].equal(theirs[row, :used])
        else:
            assert mine.dtype == torch.int32
            assert mine.equal(theirs)


@settings(max_examples=60, deadline=None)
@given(tables())
def test_the_kernel_says_what_plain_torch_says(drawn: tuple[SlotTable, torch.Tensor, int]) -> None:
    """The next step, the one after it, and what is left in the table."""
    table, slots, query_len = drawn
    device = "cuda" if torch.cuda.is_available() else "cpu"
    copy = SlotTable(table.num_rows - 1, table.max_blocks, table.max_query_len, torch.device(device))
    copy.words.copy_(table.words)
    for _ in range(2):
        found = inputs.gather(copy, slots.to(device), query_len, BLOCK_SIZE)
        expected = slot_table.gather(table, slots, query_len)
        agree(NextStep(found.batch.to(slots.device), found.numbers.cpu()), expected)
        assert copy.words.cpu().equal(table.words)
        tokens = torch.arange(slots.numel(), dtype=torch.int32) - 1
        tokens[slots < 0] = -1
        copy.keep_tokens(slots.to(device), tokens.to(device))
        table.keep_tokens(slots, tokens)
