"""The table of the running sequences: what steps find in it is what the host would have sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.execution.seats import Placed, Seats, StepShape
from penstock.engine.execution.uploads import send_apart
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.sequence_table import SequenceTable, StepInputs, gather
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import Chunk, StepPlan
from tests.engine.fake_runner import make_request
from tests.engine.queued_runner import QueuedRunner, QueuedStep
from tests.engine.test_overlap import StoppingSink, answers
from tests.engine.workloads import BLOCK_SIZE, Run, Workload, workloads
from tests.few import examples

CPU = torch.device("cpu")


def sequence_of(name: str, length: int, *, blocks: list[int] | None = None) -> Sequence:
    sequence = Sequence(make_request(name, list(range(100, 100 + length)), max_tokens=50))
    sequence.block_table = [1] if blocks is None else blocks
    return sequence


def plan_of(*chunks: Chunk) -> StepPlan:
    return StepPlan(list(chunks), num_tokens=sum(chunk.num_tokens for chunk in chunks))


def whole(sequence: Sequence) -> Chunk:
    return Chunk(sequence, 0, len(sequence.token_ids), samples=True)


def seats_of(num_seats: int, max_blocks: int, **told: Callable[..., None]) -> Seats:
    return Seats(SequenceTable(num_seats, max_blocks, 4, CPU), **told)


def place(seats: Seats, plan: StepPlan) -> Placed:
    return seats.place(plan, StepShape.of(plan))


def inputs_of(seats: Seats, placed: Placed) -> StepInputs:
    """As the device sees them."""
    return gather(seats.table, placed.tokens)


def choose(seats: Seats, plan: StepPlan, placed: Placed, sampled: list[int]) -> None:
    """The step chose these tokens, one for each of its rows."""
    rows = sampled + [-1] * (placed.sample_seats.numel() - len(sampled))
    seats.table.last_tokens[placed.sample_seats.long()] = torch.tensor(rows, dtype=torch.int32)
    seats.note_launched(plan, placed.seats)


def launch(seats: Seats, plan: StepPlan, sampled: list[int]) -> Batch:
    """Does all that a runner does with a plan, except for running the model."""
    placed = place(seats, plan)
    batch = inputs_of(seats, placed).batch
    choose(seats, plan, placed, sampled)
    return batch


class TableRunner(QueuedRunner):
    """A fake runner that looks at every batch as it comes out of the table, padded or not."""

    def __init__(
        self, workload: Workload, runs_early: Callable[[], bool], pad: Callable[[StepShape], StepShape]
    ) -> None:
        super().__init__(workload.num_blocks, BLOCK_SIZE, runs_early)
        self.seats = Seats(SequenceTable(workload.max_num_seqs, 12, BLOCK_SIZE, CPU))
        self.pad = pad

    def forget(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.seats.forget(sequence)

    def launch(self, plan: StepPlan) -> QueuedStep:
        placed = self.seats.place(plan, self.pad(StepShape.of(plan)))
        step = super().launch(plan)
        for flying in self.in_flight:
            self._run(flying)
        assert step.result is not None
        inputs = inputs_of(self.seats, placed)
        batch, starts = inputs.batch, inputs.batch.query_starts.tolist()
        for i, (order, chunk) in enumerate(zip(step.chunks, plan.chunks, strict=True)):
            rows = slice(starts[i], starts[i + 1])
            seen = [(p, self._read(order.table, 0, p)) for p in range(order.start, order.end)]
            positions, tokens = batch.positions[rows].tolist(), batch.token_ids[rows].tolist()
            assert list(zip(positions, tokens, strict=True)) == seen
            assert batch.context_lens[i] == order.end
            assert tuple(batch.block_tables[i, : len(order.table)].tolist()) == order.table
            assert inputs.numbers[i] == order.end - chunk.sequence.num_prompt_tokens
            assert batch.max_query_len is not None
            assert batch.min_query_len <= len(seen) <= batch.max_query_len
            assert batch.sample_rows[i] == starts[i + 1] - 1
            assert (placed.sample_seats[i] >= 0) == chunk.samples
        num = len(plan.chunks)
        assert not batch.min_query_len or len(batch.positions) == starts[num]
        assert set(batch.positions[starts[num] :].tolist()) <= {-1}
        assert not batch.context_lens[num:].any()
        assert set(placed.sample_seats[num:].tolist()) <= {-1}
        drawn = iter(s.token_ids[0] if s.token_ids else -1 for s in step.result.sampled)
        choose(self.seats, plan, placed, [next(drawn) if c.samples else -1 for c in plan.chunks])
        return step


@settings(max_examples=examples(60), deadline=None)
@given(
    workloads(),
    st.integers(0, 99),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5), st.booleans()), max_size=6),
)
def test_the_table_has_what_every_step_needs(
    workload: Workload, seed: int, grain: int, disturbances: list[tuple[int, int, bool]]
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

    def pad(shape: StepShape) -> StepShape:
        num = min(most, -(-shape.num_sequences // grain) * grain)
        num_tokens = num if shape.is_decode else -(-shape.num_tokens // grain) * grain
        if (num_tokens, num) == (shape.num_tokens, shape.num_sequences):
            return shape
        return replace(shape, num_tokens=num_tokens, num_sequences=num, num_rows=most, min_query_len=0)

    runner = TableRunner(workload, lambda: pace.random() < 0.5, pad)
    run = Run(workload, runner=runner, sink=StoppingSink())
    run.finish(disturb)
    if not any(is_cancel for _, _, is_cancel in disturbances):
        assert answers(run) == answers(Run(workload, sink=StoppingSink()).finish())


def test_a_step_with_prompts_is_the_one_that_the_host_would_make() -> None:
    seats = seats_of(4, 6)
    first, second = sequence_of("a", 9, blocks=[3, 1, 4]), sequence_of("b", 5, blocks=[2, 5])
    chunks = [Chunk(first, 4, 5, samples=True), Chunk(second, 0, 3, samples=False)]
    placed = place(seats, plan_of(*chunks))
    made = inputs_of(seats, placed).batch
    assert placed.sample_seats.tolist() == [placed.seats[0].number, -1]
    assert made.max_query_len == 5
    expected = {
        "token_ids": [104, 105, 106, 107, 108, 100, 101, 102],
        "positions": [4, 5, 6, 7, 8, 0, 1, 2],
        "rotary_positions": [4, 5, 6, 7, 8, 0, 1, 2],
        "query_starts": [0, 5, 8],
        "context_lens": [9, 3],
        "block_tables": [[3, 1, 4], [2, 5, 0]],
        "sample_rows": [4, 7],
    }
    for name, tensor in made.tensors().items():
        assert tensor.tolist() == expected[name]
        assert tensor.dtype == torch.int32


def test_a_decode_like_the_one_before_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = seats_of(4, 4)
    sequences = [sequence_of("a", 3), sequence_of("b", 2, blocks=[2])]
    launch(seats, plan_of(*map(whole, sequences)), [7, 8])
    launch(seats, plan_of(*(Chunk(s, len(s.token_ids), 1, samples=True) for s in sequences)), [9, 10])
    monkeypatch.setattr(
        "penstock.engine.execution.seats.send_apart", lambda *_: pytest.fail("something was sent")
    )
    placed = place(seats, plan_of(*(Chunk(s, len(s.token_ids) + 1, 1, samples=True) for s in sequences)))
    batch = inputs_of(seats, placed).batch
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([9, 10], [4, 3])


def test_a_new_block_is_all_that_is_sent_of_a_longer_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = seats_of(2, 8)
    sequence = sequence_of("a", 4, blocks=[5])
    launch(seats, plan_of(whole(sequence)), [7])
    sent: list[int] = []

    def note(parts: list[list[int]], device: torch.device) -> list[torch.Tensor]:
        sent.extend(map(len, parts))
        return send_apart(parts, device)

    monkeypatch.setattr("penstock.engine.execution.seats.send_apart", note)
    sequence.block_table.append(6)
    placed = place(seats, plan_of(Chunk(sequence, 4, 1, samples=True)))
    assert sorted(sent) == [0, 0, 1, 1, 1], "the place of the entry, the block, and the seat"
    assert inputs_of(seats, placed).batch.block_tables[0].tolist() == [5, 6]


def test_another_table_of_the_same_length_is_sent() -> None:
    seats = seats_of(2, 4)
    sequence = sequence_of("a", 3, blocks=[5])
    launch(seats, plan_of(whole(sequence)), [7])
    sequence.block_table = [6]
    batch = launch(seats, plan_of(Chunk(sequence, 3, 1, samples=True)), [8])
    assert batch.block_tables[0].tolist() == [6]


def test_tokens_move_up_where_some_were_dropped() -> None:
    """The table is as long as before, and starts anew elsewhere; the number of the next output token is as ever."""
    seats = seats_of(2, 8)
    keeping = Keeping(num_first=4, num_kept=8, stride=4)
    sequence = Sequence(make_request("a", list(range(12)), max_tokens=50, keeping=keeping))
    sequence.block_table = [5, 6, 7]
    launch(seats, plan_of(whole(sequence)), [7])
    sequence.block_table, sequence.rewritten = [5, 7, 3], []
    sequence.drop()
    plan = plan_of(Chunk(sequence, 12, 1, samples=True))
    placed = place(seats, plan)
    made = inputs_of(seats, placed)
    assert made.batch.token_ids.tolist() == [7]
    assert (made.batch.positions.tolist(), made.batch.rotary_positions) == ([8], torch.tensor([12]))
    assert made.batch.context_lens.tolist() == [9]
    assert made.batch.block_tables.tolist() == [[5, 7, 3]]
    assert made.numbers.tolist() == [1]
    choose(seats, plan, placed, [8])
    then = inputs_of(seats, place(seats, plan_of(Chunk(sequence, 13, 1, samples=True))))
    assert (then.batch.positions.tolist(), then.batch.rotary_positions) == ([9], torch.tensor([13]))
    assert then.numbers.tolist() == [2]


def test_a_token_that_could_not_be_sampled_is_no_index_out_of_range() -> None:
    seats = seats_of(2, 2)
    sequence = sequence_of("a", 2)
    launch(seats, plan_of(whole(sequence)), [-1])
    assert launch(seats, plan_of(Chunk(sequence, 2, 1, samples=True)), [0]).token_ids.tolist() == [0]


def test_a_seat_goes_to_the_next_once_its_sequence_is_forgotten() -> None:
    seated: list[tuple[int, str]] = []
    left: list[int] = []
    seats = seats_of(
        2, 2, on_seat=lambda seat, s: seated.append((seat, s.request.request_id)), on_leave=left.append
    )
    a, b, c, d = (sequence_of(name, 2, blocks=[i + 1]) for i, name in enumerate("abcd"))
    launch(seats, plan_of(whole(a), whole(b)), [1, 2])
    seats.forget(b)
    launch(seats, plan_of(whole(c)), [3])
    assert (seated, left) == ([(0, "a"), (1, "b"), (1, "c")], [1])
    seats.forget(a)
    seats.forget(c)
    seats.forget(c)
    launch(seats, plan_of(whole(b), whole(d)), [4, 5])
    assert sorted(left) == [0, 1, 1]
    assert {name for _, name in seated[3:]} == {"b", "d"}


def test_who_comes_back_after_giving_way_is_seated_anew() -> None:
    seated: list[int] = []
    seats = seats_of(2, 4, on_seat=lambda seat, _: seated.append(seat))
    sequence = sequence_of("a", 3, blocks=[1, 2])
    launch(seats, plan_of(whole(sequence)), [7])
    sequence.token_ids.append(7)
    seats.forget(sequence)
    sequence.block_table = [3, 4]
    batch = launch(seats, plan_of(whole(sequence)), [8])
    assert batch.token_ids.tolist() == [100, 101, 102, 7]
    assert batch.block_tables.tolist() == [[3, 4]]
    assert seated == [0, 0]


def test_after_a_launch_that_failed_everything_but_the_token_is_sent_again() -> None:
    seats = seats_of(2, 4)
    sequence = sequence_of("a", 4, blocks=[5])
    launch(seats, plan_of(whole(sequence)), [7])
    sequence.block_table.append(6)
    again = plan_of(Chunk(sequence, 4, 1, samples=True))
    place(seats, again)
    table = seats.table
    for column in (table.lengths, table.prompt_lens, table.block_tables):
        column.fill_(99)
    seats.distrust(again)
    inputs = inputs_of(seats, place(seats, again))
    batch = inputs.batch
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([7], [4])
    assert inputs.numbers.tolist() == [1]
    assert batch.block_tables[0].tolist() == [5, 6]


def test_the_last_token_of_a_prompt_in_chunks_comes_from_the_host() -> None:
    """It is one token, and not the one that the seat sampled last."""
    seats = seats_of(2, 4)
    sequence = sequence_of("a", 4)
    launch(seats, plan_of(Chunk(sequence, 0, 3, samples=False)), [])
    plan = plan_of(Chunk(sequence, 3, 1, samples=True))
    assert StepShape.of(plan).is_decode
    assert launch(seats, plan, [1]).token_ids.tolist() == [103]


def test_a_step_that_was_sampled_and_prompts_go_together() -> None:
    """The decode's token is known to the device alone."""
    seats = seats_of(3, 4)
    old, new = sequence_of("old", 3, blocks=[1]), sequence_of("new", 2, blocks=[2])
    launch(seats, plan_of(whole(old)), [42])
    batch = launch(seats, plan_of(whole(new), Chunk(old, 3, 1, samples=True)), [1, 2])
    assert batch.token_ids.tolist() == [100, 101, 42]
