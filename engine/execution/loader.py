"""Brings a checkpoint into memory: checks it, says whether it fits, loads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.execution.device_memory import table_bytes
from engine.execution.memory import (
    Card,
    Dtypes,
    Measured,
    MemoryPlan,
    budget,
    largest_batches,
    measure_steps,
    plan_memory,
)
from engine.kernels.kv_cache import KVCache, KVShape
from engine.kernels.ops import ForwardPass, Kernels, select
from engine.model.config import LoadOptions, ModelConfig
from engine.model.dtype import choose_device, choose_dtype
from engine.model.parameters import Weights
from engine.model.parse import read_config
from engine.model.safetensors import TensorFiles
from engine.model.transformer import make_decoder
from engine.model.weights import Progress, check_tensors, load_weights
from engine.sampling.device import MAX_TOP_LOGPROBS, most_likely


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run."""

    config: ModelConfig
    decoder: ForwardPass
    kv: KVCache
    kernels: Kernels
    memory: MemoryPlan
    device: torch.device
    options: LoadOptions


def load_model(
    folder: Path, options: LoadOptions, say: Callable[[str], None], progress: Progress
) -> LoadedModel:
    """
    Args:
        folder: a directory with config.json and safetensors files (see `hub.find_checkpoint`).
        say: is told lines for the operator: what memory it takes, before it is taken; what could be faster.
        progress: is told bytes read and bytes in all.

    Raises:
        CheckpointError: the checkpoint is missing, broken or not supported, or has fewer positions than asked for.
        NotEnoughMemory: weights and KV cache do not fit.
    """
    config = read_config(folder)
    files = TensorFiles(folder)
    check_tensors(config, files)
    max_model_len = _max_model_len(config, options)
    device = choose_device(options.device)
    options = options.for_device(device.type)
    dtype = choose_dtype(options.dtype, config, device)
    kernels = select(config, device, dtype, options, say)
    shape = KVShape.of(config, options.block_size)
    dtypes = Dtypes(kernels.weight_dtype, kernels.kv_dtype)
    limits = budget(device, options)
    tables = partial(table_bytes, config, options, kernels)
    memory = plan_memory(config, shape, dtypes, options, limits, tables=tables)
    say(memory.text)
    weights = load_weights(config, files, kernels, progress)
    if limits.card is not None:
        say(
            "running the largest steps; kernels that are new to this machine are compiled, which takes a while"
        )
        measured = _measure(config, weights, kernels, shape, options, max_model_len, limits.card)
        memory = plan_memory(config, shape, dtypes, options, limits, measured, tables)
        for line in memory.table:
            say(line)
    kv = KVCache(shape, memory.num_blocks, kernels.kv_dtype, device)
    decoder = make_decoder(config, weights, kernels, kv, max_model_len)
    return LoadedModel(
        config=config,
        decoder=decoder,
        kv=kv,
        kernels=kernels,
        memory=memory,
        device=device,
        options=options,
    )


def _measure(
    config: ModelConfig,
    weights: Weights,
    kernels: Kernels,
    shape: KVShape,
    options: LoadOptions,
    max_model_len: int,
    before: Card,
) -> Measured:
    """What the largest steps take beside the weights."""
    decoder = make_decoder(
        config, weights, kernels, KVCache(shape, 1, kernels.kv_dtype, kernels.device), max_model_len
    )

    def steps() -> None:
        for batch in largest_batches(options, max_model_len, shape.block_size):
            most_likely(decoder(batch.to(kernels.device)), MAX_TOP_LOGPROBS)

    return measure_steps(kernels.device, before, steps)


def _max_model_len(config: ModelConfig, options: LoadOptions) -> int:
    if options.max_model_len is None:
        return config.max_position
    if options.max_model_len > config.max_position:
        raise CheckpointError(
            f"max_model_len {options.max_model_len} is more than the {config.max_position} positions of the model"
        )
    return options.max_model_len
