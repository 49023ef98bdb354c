"""The runner of a device that runs beside the host, put together on a CPU: it says what the plain runner says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from threading import Lock

import pytest
import torch

from engine.engine import launch_fitting
from engine.execution import loader
from engine.execution.device_memory import table_bytes
from engine.execution.device_runner import DeviceLimits, DeviceSteps
from engine.execution.graphs import Graph, Rung
from engine.execution.loader import LoadedModel, load_model
from engine.execution.runner import ModelRunner
from engine.kernels import gathered
from engine.kernels.batch import Batch
from engine.kernels.gathered import FLASH, Attend, Ways
from engine.kernels.kv_cache import KVShape
from engine.kernels.ops import Kernels, reference_kernels
from engine.kernels.reference import PagedAttention
from engine.model.config import LoadOptions
from engine.planning.block_tables import BlockTables
from engine.planning.request import Output, Request, SamplingParams
from engine.planning.scheduler import Scheduler, SchedulerLimits
from engine.planning.step import DeviceError, OutOfMemory, Plan, Runner, StepInFlight
from priority.queue import LaneQueue
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import NoText

SEATS = 6


class Replayed:
    def __init__(self, work: Callable[[], None], replays: list[int], number: int) -> None:
        self._work, self._replays, self._number = work, replays, number

    def replay(self) -> None:
        self._replays.append(self._number)
        self._work()


class RepeatingDevice:
    """Its graphs do the work again, on the memory that it was recorded with."""

    def __init__(self) -> None:
        self.replays: list[int] = []
        self.num_recorded = 0

    def record(self, work: Callable[[], None]) -> Graph:
        self.num_recorded += 1
        work()
        return Replayed(work, self.replays, self.num_recorded)

    def synchronize(self) -> None:
        pass

    def num_bytes_in_use(self) -> int:
        return 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder: Path = tmp_path_factory.mktemp("model")
    make_checkpoint("qwen3", folder)
    options = LoadOptions(device="cpu", dtype="float32", num_blocks=60, max_batch_tokens=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "select", lambda _, device, dtype, *__: reference_kernels(device, dtype))
        yield load_model(folder, options, lambda _: None, lambda *_: None)


def device_runner(model: LoadedModel, device: RepeatingDevice | None, max_query_len: int = 1) -> ModelRunner:
    """With graphs if there is a device that records them."""

    def decoder(batch: Batch) -> torch.Tensor:
        """Plain attention supposes that every sequence has context; what it says of padding is for nobody."""
        return model.decoder(replace(batch, context_lens=batch.context_lens.clamp(min=1)))

    named = replace(model, decoder=decoder, kernels=replace(model.kernels, is_static=True))
    limits = DeviceLimits(max_num_seqs=SEATS, max_batch_tokens=32, max_query_len=max_query_len)
    runner = ModelRunner(lambda: named, lambda model: DeviceSteps(model, limits, device, say=lambda _: None))
    runner.load()
    return runner


def steps_of(runner: ModelRunner) -> DeviceSteps:
    assert isinstance(runner.steps, DeviceSteps)
    return runner.steps


class Party:
    """A runner with a scheduler, on the test's own thread, as far ahead as the runner goes."""

    def __init__(self, runner: Runner, *, budget: int = 32, num_blocks: int = 60) -> None:
        self.runner = runner
        self.queue = LaneQueue(Lock())
        tables = BlockTables(num_blocks, runner.block_size)
        limits = SchedulerLimits(max_batch_tokens=budget, max_num_seqs=SEATS, max_model_len=200)
        self.scheduler = Scheduler(self.queue, tables, NoText(), limits)
        self.flights: deque[tuple[Plan, StepInFlight]] = deque()
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        self.num_steps = 0

    def run(self, *requests: Request, preempt_at: tuple[int, ...] = ()) -> Party:
        for request in requests:
            self.queue.put(request, 0.0)
        while not self.scheduler.is_idle or any(self.queue.depths().values()):
            if self.num_steps in preempt_at:
                self.scheduler.preempt(self.scheduler.running[-1])
            self.step()
        self.scheduler.check()
        return self

    def step(self) -> None:
        self.num_steps += 1
        plan = self.scheduler.plan(0.0)
        if plan.chunks:
            self.flights.append((plan, self.runner.launch(plan)))
        while len(self.flights) > (self.runner.num_ahead if plan.chunks else 0):
            flown, step = self.flights.popleft()
            for output in self.scheduler.commit(flown, step.wait(), 0.0):
                self.outputs.setdefault((output.request_id, output.index), []).append(output)

    def tokens(self) -> dict[tuple[str, int], list[int]]:
        return {key: [t for o in outputs for t in o.token_ids] for key, outputs in self.outputs.items()}


def ask(name: str, length: int, n: int = 1, max_tokens: int = 9, **more: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]
    prompt = tuple((13 * i + 5 * length) % 390 for i in range(length))
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, n=n)


REQUESTS = (
    ask("greedy", 21, temperature=0.0),
    ask("warm", 9, n=3, seed=5, top_p=0.9),
    ask("penalised", 17, seed=2, presence_penalty=1.0, repetition_penalty=1.3, max_tokens=14),
    ask("banned", 3, seed=3, min_tokens=5, stop_token_ids=frozenset(range(40)), top_k=30),
    ask("told", 12, seed=4, num_logprobs=3, min_p=0.01),
    ask("long", 60, seed=6, max_tokens=20),
)


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> Party:
    runner = ModelRunner(lambda: model)
    runner.load()
    return Party(runner).run(*REQUESTS)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("budget", [32, 5])
@pytest.mark.parametrize("max_query_len", [1, 4])
def test_it_says_what_the_plain_runner_says(
    model: LoadedModel, expected: Party, graphs: bool, budget: int, max_query_len: int
) -> None:
    device = RepeatingDevice() if graphs else None
    party = Party(device_runner(model, device, max_query_len), budget=budget).run(*REQUESTS)
    assert party.tokens() == expected.tokens()
    if device is not None:
        passes, choices = 4 * len({1, max_query_len}), 4 * 4
        assert device.num_recorded == passes + choices, "1, 2, 4, 6"
        assert len({number for number in device.replays if number <= passes}) > (1 if budget == 32 else 0)
        assert len({number for number in device.replays if number > passes}) > (3 if budget == 32 else 0)


def test_short_ends_of_prompts_are_steps_of_the_table(model: LoadedModel) -> None:
    """Prompts of different lengths are in one step, and it has a graph."""
    runner = device_runner(model, RepeatingDevice(), max_query_len=4)
    steps = steps_of(runner)
    seen: list[tuple[int, int]] = []
    run = steps.passes.run

    def note(rung: Rung) -> None:
        seen.append((rung.num_sequences, rung.query_len))
        run(rung)

    steps.passes.run = note  # type: ignore[method-assign]
    requests = (ask("first", 3, temperature=0.0), ask("second", 4, seed=1), ask("third", 2, seed=1))
    party = Party(runner).run(*requests)
    assert seen[:3] == [(4, 4), (4, 1), (4, 1)]
    plain = ModelRunner(lambda: model)
    plain.load()
    assert party.tokens() == Party(plain).run(*requests).tokens()


def test_who_gave_way_in_flight_says_the_same(model: LoadedModel, expected: Party) -> None:
    party = Party(device_runner(model, RepeatingDevice())).run(*REQUESTS, preempt_at=(3, 4, 9))
    assert party.scheduler.counters.num_preemptions == 3
    assert party.tokens() == expected.tokens()


def test_forks_and_a_short_pool_say_the_same(model: LoadedModel, expected: Party) -> None:
    party = Party(device_runner(model, None), num_blocks=8).run(*REQUESTS)
    assert party.scheduler.counters.num_preemptions
    assert party.tokens() == expected.tokens()


def test_log_probabilities_come_along(model: LoadedModel, expected: Party) -> None:
    party = Party(device_runner(model, RepeatingDevice())).run(*REQUESTS)
    for output, other in zip(party.outputs["told", 0], expected.outputs["told", 0], strict=True):
        assert output.logprobs is not None
        assert other.logprobs is not None
        for mine, theirs in zip(output.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    assert all(output.logprobs is None for output in party.outputs["greedy", 0])


def test_logits_that_are_not_finite_fail_their_sequence_alone(model: LoadedModel) -> None:
    """Its next step is in flight already, with no token to compute."""
    runner = device_runner(model, None)
    party = Party(runner)
    decoder = runner.model.decoder

    def broken(batch: object) -> torch.Tensor:
        logits = decoder(batch)  # type: ignore[arg-type]
        logits[0, 7] = torch.nan
        object.__setattr__(runner.model, "decoder", decoder)
        return logits

    object.__setattr__(runner.model, "decoder", broken)
    party.run(ask("bad", 4), ask("good", 5))
    assert party.outputs["bad", 0][-1].error == "the model's output was not finite"
    assert len(party.tokens()["good", 0]) == 9


def test_a_request_that_the_sampler_cannot_take_fails_alone(model: LoadedModel) -> None:
    runner = device_runner(model, None)
    steps_of(runner).sampler._max_biases = 2
    party = Party(runner).run(ask("bad", 4, logit_bias={1: 1.0, 2: 1.0, 3: 1.0}), ask("good", 5))
    assert "tokens with a bias or a ban" in str(party.outputs["bad", 0][-1].error)
    assert len(party.tokens()["good", 0]) == 9


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(torch.OutOfMemoryError("full"), OutOfMemory), (torch.AcceleratorError("gone"), DeviceError)],
)
def test_what_the_device_raises_has_a_name_of_ours(
    model: LoadedModel, raised: Exception, seen: type[Exception]
) -> None:
    runner = device_runner(model, None)

    def broken(_: object) -> torch.Tensor:
        raise raised

    object.__setattr__(runner.model, "decoder", broken)
    party = Party(runner)
    party.queue.put(ask("r", 4), 0.0)
    with pytest.raises(seen):
        party.step()


def test_a_step_that_had_no_room_can_be_launched_again(model: LoadedModel, expected: Party) -> None:
    """In smaller pieces, too; tokens that only the device knows are not lost."""
    runner = device_runner(model, RepeatingDevice())
    launch, failures = steps_of(runner).launch, cycle([False, True])

    def sometimes(plan: Plan) -> StepInFlight:
        if plan.num_tokens > 1 and next(failures):
            decoder = runner.model.decoder
            object.__setattr__(runner.model, "decoder", _no_room)
            try:
                return launch(plan)
            finally:
                object.__setattr__(runner.model, "decoder", decoder)
        return launch(plan)

    steps_of(runner).launch = sometimes  # type: ignore[method-assign]
    party = Party(runner)

    class Patient:
        num_ahead, block_size, num_blocks, max_batch_tokens = 1, runner.block_size, runner.num_blocks, 32
        load, close = runner.load, runner.close

        def launch(self, plan: Plan) -> StepInFlight:
            return launch_fitting(runner, party.scheduler, plan)

    party.runner = Patient()
    party.run(*REQUESTS)
    assert party.tokens() == expected.tokens()


def _no_room(_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("max_query_len", [1, 4])
def test_what_it_keeps_on_its_device_was_planned_to_the_byte(model: LoadedModel, max_query_len: int) -> None:
    steps = steps_of(device_runner(model, RepeatingDevice(), max_query_len))
    steps.state._last_slot_tensor = torch.zeros(0)  # an input of the last step
    kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors_of(steps, {})}
    options = replace(model.options, max_num_seqs=SEATS, max_query_len=max_query_len)
    assert model.config.max_position < 60 * 16
    planned = table_bytes(model.config, options, model.kernels, model.config.max_position)
    assert sum(storage.nbytes() for storage in kept.values()) == planned


def tensors_of(thing: object, seen: dict[int, object]) -> Iterator[torch.Tensor]:
    """All that can be reached from it, but for the model's own."""
    if id(thing) in seen or isinstance(thing, LoadedModel):
        return
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        yield from tensors_of([*thing.keys(), *thing.values()], seen)
    elif isinstance(thing, list | tuple | set):
        for part in list(thing):
            yield from tensors_of(part, seen)
    elif type(thing).__module__.startswith("engine."):
        names = [*getattr(thing, "__dict__", ()), *getattr(thing, "__slots__", ())]
        yield from tensors_of([getattr(thing, name) for name in names], seen)


def test_a_closed_runner_has_no_model(model: LoadedModel) -> None:
    runner = device_runner(model, None)
    runner.close()
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = runner.num_blocks


def test_long_chunks_by_torch_change_no_answer(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step says of its lengths is what they are."""
    made: list[gathered.GatheredAttention] = []
    ways = Ways(min_queries=8, whole=FLASH, later=FLASH)

    def attention(batch: Batch, shape: KVShape) -> Attend:
        attend = gathered.attention(batch, shape, others=PagedAttention, ways=ways)
        made.extend([attend] if isinstance(attend, gathered.GatheredAttention) else [])
        return attend

    def table(_: object, device: torch.device, dtype: torch.dtype, *__: object) -> Kernels:
        return replace(reference_kernels(device, dtype), attention=attention)

    make_checkpoint("qwen3", tmp_path)
    monkeypatch.setattr(loader, "select", table)
    other = load_model(tmp_path, model.options, lambda _: None, lambda *_: None)
    found = Party(device_runner(other, None)).run(*REQUESTS)
    assert len(made) > 3
    assert found.tokens() == Party(device_runner(model, None)).run(*REQUESTS).tokens()
