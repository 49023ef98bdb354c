"""Steps on a CUDA device that is not there: no launch waits for it, and no tensor is on the wrong side."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.execution.graphs import CudaDevice
from penstock.engine.execution.in_flight import TokensInFlight
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import LaunchedStep, ModelRunner
from penstock.engine.kernels.kv_cache import QUANTIZED
from penstock.engine.model.drafts import DraftSource
from penstock.engine.planning.device import OutOfMemory
from penstock.engine.planning.params import Pooling
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import StepPlan, StepResult
from penstock.engine.planning.timings import DraftSeconds
from tests.engine import skip_reasons
from tests.engine.checkpoints import make_checkpoint
from tests.engine.eagle_heads import make_eagle
from tests.engine.execution.test_steps import REQUESTS, SEATS, StepDriver, ask
from tests.engine.fake_cuda import FakeCuda, HostWaits, Mixed, Raced, patched
from tests.engine.fake_runner import UnpricedDrafting

pytest.importorskip("triton", reason=skip_reasons.TRITON)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with patched(monkeypatch) as device:
        yield device


class Watched(ModelRunner):
    """A model on the device, whose launches may not wait."""

    def __init__(
        self, folder: Path, cuda: FakeCuda, draft: DraftSource | None = None, **options: Any
    ) -> None:
        wanted = LoadOptions(
            device="cuda",
            dtype="bfloat16",
            num_blocks=60,
            max_batch_tokens=32,
            max_num_seqs=SEATS,
            **options,
        )
        self.said: list[str] = []
        super().__init__(lambda: load_model(folder, wanted, self.said.append, lambda *_: None, draft))
        self._cuda = cuda
        self.num_copies = 0
        self.load()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.num_copies += len(plan.copies)
        with self._cuda.watching():
            step = super().launch(plan)
        assert isinstance(step, LaunchedStep)
        choose = step.choose

        def watched() -> None:
            with self._cuda.watching():
                choose()

        step.choose = watched  # type: ignore[method-assign]
        return step


def assert_complete(driver: StepDriver) -> None:
    assert {key: len(tokens) for key, tokens in driver.tokens().items()} == {
        (request.request_id, index): request.sampling.max_tokens
        for request in REQUESTS
        for index in range(request.n)
    }


@pytest.mark.parametrize(
    ("budget", "cuda_graphs", "max_drafts", "kv_dtype"),
    [
        (32, True, 0, "auto"),
        (5, True, 0, "auto"),
        (32, False, 0, "auto"),
        (32, True, 3, "auto"),
        (32, False, 3, "auto"),
        (32, True, 0, "int8"),
        (32, True, 0, "int4"),
    ],
)
def test_no_launch_waits_for_the_device(
    folder: Path,
    tmp_path: Path,
    cuda: FakeCuda,
    budget: int,
    cuda_graphs: bool,
    max_drafts: int,
    kv_dtype: str,
) -> None:
    """Prompts in pieces, decodes, every kind of sampling, sequences that come and go, with a step in flight."""
    if kv_dtype == "int4":
        folder = make_checkpoint("qwen3", tmp_path, head_dim=32)
    runner = Watched(folder, cuda, cuda_graphs=cuda_graphs, max_drafts=max_drafts, kv_dtype=kv_dtype)
    assert runner.model.kernels.name == "triton", runner.said
    assert runner.model.kv.data.dtype == QUANTIZED.get(kv_dtype, torch.bfloat16)
    assert_complete(StepDriver(runner, budget=budget).run(*REQUESTS, preempt_at=(4, 9)))
    assert (cuda.num_replays > 0) == cuda_graphs
    assert runner.num_copies
    assert {"rms_norm_kernel", "decode_attention_kernel", "prepare_kernel", "gather_kernel"} <= cuda.launched


class Zeros:
    """A proposer of the token 0, which is all that a device without kernels samples; every third draft is wrong."""

    name = "zeros"
    is_behind = False

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        return [
            [i % 3 // 2 for i in range(len(sequence.token_ids), len(sequence.token_ids) + length)]
            for sequence, length in zip(sequences, lengths, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None: ...


def test_verifying_drafts_waits_for_nothing(folder: Path, cuda: FakeCuda) -> None:
    runner = Watched(folder, cuda, max_drafts=4)
    verified = list[int]()

    class Drafts(UnpricedDrafting):
        def observe(self, plan: StepPlan, seconds: float) -> DraftSeconds:
            found = super().observe(plan, seconds)
            verified.extend(len(chunk.drafts) - chunk.num_accepted for chunk in plan.chunks if chunk.drafts)
            return found

    drafting = Drafts(Zeros(), 4, random.Random(0))
    assert_complete(StepDriver(runner, budget=20, drafting=drafting).run(*REQUESTS, preempt_at=(4, 9)))
    assert {0, 1} < set(verified), "right and wrong ones"


@pytest.mark.parametrize("may_stay", [True, False])
def test_a_draft_model_waits_for_its_tokens_once_and_at_the_end_or_never(
    folder: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, may_stay: bool
) -> None:
    """It is loaded as its target is, in the memory that was planned for it; its passes are Triton's."""
    runner = Watched(folder, cuda, DraftSource(folder), max_drafts=4)
    drafter, of_draft, order = runner.steps.drafter, runner.steps.of_draft, list[str]()
    assert drafter is not None
    assert of_draft is not None
    assert runner.model.memory.draft > 0

    def launch(plan: StepPlan, follow: TokensInFlight | None) -> LaunchedStep:
        with cuda.watching():
            step = of_draft.launch(plan, follow)
            step.choose()
        order.append("launch")
        wait = step.wait

        def waited() -> StepResult:
            order.append("wait")
            return wait()

        step.choose, step.wait = lambda: None, waited  # type: ignore[method-assign]
        return step

    monkeypatch.setattr(drafter, "_launch", launch)
    cuda.launched.clear()
    drafting = UnpricedDrafting(None, 4, random.Random(0), has_model=True)
    monkeypatch.setattr(drafting, "must_know", lambda _: not may_stay)
    assert_complete(StepDriver(runner, budget=20, drafting=drafting).run(*REQUESTS, preempt_at=(4, 9)))
    assert not drafting.failed
    assert ("launch launch launch wait wait wait" in " ".join(order)) != may_stay
    assert ("launch launch launch launch" in " ".join(order)) == may_stay
    assert "decode_attention_kernel" in cuda.launched


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_head_reads_its_target_and_itself_without_waiting(
    folder: Path, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool
) -> None:
    """Its later passes are those of a program of their own."""
    runner = Watched(folder, cuda, DraftSource(make_eagle(tmp_path)), max_drafts=4, cuda_graphs=cuda_graphs)
    drafter, of_draft, of_chain = runner.steps.drafter, runner.steps.of_draft, runner.steps.of_chain
    assert drafter is not None
    assert of_draft is not None
    assert of_chain is not None
    assert (len(of_chain.passes.graphs) > 0) == cuda_graphs
    order = list[str]()

    def watched(name: str, launch: Callable[..., LaunchedStep]) -> Callable[..., LaunchedStep]:
        def launched(plan: StepPlan, follow: TokensInFlight | None = None) -> LaunchedStep:
            order.append(name if follow is None else f"{name} follows")
            with cuda.watching():
                step = launch(plan, follow)
                step.choose()
            step.choose = lambda: None  # type: ignore[method-assign]
            return step

        return launched

    monkeypatch.setattr(drafter, "_launch", watched("first", of_draft.launch))
    monkeypatch.setattr(drafter, "_go_on", watched("later", of_chain.launch))
    drafting = UnpricedDrafting(None, 4, random.Random(0), has_model=True, may_follow=True)
    assert_complete(StepDriver(runner, budget=20, drafting=drafting).run(*REQUESTS, preempt_at=(4, 9)))
    assert not drafting.failed
    assert "first later" in " ".join(order)
    assert "first follows later later" in " ".join(order)


def test_reading_prompts_waits_for_nothing(folder: Path, cuda: FakeCuda) -> None:
    driver = StepDriver(Watched(folder, cuda), budget=11)
    pooled = replace(ask("pooled", 30, max_tokens=0), pooling=Pooling.MEAN)
    driver.run(ask("scored", 40, num_prompt_logprobs=2), pooled, *REQUESTS, preempt_at=(2,))
    assert driver.outputs["pooled", 0][0].embedding
    assert cuda.num_replays
    found = driver.outputs["scored", 0][0].prompt_logprobs
    assert found is not None
    assert [len(at.top) for at in found] == [2] * 39


def test_a_launch_that_is_tried_again_overwrites_nothing(folder: Path, cuda: FakeCuda) -> None:
    """Copies of the failed launches may be under way still, beside the step in flight; only these launches may wait."""

    class Tight(Watched):
        def launch(self, plan: StepPlan) -> LaunchedStep:
            decoder = self.model.decoder
            object.__setattr__(self.model, "decoder", _no_room)
            try:
                for _ in range(5):
                    with pytest.raises(OutOfMemory):
                        self.steps.launch(plan)
            finally:
                object.__setattr__(self.model, "decoder", decoder)
            return super().launch(plan)

    assert_complete(StepDriver(Tight(folder, cuda, cuda_graphs=False), num_blocks=8).run(*REQUESTS))


def _no_room(_: object) -> Tensor:
    raise torch.OutOfMemoryError("full")


def test_a_recording_that_failed_spoils_no_other(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    x = torch.zeros(4, device="cuda")

    def waits() -> None:
        x.tolist()

    def adds() -> None:
        x.add_(1)

    with pytest.raises(HostWaits):
        device.record(waits)
    device.record(adds).replay()
    assert x.tolist() == [2] * 4
    assert cuda.num_replays == 1


def _overwritten(x: Tensor) -> Tensor:
    pinned = torch.zeros(4, pin_memory=True)
    pinned.to(x.device, non_blocking=True)
    return pinned.fill_(1)


def _read_early(x: Tensor) -> object:
    return torch.zeros(4, pin_memory=True).copy_(x, non_blocking=True).tolist()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda x: x[0].item(), HostWaits),
        (lambda x: x.tolist(), HostWaits),
        (lambda x: x.cpu(), HostWaits),
        (lambda x: bool(x.sum() > 0), HostWaits),
        (lambda x: x[x > 0], HostWaits),
        (lambda x: x.nonzero(), HostWaits),
        (lambda x: torch.ones(4).to(x.device, non_blocking=True), HostWaits),
        (lambda x: torch.empty(4).copy_(x, non_blocking=True), HostWaits),
        (lambda x: x + torch.ones(4), Mixed),
        (lambda x: x[torch.tensor([0, 1])], Mixed),
        (_overwritten, Raced),
        (_read_early, Raced),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_what_the_device_does_not_let_pass(
    cuda: FakeCuda, wrong: Callable[[Tensor], object], error: type[Exception], inference: bool
) -> None:
    with torch.inference_mode(inference):
        x = torch.zeros(4, device="cuda")
        with cuda.watching(), pytest.raises(error):
            wrong(x)
