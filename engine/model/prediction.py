"""A model's own layer of multi-token prediction: a model of one layer, whose tensors lie among its model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.ops import Kernels
from penstock.engine.model.quantize_cache import Checkpoint
from penstock.engine.model.safetensors import TensorEntry, TensorFiles
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import (
    LinearSpec,
    Part,
    Recipe,
    check_expected,
    check_recipe,
    layer_tensors,
    linear_specs,
    tensors_of,
)
from penstock.engine.model.weights import Reader, load_layer
from penstock.engine.program.parameters import PredictionWeights
from penstock.engine.quant.storage import FLOATS, PLAIN, Storage, StoredTensor
from penstock.engine.quant.storages.names import LAYERS
from penstock.engine.spec import ModelSpec, Norm, Prediction

_LAYER = f"{LAYERS}0."


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionLayer:
    """Such a layer, and how it is stored."""

    own: Prediction
    config: ModelConfig
    """The config of the one layer; its tensors are named like those of a model's first layer."""
    recipe: Recipe

    @property
    def norms(self) -> list[Norm]:
        """The norms outside of its layer."""
        return [self.own.token_norm, self.own.features_norm, self.own.final_norm]

    @property
    def num_loose(self) -> int:
        """The numbers of norms and vectors."""
        layer = self.own.layer
        vectors = sum(vector.size * vector.each for vector in layer.vectors().values())
        return vectors + sum(norm.size for norm in (*self.norms, *layer.norms().values()))

    def specs(self) -> dict[str, LinearSpec]:
        """Returns the linear maps: the layer's by their field of LayerWeights or of its parts, and `map`.

        Raises:
            CheckpointError: see `Quantization.layer_format`.
        """
        hidden, quantization = self.config.hidden_size, self.recipe.quantization
        format = None if quantization is None else quantization.layer_format(0, 2 * hidden)
        part = Part(self.own.map, hidden, self.recipe.storage(self.own.map))
        map = LinearSpec((part,), 2 * hidden, quantized=format)
        return {**linear_specs(self.config, 0, self.recipe), "map": map}

    def expected(self) -> Iterator[tuple[str, StoredTensor]]:
        """Every tensor that there must be, by its full name."""
        yield from tensors_of(self.specs()["map"])
        yield from ((norm.tensor, StoredTensor("weight", (norm.size,))) for norm in self.norms)
        yield from layer_tensors(self.config, 0, self.recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionSource(PredictionLayer):
    """Where such a layer is loaded from."""

    files: TensorFiles


def prediction_tensors(config: ModelConfig, recipe: Recipe) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor that a model's own layer must have, by its name among its model's; none if config tells of none."""
    own = config.spec.prediction
    if own is None or not own.is_told:
        return
    layer = PredictionLayer(own=own, config=_alone(config, own), recipe=_own_recipe(recipe, {}, own))
    for name, tensor in layer.expected():
        yield _of_model(name, own), tensor


def find_prediction(target: Checkpoint) -> PredictionSource | None:
    """Returns the layer of a model that has one; None where neither the config nor the tensors have it.

    Raises:
        CheckpointError: a tensor of it is missing, or cannot be read.
    """
    own = target.config.spec.prediction
    if own is None or not (own.is_told or f"{own.map}.weight" in target.files.entries):
        return None
    config = _alone(target.config, own)
    files = unstacked(_own_files(target.files, own), config)
    recipe = _own_recipe(target.recipe, files.entries, own)
    source = PredictionSource(own=own, config=config, recipe=recipe, files=files)
    check_expected(source.expected(), files)
    check_recipe(config, source.recipe)
    return source


def load_prediction(source: PredictionSource, kernels: Kernels) -> PredictionWeights:
    """Reads, quantizes if that is asked for, and packs."""
    own, specs, reader = source.own, source.specs(), Reader(source.files, kernels)
    return PredictionWeights(
        layer=load_layer(own.layer, reader, 0, specs),
        token_norm=reader.norm(own.token_norm),
        features_norm=reader.norm(own.features_norm),
        final_norm=reader.norm(own.final_norm),
        map=reader.linear(specs["map"]),
    )


def _alone(config: ModelConfig, own: Prediction) -> ModelConfig:
    """The config of a model of that layer alone."""
    spec = config.spec
    alone = ModelSpec(
        hidden_size=spec.hidden_size,
        layers=(own.layer,),
        ropes=spec.ropes,
        norm_eps=spec.norm_eps,
        final_norm=own.final_norm,
    )
    return replace(config, spec=alone)


def _outside(own: Prediction) -> tuple[str, ...]:
    """Returns the prefixes of the names of the tensors around the layer."""
    modules = (own.map, own.token_norm.name, own.features_norm.name, own.final_norm.name)
    return tuple(f"{name}." for name in modules)


def _own_files(files: TensorFiles, own: Prediction) -> TensorFiles:
    """The tensors of the layer by the names of a first layer's, and the tensors outside of it by their own."""
    outside = _outside(own)
    entries = {
        name if name.startswith(outside) else name.replace(own.prefix, _LAYER, 1): entry
        for name, entry in files.entries.items()
        if name.startswith((own.prefix, *outside))
    }
    return TensorFiles(files.path, entries, lambda name: files.own_name(_of_model(name, own)), files.config)


def _of_model(name: str, own: Prediction) -> str:
    """The name among its model's of a tensor or a linear map of the layer."""
    return name.replace(_LAYER, own.prefix, 1) if name.startswith(_LAYER) else name


def _own_recipe(recipe: Recipe, entries: Mapping[str, TensorEntry], own: Prediction) -> Recipe:
    """Returns the recipe of the model, except for maps in floating point: many quantize all layers but this one."""

    def storage(name: str) -> Storage:
        entry = entries.get(f"{name}.weight")
        return PLAIN if entry is not None and entry.dtype in FLOATS else recipe.storages(_of_model(name, own))

    return Recipe(storage, recipe.quantization)
