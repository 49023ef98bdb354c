"""What the weights of the decoder are called in a checkpoint, and how they get from disk into a kernel table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.kernels.ops import Kernels
from engine.model.config import ModelConfig
from engine.model.parameters import LayerWeights, Linear, Weights
from engine.model.safetensors import DTYPES, TensorFiles

Progress = Callable[[int, int], None]
"""Told of bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear map of a layer, fused of the checkpoint's `parts` (name, rows)."""

    parts: tuple[tuple[str, int], ...]
    in_features: int
    bias: bool
    gated: bool = False
    """See LinearPacker."""


def linear_specs(config: ModelConfig) -> dict[str, LinearSpec]:
    """The linear maps of one layer, by their field of LayerWeights."""
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    return {
        "qkv": LinearSpec(
            (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)),
            hidden,
            config.qkv_bias,
        ),
        "o": LinearSpec((("self_attn.o_proj", hidden),), q, config.o_bias),
        "gate_up": LinearSpec(
            (("mlp.gate_proj", inner), ("mlp.up_proj", inner)), hidden, config.mlp_bias, gated=True
        ),
        "down": LinearSpec((("mlp.down_proj", hidden),), inner, config.mlp_bias),
    }


def norm_shapes(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """The norms of one layer, by their field of LayerWeights: name in the checkpoint, and length."""
    norms = {
        "input_norm": ("input_layernorm", config.hidden_size),
        "post_norm": ("post_attention_layernorm", config.hidden_size),
    }
    if config.qk_norm:
        norms["q_norm"] = ("self_attn.q_norm", config.head_dim)
        norms["k_norm"] = ("self_attn.k_norm", config.head_dim)
    return norms


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must have."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size)
    }
    for i in range(config.num_layers):
        shapes.update((f"model.layers.{i}.{name}", shape) for name, shape in _layer_shapes(config))
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def check_tensors(config: ModelConfig, files: TensorFiles) -> None:
    """Compares what is there with what the config needs; more than that is fine.

    Raises:
        CheckpointError: naming the first tensor that is missing, or has a wrong shape or an unsupported dtype.
    """
    for name, shape in expected_shapes(config).items():
        entry = files.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{files.folder}: tensor {name} is missing")
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, and config.json says {list(shape)}"
            )
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{entry.file}: {name} is {entry.dtype}, which is not supported; only {', '.join(DTYPES)} are"
            )


def load_weights(config: ModelConfig, files: TensorFiles, kernels: Kernels, progress: Progress) -> Weights:
    """Reads and packs layer by layer, so that at most one layer exists twice.

    Raises:
        CheckpointError: see `check_tensors`.
    """
    check_tensors(config, files)
    reader = _Reader(files, kernels, progress, sum(_num_bytes(config, files)))
    embedding = reader.tensor("model.embed_tokens.weight", kernels.weight_dtype)
    layers = [_load_layer(config, reader, f"model.layers.{i}.") for i in range(config.num_layers)]
    final_norm = reader.tensor("model.norm.weight", kernels.activation_dtype)
    if config.tie_word_embeddings:
        lm_head = kernels.linear(embedding, None)
    else:
        lm_head = reader.linear("", LinearSpec((("lm_head", config.vocab_size),), config.hidden_size, False))
    return Weights(embedding, layers, final_norm, lm_head)


def _load_layer(config: ModelConfig, reader: _Reader, prefix: str) -> LayerWeights:
    linears = {field: reader.linear(prefix, spec) for field, spec in linear_specs(config).items()}
    norms = {
        field: reader.tensor(f"{prefix}{name}.weight", reader.kernels.activation_dtype)
        for field, (name, _) in norm_shapes(config).items()
    }
    return LayerWeights(
        input_norm=norms["input_norm"],
        qkv=linears["qkv"],
        q_norm=norms.get("q_norm"),
        k_norm=norms.get("k_norm"),
        o=linears["o"],
        post_norm=norms["post_norm"],
        gate_up=linears["gate_up"],
        down=linears["down"],
    )


class _Reader:
    """Takes tensors off the files and counts the bytes."""

    def __init__(self, files: TensorFiles, kernels: Kernels, progress: Progress, total: int) -> None:
        self.kernels = kernels
        self._files = files
        self._progress = progress
        self._done, self._total = 0, total

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A copy of its own, on the device."""
        return self._read(name).to(device=self.kernels.device, dtype=dtype, copy=True)

    def linear(self, prefix: str, spec: LinearSpec) -> Linear:
        names = [prefix + name for name, _ in spec.parts]
        weight = torch.cat([self._read(f"{name}.weight") for name in names])
        bias = torch.cat([self._read(f"{name}.bias") for name in names]) if spec.bias else None
        return self.kernels.linear(weight, bias, gated=spec.gated)

    def _read(self, name: str) -> Tensor:
        self._done += self._files.entries[name].num_bytes
        self._progress(self._done, self._total)
        return self._files.read(name)


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, length in norm_shapes(config).values():
        yield f"{name}.weight", (length,)
    for spec in linear_specs(config).values():
        for name, rows in spec.parts:
            yield f"{name}.weight", (rows, spec.in_features)
            if spec.bias:
                yield f"{name}.bias", (rows,)


def _num_bytes(config: ModelConfig, files: TensorFiles) -> Iterator[int]:
    return (files.entries[name].num_bytes for name in expected_shapes(config))
