"""Brings a checkpoint onto a device: says whether it fits, loads it, and gives what memory is left to the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.execution.buffers import StepBuffers
from engine.execution.memory import Budget, MemoryPlan, budget, largest_batches, measure_steps, plan_memory
from engine.kernels.kv_cache import KVCache, KVShape
from engine.kernels.linear import Linear
from engine.kernels.ops import Kernels
from engine.kernels.select import select
from engine.kernels.sequence_table import SequenceTable
from engine.model.checkpoint import read_config
from engine.model.config import LoadOptions, ModelConfig
from engine.model.dtype import choose_device, choose_dtype, choose_kv_dtype
from engine.model.files import open_files
from engine.model.parameters import Weights
from engine.model.quantize_cache import Checkpoint, quantized
from engine.model.transformer import ForwardPass, make_decoder
from engine.model.weights import Progress, Recipe, check_tensors, load_weights, make_recipe
from engine.sampling.reference import most_likely
from engine.sampling.sampler import MAX_TOP_LOGPROBS, Sampler

MAX_WINDOWED_TOKENS = 1 << 17
"""Where all layers have a sliding window, a sequence may be longer than the KV cache, up to so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device, and all that its steps keep there."""

    config: ModelConfig
    options: LoadOptions
    device: torch.device
    kernels: Kernels
    max_model_len: int
    """Tokens of the longest sequence."""
    decoder: ForwardPass
    lm_head: Linear
    kv: KVCache
    table: SequenceTable
    sampler: Sampler
    buffers: StepBuffers | None
    """None if no steps are captured."""
    memory: MemoryPlan


def load_model(
    folder: Path, options: LoadOptions, say: Callable[[str], None], progress: Progress
) -> LoadedModel:
    """Loads the checkpoint in a folder.

    Args:
        folder: a directory with config.json and safetensors files, or a GGUF file.
        say: is told lines for the operator: what memory the model takes, before it is taken; what could be faster.
        progress: is told bytes read and bytes in all.

    Raises:
        CheckpointError: the checkpoint is missing, broken or not supported, has fewer positions than asked for, or
            cannot be served with the options.
        NotEnoughMemory: weights and KV cache do not fit.
    """
    config = read_config(folder)
    files = open_files(folder)
    device = choose_device(options.device)
    recipe = make_recipe(config, options)
    check_tensors(config, files, recipe)
    max_model_len = _max_model_len(config, options)
    options = options.for_device(device.type)
    kernels = select(config, device, choose_dtype(options.dtype, config, device), options, say)
    kernels = replace(kernels, kv_dtype=choose_kv_dtype(options.kv_dtype, kernels.kv_dtype, device))
    limits = budget(device, options)
    memory = plan_memory(config, kernels, options, limits, recipe=recipe)
    say(_kernels_text(kernels))
    say(memory.text)
    most = _most_tokens(memory)
    max_model_len = min(max_model_len, max(most, MAX_WINDOWED_TOKENS) if config.context_window else most)
    source = Checkpoint(config, files, recipe)
    if options.keep_quantized:
        source = quantized(source, say, progress)
    weights = load_weights(source.config, source.files, kernels, progress, source.recipe)
    table, sampler, buffers = _tables(config, kernels, options, max_model_len)
    if limits.card is not None:
        memory = _measured_plan(config, recipe, weights, kernels, options, limits, max_model_len, say)
    shape = KVShape.of(config, options.block_size)
    kv = KVCache(shape, memory.num_blocks, kernels.kv_dtype, device)
    return LoadedModel(
        config=config,
        options=options,
        device=device,
        kernels=kernels,
        max_model_len=max_model_len,
        decoder=make_decoder(config, weights, kernels, kv, max_model_len),
        lm_head=weights.lm_head,
        kv=kv,
        table=table,
        sampler=sampler,
        buffers=buffers,
        memory=memory,
    )


def _kernels_text(kernels: Kernels) -> str:
    """One line for the operator: what computes the model, and in which type."""
    dtype = str(kernels.embedding_dtype).removeprefix("torch.")
    if (team := kernels.team) is None:
        return f"model on {kernels.device.type}, {kernels.name} kernels, {dtype}"
    library, threads = team.library, "1 thread" if team.num_threads == 1 else f"{team.num_threads} threads"
    return f"model on {threads}, native kernels for {library.level} ({library.text}), {dtype}"


def _most_tokens(memory: MemoryPlan) -> int:
    """The tokens of the longest sequence that a KV cache on this device can hold: no table needs rows for more.

    On a GPU the plan is made once more from measured sizes, and the cache may become larger than it is planned here.
    """
    on_card = memory.card is not None
    num_blocks = max(memory.num_blocks, memory.available // memory.block) if on_card else memory.num_blocks
    return num_blocks * memory.block_size


def _tables(
    config: ModelConfig, kernels: Kernels, options: LoadOptions, max_model_len: int
) -> tuple[SequenceTable, Sampler, StepBuffers | None]:
    """What steps keep on the device of the running sequences."""
    num_slots, device = options.max_num_seqs, kernels.device
    max_blocks = -(-max_model_len // options.block_size)
    table = SequenceTable(num_slots, max_blocks, options.block_size, device)
    sampler = Sampler(num_slots, config.vocab_size, config.eos_token_ids, device, kernels.choose)
    if not (kernels.is_static and options.cuda_graphs):
        return table, sampler, None
    dtype, most = kernels.activation_dtype, options.max_batch_tokens
    return table, sampler, StepBuffers(num_slots, most, config.vocab_size, dtype, device)


def _measured_plan(
    config: ModelConfig,
    recipe: Recipe,
    weights: Weights,
    kernels: Kernels,
    options: LoadOptions,
    limits: Budget,
    max_model_len: int,
    say: Callable[[str], None],
) -> MemoryPlan:
    """The memory plan from what weights, tables and the largest steps really take on a GPU."""
    say("running the largest steps; kernels that are new to this machine are compiled, which takes a while")
    shape = KVShape.of(config, options.block_size)
    decoder = make_decoder(
        config, weights, kernels, KVCache(shape, 1, kernels.kv_dtype, kernels.device), max_model_len
    )

    def steps() -> None:
        for batch in largest_batches(options, max_model_len, shape.block_size):
            most_likely(weights.lm_head(decoder(batch.to(kernels.device))), MAX_TOP_LOGPROBS)

    assert limits.card is not None
    measured = measure_steps(kernels.device, limits.card, steps)
    memory = plan_memory(config, kernels, options, limits, measured, recipe)
    for line in memory.table:
        say(line)
    return memory


def _max_model_len(config: ModelConfig, options: LoadOptions) -> int:
    if options.max_model_len is None:
        return config.max_position
    if options.max_model_len > config.max_position:
        raise CheckpointError(
            f"max_model_len {options.max_model_len} is more than the {config.max_position} positions of the model"
        )
    return options.max_model_len
