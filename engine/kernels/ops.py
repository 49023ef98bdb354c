"""The kernel table: which implementation of each operation serves this device.

The decoder and the sampler call nothing but what is in the table. Faster kernels replace single entries of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.execution import slot_table
from engine.execution.slot_table import Gather
from engine.kernels import reference
from engine.kernels.batch import Batch
from engine.kernels.cpu import native
from engine.kernels.kv_cache import KVCache, KVShape
from engine.kernels.reference import TokenPlaces
from engine.model.config import LoadOptions, ModelConfig
from engine.model.parameters import LayerWeights, Linear, Weights
from engine.sampling import sampler
from engine.sampling.batch import SampledRows, SamplingBatch
from engine.sampling.device import Choose, PlainChoose

LONG_CHUNK = 1024
"""Tokens of a chunk from which on torch's attention is worth a try: in shorter ones the linear maps are nearly all."""


class Attention(Protocol):
    """One step's attention: (queries [T, heads, d], one layer's KV, window) -> [T, heads * d]."""

    def __call__(self, queries: Tensor, layer_kv: Tensor, window: int, /) -> Tensor: ...


class RotateAndWrite(Protocol):
    """See `reference.rotate_and_write`."""

    def __call__(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        places: TokenPlaces,
        layer_kv: Tensor,
        shape: KVShape,
        /,
    ) -> Tensor: ...


class LinearPacker(Protocol):
    """Packs (weight [out, in], bias [out] or None) of any dtype from any device; keeps neither.

    With `gated`, the rows are those of gates, then those of ups. A table with a `decoder` of its own may pack them as
    one map to silu(gate) * up; the others give both, one after the other, for `silu_mul`.
    """

    def __call__(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Linear: ...


ForwardPass = Callable[[Batch], Tensor]
"""A whole decoder: batch -> logits [R, vocab] in the dtype of activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Each entry is specified by the function or class of the same name in `kernels/reference.py`."""

    name: str
    device: torch.device
    weight_dtype: torch.dtype
    """What embeddings are kept in; `linear` packs as it likes."""
    activation_dtype: torch.dtype
    kv_dtype: torch.dtype
    linear: LinearPacker
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    slot_mapping: Callable[[Batch, int], Tensor]
    rotate_and_write: RotateAndWrite
    silu_mul: Callable[[Tensor], Tensor]
    attention: Callable[[Batch, KVShape], Attention]
    """Prepares one step's attention, which every layer then calls."""
    sample: Callable[[Tensor, SamplingBatch], SampledRows]
    is_static: bool = False
    """Nothing of it looks at a batch on the host, so that graphs can hold it."""
    gather: Gather = slot_table.gather
    make_choose: Callable[[int, int, torch.device], Choose] = PlainChoose
    """(most rows, vocabulary, device) -> what chooses their tokens."""
    decoder: Callable[[ModelConfig, Weights, KVCache, Tensor, Tensor], ForwardPass] | None = None
    """If there is one, it runs the whole pass in place of the operations above. The last two: cos and sin."""


def select(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    options: LoadOptions,
    say: Callable[[str], None],
) -> Kernels:
    """The fastest table for a model on a device.

    Args:
        say: is told, in one line each, why it is slower than it could be, and what was measured to choose.
    """
    if device.type == "cuda":
        kernels = _select_triton(config, device, dtype, options, say)
        return _with_fastest_prefill(kernels, config, options, say)
    try:
        _check_native(config, options.block_size)
        team = native.load_library(say).start_team(options.num_threads)
    except native.NativeUnavailable as error:
        say(f"no native CPU kernels ({error}); plain torch in float32 serves instead, several times slower")
        return reference_kernels(device, dtype)
    return native_kernels(team, dtype)


def _select_triton(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    options: LoadOptions,
    say: Callable[[str], None],
) -> Kernels:
    try:
        kernels = triton_kernels(config, device, dtype, options)
        _try_out(kernels)
    except Exception as error:  # Triton has errors of its own, and asserts what it did not find
        reason = str(error).partition("\n")[0] or type(error).__name__
        say(f"no Triton kernels ({reason}); plain torch serves instead, without CUDA graphs and slower")
        return reference_kernels(device, dtype)
    return kernels


def _with_fastest_prefill(
    kernels: Kernels, config: ModelConfig, options: LoadOptions, say: Callable[[str], None]
) -> Kernels:
    """With torch's attention for long chunks where the card is faster at it, see `kernels/gathered.py`."""
    windows = any(config.window(layer) for layer in range(config.num_layers))
    if kernels.name != "triton" or windows or options.max_batch_tokens < LONG_CHUNK:
        return kernels
    # Not above: it takes seconds, for a part of torch that nothing else here needs.
    from engine.kernels import gathered, prefill_choice

    model = prefill_choice.Model(
        shape=KVShape.of(config, options.block_size),
        num_heads=config.num_heads,
        dtype=kernels.kv_dtype,
        device=kernels.device,
        max_position=options.max_model_len or config.max_position,
        min_queries=LONG_CHUNK,
        max_queries=options.max_batch_tokens,
    )
    ways = prefill_choice.choose(model, kernels.attention, prefill_choice.seconds_on_card, say)
    if ways.whole is None and ways.later is None:
        return kernels
    return replace(kernels, attention=partial(gathered.attention, others=kernels.attention, ways=ways))


def _try_out(kernels: Kernels) -> None:
    """Runs one small kernel: triton may be there, and not the C compiler or the driver that it needs."""
    row = torch.ones(1, 16, device=kernels.device, dtype=kernels.activation_dtype)
    kernels.rms_norm(row, row[0], 1e-6)


def reference_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Plain torch. On a CPU everything is float32, whatever was asked for: half precision there is 50 times slower."""
    return _torch_kernels(device, torch.float32 if device.type == "cpu" else dtype)


def triton_kernels(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, options: LoadOptions
) -> Kernels:
    """Triton between the linear maps, which are cuBLAS's; nothing waits for the device, so that graphs can hold it.

    Its workspace, and what the kernels return, is all that it allocates; no batch may have more sequences than the
    options say. A CPU device is for tests, where triton interprets.

    Raises:
        ImportError: there is no triton here.
    """
    # Not above: the package is there without triton, too.
    from engine.kernels.triton import activation, attention, inputs, norms, rotary, sampling

    shape = KVShape.of(config, options.block_size)
    windows = {config.window(layer) for layer in range(config.num_layers)}
    workspace = attention.Workspace(
        shape,
        dtype,
        config.num_heads,
        options.max_num_seqs,
        device,
        windows=windows,
        max_few_queries=options.max_query_len,
    )
    return replace(
        _torch_kernels(device, dtype),
        name="triton",
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        slot_mapping=rotary.slot_mapping,
        rotate_and_write=rotary.rotate_and_write,
        silu_mul=activation.silu_mul,
        attention=partial(attention.TritonAttention, workspace=workspace),
        is_static=True,
        gather=partial(inputs.gather, block_size=options.block_size),
        make_choose=sampling.TritonChoose,
    )


def _torch_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    def linear(weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Linear:  # noqa: ARG001
        moved = None if bias is None else bias.to(device, dtype)
        return reference.ReferenceLinear(weight.to(device, dtype), moved)

    return Kernels(
        name="torch",
        device=device,
        weight_dtype=dtype,
        activation_dtype=dtype,
        kv_dtype=dtype,
        linear=linear,
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        slot_mapping=reference.slot_mapping,
        rotate_and_write=reference.rotate_and_write,
        silu_mul=reference.silu_mul,
        attention=reference.PagedAttention,
        sample=sampler.sample,
    )


def native_kernels(team: native.Team, dtype: torch.dtype) -> Kernels:
    """One C call for a whole pass, and one for sampling; activations are float32, weights and KV are `dtype`."""

    def linear(weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Linear:
        return native.PackedLinear(team, weight, bias, dtype, gated)

    def sample(logits: Tensor, batch: SamplingBatch) -> SampledRows:
        return native.sample(team, logits, batch, batch.wants_logprobs)

    return replace(
        reference_kernels(torch.device("cpu"), torch.float32),
        name="native",
        weight_dtype=dtype,
        kv_dtype=dtype,
        linear=linear,
        sample=sample,
        decoder=partial(_native_decoder, team),
    )


def _native_decoder(
    team: native.Team, config: ModelConfig, weights: Weights, kv: KVCache, cos: Tensor, sin: Tensor
) -> ForwardPass:
    return native.NativeDecoder(
        team,
        config,
        embedding=None if config.tie_word_embeddings else weights.embedding,
        layers=[_native_layer(layer) for layer in weights.layers],
        final_norm=weights.final_norm,
        lm_head=_packed(weights.lm_head),
        cos=cos,
        sin=sin,
        kv=kv.data,
    )


def _native_layer(layer: LayerWeights) -> native.NativeLayer:
    return native.NativeLayer(
        attention_norm=layer.input_norm,
        qkv=_packed(layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=_packed(layer.o),
        mlp_norm=layer.post_norm,
        gate_up=_packed(layer.gate_up),
        down=_packed(layer.down),
    )


def _packed(linear: Linear) -> native.PackedLinear:
    assert isinstance(linear, native.PackedLinear)
    return linear


def _check_native(config: ModelConfig, block_size: int) -> None:
    if block_size != native.BLOCK_SIZE:
        raise native.NativeUnavailable(f"they have blocks of {native.BLOCK_SIZE} tokens, not {block_size}")
    if config.head_dim % 8:
        raise native.NativeUnavailable(f"they need a head_dim that is a multiple of 8, not {config.head_dim}")
