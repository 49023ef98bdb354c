"""Loads the companion that drafts for a model: a draft model, a head, or a layer of the model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.memory import (
    NO_DRAFT,
    DraftSize,
    MemoryPlan,
    fitting_draft,
    tensor_bytes,
    weight_bytes,
)
from penstock.engine.kernels.cpu.native import NativeLinear, NativeUnavailable
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.select import check_native, native_kernels, select
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.drafts import DraftSource, SharedTokens, check_draft
from penstock.engine.model.dtype import check_kv_heads
from penstock.engine.model.eagle import EagleConfig, check_eagle, is_eagle, read_eagle
from penstock.engine.model.eagle_weights import (
    EagleFiles,
    check_eagle_tensors,
    eagle_specs,
    has_embedding,
    load_eagle,
)
from penstock.engine.model.files import open_files
from penstock.engine.model.prediction import PredictionSource, find_prediction, load_prediction
from penstock.engine.model.quantize_cache import Checkpoint
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import LinearSpec, Recipe, check_tensors, make_recipe
from penstock.engine.model.translation import Translation, columns_of, spread
from penstock.engine.model.weights import load_weights
from penstock.engine.program.decoders import ForwardPass, make_decoder
from penstock.engine.program.interpreter import Interpreter
from penstock.engine.program.lowering import head_program, prediction_program
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.native_drafts import NativeDraft
from penstock.engine.program.ops import Program
from penstock.engine.program.parameters import Weights

_FEATURES = torch.bfloat16
"""The type of the features that a head reads of its target."""
_MOST_CAPTURED = 64
"""Sequences of the largest pass of a draft model that is captured, of about two tokens each."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A draft model, a head or a layer of its own that can be loaded with its target."""

    size: DraftSize
    attach: Callable[[LoadedModel, Weights], LoadedModel]
    """Loads it: the target, of which the weights are given, with its draft."""
    is_own: bool = False
    """Whether it is a layer of the target's own. No option asks for it, and where it does not fit, it is left out."""


def _with_draft(
    target: LoadedModel,
    config: ModelConfig,
    kernels: Kernels,
    kv: KVCache,
    decoder: ForwardPass,
    lm_head: Linear,
    **more: Any,
) -> LoadedModel:
    """Returns the target with a draft model of these parts, and `more`, which are fields of LoadedModel."""
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


def _native(
    target: LoadedModel, decoder: ForwardPass, lm_head: Linear, drafted: Tensor | None = None
) -> NativeDraft | None:
    """All passes of a draft in one call, on native kernels; see NativeDraft. None if there are none."""
    if target.kernels.team is None:
        return None
    assert isinstance(decoder, NativeDecoder)
    assert isinstance(lm_head, NativeLinear)
    return NativeDraft(target.kernels.team, decoder, lm_head, target.table, target.sampler.tables, drafted)


def _with_head(
    target: LoadedModel,
    config: ModelConfig,
    kernels: Kernels,
    layout: KVLayout,
    make: Callable[[Tensor], tuple[Program, Program]],
    lm_head: Linear,
    drafted: Tensor | None = None,
) -> LoadedModel:
    """Returns the target with a head.

    Args:
        make: makes the head's program, and the target's, for these features of the target's tokens.
        drafted: int32, the tokens whose logits lm_head makes; None for all.
    """
    kv, device = _kv_beside(target, layout, kernels), kernels.device
    size = kv.num_blocks, kv.block_size, config.hidden_size
    features = torch.zeros(size, dtype=_FEATURES, device=device)
    program, of_target = make(features)
    assert isinstance(target.decoder, Interpreter | NativeDecoder)
    target.decoder.set_program(of_target)
    target = replace(target, features=features)
    if kernels.team is not None:
        decoder = NativeDecoder(kernels.team, kv, program)
        native = _native(target, decoder, lm_head, drafted)
        return _with_draft(target, config, kernels, kv, decoder, lm_head, native=native, reads_target=True)
    if drafted is not None:
        lm_head = spread(lm_head, columns_of(drafted.to(device), target.config.vocab_size))
    most, dtype = target.options.max_rows, kernels.activation_dtype
    first, later = program.chained(torch.zeros(most, config.hidden_size, dtype=dtype, device=device))
    of_first = Interpreter(kernels, kv, first)
    model = _with_draft(target, config, kernels, kv, of_first, lm_head, reads_target=True)
    assert model.draft is not None
    chain = replace(model.draft, decoder=Interpreter(kernels, kv, later), is_chain=True)
    return replace(model, draft=replace(model.draft, chain=chain))


def _longest(target: LoadedModel) -> int:
    """Returns the positions that a draft needs: drafts beyond the end are of no use, and do no harm."""
    return target.max_model_len + target.options.max_drafts


def open_companion(
    draft: DraftSource | None,
    target: Checkpoint,
    kernels: Kernels,
    options: LoadOptions,
    max_model_len: int,
    say: Callable[[str], None],
) -> Companion | None:
    """Returns the companion, in the types of the target's kernels, on their device; None if none drafts, or can.

    Args:
        draft: a draft model or head; without one, the target's own layer drafts if it has one.

    Raises:
        CheckpointError: the draft is broken, or cannot be served as its target is.
    """
    if not options.max_drafts:
        return None
    if draft is None:
        return _open_own(target, kernels, options, say) if options.own_drafts else None
    options = replace(options, quantize_group_size=None)
    if not is_eagle(draft.folder):
        return _open_draft(draft, target.config, kernels, options, max_model_len, say)
    return _open_head(draft, target.config, kernels, options, say)


def with_room(
    companion: Companion | None, plan: Callable[..., MemoryPlan], say: Callable[[str], None]
) -> Companion | None:
    """The companion, but for a target's own layer if there is no room for it; see `fitting_draft`."""
    if companion is None or not companion.is_own or fitting_draft(plan, companion.size) is not NO_DRAFT:
        return companion
    say("there is no room for the model's own layer for multi-token prediction, which is not used")
    return None


def _own_kernels(
    target: Kernels, config: ModelConfig, options: LoadOptions, say: Callable[[str], None]
) -> Kernels:
    """Kernels of a draft, of another shape: in the types of its target's, on their device or their threads."""
    check_kv_heads(options.kv_dtype, config)
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
    max_model_len: int,
    say: Callable[[str], None],
) -> Companion:
    folder, tokens = draft.folder, draft.tokens
    config = read_config(folder)
    check_draft(target, config, max_model_len)
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
    return Companion(size, lambda model, _: _load_draft(model, source, tokens, kernels, layout))


def _load_draft(
    target: LoadedModel, source: Checkpoint, tokens: SharedTokens | None, kernels: Kernels, layout: KVLayout
) -> LoadedModel:
    config, vocab = source.config, target.config.vocab_size
    own = load_weights(config, source.files, kernels, lambda *_: None, source.recipe)
    kv = _kv_beside(target, layout, kernels)
    decoder: ForwardPass = make_decoder(config, own, kernels, kv, _longest(target))
    lm_head, native = own.lm_head, None
    if tokens is not None or config.vocab_size != vocab:
        translation = Translation.of(tokens, vocab, config.vocab_size).to(kernels.device)
        decoder, lm_head = translation.decoder(decoder), translation.head(lm_head)
    else:
        native = _native(target, decoder, lm_head)
    return _with_draft(target, config, kernels, kv, decoder, lm_head, native=native)


def _open_head(
    draft: DraftSource,
    target: ModelConfig,
    kernels: Kernels,
    options: LoadOptions,
    say: Callable[[str], None],
) -> Companion:
    head = read_eagle(draft.folder)
    check_eagle(target, head)
    if kernels.team is not None:
        _check_native(head.layer, options)
    files, recipe = EagleFiles(draft.folder), make_recipe(head.layer, options)
    check_eagle_tensors(head, files, recipe)
    after = ", ".join(str(tap) for tap in sorted(head.taps_of(target)))
    say(f"drafts come from the head {draft.folder}, which reads the model after {after} of its layers")
    kernels = _own_kernels(kernels, head.layer, options, say)
    layout = KVLayout.of(head.layer, options.block_size, beside=KVLayout.of(target, options.block_size))
    num_loose = head.layer.hidden_size + sum(norm.size for _, norm in head.layer.spec.norms())
    if has_embedding(files):
        num_loose += head.layer.vocab_size * head.layer.hidden_size
    size = _head_size(head.layer, eagle_specs(head, recipe), num_loose, kernels, layout)
    return Companion(
        size, lambda model, weights: _load_head(model, weights, head, files, recipe, kernels, layout)
    )


def _head_size(
    config: ModelConfig, specs: Mapping[str, LinearSpec], num_loose: int, kernels: Kernels, layout: KVLayout
) -> DraftSize:
    """The size of a head's linear maps, and so many other numbers; in each block are features, too."""
    weights = tensor_bytes(specs.values(), num_loose, kernels)
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
    assert isinstance(target.decoder, Interpreter | NativeDecoder)
    before, embedding = target.decoder.program, weights.rows if own.embedding is None else own.embedding

    def make(features: Tensor) -> tuple[Program, Program]:
        normed = head.residual_is_normed
        program = head_program(
            head.layer.spec, own, embedding, features, _longest(target), residual_is_normed=normed
        )
        return program, before.tapped(head.taps_of(target.config), own.fuse, features)

    return _with_head(target, head.layer, kernels, layout, make, own.lm_head, own.drafted)


def _open_own(
    target: Checkpoint, kernels: Kernels, options: LoadOptions, say: Callable[[str], None]
) -> Companion | None:
    try:
        source = find_prediction(target)
        if source is not None and kernels.team is not None:
            _check_native(source.config, options)
    except CheckpointError as error:
        say(f"the model's own layer for multi-token prediction is not used: {error}")
        return None
    if source is None:
        return None
    say("drafts come from the model's own layer for multi-token prediction")
    layout, size = own_size(source, target.config, kernels, options)
    own_kernels = _own_kernels(kernels, source.config, options, say)
    return Companion(
        size, lambda model, weights: _load_own(model, weights, source, own_kernels, layout), is_own=True
    )


def own_size(
    source: PredictionSource, target: ModelConfig, kernels: Kernels, options: LoadOptions
) -> tuple[KVLayout, DraftSize]:
    """Returns the layout and the size that a model's own layer for multi-token prediction adds to the model."""
    beside = KVLayout.of(target, options.block_size)
    layout = KVLayout.of(source.config, options.block_size, beside=beside)
    return layout, _head_size(source.config, source.specs(), source.num_loose, kernels, layout)


def _load_own(
    target: LoadedModel, weights: Weights, source: PredictionSource, kernels: Kernels, layout: KVLayout
) -> LoadedModel:
    own = load_prediction(source, kernels)
    assert isinstance(target.decoder, Interpreter | NativeDecoder)
    before, spec = target.decoder.program, source.config.spec

    def make(features: Tensor) -> tuple[Program, Program]:
        program = prediction_program(spec, source.own, own, weights.rows, features, _longest(target))
        return program, before.keeping(features)

    return _with_head(target, source.config, kernels, layout, make, weights.lm_head)


def _check_native(config: ModelConfig, options: LoadOptions) -> None:
    try:
        check_native(config, options)
    except NativeUnavailable as error:
        raise CheckpointError(f"the draft model cannot run on the native CPU kernels: {error}") from None
