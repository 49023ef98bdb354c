"""The steps of a device that runs beside the host, on a CPU: graphs and a step in flight change no answer."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Lock

import pytest
import torch

from penstock.engine.config import LoadOptions
from penstock.engine.execution import graphs as module
from penstock.engine.execution import loader
from penstock.engine.execution.buffers import StepBuffers
from penstock.engine.execution.graphs import Graph
from penstock.engine.execution.in_flight import TokensInFlight
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import LaunchedStep, ModelRunner
from penstock.engine.execution.seats import StepShape
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.launching import launch_fitting
from penstock.engine.planning.device import DeviceError, OutOfMemory, Runner, StepInFlight
from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.params import BeamParams, SamplingParams
from penstock.engine.planning.request import Output, Request, Sequence
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.step import Masks, StepPlan
from penstock.engine.program.decoders import ForwardPass
from penstock.priority.queue import LaneQueue
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import NoText
from tests.engine.rounding_noise import error_of

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

    def waits_for_host(self, work: Callable[[], None]) -> bool:
        work()
        return True

    def num_bytes_in_use(self) -> int:
        return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LoadedModel]:
    options = LoadOptions(
        device="cpu", dtype="float32", num_blocks=60, max_batch_tokens=32, max_num_seqs=SEATS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "select", lambda _, device, dtype, *__: reference_kernels(device, dtype))
        yield load_model(folder, options, lambda _: None, lambda *_: None)


def padded(decoder: ForwardPass) -> ForwardPass:
    """Plain attention supposes that every sequence has context; what it says of padding is for nobody."""
    return lambda batch: decoder(replace(batch, context_lens=batch.context_lens.clamp(min=1)))


def device_runner(
    model: LoadedModel, device: RepeatingDevice | None, max_drafts: int = 0, num_ahead: int = 1
) -> ModelRunner:
    """With a step ahead, as on a GPU, and with graphs if there is a device that captures them."""

    options = replace(model.options, max_drafts=max_drafts)
    buffers = StepBuffers(options.max_rows, 32, model.config.vocab_size, torch.float32, model.device)
    own = replace(model, options=options, decoder=padded(model.decoder), buffers=buffers if device else None)
    if own.draft is not None:
        own = replace(own, draft=replace(own.draft, buffers=own.buffers))
    runner = ModelRunner(lambda: own, make_device=lambda _: device, num_ahead=num_ahead)
    runner.load()
    return runner


class StepDriver:
    """A runner with a scheduler, on the test's own thread, as far ahead as the runner goes."""

    def __init__(
        self,
        runner: Runner,
        *,
        num_ahead: int = 1,
        num_stages: int = 1,
        budget: int = 32,
        num_blocks: int = 60,
        block_size: int = 16,
        drafting: Drafting | None = None,
        prefix_cache: bool = True,
        tables: SequenceMemory | None = None,
    ) -> None:
        self.runner = runner
        self.num_ahead = num_ahead
        self.queue = LaneQueue(Lock())
        self.tables = tables = tables or SequenceMemory(num_blocks, block_size, prefix_cache=prefix_cache)
        limits = SchedulerLimits(
            max_batch_tokens=budget, max_num_seqs=SEATS, max_model_len=200, num_stages=num_stages
        )
        self.scheduler = Scheduler(self.queue, tables, NoText(), limits, drafting)
        self.flights: deque[tuple[StepPlan, StepInFlight]] = deque()
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        self.num_steps = 0

    def run(self, *requests: Request, preempt_at: tuple[int, ...] = ()) -> StepDriver:
        for request in requests:
            self.queue.put(request, 0.0)
        while not self.scheduler.sequences.is_idle or any(self.queue.depths().values()):
            if self.num_steps in preempt_at:
                self.scheduler.sequences.preempt(self.scheduler.sequences.running[-1])
            self.step()
        self.scheduler.sequences.check()
        return self

    def step(self) -> None:
        self.num_steps += 1
        if self.flights and self.scheduler.awaits_tokens:
            self.land(0)
        plan = self.scheduler.plan(0.0)
        self.runner.forget(self.scheduler.sequences.take_departed())
        if plan.chunks:
            self.flights.append((plan, self.launch(plan)))
        self.land(self.num_ahead if plan.chunks and self.scheduler.may_be_followed(plan) else 0)

    def land(self, num_left: int) -> None:
        while len(self.flights) > num_left:
            flown, step = self.flights.popleft()
            for output in self.scheduler.commit(flown, step.wait(), 0.0):
                self.outputs.setdefault((output.request_id, output.index), []).append(output)
            self.runner.forget(self.scheduler.sequences.take_departed())
            if self.scheduler.drafting is not None:
                self.scheduler.drafting.observe(flown, 1.0)

    def launch(self, plan: StepPlan) -> StepInFlight:
        return launch_fitting(self.runner, self.scheduler, plan, land=partial(self.land, 0))

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
def expected(model: LoadedModel) -> StepDriver:
    """One step after another, without graphs."""
    return StepDriver(device_runner(model, None, num_ahead=0), num_ahead=0).run(*REQUESTS)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("budget", [32, 5])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_graphs_and_a_step_ahead_change_no_answer(
    model: LoadedModel, expected: StepDriver, graphs: bool, budget: int, max_drafts: int
) -> None:
    device = RepeatingDevice() if graphs else None
    runner = device_runner(model, device, max_drafts)
    driver = StepDriver(runner, budget=budget).run(*REQUESTS)
    assert driver.tokens() == expected.tokens()
    if device is not None:
        ladders = [runner.steps.passes, *runner.steps.choices.values()]
        assert device.num_recorded == sum(len(ladder.shapes) for ladder in ladders)
        num_passes = len(runner.steps.passes.shapes)
        least = 3 if budget == 32 else 1
        assert len({number for number in device.replays if number <= num_passes}) > least
        assert len({number for number in device.replays if number > num_passes}) > least


def test_large_steps_go_by_graphs_as_small_ones_do(
    model: LoadedModel, expected: StepDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of more than 16 tokens count as large here: their shapes grow by eighths."""
    monkeypatch.setattr(module, "CAPTURED_TOKENS", 16)
    device = RepeatingDevice()
    runner = device_runner(model, device)
    large = [
        number
        for number, shape in enumerate(reversed(runner.steps.passes.shapes), 1)
        if shape.num_tokens > 16
    ]
    assert len(large) == 8
    driver = StepDriver(runner).run(*REQUESTS)
    assert driver.tokens() == expected.tokens()
    assert not set(large).isdisjoint(device.replays)


class LimitedStepDriver(StepDriver):
    """Two of the requests may bring the first 64 tokens alone."""

    limited = ("warm", "long")

    def launch(self, plan: StepPlan) -> StepInFlight:
        first, num_rows = [], 0
        for chunk in plan.chunks:
            is_limited = chunk.samples and chunk.sequence.request.request_id in self.limited
            first.append(num_rows if is_limited else -1)
            num_rows += is_limited
        if num_rows:
            plan.masks = Masks(bytearray(b"\xff" * 8 * num_rows), 2, first)
        return super().launch(plan)


@pytest.mark.parametrize("graphs", [True, False])
def test_masks_limit_their_rows_and_no_others(model: LoadedModel, expected: StepDriver, graphs: bool) -> None:
    """The passes are replayed; the choice is made kernel by kernel where there are masks."""
    plain = LimitedStepDriver(device_runner(model, None, num_ahead=0), num_ahead=0).run(*REQUESTS).tokens()
    found = (
        LimitedStepDriver(device_runner(model, RepeatingDevice() if graphs else None)).run(*REQUESTS).tokens()
    )
    assert found == plain
    for (name, index), tokens in found.items():
        if name in LimitedStepDriver.limited:
            assert max(tokens) < 64
        else:
            assert tokens == expected.tokens()[name, index]


def test_every_step_up_to_the_largest_graph_is_replayed_whole(model: LoadedModel) -> None:
    """Prompts in chunks, short ends of prompts, prompts beside decodes, and decodes."""
    device = RepeatingDevice()
    runner = device_runner(model, device)
    driver = StepDriver(runner)
    launched: list[StepShape] = []
    launch = driver.launch

    def note(plan: StepPlan) -> StepInFlight:
        before = len(device.replays)
        launched.append(StepShape.of(plan))
        step = launch(plan)
        assert len(device.replays) - before == 2, "a pass, and a choice"
        return step

    driver.launch = note  # type: ignore[method-assign]
    driver.run(*REQUESTS)
    assert {shape.is_decode for shape in launched} == {True, False}
    assert any(shape.num_sequences > 1 and not shape.is_decode for shape in launched)


def test_who_gave_way_in_flight_says_the_same(model: LoadedModel, expected: StepDriver) -> None:
    driver = StepDriver(device_runner(model, RepeatingDevice())).run(*REQUESTS, preempt_at=(3, 4, 9))
    assert driver.scheduler.sequences.counters.num_preemptions == 3
    assert driver.tokens() == expected.tokens()


def test_forks_and_a_short_pool_say_the_same(model: LoadedModel, expected: StepDriver) -> None:
    driver = StepDriver(device_runner(model, None), num_blocks=8).run(*REQUESTS)
    assert driver.scheduler.sequences.counters.num_preemptions
    assert driver.tokens() == expected.tokens()


@pytest.mark.parametrize("preempt_at", [(), (4, 7)])
def test_a_beam_search_finds_the_same(
    model: LoadedModel, expected: StepDriver, preempt_at: tuple[int, ...]
) -> None:
    """Beside steps in flight: its beams take their seats anew with every token."""
    search = replace(ask("search", 19, n=4), beams=BeamParams(length_penalty=0.5))
    alone = StepDriver(device_runner(model, None, num_ahead=0), num_ahead=0).run(search)
    device = RepeatingDevice()
    driver = StepDriver(device_runner(model, device)).run(*REQUESTS, search, preempt_at=preempt_at)
    assert device.replays
    assert driver.tokens() == {**expected.tokens(), **alone.tokens()}


def test_log_probabilities_come_along(model: LoadedModel, folder: Path, expected: StepDriver) -> None:
    error = 2 * error_of(
        folder, list(range(1, 40))
    )  # logits that are off put off their logarithm of a sum, too
    driver = StepDriver(device_runner(model, RepeatingDevice())).run(*REQUESTS)
    for output, other in zip(driver.outputs["told", 0], expected.outputs["told", 0], strict=True):
        assert output.logprobs is not None
        assert other.logprobs is not None
        for mine, theirs in zip(output.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=error)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    assert all(output.logprobs is None for output in driver.outputs["greedy", 0])


@pytest.mark.parametrize("preempt_at", [(), (2, 3)])
def test_a_prompt_is_scored_beside_steps_in_flight(
    model: LoadedModel, expected: StepDriver, preempt_at: tuple[int, ...]
) -> None:
    """The tokens that a step brings for a sequence count even if it was preempted meanwhile."""
    request = ask("scored", 70, num_prompt_logprobs=2)
    (alone,) = StepDriver(device_runner(model, None, num_ahead=0)).run(request).outputs["scored", 0][:1]
    device = RepeatingDevice()
    driver = StepDriver(device_runner(model, device), budget=11)
    driver.run(request, *REQUESTS, preempt_at=preempt_at)
    found = driver.outputs["scored", 0][0].prompt_logprobs
    assert driver.scheduler.sequences.counters.num_preemptions == len(preempt_at)
    assert device.replays
    assert found is not None
    assert alone.prompt_logprobs is not None
    assert len(found) == 69
    for mine, theirs in zip(found, alone.prompt_logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    tokens = driver.tokens()
    assert all(tokens[key] == others for key, others in expected.tokens().items())


def test_logits_that_are_not_finite_fail_their_sequence_alone(model: LoadedModel) -> None:
    """Its next step is in flight already, with no token to compute."""
    runner = device_runner(model, None)
    driver = StepDriver(runner)
    decoder = runner.model.decoder

    def broken(batch: Batch) -> torch.Tensor:
        hidden = decoder(batch)
        hidden[0, 7] = torch.nan
        object.__setattr__(runner.model, "decoder", decoder)
        return hidden

    object.__setattr__(runner.model, "decoder", broken)
    driver.run(ask("bad", 4), ask("good", 5))
    assert driver.outputs["bad", 0][-1].error == "the model's output was not finite"
    assert len(driver.tokens()["good", 0]) == 9


def test_a_request_that_the_sampler_cannot_take_fails_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = device_runner(model, None)
    monkeypatch.setattr(runner.model.sampler, "_max_biases", 2)
    driver = StepDriver(runner).run(ask("bad", 4, logit_bias={1: 1.0, 2: 1.0, 3: 1.0}), ask("good", 5))
    assert "tokens with a bias or a ban" in str(driver.outputs["bad", 0][-1].error)
    assert len(driver.tokens()["good", 0]) == 9


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (torch.OutOfMemoryError("full"), OutOfMemory),
        (MemoryError("the native kernels could not get their memory"), OutOfMemory),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            OutOfMemory,
        ),
        (torch.AcceleratorError("gone"), DeviceError),
    ],
)
def test_what_the_device_raises_has_a_name_of_ours(
    model: LoadedModel, raised: Exception, seen: type[Exception]
) -> None:
    runner = device_runner(model, None)

    def broken(_: object) -> torch.Tensor:
        raise raised

    object.__setattr__(runner.model, "decoder", broken)
    driver = StepDriver(runner)
    driver.queue.put(ask("r", 4), 0.0)
    with pytest.raises(seen):
        driver.step()


@pytest.mark.parametrize("where", ["decoder", "lm_head"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_that_had_no_room_can_be_launched_again(
    model: LoadedModel, expected: StepDriver, where: str, graphs: bool
) -> None:
    """In smaller pieces, too; tokens that only the device knows are not lost."""
    runner = device_runner(model, RepeatingDevice() if graphs else None)
    driver = StepDriver(runner)
    launch, failures = runner.steps.launch, cycle([False, True])

    def sometimes(plan: StepPlan, follow: TokensInFlight | None = None) -> LaunchedStep:
        if plan.num_tokens > 1 and next(failures):
            whole = getattr(runner.model, where)
            object.__setattr__(runner.model, where, _no_room)
            try:
                return launch(plan, follow)
            finally:
                object.__setattr__(runner.model, where, whole)
        return launch(plan, follow)

    runner.steps.launch = sometimes  # type: ignore[method-assign]
    driver.run(*REQUESTS)
    assert driver.tokens() == expected.tokens()


@pytest.mark.parametrize("num_failures", [1, 4])
def test_a_choice_that_had_no_room_is_made_again_and_counted_once(
    model: LoadedModel, expected: StepDriver, num_failures: int
) -> None:
    left = [num_failures]

    def sometimes(
        logits: torch.Tensor, rows: torch.Tensor, num: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if left[0] and len(rows) > 1:
            left[0] -= 1
            raise torch.OutOfMemoryError("full")
        return model.kernels.most_likely(logits, rows, num)

    runner = device_runner(replace(model, kernels=replace(model.kernels, most_likely=sometimes)), None)
    asking = [replace(one, sampling=replace(one.sampling, num_logprobs=2)) for one in REQUESTS]
    assert StepDriver(runner).run(*asking).tokens() == expected.tokens()
    assert not left[0]


def test_only_rows_that_are_asked_for_likely_tokens_are_looked_through(
    model: LoadedModel, expected: StepDriver
) -> None:
    num_rows: list[int] = []

    def noted(
        logits: torch.Tensor, rows: torch.Tensor, num: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows.append(len(rows))
        return model.kernels.most_likely(logits, rows, num)

    first, *others = (replace(one, sampling=replace(one.sampling, num_logprobs=None)) for one in REQUESTS)
    asking = replace(first, sampling=replace(first.sampling, num_logprobs=3))
    runner = device_runner(replace(model, kernels=replace(model.kernels, most_likely=noted)), None)
    assert StepDriver(runner).run(asking, *others).tokens() == expected.tokens()
    assert set(num_rows) == {first.n}


def test_blocks_are_copied_once_however_often_a_step_is_launched(model: LoadedModel) -> None:
    runner = device_runner(model, None)
    driver = StepDriver(runner)
    copied: list[tuple[int, int]] = []
    copy_blocks, decoder = model.kv.copy_blocks, runner.model.decoder

    def note(sources: torch.Tensor, targets: torch.Tensor) -> None:
        copied.extend(zip(sources.tolist(), targets.tolist(), strict=True))
        copy_blocks(sources, targets)
        object.__setattr__(runner.model, "decoder", _no_room)

    launch = runner.steps.launch

    def restored(plan: StepPlan, follow: TokensInFlight | None = None) -> LaunchedStep:
        try:
            return launch(plan, follow)
        finally:
            object.__setattr__(runner.model, "decoder", decoder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.kv, "copy_blocks", note)
        runner.steps.launch = restored  # type: ignore[method-assign]
        found = driver.run(ask("forked", 9, n=3, seed=5, top_p=0.9))
    assert copied
    assert len(copied) == len(set(copied))
    plain = StepDriver(device_runner(model, None)).run(ask("forked", 9, n=3, seed=5, top_p=0.9))
    assert found.tokens() == plain.tokens()


def test_nothing_of_a_sequence_that_ended_is_kept(model: LoadedModel) -> None:
    runner = device_runner(model, RepeatingDevice())
    StepDriver(runner).run(
        *(replace(request, request_id=f"kept/{request.request_id}") for request in REQUESTS)
    )
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is Sequence]
    assert not [sequence for sequence in alive if sequence.request.request_id.startswith("kept/")]


def _no_room(_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("full")


def test_a_closed_runner_has_no_model(model: LoadedModel) -> None:
    runner = device_runner(model, None)
    runner.close()
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = runner.model
