"""A layer of a decoder that stops before each of its linear maps, so that they can be looked at and replaced."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.batch import blank_batch
from engine.kernels.kv_cache import KVCache, KVLayout, KVShape
from engine.kernels.reference import (
    PagedAttention,
    TokenPlaces,
    gelu_mul,
    layer_norm,
    rms_norm,
    rotate_and_write,
    silu_mul,
)
from engine.model.config import ModelConfig
from engine.model.rotary import RotaryTables
from engine.model.safetensors import DTYPES, TensorFiles
from engine.model.spec import Norm, Rows
from engine.model.tensors import expected_shapes, linear_specs, norm_in_our_order, row_order

QKV, OUT, GATE_UP, DOWN = STAGES = ("qkv", "o", "gate_up", "down")
"""The linear maps of a layer in the order in which they run; those of one stage have the same inputs."""


class Layer:
    """The weights of one layer by the names that follow `model.layers.N.` in a checkpoint; all may be replaced."""

    def __init__(self, config: ModelConfig, index: int, files: TensorFiles, device: torch.device) -> None:
        self._spec = config.spec.layers[index]
        self._eps = config.spec.norm_eps
        self.prefix = f"model.layers.{index}."
        self.linears = {
            stage: [part.name.removeprefix(self.prefix) for part in spec.parts]
            for stage, spec in linear_specs(config, index).items()
        }
        """The names of the linear maps of each stage."""
        self.weights = {
            name.removeprefix(self.prefix): files.read(name).to(device, torch.float32, copy=True)
            for name in expected_shapes(config)
            if name.startswith(self.prefix)
        }
        """By name, `weight` or `bias` included, in float32."""
        self._dtypes = {name: DTYPES[files.entries[self.prefix + name].dtype] for name in self.weights}

    def before(self, stage: str) -> str | None:
        """What alone makes the inputs of a stage, and can be divided: a norm, a linear map, or None."""
        spec = self._spec
        attention, mlp = spec.attention, spec.feed_forward
        if stage in (OUT, DOWN):
            fused = attention.qkv if stage == OUT else mlp.gate_up
            return fused[-1] if len(fused) > 1 else None
        norm = spec.input_norm if stage == QKV else spec.post_norm
        can_be_divided = norm is not None and not norm.offset and not spec.is_parallel
        return norm.name if norm is not None and can_be_divided else None

    @property
    def heads(self) -> tuple[int, int, int]:
        """(key-value heads, query heads that share one, head_dim): the inputs of the output projection."""
        own = self._spec.attention
        return own.num_kv_heads, own.num_heads // own.num_kv_heads, own.head_dim

    def divide(self, name: str, scales: Tensor) -> Tensor:
        """Divides the outputs of a norm, or of a linear map with its bias.

        Args:
            scales: of each of the inputs of the linear maps that follow; those that share a value head are the same.

        Returns:
            What the outputs have been divided by, in the shape of `scales`: a norm is rounded to its type in the
            checkpoint, and where that makes it 0, it is left as it is.
        """
        if self.weight(name).dim() == 1:
            return self._divide_norm(f"{name}.weight", scales)
        divisor = scales
        if name == self.before(OUT):
            divisor = scales.view(self.heads)[:, 0].flatten()
        self.weights[f"{name}.weight"] = self.weight(name) / divisor[:, None]
        if (bias := f"{name}.bias") in self.weights:
            self.weights[bias] = self.weights[bias] / divisor
        return scales

    def _divide_norm(self, name: str, scales: Tensor) -> Tensor:
        norm = self.weights[name]
        divided = (norm / scales).to(self._dtypes[name]).float()
        divided = torch.where((divided != 0) & divided.isfinite(), divided, norm)
        self.weights[name] = divided
        return torch.where(divided != 0, norm / divided, torch.ones_like(norm))

    def weight(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"]

    def run(self, x: Tensor, tables: RotaryTables) -> Iterator[Tensor]:
        """Yields the inputs of each stage, and last the output; every stage has the weights of the moment it runs.

        Args:
            x: [T, hidden] float32, one sequence from its start.
            tables: of at least T positions.
        """
        spec, by = self._spec, self._spec.residual_scale
        read = inner = self._norm(x, spec.input_norm)
        yield inner
        inner = self._attend(inner, tables)
        yield inner
        attended = self._norm(self._made(inner, OUT), spec.attention_norm) * by
        x = x + attended
        inner = read if spec.is_parallel else self._norm(x, spec.post_norm)
        yield inner
        inner = _GLU[spec.feed_forward.activation](self._made(inner, GATE_UP))
        yield inner
        yield x + self._norm(self._made(inner, DOWN), spec.feed_forward_norm) * by

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        kernel = layer_norm if norm.is_centered else rms_norm
        return kernel(x, self.weight(norm.name) + norm.offset, self._eps)

    def _made(self, x: Tensor, stage: str) -> Tensor:
        """What the linear maps of a stage make, one after another."""
        made = [
            F.linear(x, self.weight(name), self.weights.get(f"{name}.bias")) for name in self.linears[stage]
        ]
        return torch.cat(made, dim=-1)

    def _attend(self, x: Tensor, tables: RotaryTables) -> Tensor:
        """[T, hidden] -> [T, num_heads * head_dim], causal, over a cache that has this sequence alone."""
        own, length = self._spec.attention, len(x)
        shape = KVShape(num_kv_heads=own.num_kv_heads, head_dim=own.head_dim, block_size=length)
        kv = KVCache(KVLayout.even(shape, 1), 1, torch.float32, x.device)
        batch = blank_batch([length], [length], torch.zeros((1, 1), dtype=torch.int32)).to(x.device)
        q_norm, k_norm = self._head_norm(own.q_norm), self._head_norm(own.k_norm)
        places = TokenPlaces(batch.positions, torch.arange(length, device=x.device), *tables.of(own))
        qkv = self._in_our_order(self._made(x, QKV))
        queries = rotate_and_write(
            qkv, q_norm, k_norm, self._eps, places, kv.layer(0), shape, norms_last=own.norms_after_rotation
        )
        return PagedAttention(batch, shape)(queries, kv.layer(0), own.window, own.scale, own.softcap)

    def _head_norm(self, norm: Norm | None) -> Tensor | None:
        if norm is None:
            return None
        return norm_in_our_order(self.weight(norm.name) + norm.offset, self._spec.attention.head_order)

    def _in_our_order(self, qkv: Tensor) -> Tensor:
        """Puts the dimensions of queries and keys in the order in which they are rotated."""
        own = self._spec.attention
        order = row_order(Rows("", (own.q_size, own.kv_size, own.kv_size), own.head_order))
        return qkv if order is None else qkv[:, order.to(qkv.device)]


_GLU = {"silu": silu_mul, "gelu_tanh": gelu_mul}
