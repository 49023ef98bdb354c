"""All of a GPU's step, from the table of sequences to the tokens, as Triton computes it: the tokens of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.execution import loader
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.kernels.kv_cache import QUANTIZED
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.select import triton_kernels
from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.request import Request
from tests.engine.checkpoints import make_checkpoint
from tests.engine.execution.test_steps import RepeatingDevice, StepDriver, ask
from tests.engine.execution.test_verified_steps import AnswerProposer, Drafts
from tests.engine.families import SPARSE

NUM_SEQS, BUDGET = 2, 8
CPU = torch.device("cpu")
OPTIONS = LoadOptions(
    dtype="float32", num_blocks=12, max_num_seqs=NUM_SEQS, max_batch_tokens=BUDGET, max_drafts=1
)
REQUESTS = (
    ask("greedy", 10, max_tokens=7, temperature=0.0),
    ask("drawn", 2, max_tokens=4, seed=3, top_p=0.9, top_k=40, presence_penalty=1.0),
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def load(
    folder: Path, device: torch.device, kernels: Callable[[ModelConfig], Kernels], **changes: Any
) -> LoadedModel:
    options = replace(OPTIONS, device=device.type, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "select", lambda config, *_: kernels(config))
        return load_model(folder, options, lambda _: None, lambda *_: None)


def driver(
    make: Callable[[], LoadedModel],
    graphs: RepeatingDevice | None,
    requests: tuple[Request, ...] = REQUESTS,
    drafting: Drafting | None = None,
) -> StepDriver:
    runner = ModelRunner(make, make_device=lambda _: graphs, num_ahead=1)
    runner.load()
    return StepDriver(runner, budget=BUDGET, num_blocks=12, drafting=drafting).run(*requests)


def check_whole_step(folder: Path, device: torch.device) -> None:
    graphs = RepeatingDevice()
    found = driver(
        lambda: load(folder, device, lambda c: triton_kernels(c, device, torch.float32, OPTIONS)), graphs
    )
    expected = driver(lambda: load(folder, CPU, lambda _: reference_kernels(CPU, torch.float32)), None)
    assert found.tokens() == expected.tokens()
    assert len(set(graphs.replays)) > 3


def test_a_whole_step_says_what_plain_torch_says(folder: Path, device: torch.device) -> None:
    """Prompts in chunks, short ends of prompts, decodes alone and together, out of graphs that do the work again."""
    check_whole_step(folder, device)


def test_a_step_with_drafts_says_what_plain_torch_says_without(folder: Path, device: torch.device) -> None:
    """Right drafts and wrong ones, with attention of two queries a sequence and rows that are sampled in rounds."""
    requests = (
        ask("greedy", 5, max_tokens=5, temperature=0.0),
        ask("drawn", 2, max_tokens=5, seed=3, presence_penalty=1.0),
    )
    expected = driver(
        lambda: load(folder, CPU, lambda _: reference_kernels(CPU, torch.float32)), None, requests
    )
    drafts = Drafts(AnswerProposer(expected.tokens(), 0.7), 1)
    found = driver(
        lambda: load(folder, device, lambda c: triton_kernels(c, device, torch.float32, OPTIONS)),
        None,
        requests,
        drafts,
    )
    assert found.tokens() == expected.tokens()
    assert min(drafts.count[True], drafts.count[False]) > 0


@pytest.mark.long("whole steps by Triton's interpreter")
@pytest.mark.parametrize(("kv_dtype", "head_dim"), [("int8", 24), ("int4", 32)])
def test_a_quantized_cache_says_what_plain_torch_reads_from_one(
    kv_dtype: str, head_dim: int, tmp_path: Path, device: torch.device
) -> None:
    """Out of graphs, too."""
    folder = make_checkpoint("qwen3", tmp_path, num_hidden_layers=1, head_dim=head_dim)
    options = replace(OPTIONS, kv_dtype=kv_dtype)

    def loaded(device: torch.device, kernels: Callable[[ModelConfig], Kernels]) -> LoadedModel:
        model = load(folder, device, kernels, kv_dtype=kv_dtype)
        assert model.kv.data.dtype == QUANTIZED[kv_dtype]
        return model

    found = driver(
        lambda: loaded(device, lambda c: triton_kernels(c, device, torch.float32, options)), RepeatingDevice()
    )
    expected = driver(lambda: loaded(CPU, lambda _: reference_kernels(CPU, torch.float32)), None)
    assert found.tokens() == expected.tokens()


@pytest.mark.long("whole steps by Triton's interpreter")
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")  # rows of zeros, that pad
def test_a_model_with_experts_says_what_plain_torch_says(tmp_path: Path, device: torch.device) -> None:
    """Out of graphs, too."""
    folder = SPARSE["Qwen 3 MoE"].make(tmp_path, num_hidden_layers=1)
    check_whole_step(folder, device)


@pytest.mark.long("whole steps by Triton's interpreter")
def test_a_model_in_int8_says_what_it_says_by_the_specification(folder: Path, device: torch.device) -> None:
    """The linear maps have the bits of the CPU's, in whatever chunks and batches."""
    found = driver(
        lambda: load(
            folder, device, lambda c: triton_kernels(c, device, torch.float32, OPTIONS), quantize="int8"
        ),
        None,
    )
    expected = driver(
        lambda: load(folder, CPU, lambda _: reference_kernels(CPU, torch.float32), quantize="int8"), None
    )
    assert found.tokens() == expected.tokens()
