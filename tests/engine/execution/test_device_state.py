"""The table of the running sequences: what steps find in it is what the host would have sent."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.device_state import I32, DeviceState, Placed
from engine.execution.runner import make_batch
from engine.execution.slot_table import SlotTable, gather
from engine.kernels.batch import Batch
from engine.planning.request import FinishReason, Sequence
from engine.planning.step import Chunk, Plan
from tests.engine.late import LateRunner, LateStep
from tests.engine.paper import make_request
from tests.engine.test_overlap import StoppingSink, answers
from tests.engine.workloads import BLOCK_SIZE, Run, Workload, workloads

CPU = torch.device("cpu")


def sequence_of(name: str, length: int, *, blocks: list[int] | None = None) -> Sequence:
    sequence = Sequence(make_request(name, list(range(100, 100 + length)), max_tokens=50))
    sequence.block_table = [1] if blocks is None else blocks
    return sequence


def plan_of(*chunks: Chunk) -> Plan:
    return Plan(list(chunks), num_tokens=sum(chunk.num_tokens for chunk in chunks))


def whole(sequence: Sequence) -> Chunk:
    return Chunk(sequence, 0, len(sequence.token_ids), samples=True)


def state_of(
    num_slots: int, max_blocks: int, *, query_lens: tuple[int, ...] = (1,), **told: Callable[..., None]
) -> DeviceState:
    table = SlotTable(num_slots, max_blocks, max(query_lens), CPU)
    return DeviceState(table, 64, query_lens=query_lens, **told)


def batch_of(state: DeviceState, placed: Placed) -> Batch:
    """As the device sees it."""
    if placed.query_len is None:
        assert placed.batch is not None
        state.table.keep_lengths(placed.slot_tensor, placed.batch.context_lens)
        return placed.batch
    return gather(state.table, placed.slot_tensor, placed.query_len).batch


def launch(state: DeviceState, plan: Plan, sampled: list[int]) -> None:
    """What a runner does with a plan, but for the model."""
    placed = state.place(plan)
    batch_of(state, placed)
    slots = placed.slot_tensor if placed.sampled_slots is None else placed.sampled_slots
    state.table.keep_tokens(slots, torch.tensor(sampled, dtype=torch.int32))
    state.note_launched(plan, placed.seats)


class TableRunner(LateRunner):
    """A paper runner that looks at every batch as it comes out of the table, padded or not."""

    def __init__(
        self,
        workload: Workload,
        hurries: Callable[[], bool],
        pad: Callable[[int, int], int],
        query_lens: tuple[int, ...],
    ) -> None:
        super().__init__(workload.num_blocks, BLOCK_SIZE, hurries)
        self.state = state_of(workload.max_num_seqs, 12, query_lens=query_lens)
        self.pad = pad

    def launch(self, plan: Plan) -> LateStep:
        placed = self.state.place(plan, self.pad)
        step = super().launch(plan)
        self._run_all()
        assert step.result is not None
        batch, numbers = self._inputs(placed)
        for i, (order, chunk) in enumerate(zip(step.orders, plan.chunks, strict=True)):
            rows = slice(int(batch.query_starts[i]), int(batch.query_starts[i + 1]))
            seen = [
                self._blocks[order.table[p // BLOCK_SIZE]][p % BLOCK_SIZE]
                for p in range(order.start, order.end)
            ]
            positions, tokens = batch.positions[rows].tolist(), batch.token_ids[rows].tolist()
            padding = len(tokens) - len(seen)
            assert list(zip(positions, tokens, strict=True)) == [(-1, 0)] * padding + seen
            assert batch.context_lens[i] == order.end
            assert tuple(batch.block_tables[i, : len(order.table)].tolist()) == order.table
            assert numbers[i] == order.end - chunk.sequence.num_prompt_tokens
            assert batch.max_query_len is not None
            assert len(seen) <= batch.max_query_len
        for i in range(len(plan.chunks), placed.slot_tensor.numel()):
            rows = slice(int(batch.query_starts[i]), int(batch.query_starts[i + 1]))
            assert batch.context_lens[i] == 0
            assert set(batch.positions[rows].tolist()) == {-1}
            assert not batch.block_tables[i].any()
        wanted = [int(batch.query_starts[i + 1]) - 1 for i, c in enumerate(plan.chunks) if c.samples]
        assert batch.sample_rows.tolist()[: len(wanted)] == wanted
        drawn = [s.token_ids[0] if s.token_ids else -1 for s in step.result.sampled]
        slots = placed.slot_tensor if placed.sampled_slots is None else placed.sampled_slots
        drawn += [-1] * (slots.numel() - len(drawn))
        self.state.table.keep_tokens(slots, torch.tensor(drawn, dtype=torch.int32))
        self.state.note_launched(plan, placed.seats)
        return step

    def _inputs(self, placed: Placed) -> tuple[Batch, torch.Tensor]:
        if placed.query_len is None:
            batch = batch_of(self.state, placed)
            return batch, self.state.table.numbers(placed.slot_tensor, batch.context_lens)
        step = gather(self.state.table, placed.slot_tensor, placed.query_len)
        return step.batch, step.numbers

    def _run_all(self) -> None:
        for step in self.in_flight:
            self._run(step)


@settings(max_examples=60, deadline=None)
@given(
    workloads(),
    st.integers(0, 99),
    st.integers(1, 4),
    st.sampled_from([(1,), (1, 3), (1, 2, 5)]),
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5), st.booleans()), max_size=6),
)
def test_the_table_has_what_every_step_needs(
    workload: Workload,
    seed: int,
    grain: int,
    query_lens: tuple[int, ...],
    disturbances: list[tuple[int, int, bool]],
) -> None:
    """Over random work with preemptions, forks, cancels and ends that nobody could know."""

    def disturb(run: Run) -> None:
        for at, pick, is_cancel in disturbances:
            if at == len(run.steps) and is_cancel:
                run.cancel(workload.requests[pick % len(workload.requests)])
            elif at == len(run.steps):
                run.preempt(pick)

    pace = random.Random(seed)
    most = workload.max_num_seqs

    def pad(num: int, _: int) -> int:
        return min(most, -(-num // grain) * grain)

    runner = TableRunner(workload, lambda: pace.random() < 0.5, pad, query_lens)
    run = Run(workload, runner=runner, sink=StoppingSink())
    run.finish(disturb)
    if not any(is_cancel for _, _, is_cancel in disturbances):
        assert answers(run) == answers(Run(workload, sink=StoppingSink()).finish())


def test_a_batch_that_is_no_decode_is_the_one_that_the_host_would_make() -> None:
    state = state_of(4, 6)
    first, second = sequence_of("a", 9, blocks=[3, 1, 4]), sequence_of("b", 5, blocks=[2, 5])
    chunks = [Chunk(first, 4, 5, samples=True), Chunk(second, 0, 3, samples=False)]
    made, expected = state.place(plan_of(*chunks)).batch, make_batch(chunks, 4)
    assert made is not None
    assert (made.max_query_len, made.host_lengths) == (5, [(5, 9), (3, 3)])
    for name, tensor in made.tensors().items():
        assert tensor.tolist() == expected.tensors()[name].tolist()
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_a_decode_like_the_one_before_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(4, 4)
    sequences = [sequence_of("a", 3), sequence_of("b", 2, blocks=[2])]
    launch(state, plan_of(*map(whole, sequences)), [7, 8])
    launch(state, plan_of(*(Chunk(s, len(s.token_ids), 1, samples=True) for s in sequences)), [9, 10])
    monkeypatch.setattr(state._uploader, "send", lambda _: pytest.fail("something was sent"))
    placed = state.place(plan_of(*(Chunk(s, len(s.token_ids) + 1, 1, samples=True) for s in sequences)))
    batch = batch_of(state, placed)
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([9, 10], [4, 3])


def test_a_new_block_is_all_that_is_sent_of_a_longer_table() -> None:
    state = state_of(2, 8)
    sequence = sequence_of("a", 4, blocks=[5])
    launch(state, plan_of(whole(sequence)), [7])
    sent: list[list[int]] = []
    send = state._uploader.send

    def note(words: I32) -> torch.Tensor:
        sent.append(words.tolist())
        return send(words)

    state._uploader.send = note  # type: ignore[method-assign]
    sequence.block_table.append(6)
    placed = state.place(plan_of(Chunk(sequence, 4, 1, samples=True)))
    assert len(sent[0]) == 3 * 4, "the place of the entry, the block, and the slot; each aligned"
    assert batch_of(state, placed).block_tables[0, :3].tolist() == [5, 6, 0]


def test_a_token_that_could_not_be_sampled_is_no_index_out_of_range() -> None:
    state = state_of(2, 2)
    sequence = sequence_of("a", 2)
    launch(state, plan_of(whole(sequence)), [-1])
    placed = state.place(plan_of(Chunk(sequence, 2, 1, samples=True)))
    assert batch_of(state, placed).token_ids.tolist() == [0]


def test_a_slot_goes_to_the_next_once_its_sequence_ended_or_gave_way() -> None:
    seated: list[tuple[int, str]] = []
    vacated: list[int] = []
    state = state_of(
        2, 2, seat=lambda slot, s: seated.append((slot, s.request.request_id)), vacate=vacated.append
    )
    a, b, c, d = (sequence_of(name, 2, blocks=[i + 1]) for i, name in enumerate("abcd"))
    launch(state, plan_of(whole(a), whole(b)), [1, 2])
    b.block_table = []
    launch(state, plan_of(whole(c)), [3])
    assert (seated, vacated) == ([(0, "a"), (1, "b"), (1, "c")], [1])
    a.finish_reason = c.finish_reason = FinishReason.STOP
    b.block_table = [2]
    launch(state, plan_of(whole(b), whole(d)), [4, 5])
    assert sorted(vacated) == [0, 1, 1]
    assert {name for _, name in seated[3:]} == {"b", "d"}


def test_who_comes_back_after_giving_way_is_seated_anew_in_its_slot() -> None:
    seated: list[int] = []
    state = state_of(2, 4, seat=lambda slot, _: seated.append(slot))
    sequence = sequence_of("a", 3, blocks=[1, 2])
    launch(state, plan_of(whole(sequence)), [7])
    sequence.token_ids.append(7)
    sequence.num_preemptions += 1
    sequence.block_table = [3, 4]
    placed = state.place(plan_of(whole(sequence)))
    assert placed.batch is not None
    assert placed.batch.token_ids.tolist() == [100, 101, 102, 7]
    assert placed.batch.block_tables.tolist() == [[3, 4]]
    assert seated == [0, 0]


def test_after_a_launch_that_failed_everything_but_the_token_is_sent_again() -> None:
    state = state_of(2, 4)
    sequence = sequence_of("a", 4, blocks=[5])
    launch(state, plan_of(whole(sequence)), [7])
    sequence.block_table.append(6)
    again = plan_of(Chunk(sequence, 4, 1, samples=True))
    state.place(again)
    table = state.table
    for part in (table.lengths, table.prompt_lens, table.num_next, table.block_tables):
        part.fill_(99)
    state.distrust(again)
    step = gather(table, state.place(again).slot_tensor, 1)
    batch = step.batch
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([7], [4])
    assert step.numbers.tolist() == [1]
    assert batch.block_tables[0, :2].tolist() == [5, 6]


def test_the_last_token_of_a_prompt_in_chunks_comes_from_the_host() -> None:
    """One token, and not the one that the slot sampled last."""
    state = state_of(2, 4)
    sequence = sequence_of("a", 4)
    launch(state, plan_of(Chunk(sequence, 0, 3, samples=False)), [])
    placed = state.place(plan_of(Chunk(sequence, 3, 1, samples=True)))
    assert placed.query_len == 1
    assert batch_of(state, placed).token_ids.tolist() == [103]


def test_a_step_that_was_sampled_and_prompts_go_together() -> None:
    """The decode's token is known to the device alone."""
    state = state_of(3, 4)
    old, new = sequence_of("old", 3, blocks=[1]), sequence_of("new", 2, blocks=[2])
    launch(state, plan_of(whole(old)), [42])
    batch = state.place(plan_of(whole(new), Chunk(old, 3, 1, samples=True))).batch
    assert batch is not None
    assert batch.token_ids.tolist() == [100, 101, 42]
