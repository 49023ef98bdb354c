"""The plans that rank 0 tells are those that the others make of it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.parallel.messages import ChooseTokens, Forget, Launch, Listener, Narrator
from penstock.engine.planning.device import StepInFlight
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.state_records import ChunkState, Save
from penstock.engine.planning.step import Chunk, Masks, StepPlan
from tests.engine.fake_runner import FakeRunner, make_request
from tests.engine.workloads import BLOCK_SIZE, Run, Workload, workloads
from tests.few import examples


def same(told: StepPlan, heard: StepPlan) -> None:
    """All that a step reads of a plan."""
    assert (heard.num_tokens, heard.copies) == (told.num_tokens, told.copies)
    for chunk, own in zip(told.chunks, heard.chunks, strict=True):
        assert (own.start, own.num_tokens, own.samples, list(own.drafts), own.state) == (
            chunk.start,
            chunk.num_tokens,
            chunk.samples,
            list(chunk.drafts),
            chunk.state,
        )
        assert own.sequence.request == chunk.sequence.request
        assert own.sequence.index == chunk.sequence.index
        assert own.sequence.token_ids == chunk.sequence.token_ids
        assert own.sequence.block_table == chunk.sequence.block_table


class Overheard(FakeRunner):
    """Tells every plan and hears it, by way of bytes, before it is run."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK_SIZE)
        self.narrator, self.listener = Narrator(), Listener()
        self.sizes: list[int] = []

    def launch(self, plan: StepPlan) -> StepInFlight:
        message = pickle.loads(pickle.dumps(self.narrator.launch(plan)))
        assert isinstance(message, Launch)
        self.sizes.append(len(message.words))
        same(plan, self.listener.plan(message))
        return super().launch(plan)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        gone = list(sequences)
        self.listener.forgotten(self.narrator.forget(gone))
        super().forget(gone)


@settings(max_examples=examples(20))
@given(workloads(), st.integers(1, 5))
def test_what_is_told_is_what_is_heard(workload: Workload, every: int) -> None:
    """Prompts in pieces, prefix hits, copies, choices of one request, sequences that give way and come again."""
    runner = Overheard(workload.num_blocks)

    def preempt(run: Run) -> None:
        if len(run.steps) % every == 0 and len(run.steps) < 30:
            run.preempt(len(run.steps))

    Run(workload, runner=runner).finish(preempt)
    assert runner.sizes


def test_a_decode_tells_its_token_and_no_more() -> None:
    runner = Overheard(200)
    request = make_request("r", list(range(400)), max_tokens=3)
    run = Run(
        Workload(
            requests=(request,),
            arrivals=(0,),
            num_blocks=200,
            budget=512,
            max_num_seqs=1,
            max_model_len=600,
            prefix_cache=True,
        ),
        runner=runner,
    )
    run.finish()
    words = [size // 4 for size in runner.sizes]
    assert words[0] > 100, "of the prompt, the blocks; its tokens are in the request"
    assert max(words[1:]) <= 13


def test_drafts_and_masks_come_along() -> None:
    sequence = Sequence(make_request("r", [1, 2, 3, 4, 5]))
    sequence.block_table = [3, 4]
    plan = StepPlan([Chunk(sequence, 4, 3, samples=True, drafts=[8, 9])], [(1, 4)], 3)
    message = Narrator().launch(plan)
    same(plan, Listener().plan(message))
    masks = Masks(bytearray(b"\1\2\3\4"), 1, [0])
    assert pickle.loads(pickle.dumps(ChooseTokens(masks))) == ChooseTokens(masks)


def test_a_rank_with_blocks_of_its_own_hears_its_own_numbers() -> None:
    """Its block 0 is block 60 of all, and entries without a block stay 0."""
    sequence, narrator, listener = Sequence(make_request("r", [1, 2, 3, 4, 5])), Narrator(60), Listener()
    sequence.block_table = [0, 62]
    plan = StepPlan([Chunk(sequence, 4, 1, samples=False)], [(61, 62)], 1, rows=(7, 1))
    heard = listener.plan(narrator.launch(plan))
    assert (heard.copies, heard.rows, heard.chunks[0].sequence.block_table) == ([(1, 2)], (7, 1), [0, 2])
    sequence.block_table = [0, 62, 75]
    again = listener.plan(narrator.launch(StepPlan([Chunk(sequence, 5, 1, samples=False)], [], 1)))
    assert again.chunks[0].sequence.block_table == [0, 2, 15]


def test_the_slots_of_states_come_along() -> None:
    first, second = (Sequence(make_request(name, [1, 2, 3, 4, 5])) for name in ("first", "second"))
    for sequence in (first, second):
        sequence.block_table = [3, 4]
    saves = [Save(1, 7, 2), Save(3, 8, 0)]
    chunks = [
        Chunk(first, 1, 4, samples=True, state=ChunkState(5, 6, 2, saves)),
        Chunk(second, 0, 4, samples=False, state=ChunkState(0, 9, 0, [])),
    ]
    plan = StepPlan(chunks, [], 8)
    same(plan, Listener().plan(Narrator().launch(plan)))


def test_who_is_forgotten_twice_or_was_never_told_of_is_not_told_of() -> None:
    narrator, sequence = Narrator(), Sequence(make_request("r", [1, 2, 3, 4, 5]))
    assert narrator.forget([sequence]) == Forget([])
    narrator.launch(StepPlan([Chunk(sequence, 0, 5, samples=True)], [], 5))
    assert narrator.forget([sequence]) == Forget([0])
    assert narrator.forget([sequence]) == Forget([])
