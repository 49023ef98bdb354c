"""Runner: turns a plan into tensors, runs the model, samples.

The step thread is its only caller; everything of torch happens in it, loading included.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.device_runner import CudaDevice, DeviceLimits, DeviceSteps
from engine.execution.landing import NOT_FINITE
from engine.execution.loader import LoadedModel
from engine.kernels.batch import Batch
from engine.model.weights import Progress
from engine.planning.request import Request, SamplingParams, Sequence, TokenLogprobs
from engine.planning.step import (
    Chunk,
    DeviceError,
    Ended,
    OutOfMemory,
    Plan,
    Sampled,
    StepInFlight,
    StepResult,
)
from engine.sampling.batch import SampledRows, SamplingState
from engine.sampling.sampler import top_logprobs

I32 = NDArray[np.int32]


class Steps(Protocol):
    """How the steps of one model run."""

    num_ahead: int

    def launch(self, plan: Plan) -> StepInFlight:
        """See `step.Runner`."""


class ModelRunner:
    """Executes plans on the model that `load` brings.

    `make_steps` says how, once the model is there.
    """

    def __init__(
        self, load: Callable[[], LoadedModel], make_steps: Callable[[LoadedModel], Steps] | None = None
    ) -> None:
        self._load = load
        self._make_steps = make_steps or choose_steps
        self._model: LoadedModel | None = None
        self._steps: Steps | None = None

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            raise RuntimeError("the model is not loaded")
        return self._model

    @property
    def steps(self) -> Steps:
        if self._steps is None:
            raise RuntimeError("the model is not loaded")
        return self._steps

    @property
    def num_blocks(self) -> int:
        return self.model.kv.num_blocks

    @property
    def block_size(self) -> int:
        return self.model.kv.block_size

    @property
    def max_batch_tokens(self) -> int:
        return self.model.options.max_batch_tokens

    @property
    def num_ahead(self) -> int:
        return self.steps.num_ahead

    def load(self) -> None:
        self._model = self._load()
        self._steps = self._make_steps(self._model)

    def close(self) -> None:
        self._model = self._steps = None

    def launch(self, plan: Plan) -> StepInFlight:
        return self.steps.launch(plan)

    def execute(self, plan: Plan) -> StepResult:
        """Launches a step and waits for it."""
        return self.launch(plan).wait()


def choose_steps(model: LoadedModel, progress: Progress = lambda *_: None) -> Steps:
    """One after another on a CPU, one in flight on a GPU.

    Args:
        progress: is told CUDA graphs done and graphs in all.
    """
    if model.device.type == "cpu":
        return PlainSteps(model)
    options = model.options
    limits = DeviceLimits(
        max_num_seqs=options.max_num_seqs,
        max_batch_tokens=options.max_batch_tokens,
        max_model_len=options.max_model_len,
        max_query_len=options.max_query_len,
    )
    device = CudaDevice(model.device) if options.cuda_graphs else None
    return DeviceSteps(model, limits, device, progress=progress)


class PlainSteps:
    """Each step has ended when its launch returns."""

    num_ahead = 0

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._sampling = SamplingState(model.config.vocab_size, model.config.eos_token_ids)
        if model.kernels.decoder is not None:
            # What is left for torch is small, and a second team of threads would take the first one's cores.
            torch.set_num_threads(1)
        self._warm_up()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> StepInFlight:
        try:
            return Ended(self._execute(plan))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from error
        except torch.AcceleratorError as error:
            raise DeviceError(str(error)) from error

    def _execute(self, plan: Plan) -> StepResult:
        model = self._model
        model.kv.copy_blocks(plan.copies)
        logits = model.decoder(make_batch(plan.chunks, model.kv.block_size).to(model.device))
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        if not sampling:
            return StepResult([])
        rows = model.kernels.sample(logits, self._sampling.build(sampling))
        return StepResult(self._sampled(sampling, rows, logits))

    def _warm_up(self) -> None:
        """One step of one token in block 0, which belongs to nobody: what is made on first use is made now."""
        sequence = Sequence(Request(request_id="", prompt_token_ids=(0,), sampling=SamplingParams()))
        sequence.block_table = [0]
        self.launch(Plan([Chunk(sequence, 0, 1, samples=True)], num_tokens=1))

    def _sampled(
        self, sequences: ListLike[Sequence], rows: SampledRows, logits: torch.Tensor
    ) -> list[Sampled]:
        sampled = [
            Sampled([token_id]) if token_id >= 0 else Sampled([], error=NOT_FINITE)
            for token_id in rows.token_ids.tolist()
        ]
        for row, sequence in enumerate(sequences):
            num_logprobs = sequence.request.sampling.num_logprobs
            if num_logprobs is not None and sampled[row].error is None:
                top = top_logprobs(logits[row], num_logprobs)
                sampled[row].logprobs = [TokenLogprobs(float(rows.logprobs[row]), top)]
        return sampled


def make_batch(chunks: ListLike[Chunk], block_size: int) -> Batch:
    """The tensors of one step, on the CPU."""
    num_tokens = np.fromiter((c.num_tokens for c in chunks), np.int32, len(chunks))
    ends = np.fromiter((c.start + c.num_tokens for c in chunks), np.int32, len(chunks))
    query_starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(num_tokens, out=query_starts[1:])
    total = int(query_starts[-1])
    # A token's position is its row, less the row where its sequence starts, plus the position where its chunk does.
    positions = np.arange(total, dtype=np.int32) + np.repeat(ends - query_starts[1:], num_tokens)
    token_ids = chain.from_iterable(c.sequence.token_ids[c.start : c.start + c.num_tokens] for c in chunks)
    samples = np.fromiter((c.samples for c in chunks), np.bool_, len(chunks))
    return Batch(
        token_ids=torch.from_numpy(np.fromiter(token_ids, np.int32, total)),
        positions=torch.from_numpy(positions.astype(np.int32, copy=False)),
        query_starts=torch.from_numpy(query_starts),
        context_lens=torch.from_numpy(ends),
        block_tables=torch.from_numpy(_block_tables(chunks, ends, block_size)),
        sample_rows=torch.from_numpy(query_starts[1:][samples] - 1),
        max_query_len=int(num_tokens.max()),
    )


def _block_tables(chunks: ListLike[Chunk], ends: I32, block_size: int) -> I32:
    width = -(-int(ends.max()) // block_size)
    tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        table = chunk.sequence.block_table[:width]
        tables[row, : len(table)] = table
    return tables
