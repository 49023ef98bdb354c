"""Brings a checkpoint onto a device: says whether it fits, loads it, and gives what memory is left to the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import LoadOptions, ModelConfig
from engine.cores import num_cores
from engine.errors import CheckpointError
from engine.execution.buffers import StepBuffers
from engine.execution.expert_counts import ExpertCounts, counted, counted_natively
from engine.execution.measuring import measure_steps, run_largest
from engine.execution.memory import (
    NO_DRAFT,
    DraftSize,
    MemoryPlan,
    budget,
    plan_memory,
    tensor_bytes,
    weight_bytes,
    what_would_fit,
)
from engine.execution.share import agreed, own_budget, own_device, own_options, ranked
from engine.kernels.cpu.native import (
    NativeDecoder,
    NativeDraft,
    NativeUnavailable,
    PackedLinear,
)
from engine.kernels.kv_cache import KVCache, KVLayout
from engine.kernels.linear import Linear
from engine.kernels.ops import Kernels, reference_kernels
from engine.kernels.ranks import Ranks
from engine.kernels.select import check_native, native_kernels, select
from engine.kernels.sequence_table import SequenceTable
from engine.kernels.state_cache import StateCache, StateLayout
from engine.model.checkpoint import read_config
from engine.model.drafts import DraftSource, SharedTokens, check_draft
from engine.model.dtype import choose_device, choose_dtype, choose_kv_dtype
from engine.model.eagle import EagleConfig, check_eagle, is_eagle, read_eagle
from engine.model.eagle_weights import (
    EagleFiles,
    check_eagle_tensors,
    eagle_specs,
    has_embedding,
    load_eagle,
)
from engine.model.files import open_files
from engine.model.parameters import Weights
from engine.model.quantize_cache import Checkpoint, quantized
from engine.model.safetensors import TensorFiles
from engine.model.split import split_config
from engine.model.split_files import SplitFiles
from engine.model.stacks import unstacked
from engine.model.tensors import Recipe, check_tensors, make_recipe
from engine.model.transformer import ForwardPass, make_decoder, make_head
from engine.model.translation import Translation
from engine.model.weights import Progress, load_weights
from engine.sampling.sampler import Sampler

MAX_WINDOWED_TOKENS = 1 << 17
"""Where all layers have a sliding window, a sequence may be longer than the KV cache, up to so many tokens."""

_FEATURES = torch.bfloat16
"""The type of what a head reads of its target."""
_MOST_CAPTURED = 64
"""Sequences of the largest pass of a draft model that is captured, of about two tokens each."""


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
    states: StateCache | None = None
    """None if no layer has a state."""
    expert_counts: ExpertCounts | None = None
    features: Tensor | None = None
    """[blocks, block size, width], what it keeps of its tokens for a head: see `NativeOp.rows`."""
    draft: LoadedModel | None = None
    """Its draft model. The two have blocks of the same numbers, and one table of the running sequences, sampler and
    buffers."""
    reads_target: bool = False
    """Whether it is a head: what its target computed of a token, which it reads, is better than what it makes of it."""
    native: NativeDraft | None = None
    """Of a draft model: all its passes in one call, which needs the target's numbers of tokens."""

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies all that belongs to the tokens of these blocks; what a draft model has of a copy counts as lost."""
        self.kv.copy_blocks(sources, targets)
        if self.features is not None:
            self.features[targets.long()] = self.features[sources.long()]


def load_model(
    folder: Path,
    options: LoadOptions,
    say: Callable[[str], None],
    progress: Progress,
    draft: DraftSource | None = None,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Loads the checkpoint in a folder.

    Args:
        folder: a directory with config.json and safetensors files, or a GGUF file.
        say: is told lines for the operator: what memory the model takes, before it is taken; what could be faster.
        progress: is told bytes read and bytes in all.
        draft: a draft model; it is loaded as the model is.
        ranks: those that run the model together, each of which loads its part of it; they have no draft model.

    Raises:
        CheckpointError: the checkpoint is missing, broken or not supported, has fewer positions than asked for, or
            cannot be served with the options.
        NotEnoughMemory: weights and KV cache do not fit.
    """
    config = read_config(folder)
    files = unstacked(open_files(folder), config)
    device = choose_device(options.device)
    recipe = make_recipe(config, options, files)
    check_tensors(config, files, recipe)
    max_model_len = _max_model_len(config, options)
    options = options.for_device(device.type)
    # torch counts the cores that it sees, also those that a container's quota denies it.
    torch.set_num_threads(min(torch.get_num_threads(), options.num_threads or num_cores()))
    if ranks is not None:
        device, options = own_device(device, ranks), own_options(options, device, ranks)
        part = split_config(config, ranks.size, ranks.rank, options.expert_parallel)
        config, files = part, SplitFiles(files, config, part, ranks)
    kernels = select(config, device, choose_dtype(options.dtype, config, device), options, say)
    if ranks is not None:
        kernels = ranked(kernels, ranks)
    kernels, expert_counts = counted(kernels, config)
    kernels = replace(kernels, kv_dtype=choose_kv_dtype(options.kv_dtype, kernels.kv_dtype, device))
    limits = own_budget(budget(device, options), ranks)
    companion = None if draft is None else _open_companion(draft, config, kernels, options, say)
    draft_size = NO_DRAFT if companion is None else companion.size
    plan = partial(plan_memory, config, kernels, options, limits, recipe=recipe, draft=draft_size)
    memory = plan().check(lambda: what_would_fit(config, options, lambda other: plan(recipe=other)))
    say(_kernels_text(kernels))
    say(memory.text)
    most = agreed(_most_tokens(memory), ranks)
    max_model_len = min(max_model_len, max(most, MAX_WINDOWED_TOKENS) if config.context_window else most)
    source = Checkpoint(config, files, recipe)
    if options.keep_quantized:
        source = quantized(source, say, progress)
    weights = load_weights(source.config, source.files, kernels, progress, source.recipe)
    table, sampler, buffers = _tables(config, kernels, options, max_model_len)
    if limits.card is not None:
        say(
            "running the largest steps; kernels that are new to this machine are compiled, which takes a while"
        )
        steps = partial(run_largest, config, weights, kernels, options, max_model_len)
        memory = plan(measured=measure_steps(device, limits.card, steps)).check()
    memory = replace(
        memory, num_blocks=agreed(memory.num_blocks, ranks), num_states=agreed(memory.num_states, ranks)
    )
    kv = KVCache(KVLayout.of(config, options.block_size), memory.num_blocks, kernels.kv_dtype, device)
    states = None
    if memory.num_states:
        states = StateCache(StateLayout.of(config, options.num_pending), memory.num_states, device)
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
    )
    return model if companion is None else companion.attach(model, weights)


@dataclass(frozen=True, slots=True)
class _Companion:
    """A draft model or a head that can be loaded with its target."""

    size: DraftSize
    attach: Callable[[LoadedModel, Weights], LoadedModel]
    """Loads it: the target, of which the weights are given, with its draft."""


def _with_draft(
    target: LoadedModel,
    config: ModelConfig,
    kernels: Kernels,
    kv: KVCache,
    decoder: ForwardPass,
    lm_head: Linear,
    **more: Any,
) -> LoadedModel:
    """The target with a draft model of these parts, and `more`, which are fields of LoadedModel."""
    most = min(target.options.max_num_seqs, _MOST_CAPTURED)
    draft = replace(
        target,
        config=config,
        options=replace(target.options, max_drafts=0, max_num_seqs=most, max_batch_tokens=2 * most),
        kernels=kernels,
        decoder=decoder,
        lm_head=lm_head,
        kv=kv,
        states=None,
        buffers=target.buffers if kernels.is_static else None,
        **more,
    )
    return replace(target, draft=draft)


def _kv_beside(target: LoadedModel, layout: KVLayout, kernels: Kernels) -> KVCache:
    """A draft's cache, of as many blocks as the target's."""
    return KVCache(layout, target.kv.num_blocks, kernels.kv_dtype, kernels.device)


def _longest(target: LoadedModel) -> int:
    """The positions that a draft needs: what is drafted beyond the end is of no use, and no harm."""
    return target.max_model_len + target.options.max_drafts


def _open_companion(
    draft: DraftSource,
    target: ModelConfig,
    kernels: Kernels,
    options: LoadOptions,
    say: Callable[[str], None],
) -> _Companion | None:
    """A draft model or head in the types of the target's kernels, on their device; None if it cannot draft there.

    Raises:
        CheckpointError: the draft is broken, or cannot be served as its target is.
    """
    if not options.max_drafts:
        return None
    options = replace(options, quantize_group_size=None)
    if not is_eagle(draft.folder):
        return _open_draft(draft, target, kernels, options, say)
    if kernels.team is None:
        say(
            f"the head {draft.folder} is not used: only the native CPU kernels show what it reads of the model"
        )
        return None
    return _open_head(draft, target, _own_kernels(kernels, target, options, say), options, say)


def _own_kernels(
    target: Kernels, config: ModelConfig, options: LoadOptions, say: Callable[[str], None]
) -> Kernels:
    """Kernels of a draft, of another shape: in the types of its target's, on their device or their threads."""
    if target.team is not None:
        own = native_kernels(target.team, target.embedding_dtype)
    elif target.device.type == "cpu":  # there are none for the target, which a native draft would need
        own = reference_kernels(target.device, target.embedding_dtype)
    else:
        own = select(config, target.device, target.embedding_dtype, options, say)
    return replace(own, kv_dtype=target.kv_dtype, choose=target.choose)


def _open_draft(
    draft: DraftSource,
    target: ModelConfig,
    kernels: Kernels,
    options: LoadOptions,
    say: Callable[[str], None],
) -> _Companion:
    folder, tokens = draft.folder, draft.tokens
    config = read_config(folder)
    check_draft(target, config, _max_model_len(target, options))
    if kernels.team is not None:
        _check_native(config, options)
    files = unstacked(open_files(folder), config)
    source = Checkpoint(config, files, make_recipe(config, options, files))
    check_tensors(config, source.files, source.recipe)
    some = "" if tokens is None else f"; it has {sum(i >= 0 for i in tokens.same)} of the model's tokens"
    say(f"the draft model is {folder}{some}")
    kernels = _own_kernels(kernels, config, options, say)
    layout = KVLayout.of(config, options.block_size, beside=KVLayout.of(target, options.block_size))
    size = DraftSize(weight_bytes(config, kernels, source.recipe), layout.block_bytes(kernels.kv_dtype))
    return _Companion(size, lambda model, _: _load_draft(model, source, tokens, kernels, layout))


def _load_draft(
    target: LoadedModel, source: Checkpoint, tokens: SharedTokens | None, kernels: Kernels, layout: KVLayout
) -> LoadedModel:
    config, vocab = source.config, target.config.vocab_size
    own = load_weights(config, source.files, kernels, lambda *_: None, source.recipe)
    kv = _kv_beside(target, layout, kernels)
    decoder = make_decoder(config, own, kernels, kv, _longest(target))
    lm_head, native = own.lm_head, None
    if tokens is not None or config.vocab_size != vocab:
        translation = Translation.of(tokens, vocab, config.vocab_size).to(kernels.device)
        decoder, lm_head = translation.decoder(decoder), translation.head(lm_head)
    elif kernels.team is not None:
        assert isinstance(decoder, NativeDecoder)
        assert isinstance(lm_head, PackedLinear)
        native = NativeDraft(kernels.team, decoder, lm_head)
    return _with_draft(target, config, kernels, kv, decoder, lm_head, native=native)


def _open_head(
    draft: DraftSource,
    target: ModelConfig,
    kernels: Kernels,
    options: LoadOptions,
    say: Callable[[str], None],
) -> _Companion:
    head = read_eagle(draft.folder)
    check_eagle(target, head)
    _check_native(head.layer, options)
    files, recipe = EagleFiles(draft.folder), make_recipe(head.layer, options)
    check_eagle_tensors(head, files, recipe)
    after = ", ".join(str(tap) for tap in sorted(head.taps_of(target)))
    say(f"drafts come from the head {draft.folder}, which reads the model after {after} of its layers")
    layout = KVLayout.of(head.layer, options.block_size, beside=KVLayout.of(target, options.block_size))
    size = _head_size(head, files, recipe, kernels, layout)
    return _Companion(
        size, lambda model, weights: _load_head(model, weights, head, files, recipe, kernels, layout)
    )


def _head_size(
    head: EagleConfig, files: TensorFiles, recipe: Recipe, kernels: Kernels, layout: KVLayout
) -> DraftSize:
    config = head.layer
    num_loose = config.hidden_size + sum(norm.size for _, norm in config.spec.norms())
    if has_embedding(files):
        num_loose += config.vocab_size * config.hidden_size
    weights = tensor_bytes(eagle_specs(head, recipe).values(), num_loose, kernels)
    features = layout.block_size * config.hidden_size * _FEATURES.itemsize
    return DraftSize(weights, layout.block_bytes(kernels.kv_dtype) + features)


def _load_head(
    target: LoadedModel,
    weights: Weights,
    head: EagleConfig,
    files: TensorFiles,
    recipe: Recipe,
    kernels: Kernels,
    layout: KVLayout,
) -> LoadedModel:
    own = load_eagle(head, files, kernels, recipe)
    kv = _kv_beside(target, layout, kernels)
    features = torch.zeros((kv.num_blocks, kv.block_size, head.layer.hidden_size), dtype=_FEATURES)
    embedding = weights.rows if own.embedding is None else own.embedding
    decoder = make_head(head, own, embedding, kernels, kv, features, _longest(target))
    assert kernels.team is not None
    assert isinstance(target.decoder, NativeDecoder)
    assert isinstance(own.lm_head, PackedLinear)
    assert isinstance(own.fuse, PackedLinear)
    target.decoder.tap(head.taps_of(target.config), own.fuse, features)
    native = NativeDraft(kernels.team, decoder, own.lm_head, own.drafted)
    model = _with_draft(
        target, head.layer, kernels, kv, decoder, own.lm_head, native=native, reads_target=True
    )
    return replace(model, features=features)


def _check_native(config: ModelConfig, options: LoadOptions) -> None:
    try:
        check_native(config, options)
    except NativeUnavailable as error:
        raise CheckpointError(f"the draft model cannot run on the native CPU kernels: {error}") from None


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
    num_blocks = (
        max(memory.num_blocks, memory.available // memory.block)
        if on_card and memory.block
        else memory.num_blocks
    )
    return memory.windows.room(num_blocks, memory.chunk)


def _tables(
    config: ModelConfig, kernels: Kernels, options: LoadOptions, max_model_len: int
) -> tuple[SequenceTable, Sampler, StepBuffers | None]:
    """What steps keep on the device of the running sequences."""
    num_slots, device = options.max_num_seqs, kernels.device
    num_tables = len(KVLayout.of(config, options.block_size).windows)
    max_blocks = -(-max_model_len // options.block_size) * num_tables
    table = SequenceTable(num_slots, max_blocks, options.block_size, device, num_tables)
    sampler = Sampler(num_slots, config.vocab_size, config.eos_token_ids, device, kernels.choose)
    if not (kernels.is_static and options.cuda_graphs):
        return table, sampler, None
    dtype, most = kernels.activation_dtype, options.max_batch_tokens
    return table, sampler, StepBuffers(options.max_rows, most, config.vocab_size, dtype, device)


def _max_model_len(config: ModelConfig, options: LoadOptions) -> int:
    if options.max_model_len is None:
        return config.max_position
    if options.max_model_len > config.max_position:
        raise CheckpointError(
            f"max_model_len {options.max_model_len} is more than the {config.max_position} positions of the model"
        )
    return options.max_model_len
