"""Captured steps of a model whose layers have a state: they read their slots and saves where these always are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.engine.config import LoadOptions
from penstock.engine.execution import loader
from penstock.engine.execution.facts import facts_of
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.execution.seats import StepShape
from penstock.engine.execution.state_slots import MOST_SAVES, StateBuffers
from penstock.engine.kernels.batch import blank_batch
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.setup import make_memory
from penstock.engine.planning.state_records import ChunkState, Save
from penstock.engine.planning.step import Chunk
from tests.engine.execution.test_steps import SEATS, RepeatingDevice, StepDriver, ask, device_runner
from tests.engine.fake_runner import drafting_always, make_request
from tests.engine.families import STATES
from tests.engine.test_drafts import AnswerProposer

CPU = torch.device("cpu")
REQUESTS = (
    ask("greedy", 21, temperature=0.0),
    ask("warm", 9, n=3, seed=5, top_p=0.9),
    ask("long", 60, seed=6, max_tokens=20),
    ask("short", 3, seed=3),
)


@pytest.fixture(scope="module", params=["Qwen 3.5", "LFM2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = STATES[request.param].make(tmp_path_factory.mktemp("states"))
    options = LoadOptions(
        device="cpu", dtype="float32", num_blocks=60, max_batch_tokens=32, max_num_seqs=SEATS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "select", lambda _, device, dtype, *__: reference_kernels(device, dtype))
        yield load_model(folder, options, lambda _: None, lambda *_: None)


def driver_of(runner: ModelRunner, **how: object) -> StepDriver:
    tables = make_memory(facts_of(runner.model), prefix_cache=True, log=None)
    return StepDriver(runner, tables=tables, **how)  # type: ignore[arg-type]


def talk(driver: StepDriver, preempt_at: tuple[int, ...] = ()) -> dict[tuple[str, int], list[int]]:
    """The requests, and the next turn of each."""
    driver.run(*REQUESTS, preempt_at=preempt_at)
    turns = []
    for request in REQUESTS:
        known = (*request.prompt_token_ids, *driver.tokens()[request.request_id, 0], 7, 8)
        turns.append(
            Request(
                request_id=f"{request.request_id} again", prompt_token_ids=known, sampling=request.sampling
            )
        )
    driver.run(*turns)
    ends = [driver.outputs[turn.request_id, 0][-1].timings for turn in turns]
    assert all(end is not None and end.num_cached_tokens > 0 for end in ends)
    return driver.tokens()


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_graphs_change_no_answer(model: LoadedModel, max_drafts: int) -> None:
    expected = talk(driver_of(device_runner(model, None, num_ahead=0), num_ahead=0))
    device = RepeatingDevice()
    runner = device_runner(model, device, max_drafts)
    drafting = drafting_always(AnswerProposer(expected, 0.7), 3) if max_drafts else None
    driver = driver_of(runner, drafting=drafting)
    assert talk(driver, preempt_at=(6, 9)) == expected
    assert driver.scheduler.sequences.counters.num_preemptions == 2
    replayed = {number for number in device.replays if number <= len(runner.steps.passes.shapes)}
    assert len(replayed) > 3, "passes of several shapes"


def test_what_is_shown_is_what_a_step_is_told() -> None:
    chunks = [
        Chunk(
            Sequence(make_request("a", [1, 2, 3])),
            0,
            3,
            True,
            drafts=[8],
            state=ChunkState(4, 5, 2, [Save(1, 6, 1)]),
        ),
        Chunk(Sequence(make_request("b", [1, 2, 3])), 0, 3, False),
    ]
    buffers, batch = StateBuffers(4, CPU), blank_batch([1] * 3, [1] * 3, torch.zeros(3, 1, dtype=torch.int32))
    buffers.give(batch, StepShape(6, 3, 6))
    buffers.show(chunks)
    assert batch.state_slots is not None
    assert batch.state_saves is not None
    assert batch.state_slots.tolist() == [[4, 5, 2, 2], [0, 0, 0, 3], [0, 0, 0, 0]]
    assert batch.state_saves.tolist() == [[0, 1, 6, 1]] + [[-1, 0, 0, 0]] * (MOST_SAVES - 1)
    assert chunks[0].state is not None
    chunks[0].state.saves = []
    buffers.show(chunks)
    assert batch.state_saves[0].tolist() == [-1, 0, 0, 0], "though the slots are the same"
    buffers.show(chunks[1:])
    assert batch.state_slots.tolist() == [[0, 0, 0, 3], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert {tuple(save) for save in batch.state_saves.tolist()} == {(-1, 0, 0, 0)}


@pytest.mark.parametrize(
    ("num_saves", "is_decode", "has_room"),
    [(0, True, True), (1, True, False), (32, False, True), (33, False, False)],
)
def test_a_step_that_saves_more_than_there_is_room_for_has_no_graph(
    num_saves: int, is_decode: bool, has_room: bool
) -> None:
    saves = [Save(0, 6, 0)] * num_saves
    chunk = Chunk(Sequence(make_request("a", [1])), 0, 1, samples=True, state=ChunkState(4, 5, 0, saves))
    assert StateBuffers(4, CPU).hold(StepShape(1, 1, 1, is_decode), [chunk]) == has_room
