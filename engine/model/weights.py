"""What the weights of the decoder are called in a checkpoint, and how they get from disk into a kernel table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.kernels.linear import Linear
from engine.kernels.ops import Kernels
from engine.model.config import ModelConfig
from engine.model.parameters import GatedMlp, LayerWeights, Weights
from engine.model.safetensors import DTYPES, TensorFiles
from engine.quant.formats import DENSE, Format, NamedTensors
from engine.quant.integers import Integers, Quantization

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
    format: Format = DENSE
    """How the checkpoint stores each part."""

    @property
    def out_features(self) -> int:
        return sum(rows for _, rows in self.parts)


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
    return dict(_expected_shapes(config))


def _expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    for i in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{i}.{name}", shape
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)


def check_tensors(config: ModelConfig, files: TensorFiles) -> None:
    """Compares the tensors of the files with those that the config needs; the files may have more.

    The check ends at the first tensor that is wrong, so that a config.json with absurd sizes costs nothing.

    Raises:
        CheckpointError: naming the first tensor that is missing, or has a wrong shape or an unsupported dtype.
    """
    for name, shape in _expected_shapes(config):
        entry = files.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{files.folder}: tensor {name} is missing{_layers_said(config, name)}")
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, "
                f"and config.json says {list(shape)} ({_size_fields(name)})"
            )
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{entry.file}: {name} is {entry.dtype}, which is not supported; only {', '.join(DTYPES)} are"
            )


_SIZE_FIELDS = {
    "embed_tokens": "vocab_size, hidden_size",
    "lm_head": "vocab_size, hidden_size",
    "q_proj": "num_attention_heads * head_dim, hidden_size",
    "k_proj": "num_key_value_heads * head_dim, hidden_size",
    "v_proj": "num_key_value_heads * head_dim, hidden_size",
    "o_proj": "hidden_size, num_attention_heads * head_dim",
    "gate_proj": "intermediate_size, hidden_size",
    "up_proj": "intermediate_size, hidden_size",
    "down_proj": "hidden_size, intermediate_size",
    "q_norm": "head_dim",
    "k_norm": "head_dim",
}
"""The entries of config.json that the shape of a tensor follows from."""


def _size_fields(name: str) -> str:
    module, _, kind = name.rpartition(".")
    sizes = _SIZE_FIELDS.get(module.rpartition(".")[2], "hidden_size")
    return sizes.partition(",")[0] if kind == "bias" else sizes


def _layers_said(config: ModelConfig, name: str) -> str:
    of_a_layer = name.startswith("model.layers.")
    return f"; config.json says num_hidden_layers {config.num_layers}" if of_a_layer else ""


def load_weights(
    config: ModelConfig,
    files: TensorFiles,
    kernels: Kernels,
    progress: Progress,
    quantization: Quantization | None = None,
) -> Weights:
    """Reads, quantizes and packs layer by layer, so that at most one layer exists twice.

    With a quantization, the embedding is a tensor of its own even if the checkpoint ties the output head to it: only
    the head has integers.

    Raises:
        CheckpointError: see `check_tensors` and `Quantization.layer_format`.
    """
    check_tensors(config, files)
    check_quantization(config, quantization)
    reader = _Reader(files, kernels, progress, sum(_num_bytes(config, files)), quantization)
    embedding = reader.tensor("model.embed_tokens.weight", kernels.embedding_dtype)
    layers = [_load_layer(config, reader, i) for i in range(config.num_layers)]
    final_norm = reader.tensor("model.norm.weight", kernels.activation_dtype)
    lm_head = reader.head(config, embedding)
    is_tied = config.tie_word_embeddings and quantization is None
    return Weights(embedding, layers, final_norm, lm_head, is_tied=is_tied)


def check_quantization(config: ModelConfig, quantization: Quantization | None) -> None:
    """Checks that the groups of a quantization divide the inputs of every linear map.

    Raises:
        CheckpointError: see `Quantization.layer_format`.
    """
    if quantization is not None:
        for layer in range(config.num_layers):
            for spec in linear_specs(config).values():
                quantization.layer_format(layer, spec.in_features)


def _load_layer(config: ModelConfig, reader: _Reader, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    linears = {field: reader.linear(layer, prefix, spec) for field, spec in linear_specs(config).items()}
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
        feed_forward=GatedMlp(linears["gate_up"], linears["down"], reader.kernels.silu_mul),
    )


class _Reader:
    """Takes tensors off the files, counts the bytes, and packs linear maps, quantized if that is asked for."""

    def __init__(
        self,
        files: TensorFiles,
        kernels: Kernels,
        progress: Progress,
        total: int,
        quantization: Quantization | None,
    ) -> None:
        self.kernels = kernels
        self._quantization = quantization
        self._files = files
        self._progress = progress
        self._done, self._total = 0, total

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A copy of its own, on the device."""
        return self._read(name).to(device=self.kernels.device, dtype=dtype, copy=True)

    def linear(self, layer: int, prefix: str, spec: LinearSpec) -> Linear:
        parts = [
            {
                suffix: self._read(f"{prefix}{name}.{suffix}")
                for suffix, _ in spec.format.shapes(rows, spec.in_features)
            }
            for name, rows in spec.parts
        ]
        biases = [self._read(f"{prefix}{name}.bias") for name, _ in spec.parts] if spec.bias else []
        bias = torch.cat(biases) if biases else None
        quantization = self._quantization
        integers = None if quantization is None else quantization.layer_format(layer, spec.in_features)
        return self._pack(spec.format.join(parts), spec.format, integers, bias, gated=spec.gated)

    def head(self, config: ModelConfig, embedding: Tensor) -> Linear:
        """The output head, whose rows are those of the embedding if the checkpoint ties them."""
        integers = None if self._quantization is None else self._quantization.head_format(config.hidden_size)
        if config.tie_word_embeddings:
            return self._pack({"weight": embedding}, DENSE, integers, None)
        return self._pack(DENSE.join([{"weight": self._read("lm_head.weight")}]), DENSE, integers, None)

    def _pack(
        self,
        tensors: NamedTensors,
        format: Format,
        integers: Integers | None,
        bias: Tensor | None,
        *,
        gated: bool = False,
    ) -> Linear:
        if integers is not None:
            tensors, format = integers.quantize(format.unpack(tensors)), integers
        return self.kernels.linear(tensors, format, bias, gated=gated)

    def _read(self, name: str) -> Tensor:
        self._done += self._files.entries[name].num_bytes
        self._progress(self._done, self._total)
        return self._files.read(name)


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, length in norm_shapes(config).values():
        yield f"{name}.weight", (length,)
    for spec in linear_specs(config).values():
        for name, rows in spec.parts:
            for suffix, shape in spec.format.shapes(rows, spec.in_features):
                yield f"{name}.{suffix}", shape
            if spec.bias:
                yield f"{name}.bias", (rows,)


def _num_bytes(config: ModelConfig, files: TensorFiles) -> Iterator[int]:
    return (files.entries[name].num_bytes for name, _ in _expected_shapes(config))
