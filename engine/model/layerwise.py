"""A layer of a decoder that stops before each of its linear maps, so that they can be looked at and replaced."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.reference import rms_norm, rotary
from engine.model.config import ModelConfig
from engine.model.safetensors import DTYPES, TensorFiles
from engine.model.weights import expected_shapes, linear_specs

QKV, OUT, GATE_UP, DOWN = STAGES = ("qkv", "o", "gate_up", "down")
"""The linear maps of a layer in the order in which they run; those of one stage have the same inputs."""

INPUT_NORM, POST_NORM, V, UP = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.v_proj",
    "mlp.up_proj",
)
_NORMS = (INPUT_NORM, POST_NORM)


class Layer:
    """The weights of one layer by the names that follow `model.layers.N.` in a checkpoint; all may be replaced."""

    def __init__(self, config: ModelConfig, index: int, files: TensorFiles, device: torch.device) -> None:
        self._config = config
        self._window = config.window(index)
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

    @property
    def heads(self) -> tuple[int, int, int]:
        """(key-value heads, query heads that share one, head_dim): the inputs of the output projection."""
        config = self._config
        return config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim

    def divide(self, name: str, scales: Tensor) -> Tensor:
        """Divides the outputs of a norm, or of a linear map with its bias.

        Args:
            scales: of each of the inputs of the linear maps that follow; those that share a value head are the same.

        Returns:
            What the outputs have been divided by, in the shape of `scales`: a norm is rounded to its type in the
            checkpoint, and where that makes it 0, it is left as it is.
        """
        if name in _NORMS:
            return self._divide_norm(f"{name}.weight", scales)
        divisor = scales
        if name == V:
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

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> Iterator[Tensor]:
        """Yields the inputs of each stage, and last the output; every stage has the weights of the moment it runs.

        Args:
            x: [T, hidden] float32, one sequence from its start.
            cos, sin: of the angles at the T positions, [T, head_dim / 2].
        """
        inner = self._norm(x, INPUT_NORM)
        yield inner
        inner = self._attend(inner, cos, sin)
        yield inner
        x = x + self._linear(inner, self.linears[OUT][0])
        inner = self._norm(x, POST_NORM)
        yield inner
        gate, up = self.linears[GATE_UP]
        inner = F.silu(self._linear(inner, gate)) * self._linear(inner, up)
        yield inner
        yield x + self._linear(inner, self.linears[DOWN][0])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weight(name), self._config.rms_norm_eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight(name), self.weights.get(f"{name}.bias"))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, hidden] -> [T, num_heads * head_dim], causal."""
        queries, keys, values = (
            torch.unflatten(self._linear(x, name), 1, (-1, self._config.head_dim))
            for name in self.linears[QKV]
        )
        if self._config.qk_norm:
            queries, keys = self._norm(queries, "self_attn.q_norm"), self._norm(keys, "self_attn.k_norm")
        queries, keys = rotary(queries, cos, sin), rotary(keys, cos, sin)
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=self._mask(len(x), x.device) if self._window else None,
            is_causal=not self._window,
            enable_gqa=True,
        )
        return attended.transpose(0, 1).flatten(1)

    def _mask(self, length: int, device: torch.device) -> Tensor:
        """[T, T] bool: a token sees itself and what came before it, at most `window` tokens in all."""
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
        return seen.triu_(1 - self._window)
