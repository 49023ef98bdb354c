"""The kernel table: which implementation of each operation serves this device.

The decoder and the sampler call nothing but what is in the table. Faster kernels replace single entries of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kv.cache import KVCache, KVShape
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.parameters import Linear as Linear
from engine.model.parameters import Weights
from engine.sampling import sampler
from engine.sampling.batch import SampledRows, SamplingBatch


class Attention(Protocol):
    """One step's attention: (queries [T, heads, d], one layer's KV, window) -> [T, heads * d]."""

    def __call__(self, queries: Tensor, layer_kv: Tensor, window: int, /) -> Tensor: ...


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
    linear: Callable[[Tensor, Tensor | None], Linear]
    """Packs (weight [out, in], bias [out] or None) of any dtype from any device; keeps neither."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    attention: Callable[[Batch, KVShape], Attention]
    """Prepares one step's attention, which every layer then calls."""
    sample: Callable[[Tensor, SamplingBatch], SampledRows]
    decoder: Callable[[ModelConfig, Weights, KVCache], ForwardPass] | None = None
    """If there is one, it runs the whole pass in place of the operations above."""


def select(device: torch.device, dtype: torch.dtype, say: Callable[[str], None]) -> Kernels:  # noqa: ARG001
    """The fastest table for a device. `say` is told, in one line, of anything that will be slower than it could be."""
    return reference_kernels(device, dtype)


def reference_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Plain torch. On a CPU everything is float32, whatever was asked for: half precision there is 50 times slower."""
    dtype = torch.float32 if device.type == "cpu" else dtype

    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
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
