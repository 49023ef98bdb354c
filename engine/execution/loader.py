"""Brings a checkpoint onto a device: says whether it fits, loads it, and gives the remaining memory to the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.cores import num_cores
from penstock.engine.errors import CheckpointError, NotEnoughMemory
from penstock.engine.execution.buffers import StepBuffers
from penstock.engine.execution.companions import open_companion, with_room
from penstock.engine.execution.expert_counts import ExpertCounts, counted, counted_natively
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.measuring import measure_steps, run_largest
from penstock.engine.execution.memory import (
    MemoryPlan,
    budget,
    plan_memory,
    what_would_fit,
)
from penstock.engine.execution.share import (
    agreed,
    own_budget,
    own_device,
    own_kernels,
    own_options,
    own_part,
)
from penstock.engine.kernels.cpu.rounding import rounding_of
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.ranks import World
from penstock.engine.kernels.select import select
from penstock.engine.kernels.sequence_table import SequenceTable
from penstock.engine.kernels.state_cache import StateCache, StateLayout
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.drafts import DraftSource
from penstock.engine.model.dtype import check_kv_heads, choose_device, choose_dtype, choose_kv_dtype
from penstock.engine.model.files import open_files
from penstock.engine.model.gguf.container import forget_headers
from penstock.engine.model.quantize_cache import Checkpoint, quantized
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import check_tensors, make_recipe
from penstock.engine.model.weights import Progress, load_weights
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.request import NO_LIMIT
from penstock.engine.program.decoders import make_decoder
from penstock.engine.program.native import NativeDecoder
from penstock.engine.sampling.sampler import Sampler

MAX_WINDOWED_TOKENS = 1 << 17
"""Where all layers have a sliding window, a sequence may be longer than the KV cache, up to so many tokens."""


def load_model(
    folder: Path,
    options: LoadOptions,
    say: Callable[[str], None],
    progress: Progress,
    draft: DraftSource | None = None,
    world: World | None = None,
) -> LoadedModel:
    """Loads the checkpoint in a folder.

    Args:
        folder: a directory with config.json and safetensors files, or a GGUF file.
        say: is called with lines for the operator: the memory that the model takes, before it is taken; what could be
            faster.
        progress: is called with the bytes read and the bytes in all.
        draft: a draft model; it is loaded as the model is. Without one, a model's own layer drafts if it has one.
        world: the processes that run the model together, each of which loads its part of it; nothing drafts for them.

    Raises:
        CheckpointError: the checkpoint is missing, broken or not supported, has fewer positions than asked for, or
            cannot be served with the options.
        NotEnoughMemory: weights and KV cache do not fit.
    """
    opened = _open(folder, options, world)
    source, device, options = opened.source, opened.device, opened.options
    config, max_model_len = source.config, opened.max_model_len
    kernels, expert_counts = _kernels(config, device, options, say, world)
    limits = own_budget(budget(device, options), world)
    plan = partial(plan_memory, config, kernels, options, limits, recipe=source.recipe)
    companion = None
    if world is None:
        companion = open_companion(draft, source, kernels, options, max_model_len, say)
        companion = with_room(companion, plan, say)
    if companion is not None:
        plan = partial(plan, draft=companion.size)
    memory = plan().check(lambda: what_would_fit(config, options, lambda other: plan(recipe=other)))
    say(_kernels_text(kernels))
    say(memory.text)
    if options.kv_dtype == "fp8":
        say("--kv-dtype fp8: the KV cache is in int8, which has the size of fp8 and is nearer to 16 bits")
    most = agreed(_most_tokens(memory), world)
    longest = min(max_model_len, max(most, MAX_WINDOWED_TOKENS) if config.context_window else most)
    """The tokens of the longest sequence in memory at a time."""
    if options.kv_keep:
        _check_keeping(memory, options, max_model_len)
    else:
        max_model_len = longest
    if options.keep_quantized:
        source = quantized(source, say, progress, rounding_of(kernels.team))
    weights = load_weights(source.config, source.files, kernels, progress, source.recipe)
    forget_headers()
    table, sampler, buffers = _tables(config, kernels, options, longest)
    if limits.card is not None:
        say(
            "running the largest steps; kernels that are new to this machine are compiled, which takes a while"
        )
        steps = partial(run_largest, config, weights, kernels, options, longest)
        memory = plan(measured=measure_steps(device, limits.card, steps)).check()
    if world is not None:
        memory = _in_common(memory, world)
    kv, states = _caches(config, kernels, options, memory)
    decoder = make_decoder(config, weights, kernels, kv, max_model_len, states)
    if isinstance(decoder, NativeDecoder):
        expert_counts = counted_natively(decoder, config)
    model = LoadedModel(
        config=config,
        options=options,
        device=device,
        kernels=kernels,
        max_model_len=max_model_len,
        decoder=decoder,
        lm_head=weights.lm_head,
        kv=kv,
        table=table,
        sampler=sampler,
        buffers=buffers,
        memory=memory,
        states=states,
        expert_counts=expert_counts,
        world=world,
    )
    return model if companion is None else companion.attach(model, weights)


def _in_common(memory: MemoryPlan, world: World) -> MemoryPlan:
    """The plan with as many blocks, and slots of states, as every process has room for; a stage whose layers have no
    state has room for any number."""
    num_states = agreed(memory.num_states or NO_LIMIT, world)
    return replace(
        memory,
        num_blocks=agreed(memory.num_blocks, world),
        num_states=0 if num_states == NO_LIMIT else num_states,
    )


def check_checkpoint(folder: Path, options: LoadOptions) -> None:
    """Raises the CheckpointError with which `load_model` would refuse a checkpoint before it reads any weights."""
    _open(folder, options, None)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint that can be served, as one process does it."""

    source: Checkpoint
    """This process's part."""
    device: torch.device
    options: LoadOptions
    """The options for the device."""
    max_model_len: int


def _open(folder: Path, options: LoadOptions, world: World | None) -> _Opened:
    config = read_config(folder)
    files = unstacked(open_files(folder), config)
    recipe = make_recipe(config, options, files)
    check_tensors(config, files, recipe)
    max_model_len, device = _max_model_len(config, options), choose_device(options.device)
    options = options.for_device(device.type)
    # torch counts the cores that it sees, even cores that a container's quota denies it.
    torch.set_num_threads(min(torch.get_num_threads(), options.num_threads or num_cores()))
    if world is not None:
        device = own_device(device, world)
        options = own_options(options, device, world)
        config, files = own_part(config, files, options, world)
    return _Opened(Checkpoint(config, files, recipe), device, options, max_model_len)


def _kernels(
    config: ModelConfig,
    device: torch.device,
    options: LoadOptions,
    say: Callable[[str], None],
    world: World | None,
) -> tuple[Kernels, ExpertCounts | None]:
    """Returns the kernels that run a model, and the counts of its experts."""
    check_kv_heads(options.kv_dtype, config)
    kernels = select(config, device, choose_dtype(options.dtype, config, device), options, say)
    if world is not None:
        kernels = own_kernels(kernels, world, shares_experts=options.data_parallel_attention)
    kernels, expert_counts = counted(kernels, config)
    kv_dtype = choose_kv_dtype(options.kv_dtype, kernels.kv_dtype, device)
    return replace(kernels, kv_dtype=kv_dtype), expert_counts


def _caches(
    config: ModelConfig, kernels: Kernels, options: LoadOptions, memory: MemoryPlan
) -> tuple[KVCache, StateCache | None]:
    """Keys and values, and states if layers have any."""
    layout, device = KVLayout.of(config, options.block_size), kernels.device
    kv = KVCache(layout, memory.num_blocks, kernels.kv_dtype, device)
    if not config.spec.states:
        return kv, None
    return kv, StateCache(StateLayout.of(config, options.num_pending), memory.num_states, device)


def _kernels_text(kernels: Kernels) -> str:
    """Returns one line for the operator: the code that computes the model, and its type."""
    dtype = str(kernels.embedding_dtype).removeprefix("torch.")
    if (team := kernels.team) is None:
        return f"model on {kernels.device.type}, {kernels.name} kernels, {dtype}"
    library, threads = team.library, "1 thread" if team.num_threads == 1 else f"{team.num_threads} threads"
    return f"model on {threads}, native kernels for {library.level} ({library.text}), {dtype}"


def _most_tokens(memory: MemoryPlan) -> int:
    """The tokens of the longest sequence that a KV cache on this device can hold: no table needs rows for more.

    On a GPU the plan is made once more from measured sizes, and the cache may become larger than it is planned here.
    """
    return memory.windows.room(_most_blocks(memory), memory.chunk)


def _most_blocks(memory: MemoryPlan) -> int:
    if memory.card is None or not memory.block:
        return memory.num_blocks
    return max(memory.num_blocks, memory.available // memory.block)


def _check_keeping(memory: MemoryPlan, options: LoadOptions, max_model_len: int) -> None:
    """
    Raises:
        NotEnoughMemory: the KV cache has no room for what is kept of one sequence.
    """
    most = min(Keeping.of(options.kv_keep, options.block_size).most, max_model_len)
    needed, usable = memory.windows.num_held(most, memory.chunk), _most_blocks(memory) - 1
    if needed > usable:
        raise NotEnoughMemory(
            f"--kv-keep {options.kv_keep} takes {needed} KV blocks for a sequence, up to {most} tokens, and there are "
            f"{usable}"
        )


def _tables(
    config: ModelConfig, kernels: Kernels, options: LoadOptions, max_model_len: int
) -> tuple[SequenceTable, Sampler, StepBuffers | None]:
    """Returns the tables and buffers of the running sequences that steps keep on the device."""
    num_seats, device, spec = options.max_num_seqs, kernels.device, config.spec
    num_tables = len(KVLayout.of(config, options.block_size).windows)
    max_blocks = -(-max_model_len // options.block_size) * num_tables
    table = SequenceTable(num_seats, max_blocks, options.block_size, device, num_tables)
    sampler = Sampler(num_seats, config.vocab_size, config.eos_token_ids, device, kernels.choose)
    if not (kernels.is_static and options.cuda_graphs):
        return table, sampler, None
    dtype, most = kernels.activation_dtype, options.max_batch_tokens
    num_logits = config.vocab_rows if spec.has_head else 0
    hidden_size = 0 if spec.stage is None else config.hidden_size
    buffers = StepBuffers(options.max_rows, most, num_logits, dtype, device, hidden_size=hidden_size)
    return table, sampler, buffers


def _max_model_len(config: ModelConfig, options: LoadOptions) -> int:
    if options.max_model_len is None:
        return config.max_position
    if options.max_model_len > config.max_position:
        raise CheckpointError(
            f"max_model_len {options.max_model_len} is more than the {config.max_position} positions of the model"
        )
    return options.max_model_len
