"""Runner: turns a plan into tensors, runs the model, samples.

The step thread is its only caller; everything of torch happens in it, loading included.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.batch import Batch
from engine.model.loader import LoadedModel
from engine.request import Request, SamplingParams, Sequence, TokenLogprobs
from engine.sampling.batch import SampledRows, SamplingState
from engine.sampling.sampler import top_logprobs
from engine.step import Chunk, DeviceError, Plan, Sampled, StepResult

I32 = NDArray[np.int32]

_NOT_FINITE = "the model's output was not finite"


class ModelRunner:
    """Executes plans on the model that `load` brings."""

    def __init__(self, load: Callable[[], LoadedModel]) -> None:
        self._load = load
        self._model: LoadedModel | None = None
        self._sampling: SamplingState | None = None

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            raise RuntimeError("the model is not loaded")
        return self._model

    @property
    def num_blocks(self) -> int:
        return self.model.kv.num_blocks

    @property
    def block_size(self) -> int:
        return self.model.kv.block_size

    def load(self) -> None:
        self._model = model = self._load()
        self._sampling = SamplingState(model.config.vocab_size, model.config.eos_token_ids)
        if model.kernels.decoder is not None:
            # What is left for torch is small, and a second team of threads would take the first one's cores.
            torch.set_num_threads(1)
        self._warm_up()

    def close(self) -> None:
        self._model = None

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        try:
            return self._execute(plan)
        except torch.AcceleratorError as error:
            raise DeviceError(str(error)) from error

    def _execute(self, plan: Plan) -> StepResult:
        model = self.model
        model.kv.copy_blocks(plan.copies)
        logits = model.decoder(make_batch(plan.chunks, model.kv.block_size).to(model.device))
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        if not sampling or self._sampling is None:
            return StepResult([])
        rows = model.kernels.sample(logits, self._sampling.build(sampling))
        return StepResult(self._sampled(sampling, rows, logits))

    def _warm_up(self) -> None:
        """One step of one token in block 0, which belongs to nobody: what is made on first use is made now."""
        sequence = Sequence(Request(request_id="", prompt_token_ids=(0,), sampling=SamplingParams()))
        sequence.block_table = [0]
        self.execute(Plan([Chunk(sequence, 0, 1, samples=True)], num_tokens=1))

    def _sampled(
        self, sequences: ListLike[Sequence], rows: SampledRows, logits: torch.Tensor
    ) -> list[Sampled]:
        sampled = [
            Sampled([token_id]) if token_id >= 0 else Sampled([], error=_NOT_FINITE)
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
    )


def _block_tables(chunks: ListLike[Chunk], ends: I32, block_size: int) -> I32:
    width = -(-int(ends.max()) // block_size)
    tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        table = chunk.sequence.block_table[:width]
        tables[row, : len(table)] = table
    return tables
