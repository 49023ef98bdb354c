"""Gets the weights of a decoder from disk into a kernel table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from penstock.engine.ahead import in_order
from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.heap import trim_heap
from penstock.engine.kernels.cpu.rounding import rounding_of
from penstock.engine.kernels.experts import ExpertLinear
from penstock.engine.kernels.linear import Linear, chained
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.recurrent import StateVectors
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensors import (
    AS_IT_IS,
    LinearSpec,
    Part,
    Recipe,
    check_tensors,
    embedding_spec,
    expected_tensors,
    head_spec,
    layer_embeddings_spec,
    layer_table_spec,
    linear_specs,
    norm_in_our_order,
    packs_embedding,
)
from penstock.engine.program.parameters import (
    AttentionWeights,
    ExpertsWeights,
    LatentWeights,
    LayerEmbeddingWeights,
    LayerWeights,
    MlpWeights,
    StateWeights,
    Weights,
)
from penstock.engine.quant.float8 import FLOAT8, Float8, Scaling
from penstock.engine.quant.formats import DENSE, Format, NamedTensors, by_rows
from penstock.engine.quant.integers import Integers, widen
from penstock.engine.quant.storage import BadTensor
from penstock.engine.quant.storages.gguf import BlockRows, Blocks, StoredBlocks
from penstock.engine.quant.storages.names import LAYERS
from penstock.engine.spec import (
    Attention,
    Experts,
    HeadOrder,
    LatentAttention,
    Layer,
    Mixer,
    Mlp,
    Norm,
    ShortConv,
    StateMixer,
    expert_field,
)

Progress = Callable[[int, int], None]
"""Is called with the bytes done and the bytes in all."""


def load_weights(
    config: ModelConfig,
    files: TensorFiles,
    kernels: Kernels,
    progress: Progress,
    recipe: Recipe = AS_IT_IS,
) -> Weights:
    """Reads, repacks or quantizes, and packs layer by layer, so that at most one layer exists twice.

    If the output head is quantized here, the embedding is a tensor of its own even if the checkpoint ties them.

    Raises:
        CheckpointError: see `check_tensors`.
    """
    check_tensors(config, files, recipe)
    names = [name for name, _ in expected_tensors(config, recipe) if name in files.entries]
    total = sum(files.entries[name].num_bytes for name in names)
    reader = Reader(files, kernels, progress, total)
    embedding, tied_head = _embedding(config, reader, recipe)
    files.give_back()
    layers = []
    for layer in range(config.num_layers):
        specs = linear_specs(config, layer, recipe)
        layers.append(load_layer(config.spec.layers[layer], reader, layer, specs))
        files.give_back()
        trim_heap()  # else the C library keeps several freed layers
    final_norm, lm_head = _end(config, reader, recipe, tied_head)
    has_same_rows = tied_head is embedding or head_spec(config, recipe).format == DENSE
    return Weights(
        embedding,
        layers,
        final_norm,
        lm_head,
        is_tied=kernels.team is not None and tied_head is not None and has_same_rows,
        layer_embeddings=_layer_embeddings(config, reader, recipe),
    )


def _embedding(config: ModelConfig, reader: Reader, recipe: Recipe) -> tuple[Tensor | Linear, Linear | None]:
    """The embedding, and the output head if the two are tied; see `Weights.embedding` for a stage without one."""
    own, kernels = config.spec, reader.kernels
    if not own.has_embedding:
        return torch.empty(0, config.hidden_size, device=kernels.device), None
    spec = embedding_spec(config, recipe)
    stored, is_head = reader.single(spec), own.ties_embeddings and own.has_head
    if kernels.keeps_narrow and packs_embedding(config, recipe):
        packed = reader.pack(spec, stored)
        return packed, packed if is_head else None
    copy = reader.embedding(spec, stored)
    if not is_head:
        return copy, None
    head = head_spec(config, recipe)
    tensors = {"weight": copy} if head.stored == DENSE else stored
    return copy, reader.pack(head, head.given(tensors, reader.round_groups))


def _end(
    config: ModelConfig, reader: Reader, recipe: Recipe, tied_head: Linear | None
) -> tuple[Tensor, Linear]:
    """The final norm and the output head; see `Weights` for a stage without them."""
    own, kernels = config.spec, reader.kernels
    if not own.has_head:
        return torch.empty(0, device=kernels.device), _as_it_is
    final_norm = reader.norm(own.final_norm)
    lm_head = tied_head or reader.linear(head_spec(config, recipe))
    if (own.logit_scale, own.logit_softcap) != (1.0, 0.0):
        lm_head = kernels.cap(lm_head, own.logit_scale, own.logit_softcap)
    return final_norm, lm_head


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def _layer_embeddings(config: ModelConfig, reader: Reader, recipe: Recipe) -> LayerEmbeddingWeights | None:
    own = config.spec.layer_embeddings
    if own is None:
        return None
    map = reader.linear(layer_embeddings_spec(own, config, recipe))
    return LayerEmbeddingWeights(
        _layer_table(reader, layer_table_spec(own, recipe)), map, reader.norm(own.norm)
    )


def _layer_table(reader: Reader, spec: LinearSpec) -> Tensor | Linear:
    """The table as it is stored: the memory of the mapped file, or integers in the layout of a linear map."""
    stored, format = reader.single(spec), spec.stored
    if format == DENSE:
        return stored["weight"].to(reader.kernels.device)
    keeps = reader.kernels.keeps_narrow and isinstance(format, Integers)
    return reader.pack(spec, stored) if keeps else reader.embedding(spec, stored)


def load_layer(layer: Layer, reader: Reader, number: int, specs: Mapping[str, LinearSpec]) -> LayerWeights:
    """Returns one layer, whose linear maps are given by `specs`."""
    prefix, embedding = f"{LAYERS}{number}.", layer.embedding
    norms = layer.outer_norms() | ({} if embedding is None else {"per_layer_norm": embedding.norm})
    maps = {} if embedding is None else embedding.maps()
    found: dict[str, Any] = {field: reader.norm(norm, prefix) for field, norm in norms.items()}
    found |= {field: reader.linear(specs[field]) for field in maps}
    return LayerWeights(
        mixer=_mixer(layer.mixer, reader, prefix, specs),
        feed_forward=_feed_forward(layer.feed_forward, reader, prefix, specs),
        scalar=float(reader.read(f"{LAYERS}{number}.{layer.scalar}")) if layer.scalar else 1.0,
        **found,
    )


def _mixer(
    own: Mixer | None, reader: Reader, prefix: str, specs: Mapping[str, LinearSpec]
) -> AttentionWeights | LatentWeights | StateWeights | None:
    if own is None or isinstance(own, LatentAttention):
        return None if own is None else _latent_attention(own, reader, prefix, specs)
    linears: dict[str, Any] = {field: reader.linear(specs[field]) for field in own.maps()}
    if isinstance(own, Attention):
        heads = own.head_order
        norms: dict[str, Any] = {
            field: reader.norm(norm, prefix, heads) for field, norm in own.norms().items()
        }
        vectors: dict[str, Any] = {
            field: reader.vector(f"{prefix}{vector.name}") for field, vector in own.vectors().items()
        }
        return AttentionWeights(**linears, **norms, **vectors)
    return StateWeights(spec=own, vectors=_state_vectors(own, reader, prefix), **linears)


def _latent_attention(
    own: LatentAttention, reader: Reader, prefix: str, specs: Mapping[str, LinearSpec]
) -> LatentWeights:
    maps, heads = own.maps(), (own.num_heads, -1)
    linears: dict[str, Any] = {
        field: reader.linear(specs[field]) for field, map in maps.items() if not map.is_unpacked
    }
    norms: dict[str, Any] = {field: reader.norm(norm, prefix) for field, norm in own.norms().items()}
    ups = [torch.unflatten(reader.dense(specs[field]), 0, heads) for field in maps if field not in linears]
    up = torch.cat((ups[0].mT, ups[1]), 1) if own.is_split else ups[0]
    return LatentWeights(up=reader.kernels.pack_latent_maps(up, own.plain_size), **linears, **norms)


def _state_vectors(own: StateMixer, reader: Reader, prefix: str) -> StateVectors:
    found = {
        field: reader.vector(f"{prefix}{vector.name}").view(vector.shape)
        for field, vector in own.vectors().items()
    }
    if not isinstance(own, ShortConv) and own.has_log_decay:
        found["decay"] = -found["decay"].exp()
    norms = {field: reader.norm(norm, prefix).float() for field, norm in own.norms().items()}
    return StateVectors(**found, **norms)


def _feed_forward(
    own: Mlp | Experts | None, reader: Reader, prefix: str, specs: Mapping[str, LinearSpec]
) -> MlpWeights | ExpertsWeights | None:
    if isinstance(own, Experts):
        return _experts(own, reader, prefix, specs)
    return None if own is None else _mlp(own, reader, specs)


def _mlp(own: Mlp, reader: Reader, specs: Mapping[str, LinearSpec], prefix: str = "") -> MlpWeights:
    return MlpWeights(*(reader.linear(specs[f"{prefix}{field}"]) for field in own.maps()))


def _experts(own: Experts, reader: Reader, prefix: str, specs: Mapping[str, LinearSpec]) -> ExpertsWeights:
    # The shared experts' output on each rank is added to the others', and summed with it.
    parts = {field: replace(spec, sums=False) for field, spec in specs.items()}
    return ExpertsWeights(
        spec=own,
        router=reader.linear(specs["router"]),
        gate_up=reader.experts([specs[expert_field(number, "gate_up")] for number in own.own]),
        down=reader.experts([specs[expert_field(number, "down")] for number in own.own]),
        shared=None if own.shared is None else _mlp(own.shared, reader, parts, "shared_"),
        shared_gate=reader.linear(specs["shared_gate"]) if own.shared_gate else None,
        **{field: reader.norm(norm, prefix) for field, norm in own.norms().items()},
        **{field: reader.vector(f"{prefix}{vector.name}") for field, vector in own.vectors().items()},
    )


def in_our_order(part: Part, tensors: NamedTensors) -> NamedTensors:
    """Puts the rows of a part in the order in which our kernels read them.

    Scales of blocks of e4m3 become scales of rows before.

    Raises:
        CheckpointError: its rows share scales otherwise.
    """
    if part.order is None:
        return tensors
    scale = tensors.get("scale")
    if scale is not None and tensors["weight"].dtype == FLOAT8 and len(scale) not in (1, part.rows):
        tensors = {**tensors, "scale": Float8(Scaling.BLOCK).row_scales(tensors)}
    if any(name != "permutation" and len(tensor) not in (1, part.rows) for name, tensor in tensors.items()):
        raise CheckpointError(
            f"{part.name} is stored as {part.storage.name}, whose rows share scales and cannot be put in the order of "
            "the rotary embedding"
        )
    return {
        name: tensor if name == "permutation" or len(tensor) == 1 else tensor[part.order]
        for name, tensor in tensors.items()
    }


class Reader:
    """Takes tensors off the files, counts the bytes, and packs linear maps."""

    def __init__(
        self, files: TensorFiles, kernels: Kernels, progress: Progress = lambda *_: None, total: int = 0
    ) -> None:
        self.kernels = kernels
        self.round_groups = rounding_of(kernels.team)
        self._files = files
        self._progress = progress
        self._done, self._total = 0, total
        self._lock = Lock()

    def norm(self, norm: Norm, prefix: str = "", heads: HeadOrder | None = None) -> Tensor:
        """Returns the weight of a norm: a copy of its own, on the device. A changed weight is float32.

        Args:
            heads: the order of the heads that it norms, if it is not ours.
        """
        if not norm.name:
            return torch.ones(norm.size, device=self.kernels.device, dtype=self.kernels.activation_dtype)
        weight = norm_in_our_order(self.read(f"{prefix}{norm.tensor}"), heads)
        if norm.offset or norm.factor != 1.0:
            return (weight.to(self.kernels.device, torch.float32) + norm.offset) * norm.factor
        return weight.to(device=self.kernels.device, dtype=self.kernels.activation_dtype, copy=True)

    def embedding(self, spec: LinearSpec, tensors: NamedTensors) -> Tensor:
        """A copy of its own, on the device. Integers are unpacked some rows at a time."""
        device, dtype, format = self.kernels.device, self.kernels.embedding_dtype, spec.stored
        if not isinstance(format, Integers):
            return format.unpack(tensors).to(device=device, dtype=dtype, copy=True)

        def unpacked(rows: slice) -> NamedTensors:
            return {"weight": format.unpack(format.rows(tensors, rows)).to(device, dtype)}

        return by_rows(unpacked, spec.out_features, spec.in_features)["weight"]

    def vector(self, name: str) -> Tensor:
        """A copy of its own in float32, on the device."""
        return self.read(name).flatten().to(self.kernels.device, torch.float32, copy=True)

    def dense(self, spec: LinearSpec) -> Tensor:
        """The weight [out, in] of a linear map that is unpacked, in the type of activations, on the device."""
        return self._joined(spec)["weight"].to(self.kernels.device, self.kernels.activation_dtype)

    def linear(self, spec: LinearSpec) -> Linear:
        return self.pack(spec, *self._given(spec))

    def experts(self, specs: Sequence[LinearSpec]) -> ExpertLinear:
        """The linear maps of the experts of a layer, read in threads. Ranks add up the experts' sum."""
        first, each = specs[0], in_order(partial(self._given, spec) for spec in specs)
        return self.kernels.pack_experts(
            each, first.format, len(specs), first.out_features, gated=first.gated
        )

    def pack(self, spec: LinearSpec, tensors: NamedTensors, bias: Tensor | None = None) -> Linear:
        """Returns the linear map of tensors in the kernels' format, followed by the sum over ranks if it has one."""
        linear, ranks = self.kernels.linear(tensors, spec.format, bias, gated=spec.gated), self.kernels.ranks
        return chained(linear, ranks.sum) if ranks is not None and spec.sums else linear

    def _given(self, spec: LinearSpec) -> tuple[NamedTensors, Tensor | None]:
        return self.parts(spec), self._biases(spec)

    def single(self, spec: LinearSpec) -> NamedTensors:
        """The tensors of its only part, which may be the memory of the mapped file."""
        (part,) = spec.parts
        repack = partial(self._part, part, spec.in_features, spec.stored)
        return self._blocks(spec, repack) if self._reads_blocks(spec) else repack()

    def parts(self, spec: LinearSpec) -> NamedTensors:
        """Its parts in the format that kernels are given, joined: a copy, or as they lie in the file."""
        return (
            self._blocks(spec, partial(self._joined, spec))
            if self._reads_blocks(spec)
            else self._joined(spec)
        )

    def _joined(self, spec: LinearSpec) -> NamedTensors:
        return spec.join(
            [
                spec.given(self._part(part, spec.in_features, spec.stored), self.round_groups)
                for part in spec.parts
            ]
        )

    def _reads_blocks(self, spec: LinearSpec) -> bool:
        """Returns whether the kernels pack it from its parts as they lie in the file: all are ggml's blocks."""
        return (
            self.kernels.keeps_narrow
            and spec.quantized is None
            and all(isinstance(part.storage, Blocks) for part in spec.parts)
        )

    def _blocks(self, spec: LinearSpec, repack: Callable[[], NamedTensors]) -> StoredBlocks:
        return StoredBlocks([self._rows(part) for part in spec.parts], repack)

    def _rows(self, part: Part) -> BlockRows:
        assert isinstance(part.storage, Blocks)
        name = f"{part.name}.weight"
        where = f"{self._files.entries[name].file}: {self._files.own_name(name)}"
        return BlockRows(where, part.storage, self.read(name), part.order)

    def _part(self, part: Part, in_features: int, wanted: Format) -> NamedTensors:
        """The tensors of a part, repacked into the format that it and others are wanted in.

        Raises:
            CheckpointError: one has values that it cannot have.
        """
        stored = {
            tensor.suffix: self.read(f"{part.name}.{tensor.suffix}")
            for tensor in part.storage.tensors(part.rows, in_features)
            if not tensor.optional or f"{part.name}.{tensor.suffix}" in self._files.entries
        }
        try:
            repacked = part.storage.repack(stored)
        except BadTensor as bad:
            name = f"{part.name}.{bad.suffix}"
            file, own_name = self._files.entries[name].file, self._files.own_name(name)
            raise CheckpointError(f"{file}: {own_name} {bad.fault}") from None
        format = part.storage.format(part.rows, in_features)
        for name, shape in format.shapes(part.rows, in_features):
            if repacked[name].shape != shape:
                raise CheckpointError(
                    f"{self._files.path}: {part.name} is stored with a {name} of {list(repacked[name].shape)}, "
                    f"and {self._files.config} says {list(shape)}"
                )
        if isinstance(format, Integers) and isinstance(wanted, Integers):
            repacked = widen(repacked, format, wanted)
        elif format != wanted:
            repacked = {"weight": format.unpack(repacked).to(self.kernels.embedding_dtype)}
        return in_our_order(part, repacked)

    def _biases(self, spec: LinearSpec) -> Tensor | None:
        return torch.cat([self._bias(part) for part in spec.parts]) if spec.bias else None

    def _bias(self, part: Part) -> Tensor:
        return in_our_order(part, {"bias": self.read(f"{part.name}.bias")})["bias"]

    def read(self, name: str) -> Tensor:
        """A tensor of the files, whose bytes are counted."""
        with self._lock:  # experts are read in threads
            self._done += self._files.entries[name].num_bytes
            self._progress(self._done, self._total)
            return self._files.read(name)
