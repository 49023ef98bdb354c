"""Makes tiny checkpoints that are stored in one of the ways of `makers`, beside what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.checkpoints import make_checkpoint
from tests.engine.quant.storages.makers import Config, Maker, Way

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]


def store(
    folder: Path,
    config: Config,
    maker_of: Callable[[str], Maker | None],
    *,
    family: str = "llama",
    **overrides: object,
) -> tuple[Path, Path]:
    """Writes two checkpoints: one is quantized, and the other, in floating point, has the weights it stands for.

    Args:
        config: the quantization_config.
        maker_of: the maker of each linear map of a layer by its name, None for one that stays.
        overrides: see `make_checkpoint`.
    """
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **overrides}
    dense = make_checkpoint(family, folder / "dense", **sizes)
    quantized = make_checkpoint(family, folder / "quantized", **sizes, quantization_config=config)
    tensors = load_file(dense / "model.safetensors")
    stored: Tensors = {}
    for name, weight in list(tensors.items()):
        module = name.removesuffix(".weight")
        make = maker_of(module) if name.endswith("_proj.weight") else None
        if make is None:
            stored[name] = weight
            continue
        made = make(weight)
        stored |= {f"{module}.{suffix}": tensor.clone() for suffix, tensor in made.tensors.items()}
        tensors[name] = made.weight.float().contiguous()
    save_file(tensors, dense / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    return quantized, dense


def store_all(folder: Path, way: Way, **overrides: object) -> tuple[Path, Path]:
    """The two checkpoints with all linear maps of layers stored in one way."""
    return store(folder, way.config, lambda _: way.make, **overrides)  # type: ignore[arg-type]


def change(folder: Path, how: Change) -> None:
    """Changes the tensors of a checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **entries: object) -> None:
    """Changes entries of the quantization_config; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    merged = {**config["quantization_config"], **entries}
    config["quantization_config"] = {name: value for name, value in merged.items() if value is not None}
    path.write_text(json.dumps(config))
