"""Runs the largest steps on a GPU that has the weights of a model, and measures the memory that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import NotEnoughMemory
from penstock.engine.execution.memory import GpuMemory, Measured, read_card
from penstock.engine.kernels.batch import Batch, blank_batch
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.ops import Kernels
from penstock.engine.program.decoders import make_decoder
from penstock.engine.program.parameters import Weights
from penstock.engine.sampling.sampler import MAX_TOP_LOGPROBS
from penstock.engine.sizes import size_text


def run_largest(
    config: ModelConfig, weights: Weights, kernels: Kernels, options: LoadOptions, max_model_len: int
) -> None:
    """Runs the steps that need the most memory besides the KV cache."""
    layout, device = KVLayout.of(config, options.block_size), kernels.device
    decoder = make_decoder(
        config, weights, kernels, KVCache(layout, 1, kernels.kv_dtype, device), max_model_len
    )
    for batch in largest_batches(options, max_model_len, len(layout.windows)):
        if not config.spec.has_embedding:
            size = batch.token_ids.numel(), config.hidden_size
            batch.hidden = torch.zeros(size, dtype=kernels.activation_dtype, device=device)
        made = weights.lm_head(decoder(batch.to(device)))
        if config.spec.has_head:
            rows = torch.arange(batch.sample_rows.numel(), dtype=torch.int32, device=device)
            kernels.most_likely(kernels.whole(made, config.vocab_size), rows, MAX_TOP_LOGPROBS)


def largest_batches(options: LoadOptions, max_model_len: int, num_tables: int) -> Iterator[Batch]:
    """Yields the steps that need the most memory besides the KV cache, all of it in block 0, which no sequence owns.

    As many tokens as a step may have: of as many sequences as there may be, with as many rows of logits; and at the end
    of one sequence as long as there may be.
    """
    num_sequences = min(options.max_num_seqs, options.max_batch_tokens)
    each, more = divmod(options.max_batch_tokens, num_sequences)
    lengths = [min(each + (i < more), max_model_len) for i in range(num_sequences)]
    for num_tokens, contexts, num_rows in (
        (lengths, lengths, min(options.max_rows, sum(lengths))),
        ([min(options.max_batch_tokens, max_model_len)], [max_model_len], 1),
    ):
        num_blocks = num_tables * -(-max(contexts) // options.block_size)
        tables = torch.zeros((len(contexts), num_blocks), dtype=torch.int32)
        batch = blank_batch(num_tokens, contexts, tables)
        yield replace(batch, sample_rows=torch.arange(num_rows, dtype=torch.int32))


def measure_steps(device: torch.device, before: GpuMemory, steps: Callable[[], None]) -> Measured:
    """Runs steps on a GPU that has the weights and nothing else yet.

    Args:
        before: the card before the weights. The memory that it has lost since counts, whoever took it: torch, its
            libraries, the driver for the code of kernels.

    Raises:
        NotEnoughMemory: the steps do not fit next to the weights.
    """
    torch.cuda.empty_cache()
    resident = torch.cuda.memory_allocated(device) - before.allocated
    try:
        steps()
    except torch.OutOfMemoryError:
        raise NotEnoughMemory(
            f"not enough memory: weights and tables {size_text(resident)}, and the largest step does not fit beside "
            "them; lower --max-batch-tokens or --max-num-seqs"
        ) from None
    torch.cuda.synchronize(device)
    after = read_card(device)
    torch.cuda.empty_cache()
    return Measured(resident=resident, workspace=max(0, before.free - after.free - resident))
