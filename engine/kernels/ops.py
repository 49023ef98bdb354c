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

from engine.kernels import reference
from engine.kernels.cpu import native
from engine.kv.cache import KVCache, KVShape
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.parameters import LayerWeights, Linear, Weights
from engine.sampling import sampler
from engine.sampling.batch import SampledRows, SamplingBatch


class Attention(Protocol):
    """One step's attention: (queries [T, heads, d], one layer's KV, window) -> [T, heads * d]."""

    def __call__(self, queries: Tensor, layer_kv: Tensor, window: int, /) -> Tensor: ...


class LinearPacker(Protocol):
    """Packs (weight [out, in], bias [out] or None) of any dtype from any device; keeps neither.

    With `gated`, the rows are those of gates, then those of ups. A table with a `decoder` of its own may pack them as
    one map to silu(gate) * up; the others give both, one after the other, for `silu_mul`.
    """

    def __call__(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Linear: ...


ForwardPass = Callable[[Batch], Tensor]
"""A whole decoder: batch -> logits [R, vocab], float32."""


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
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    attention: Callable[[Batch, KVShape], Attention]
    """Prepares one step's attention, which every layer then calls."""
    sample: Callable[[Tensor, SamplingBatch], SampledRows]
    decoder: Callable[[ModelConfig, Weights, KVCache, Tensor, Tensor], ForwardPass] | None = None
    """If there is one, it runs the whole pass in place of the operations above. The last two: cos and sin."""


def select(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    say: Callable[[str], None],
    num_threads: int | None = None,
) -> Kernels:
    """The fastest table for a model on a device; `say` is told, in one line, why it is slower than it could be."""
    if device.type != "cpu":
        return reference_kernels(device, dtype)
    try:
        _check_native(config, block_size)
        team = native.load_library(say).start_team(num_threads)
    except native.NativeUnavailable as error:
        say(f"no native CPU kernels ({error}); plain torch in float32 serves instead, several times slower")
        return reference_kernels(device, dtype)
    return native_kernels(team, dtype)


def reference_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Plain torch. On a CPU everything is float32, whatever was asked for: half precision there is 50 times slower."""
    dtype = torch.float32 if device.type == "cpu" else dtype

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
        rotary=reference.rotary,
        silu_mul=reference.silu_mul,
        write_kv=reference.write_kv,
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
