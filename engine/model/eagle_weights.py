"""The names of the weights of an EAGLE-3 head in a checkpoint, and their way from disk into a kernel table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.ops import Kernels
from penstock.engine.model.eagle import NUM_TAPS, EagleConfig
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensors import (
    AS_IT_IS,
    SIZE_FIELDS,
    LinearSpec,
    Part,
    Recipe,
    check_expected,
    embedding_spec,
    linear_specs,
    tensors_of,
)
from penstock.engine.model.weights import Reader, load_layer
from penstock.engine.program.parameters import EagleWeights
from penstock.engine.quant.storage import StoredTensor
from penstock.engine.quant.storages.names import EMBEDDING, LM_HEAD
from penstock.engine.spec import Norm

_HIDDEN_NORM, _FUSE, _DRAFTED = "model.layers.0.hidden_norm", "fc", "d2t"
_LAYER = "model.layers.0."
_LAYERS = ("midlayer.", "layers.0.")
"""The prefixes of the names of the layer's tensors."""
_SIZES = SIZE_FIELDS | {
    "q_proj": "num_attention_heads * head_dim, hidden_size twice",
    "k_proj": "num_key_value_heads * head_dim, hidden_size twice",
    "v_proj": "num_key_value_heads * head_dim, hidden_size twice",
    _FUSE: f"hidden_size, {NUM_TAPS} times target_hidden_size",
    LM_HEAD: "draft_vocab_size, hidden_size",
    _DRAFTED: "draft_vocab_size",
}


class EagleFiles(TensorFiles):
    """The tensors of a head, by names like a whole model's."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: a file is missing, truncated or malformed.
        """
        super().__init__(folder)
        self._prefix = next((p for p in _LAYERS if any(n.startswith(p) for n in self.entries)), _LAYERS[0])
        self.entries = {self._name(own_name): entry for own_name, entry in self.entries.items()}

    def own_name(self, name: str) -> str:
        return _own_name(name, self._prefix)

    def _name(self, own_name: str) -> str:
        if own_name.startswith(self._prefix):
            return f"{_LAYER}{own_name.removeprefix(self._prefix)}"
        return f"model.{own_name}" if own_name.startswith(("norm.", "embed_tokens.")) else own_name


def eagle_specs(head: EagleConfig, recipe: Recipe = AS_IT_IS) -> dict[str, LinearSpec]:
    """Returns the linear maps of a head: the layer's by their field of LayerWeights, `fuse` and `lm_head`.

    Raises:
        CheckpointError: see `Quantization.layer_format`.
    """
    config, quantization = head.layer, recipe.quantization
    hidden = config.hidden_size

    def spec(name: str, rows: int, in_features: int) -> LinearSpec:
        return LinearSpec((Part(name, rows, recipe.storages(name)),), in_features)

    specs = linear_specs(config, 0, recipe)
    specs["qkv"] = replace(specs["qkv"], in_features=2 * hidden)
    specs["fuse"] = spec(_FUSE, hidden, NUM_TAPS * head.target_hidden_size)
    specs["lm_head"] = spec(LM_HEAD, head.num_drafted, hidden)
    if quantization is None:
        return specs
    formats = {name: quantization.layer_format(0, one.in_features) for name, one in specs.items()}
    formats["lm_head"] = quantization.head_format(hidden)
    return {name: replace(one, quantized=formats[name]) for name, one in specs.items()}


def eagle_tensors(head: EagleConfig, recipe: Recipe = AS_IT_IS) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor that a head must have, by its name in a file; an embedding if its target's is of another width."""
    needs_embedding = head.layer.hidden_size != head.target_hidden_size
    for name, tensor in _expected(head, recipe, with_embedding=needs_embedding):
        yield _own_name(name, _LAYERS[0]), tensor


def has_embedding(files: TensorFiles) -> bool:
    """Returns whether a head has an embedding of its own."""
    return f"{EMBEDDING}.weight" in files.entries


def check_eagle_tensors(head: EagleConfig, files: TensorFiles, recipe: Recipe = AS_IT_IS) -> None:
    """Compares the tensors of the files with the tensors that a head needs; the files may have more.

    Raises:
        CheckpointError: names the first tensor that is missing, or has a wrong shape or an unsupported dtype.
    """
    expected = _expected(head, recipe, with_embedding=has_embedding(files))
    check_expected(expected, files, sizes=_SIZES)
    if not has_embedding(files) and head.layer.hidden_size != head.target_hidden_size:
        raise CheckpointError(
            f"{files.path}: tensor {files.own_name(EMBEDDING)}.weight is missing, and the model's embedding is not as "
            f"wide as the head: hidden_size {head.layer.hidden_size}, target_hidden_size {head.target_hidden_size}"
        )


def load_eagle(
    head: EagleConfig, files: TensorFiles, kernels: Kernels, recipe: Recipe = AS_IT_IS
) -> EagleWeights:
    """Reads, quantizes if that is asked for, and packs.

    Raises:
        CheckpointError: see `check_eagle_tensors`; or the tokens that it drafts are none, or some twice.
    """
    check_eagle_tensors(head, files, recipe)
    specs, reader = eagle_specs(head, recipe), Reader(files, kernels)
    fuse, lm_head = specs.pop("fuse"), specs.pop("lm_head")
    embedding = embedding_spec(head.layer)
    return EagleWeights(
        layer=load_layer(head.layer.layers[0], reader, 0, specs),
        hidden_norm=reader.norm(Norm(name=_HIDDEN_NORM, size=head.layer.hidden_size)),
        fuse=reader.linear(fuse),
        final_norm=reader.norm(head.layer.spec.final_norm),
        lm_head=reader.linear(lm_head),
        drafted=_drafted(head, files, reader),
        embedding=reader.embedding(embedding, reader.single(embedding)) if has_embedding(files) else None,
    )


def _own_name(name: str, prefix: str) -> str:
    """A head's name of a tensor."""
    return name.replace(_LAYER, prefix).removeprefix("model.")


def _expected(
    head: EagleConfig, recipe: Recipe, *, with_embedding: bool
) -> Iterator[tuple[str, StoredTensor]]:
    hidden = head.layer.hidden_size
    if with_embedding:
        yield from tensors_of(embedding_spec(head.layer))
    for name, norm in head.layer.spec.norms():
        yield f"{name}{norm.suffix}", StoredTensor("weight", (norm.size,))
    for spec in eagle_specs(head, recipe).values():
        yield from tensors_of(spec)
    yield f"{_HIDDEN_NORM}.weight", StoredTensor("weight", (hidden,))
    is_needed = head.num_drafted < head.layer.vocab_size
    yield _DRAFTED, StoredTensor(_DRAFTED, (head.num_drafted,), ("I64", "I32"), optional=not is_needed)


def _drafted(head: EagleConfig, files: TensorFiles, reader: Reader) -> Tensor | None:
    """The tokens that are drafted: `d2t` says by how much the number of each is another than its row's."""
    if _DRAFTED not in files.entries:
        return None
    tokens = torch.arange(head.num_drafted) + reader.read(_DRAFTED)
    if tokens.min() < 0 or tokens.max() >= head.layer.vocab_size or len({*tokens.tolist()}) < len(tokens):
        raise CheckpointError(
            f"{files.entries[_DRAFTED].file}: {_DRAFTED} does not lead to tokens of the model, each of them once"
        )
    return tokens.int()
