"""The linear maps of a checkpoint, and the tensors that it must have for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.model.dtype import choose_device
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.quant.checkpoints import storages_of
from penstock.engine.quant.formats import DENSE, Format, NamedTensors, Rounding, by_rows
from penstock.engine.quant.integers import Integers, common_format
from penstock.engine.quant.quantization import Quantization
from penstock.engine.quant.rounding import RoundGroups
from penstock.engine.quant.storage import FLOATS, PLAIN, Storage, Storages, StoredTensor
from penstock.engine.quant.storages.names import EMBEDDING, LAYERS, LM_HEAD
from penstock.engine.spec import Experts, HeadOrder, LayerEmbeddings, LinearMap, Rows, expert_field


@dataclass(frozen=True, slots=True)
class Recipe:
    """The storage of a checkpoint's linear maps, and the formats that they are quantized to at load."""

    storages: Storages = lambda _: PLAIN
    quantization: Quantization | None = None
    floats: frozenset[str] = frozenset()
    """The linear maps that stay in floating point, and are so in the files, whatever quantization_config says."""

    def storage(self, name: str) -> Storage:
        """The storage of a linear map by its full name."""
        return PLAIN if name in self.floats else self.storages(name)


AS_IT_IS = Recipe()
"""Of a checkpoint in floating point that stays so."""


def make_recipe(config: ModelConfig, options: LoadOptions, files: TensorFiles | None = None) -> Recipe:
    """The recipe of a checkpoint that is loaded with these options.

    Args:
        files: the checkpoint's. Without them, a router counts as one in floating point, as most are.

    Raises:
        CheckpointError: quantization_config is not supported, or the options cannot be met.
    """
    storages = storages_of(config.quantization)
    wanted = options.quantize
    quantization = None if wanted is None else Quantization(wanted, options.quantize_group_size)
    if quantization is not None and config.quantization is not None:
        method = config.quantization.text("quant_method")
        raise CheckpointError(
            f"--quantize {options.quantize}: the checkpoint is quantized already, quant_method {method}"
        )
    if options.quantize == "nf4" and choose_device(options.device).type == "cuda":
        raise CheckpointError("--quantize nf4 is served on the CPU; on CUDA there are int8, int4 and fp8")
    return Recipe(lru_cache(maxsize=None)(storages), quantization, frozenset(_floats(config, files)))


def _floats(config: ModelConfig, files: TensorFiles | None) -> Iterator[str]:
    """Yields the linear maps that stay in floating point, and are so in the files.

    GPTQ does not list the maps that it leaves out, and some programs quantize routers, where others do not. The words
    of bitsandbytes may have the type of floats, and are [words, 1].
    """
    if config.quantization is None or config.quantization.text("quant_method") == "gguf":
        return
    for name in staying(config):
        entry = None if files is None else files.entries.get(f"{name}.weight")
        if files is None or (entry is not None and entry.dtype in FLOATS and entry.shape[1:] != (1,)):
            yield name


def staying(config: ModelConfig) -> Iterator[str]:
    """Yields the names of the layers' linear maps that are never quantized."""
    maps = ((number, map) for number, layer in enumerate(config.layers) for map in layer.maps().values())
    yield from (f"{LAYERS}{number}.{rows.name}" for number, map in maps if map.stays for rows in map.rows)


@dataclass(frozen=True, slots=True)
class Part:
    """One of the checkpoint's linear maps that are fused into one."""

    name: str
    """The full one: "model.layers.0.self_attn.q_proj"."""
    rows: int
    storage: Storage = PLAIN
    order: Tensor | None = field(default=None, compare=False)
    """See `row_order`."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear map of a layer, fused of the checkpoint's `parts`."""

    parts: tuple[Part, ...]
    in_features: int
    bias: bool = False
    gated: bool = False
    """See LinearPacker."""
    quantized: Rounding | None = None
    """The format that it is quantized to at load; None if it is not."""
    sums: bool = False
    """Among ranks, each has some of its inputs, and the outputs are summed. Otherwise each has some of its outputs."""
    is_unpacked: bool = False
    """See `LinearMap.is_unpacked`."""

    @property
    def out_features(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def names(self) -> list[str]:
        """The checkpoint's linear maps, each once: keys that are values, too, are two parts."""
        return list(dict.fromkeys(part.name for part in self.parts))

    @property
    def stored(self) -> Format:
        """The format that the parts have in common, once they are repacked, and widened or unpacked to it.

        Raises:
            CheckpointError: they are integers whose inputs are permuted in different ways.
        """
        formats = [part.storage.format(part.rows, self.in_features) for part in self.parts]
        integers = [format for format in formats if isinstance(format, Integers)]
        if len(integers) == len(formats):
            with self._named():
                return common_format(integers)
        return formats[0] if all(format == formats[0] for format in formats) else DENSE

    @property
    def format(self) -> Format:
        """The format that the kernels take."""
        return DENSE if self.is_unpacked else self.quantized or self.stored

    def given(self, tensors: NamedTensors, round_groups: RoundGroups) -> NamedTensors:
        """Tensors in its stored format as kernels are given them."""
        if self.is_unpacked:
            return {"weight": self.stored.unpack(tensors)}
        if self.quantized is None:
            return tensors
        return rounded(self.quantized, self.stored.unpack(tensors), round_groups)

    def join(self, parts: Sequence[NamedTensors]) -> NamedTensors:
        """A copy of the parts as one, all of them in the format that kernels are given.

        Raises:
            CheckpointError: they cannot be multiplied together.
        """
        with self._named():
            return self.format.join(parts)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Puts the names of the parts before the text of an error."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{', '.join(part.name for part in self.parts)}: {error}") from None


def linear_specs(config: ModelConfig, layer: int = 0, recipe: Recipe = AS_IT_IS) -> dict[str, LinearSpec]:
    """The linear maps of one layer, by their field of LayerWeights or of its mixer or feed-forward part.

    Raises:
        CheckpointError: see `Quantization.layer_format`.
    """
    own = config.spec
    return {
        field: _linear_spec(map, layer, own.first_layer, recipe)
        for field, map in own.layers[layer].maps().items()
    }


def layer_specs(config: ModelConfig, recipe: Recipe = AS_IT_IS) -> Iterator[LinearSpec]:
    """Yields the linear maps of all layers.

    Raises:
        CheckpointError: see `Quantization.layer_format`.
    """
    for layer in range(config.num_layers):
        yield from linear_specs(config, layer, recipe).values()


def with_one_expert(config: ModelConfig) -> ModelConfig:
    """Returns the config with the first expert alone of each layer, for the properties that all have in common."""
    layers = (
        layer.with_feed_forward(num_own=1) if isinstance(layer.feed_forward, Experts) else layer
        for layer in config.layers
    )
    return replace(config, spec=replace(config.spec, layers=tuple(layers)))


def _linear_spec(map: LinearMap, layer: int, first_layer: int, recipe: Recipe) -> LinearSpec:
    names = [f"{LAYERS}{layer}.{rows.name}" for rows in map.rows]
    parts = (
        Part(name, rows.count, recipe.storage(name), row_order(rows))
        for name, rows in zip(names, map.rows, strict=True)
    )
    quantization, quantized = recipe.quantization, None
    if quantization is not None and not map.stays:
        quantized = quantization.layer_format(first_layer + layer, map.in_features)
    return LinearSpec(
        tuple(parts), map.in_features, map.has_bias, map.is_gated, quantized, map.sums, map.is_unpacked
    )


def norm_in_our_order(weight: Tensor, heads: HeadOrder | None) -> Tensor:
    """The weight of a norm of one head or of several, [n * head_dim], in the order in which our kernels rotate them."""
    return weight if heads is None else weight.view(-1, heads.head_dim)[:, heads.dimensions].flatten()


def row_order(rows: Rows) -> Tensor | None:
    """[rows] the checkpoint's row for each of ours; None if they are the same."""
    if rows.groups is not None:
        return torch.tensor(rows.groups.rows)
    if rows.heads is None:
        return None
    dimensions, head_dim = torch.tensor(rows.heads.dimensions), rows.heads.head_dim
    if rows.heads.has_gates:
        heads = torch.arange(0, rows.count, 2 * head_dim)[:, None]
        gates = heads + head_dim + torch.arange(head_dim)
        return torch.cat((gates.flatten(), (heads + dimensions).flatten()))
    order, end = torch.arange(rows.count), sum(rows.sections[:2])
    heads = torch.arange(0, end, head_dim)[:, None]
    order[:end] = (heads + dimensions).flatten()
    return order


def head_spec(config: ModelConfig, recipe: Recipe = AS_IT_IS) -> LinearSpec:
    """Returns the output head, whose rows are the embedding's if the checkpoint ties them."""
    name = EMBEDDING if config.spec.ties_embeddings else LM_HEAD
    quantization = recipe.quantization
    quantized = None if quantization is None else quantization.head_format(config.hidden_size)
    part = Part(name, config.vocab_rows, recipe.storages(name))
    return LinearSpec((part,), config.hidden_size, quantized=quantized)


def embedding_spec(config: ModelConfig, recipe: Recipe = AS_IT_IS) -> LinearSpec:
    """The embedding, as if it were a linear map: it can be stored like one."""
    part = Part(EMBEDDING, config.vocab_rows, recipe.storages(EMBEDDING))
    return LinearSpec((part,), config.hidden_size)


def layer_table_spec(own: LayerEmbeddings, recipe: Recipe = AS_IT_IS) -> LinearSpec:
    """The table of the embeddings for each layer, as if it were a linear map: it can be stored like one."""
    return LinearSpec((Part(own.table, own.vocab_size, recipe.storages(own.table)),), own.width)


def layer_embeddings_spec(own: LayerEmbeddings, config: ModelConfig, recipe: Recipe = AS_IT_IS) -> LinearSpec:
    """Returns the map from the embedding to the second input of layers, which is never quantized at load."""
    return LinearSpec((Part(own.map, own.width, recipe.storages(own.map)),), config.hidden_size)


def packs_embedding(config: ModelConfig, recipe: Recipe) -> bool:
    """Returns whether the embedding becomes a packed linear map where `Kernels.keeps_narrow`.

    It does if it has integers, or if it is the output head, too, which stays in floating point.
    """
    is_head = config.spec.ties_embeddings and head_spec(config, recipe).format == DENSE
    return is_head or isinstance(embedding_spec(config, recipe).format, Integers)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must have if it is not quantized."""
    return {name: tensor.known_shape for name, tensor in expected_tensors(config, AS_IT_IS)}


def expected_tensors(config: ModelConfig, recipe: Recipe) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor that a checkpoint must have, by its full name."""
    spec = config.spec
    if spec.has_embedding or (spec.has_head and spec.ties_embeddings):
        yield from tensors_of(embedding_spec(config, recipe))
    if (own := spec.layer_embeddings) is not None:
        yield from tensors_of(layer_table_spec(own, recipe))
        yield from tensors_of(layer_embeddings_spec(own, config, recipe))
        yield own.norm.tensor, StoredTensor("weight", (own.norm.size,))
    for number in range(config.num_layers):
        yield from layer_tensors(config, number, recipe)
    if spec.has_head:
        yield f"{spec.final_norm.name}.weight", StoredTensor("weight", (spec.final_norm.size,))
    if spec.has_head and not spec.ties_embeddings:
        yield from tensors_of(head_spec(config, recipe))


def layer_tensors(config: ModelConfig, number: int, recipe: Recipe) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor that a checkpoint must have of a layer, by its full name."""
    layer = config.layers[number]
    for norm in filter(lambda norm: norm.name, layer.norms().values()):
        yield f"{LAYERS}{number}.{norm.tensor}", StoredTensor("weight", (norm.size,))
    for vector in layer.vectors().values():
        yield f"{LAYERS}{number}.{vector.name}", StoredTensor("", vector.shape, loose=True)
    if layer.scalar:
        yield f"{LAYERS}{number}.{layer.scalar}", StoredTensor(layer.scalar, (1,))
    for spec in linear_specs(config, number, recipe).values():
        yield from tensors_of(spec)


def tensors_of(spec: LinearSpec) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a linear map by their full names."""
    for part in spec.parts:
        for tensor in part.storage.tensors(part.rows, spec.in_features):
            yield f"{part.name}.{tensor.suffix}", tensor
        if spec.bias:
            yield f"{part.name}.bias", StoredTensor("bias", (part.rows,))


SIZE_FIELDS = {
    "embed_tokens": "vocab_size, hidden_size",
    "lm_head": "vocab_size, hidden_size",
    "q_proj": "num_attention_heads * head_dim, hidden_size",
    "k_proj": "num_key_value_heads * head_dim, hidden_size",
    "v_proj": "num_key_value_heads * head_dim, hidden_size",
    "o_proj": "hidden_size, num_attention_heads * head_dim",
    "qkv_proj": "(num_attention_heads + 2 * num_key_value_heads) * head_dim, hidden_size",
    "gate_up_proj": "2 * intermediate_size, hidden_size",
    "gate_proj": "intermediate_size, hidden_size",
    "up_proj": "intermediate_size, hidden_size",
    "down_proj": "hidden_size, intermediate_size",
    "q_norm": "head_dim",
    "k_norm": "head_dim",
    "embed_tokens_per_layer": "vocab_size_per_layer_input, num_hidden_layers * hidden_size_per_layer_input",
    "per_layer_model_projection": "num_hidden_layers * hidden_size_per_layer_input, hidden_size",
    "per_layer_projection_norm": "hidden_size_per_layer_input",
    "per_layer_input_gate": "hidden_size_per_layer_input, hidden_size",
    "per_layer_projection": "hidden_size, hidden_size_per_layer_input",
    "gate": "num_experts, hidden_size",
    "router": "num_experts, hidden_size",
    "w1": "intermediate_size, hidden_size",
    "w2": "hidden_size, intermediate_size",
    "w3": "intermediate_size, hidden_size",
    **dict.fromkeys(
        ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj_a", "in_proj_b", "in_proj_ba"),
        "heads and head sizes of the layers with a state, hidden_size",
    ),
    "out_proj": "hidden_size, heads and head sizes",
    "conv1d": "the channels of a convolution, its kernel",
    "conv": "hidden_size, conv_L_cache",
    **dict.fromkeys(("linear_attn", "mamba", "mixer"), "the heads of a layer with a state"),
}
"""The entries of config.json that the shape of a tensor follows from."""


def check_tensors(config: ModelConfig, files: TensorFiles, recipe: Recipe = AS_IT_IS) -> None:
    """Compares the tensors of the files with the tensors that the config needs; the files may have more.

    The check ends at the first tensor that is wrong, so that a config.json with absurd sizes costs nothing.

    Raises:
        CheckpointError: names the first tensor that is missing, or has a wrong shape or an unsupported dtype, or the
            first linear map that cannot be served in its format.
    """
    check_expected(expected_tensors(config, recipe), files, partial(_hint, config, files))
    check_recipe(config, recipe)


def check_expected(
    expected: Iterable[tuple[str, StoredTensor]],
    files: TensorFiles,
    hint: Callable[[str], str] = lambda _: "",
    sizes: Mapping[str, str] = SIZE_FIELDS,
) -> None:
    """Compares tensors of the files with the expected ones, up to the first that is wrong.

    Args:
        hint: returns the likely cause of a missing tensor, by its module.
        sizes: by the last part of a module's name, the entries of config.json that its shapes follow from.

    Raises:
        CheckpointError: see `check_tensors`.
    """
    for name, tensor in expected:
        entry = files.entries.get(name)
        if entry is None and tensor.optional:
            continue
        if entry is None:
            cause = hint(name.removesuffix(f".{tensor.suffix}"))
            raise CheckpointError(f"{files.path}: tensor {files.own_name(name)} is missing{cause}")
        if not tensor.fits(entry.shape):
            raise CheckpointError(
                f"{entry.file}: {files.own_name(name)} has shape {list(entry.shape)}, "
                f"and {files.config} says {tensor.shape_text} ({_size_fields(name, sizes)})"
            )
        if entry.dtype not in tensor.dtypes:
            raise CheckpointError(
                f"{entry.file}: {files.own_name(name)} is {entry.dtype}, which is not supported; "
                f"only {', '.join(tensor.dtypes)} are"
            )


def check_recipe(config: ModelConfig, recipe: Recipe) -> None:
    """Checks that every linear map has a format that kernels can be given.

    Raises:
        CheckpointError: see `LinearSpec.stored` and `Quantization.layer_format`; or experts of a layer have several.
    """
    if config.quantization is None:
        config = with_one_expert(config)
    for number, layer in enumerate(config.layers):
        specs = linear_specs(config, number, recipe)
        for spec in specs.values():
            _ = spec.format
        if isinstance(layer.feed_forward, Experts):
            _check_experts(layer.feed_forward, specs)
    _ = head_spec(config, recipe).format


def _check_experts(experts: Experts, specs: Mapping[str, LinearSpec]) -> None:
    """Checks that the linear maps of all experts of a layer have one format."""
    for map in ("gate_up", "down"):
        first, *others = (specs[expert_field(number, map)] for number in experts.own)
        for other in others:
            if other.format != first.format:
                raise CheckpointError(
                    f"{other.parts[0].name} is stored otherwise than {first.parts[0].name}: the experts of a layer "
                    "must have one format"
                )


def _size_fields(name: str, sizes: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    found = sizes.get((module or name).rpartition(".")[2], "hidden_size")
    if ".experts." in module:
        found = found.replace("intermediate_size", "the intermediate size of experts")
    return found.partition(",")[0] if kind == "bias" else found


def _hint(config: ModelConfig, files: TensorFiles, module: str) -> str:
    """Returns the likely cause of a missing tensor of a module."""
    if not module.startswith(LAYERS):
        return ""
    other = next(
        (name for name in files.entries if name.startswith(f"{module}.") and name != f"{module}.bias"), None
    )
    if other is not None and config.quantization is not None:
        return f"; {other} is there, which is not what quantization_config in {files.config} says"
    number, _, name = module.removeprefix(LAYERS).partition(".")
    experts = config.layers[int(number)].feed_forward
    if isinstance(experts, Experts) and name.startswith(f"{experts.prefix}."):
        return f"; {files.config} says {experts.router.num_experts} experts"
    return f"; {files.config} says num_hidden_layers {config.num_layers}"


def rounded(format: Rounding, weight: Tensor, round_groups: RoundGroups) -> NamedTensors:
    """A weight [out, in] in a format.

    Args:
        round_groups: has the results of `rounding.round_groups`.
    """
    if isinstance(format, Integers):
        return format.quantize(weight, round_groups)
    return by_rows(lambda rows: format.quantize(weight[rows].contiguous()), *weight.shape)
