"""Makes a quantized checkpoint of one in floating point, layer by layer.

At any time there is one layer in float32, the Hessians of its linear maps, and the activations of the texts between two
layers. Every layer is calibrated on the outputs of the layers before it, which are quantized already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.model.files import open_files
from penstock.engine.model.layerwise import LayerTensors, LayerwiseDecoder, ResidualStream
from penstock.engine.model.parse import read_config
from penstock.engine.model.safetensors import DTYPES, TensorFiles
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensor_writer import TensorWriter
from penstock.engine.model.tensors import LinearSpec, check_tensors, expected_shapes, linear_specs, staying
from penstock.engine.model.texts import Outcome, Texts
from penstock.engine.quant.awq import input_scales, round_clipped
from penstock.engine.quant.gptq import Gptq
from penstock.engine.quant.grid import Grid, Method, Rounded, round_to_nearest
from penstock.engine.quant.pack_quantized import pack, quantization_config, stored_tensors
from penstock.engine.quant.storages.names import LAYERS, LM_HEAD

METHODS = ("gptq", "awq", "rtn")

_FEWEST_ROWS = 32
"""An expert that fewer tokens of the calibration texts chose is rounded to the nearest."""

ShareDone = Callable[[float], None]
"""Is called with the fraction that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way to quantize a checkpoint."""

    method: str
    """One of METHODS."""
    bits: int = 4
    """4 or 8."""
    group_size: int | None = 64
    """The inputs of a row that share a scale; None is a whole row."""
    symmetric: bool = True
    by_activation: bool = False
    """See `Gptq`."""
    num_wide_layers: int = 1
    """With 4 bits: so many layers at the start have 8, and one scale a row: all later layers read their outputs."""

    def grid(self, layer: int, dtype: torch.dtype) -> Grid:
        """The grid of the linear maps of a layer, whose weights are stored in this type."""
        if self.bits == 4 and layer < self.num_wide_layers:
            return Grid(8, None, True, dtype)
        return Grid(self.bits, self.group_size, self.symmetric, dtype)

    @property
    def rounding(self) -> Method:
        if self.method == "gptq":
            return Gptq(by_activation=self.by_activation)
        return round_clipped if self.method == "awq" else round_to_nearest

    def config(self, num_layers: int, ignored: Sequence[str] = (LM_HEAD,)) -> dict[str, object]:
        """The entry `quantization_config` of config.json.

        Args:
            ignored: see `left_out`.
        """
        wide = min(self.num_wide_layers, num_layers) if self.bits == 4 else 0
        groups = [
            (_layer_targets(layers, num_layers), self.grid(layers.start, torch.float32), self.by_activation)
            for layers in (range(wide), range(wide, num_layers))
            if layers
        ]
        return quantization_config(groups, list(ignored))


def _layer_targets(layers: range, num_layers: int) -> list[str]:
    if len(layers) == num_layers:
        return ["Linear"]
    return [rf"re:.*layers\.({'|'.join(str(layer) for layer in layers)})\..*"]


def check(folder: Path, scheme: Scheme) -> ModelConfig:
    """Looks whether a checkpoint can be quantized so.

    Raises:
        CheckpointError: it is broken, quantized already, or the groups do not divide the inputs of a linear map.
    """
    config = read_config(folder)
    if config.quantization is not None:
        method = config.quantization.text("quant_method")
        raise CheckpointError(f"{folder} is quantized already, quant_method {method}")
    if any(layer.embedding for layer in config.layers) or any(
        a.shares is not None for a in config.attentions
    ):
        raise CheckpointError(
            f"{folder}: its layers read what others made, and are quantized at load only: serve it with --quantize"
        )
    check_tensors(config, unstacked(open_files(folder), config))
    for spec in (spec for index in range(config.num_layers) for spec in _specs(config, index)):
        if scheme.group_size is not None and spec.in_features % scheme.group_size:
            raise CheckpointError(
                f"groups of {scheme.group_size} do not divide the {spec.in_features} inputs of {spec.parts[0].name}"
            )
    return config


def layer_bytes(config: ModelConfig) -> int:
    """The memory of the largest layer in float32 and of its Hessians, as `quantize` needs them."""
    return 4 * max(_numbers(config, index) for index in range(config.num_layers))


def _numbers(config: ModelConfig, index: int) -> int:
    """Of a layer's weights and Hessians; all experts but one have theirs at other times."""
    specs = linear_specs(config, index)
    weights = sum(spec.out_features * spec.in_features for spec in specs.values())
    hessians = {field.rpartition(".")[2]: spec.in_features**2 for field, spec in specs.items()}
    return weights + sum(hessians.values())


def _specs(config: ModelConfig, index: int) -> Iterator[LinearSpec]:
    """Yields the linear maps of a layer that are quantized."""
    maps = config.layers[index].maps()
    yield from (spec for field, spec in linear_specs(config, index).items() if not maps[field].stays)


def largest_group(config: ModelConfig) -> int:
    """Returns the inputs of a scale: 64, or 32 if 64 do not divide the inputs of each linear map that is quantized."""
    specs = (spec for index in range(config.num_layers) for spec in _specs(config, index))
    return 64 if all(spec.in_features % 64 == 0 for spec in specs) else 32


def left_out(config: ModelConfig, files: TensorFiles) -> list[str]:
    """Returns the linear maps that stay in floating point, by their names in the files, also of layers that draft and
    of image towers."""
    own = config.spec.prediction
    drafting = [] if own is None else [_named(files, own.map), f"re:{re.escape(own.prefix)}.*"]
    others = (
        name for name in _others(config, files) if name.endswith(".weight") and not name.startswith(LAYERS)
    )
    parts = (re.match(r"(?:model\.)?[^.]+", files.own_name(name)) for name in others)
    towers = dict.fromkeys(part[0] for part in parts if part is not None and part[0] not in (LM_HEAD, "mtp"))
    maps = [_named(files, name) for name in staying(config)]
    return [LM_HEAD, *maps, *drafting, *(rf"re:{re.escape(tower)}\..*" for tower in towers)]


def _named(files: TensorFiles, map: str) -> str:
    """The name of a linear map in the files."""
    return files.own_name(f"{map}.weight").removesuffix(".weight")


def _others(config: ModelConfig, files: TensorFiles) -> dict[str, tuple[int, ...]]:
    """Returns the tensors outside the decoder, which a copy gets as they are, by their shapes."""
    expected, found = expected_shapes(config), unstacked(files, config).entries
    return {
        name: entry.shape for name, entry in found.items() if name not in expected and entry.dtype in DTYPES
    }


class _Streams(NamedTuple):
    """The hidden states of the texts between two layers."""

    calibration: ResidualStream
    before: ResidualStream
    """Of the held-out texts, with the float weights."""
    after: ResidualStream
    """Of the held-out texts, with the quantized weights."""


def quantize(
    folder: Path,
    target: Path,
    scheme: Scheme,
    texts: Texts,
    device: torch.device,
    progress: ShareDone = lambda _: None,
) -> Outcome:
    """Writes the quantized weights of the checkpoint in `folder` into the safetensors file `target`.

    Args:
        texts: the method "rtn" does not use those for calibration.

    Raises:
        CheckpointError: see `check`; or a linear map has weights or inputs that are not finite.
    """
    config, stored = check(folder, scheme), open_files(folder)
    files, others = unstacked(stored, config), _others(config, stored)
    names = expected_shapes(config) | others
    grids = dict(_grids(config, files, scheme))
    decoder = LayerwiseDecoder(config, files, device)
    held_out = decoder.start(texts.held_out)
    streams = _Streams(decoder.start(() if scheme.method == "rtn" else texts.calibration), held_out, held_out)
    announced = {stored.own_name(name): one for name, one in _announced(names, grids, files)}
    with TensorWriter(target, announced) as writer:
        for name in names:
            if name in others or not name.startswith(LAYERS):
                writer.write(stored.own_name(name), files.read(name))
        for index in range(config.num_layers):

            def said(done: float, index: int = index) -> None:
                progress((index + done) / config.num_layers)

            layer = LayerTensors(config, index, files, device)
            tensors, streams = _quantized_layer(layer, decoder, streams, scheme, grids, said)
            del layer  # before the next one is read
            for name, tensor in tensors.items():
                writer.write(stored.own_name(name), tensor)
    if not texts.held_out:
        return Outcome(None, None)
    return Outcome(decoder.perplexity(streams.before), decoder.perplexity(streams.after))


def _quantized_layer(
    layer: LayerTensors,
    decoder: LayerwiseDecoder,
    streams: _Streams,
    scheme: Scheme,
    grids: Mapping[str, Grid],
    progress: ShareDone,
) -> tuple[dict[str, Tensor], _Streams]:
    """The tensors of a layer as the checkpoint has them, by their full names, and the streams after the layer."""
    before = decoder.through(layer, streams.before)
    if scheme.method == "awq":
        _fold(layer, decoder, streams.calibration, grids)
    rounded: dict[str, Rounded] = {}

    total = sum(len(one.names) for one in layer.specs.values())

    def round_weights(spec: LinearSpec, x: Tensor) -> None:
        progress(len(rounded) / total)
        names = [name for name in spec.names if name in grids]
        hessian = _hessian(spec, x) if names else x
        rounding = scheme.rounding if len(x) >= _FEWEST_ROWS else round_to_nearest
        for name in names:
            one = rounded[name] = rounding(layer.weight(name), hessian, grids[name])
            layer.tensors[f"{name}.weight"] = one.weight()

    calibration = decoder.through(layer, streams.calibration, round_weights)
    found = _Streams(calibration, before, decoder.through(layer, streams.after))
    progress(1.0)
    return _stored(layer, grids, rounded), found


def _fold(
    layer: LayerTensors, decoder: LayerwiseDecoder, calibration: ResidualStream, grids: Mapping[str, Grid]
) -> None:
    """Multiplies the columns of linear maps as AWQ says, and divides the modules that make their inputs.

    The scales are all chosen before the first is applied; none changes the inputs of another linear map.
    """
    chosen: list[tuple[LinearSpec, Tensor]] = []

    def choose(spec: LinearSpec, x: Tensor) -> None:
        names = spec.names
        if layer.before(spec) is not None and names[0] in grids and len(x) >= _FEWEST_ROWS:
            hessian = _hessian(spec, x)
            weights = [layer.weight(name) for name in names]
            chosen.append((spec, input_scales(weights, hessian, grids[names[0]], layer.heads(spec))))

    decoder.through(layer, calibration, choose)
    for spec, scales in chosen:
        layer.scale_inputs(spec, scales)


def _hessian(spec: LinearSpec, x: Tensor) -> Tensor:
    """E[x x^T] over all tokens x [T, in]; empty without any.

    Raises:
        CheckpointError: it is not finite.
    """
    if not len(x):
        return torch.empty(0)
    hessian = x.T @ x / len(x)
    if not hessian.isfinite().all():
        raise CheckpointError(f"the calibration text gives {spec.parts[0].name} inputs that are not finite")
    return hessian


def _grids(config: ModelConfig, files: TensorFiles, scheme: Scheme) -> Iterator[tuple[str, Grid]]:
    """The grid of each linear map, by its full name; scales have the type of the float weights."""
    for index in range(config.num_layers):
        for spec in _specs(config, index):
            for part in spec.parts:
                dtype = DTYPES[files.entries[f"{part.name}.weight"].dtype]
                yield part.name, scheme.grid(index, dtype)


def _announced(
    names: Mapping[str, tuple[int, ...]], grids: Mapping[str, Grid], files: TensorFiles
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    for name, shape in names.items():
        linear, _, kind = name.rpartition(".")
        if linear in grids and kind == "weight":
            for suffix, stored, dtype in stored_tensors(grids[linear], *shape):
                yield f"{linear}.{suffix}", (stored, dtype)
        else:
            entry = files.entries[name]
            yield name, (entry.shape, DTYPES[entry.dtype])


def _stored(
    layer: LayerTensors, grids: Mapping[str, Grid], rounded: Mapping[str, Rounded]
) -> dict[str, Tensor]:
    """The tensors of a layer as the checkpoint has them, by their full names."""
    packed = {
        f"{module}.{suffix}": tensor
        for module, one in rounded.items()
        for suffix, tensor in pack(one, grids[module]).items()
    }
    others = layer.tensors.keys() - {f"{module}.weight" for module in rounded}
    return packed | {name: layer.tensors[name].to(layer.dtype(name)) for name in others}
