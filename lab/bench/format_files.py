"""Quantized checkpoints of random weights, in formats that people have: speed does not depend on what weights say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.demo.gguf_files import write_gguf
from penstock.app.bench.checkpoint import Shape, ensure_checkpoint, ensure_folder

GROUP_SIZES = (128, 64)
"""For 4 bits; the first that divides the inputs is taken."""

SCALE = 1e-3
_HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_K": (0, 2)}
"""Where the blocks of a type have float16 numbers."""

Tensors = Callable[[int, int], dict[str, Tensor]]
"""(out, in) -> the tensors of a linear map by the last part of their names."""


def ensure_gguf(type: str, shape: Shape, root: Path | None = None) -> Path:
    """A GGUF file whose matrices have a type: Q8_0, Q4_0 or Q4_K."""

    def write(folder: Path) -> None:
        write_gguf(
            ensure_checkpoint(shape, root),
            folder / "model.gguf",
            lambda name: _gguf_type(type, shape, name),
            encode=random_blocks,
        )

    return ensure_folder(f"{shape.name}-{type}", write, root) / "model.gguf"


def ensure_gptq(shape: Shape, root: Path | None = None) -> Path:
    """A GPTQ checkpoint of 4 bits, symmetric, its groups in order."""
    size = _group_size(shape)

    def tensors(rows: int, columns: int) -> dict[str, Tensor]:
        return {
            "qweight": random_words(columns // 8, rows),
            "qzeros": torch.full((columns // size, rows // 8), 0x77777777, dtype=torch.int32),
            "scales": torch.full((columns // size, rows), SCALE, dtype=torch.float16),
        }

    fields = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": True, "desc_act": False}
    return _ensure(f"{shape.name}-gptq", shape, fields, tensors, root)


def ensure_w4a16(shape: Shape, root: Path | None = None) -> Path:
    """A compressed-tensors checkpoint, pack-quantized, of 4 bits."""
    size = _group_size(shape)

    def tensors(rows: int, columns: int) -> dict[str, Tensor]:
        return {
            "weight_packed": random_words(rows, columns // 8),
            "weight_scale": torch.full((rows, columns // size), SCALE, dtype=torch.bfloat16),
            "weight_shape": torch.tensor([rows, columns]),
        }

    return _ensure(f"{shape.name}-w4a16", shape, w4a16_config(size), tensors, root)


def w4a16_config(group_size: int) -> dict[str, Any]:
    """The quantization_config of compressed-tensors' 4 bits, symmetric, in groups."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
    return _compressed("pack-quantized", weights)


def ensure_w8a8(shape: Shape, root: Path | None = None) -> Path:
    """A compressed-tensors checkpoint, int-quantized, of 8 bits and a scale for each row."""

    def tensors(rows: int, columns: int) -> dict[str, Tensor]:
        return {
            "weight": random_words(rows, columns // 4).view(torch.int8),
            "weight_scale": torch.full((rows, 1), SCALE, dtype=torch.bfloat16),
        }

    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    return _ensure(f"{shape.name}-w8a8", shape, _compressed("int-quantized", weights), tensors, root)


def _ensure(
    name: str, shape: Shape, quantization: dict[str, Any], tensors: Tensors, root: Path | None
) -> Path:
    """The checkpoint in bfloat16 with others in the place of the matrices of its layers."""

    def write(folder: Path) -> None:
        dense = ensure_checkpoint(shape, root)
        for file in dense.glob("*.json"):
            shutil.copyfile(file, folder / file.name)
        config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
        text = json.dumps(config | {"quantization_config": quantization}, indent=1)
        (folder / "config.json").write_text(text, encoding="utf-8")
        weights = dict(_replaced(load_file(dense / "model.safetensors"), tensors))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return ensure_folder(name, write, root)


def _replaced(weights: dict[str, Tensor], tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights.items():
        if weight.dim() == 1 or "layers" not in name:
            yield name, weight
            continue
        for suffix, tensor in tensors(*weight.shape).items():
            yield f"{name.removesuffix('weight')}{suffix}", tensor


def _compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _group_size(shape: Shape) -> int:
    inputs = (shape.hidden, shape.intermediate)
    return next(size for size in GROUP_SIZES if all(columns % size == 0 for columns in inputs))


def _gguf_type(type: str, shape: Shape, name: str) -> str:
    """As llama.cpp has it: Q5_0 stands in for Q4_K in rows that blocks of 256 do not divide."""
    columns = shape.intermediate if "ffn_down" in name else shape.hidden
    return "Q5_0" if type == "Q4_K" and columns % 256 else type


def random_blocks(array: npt.NDArray[Any], type: gguf.GGMLQuantizationType) -> npt.NDArray[Any]:
    """Blocks of a type, [rows, bytes of a row], for a matrix [rows, columns], of which only the shape counts."""
    if type.name not in _HALVES:
        return gguf.quants.quantize(array, type)
    block, size = gguf.GGML_QUANT_SIZES[type]
    blocks = np.frombuffer(np.random.default_rng(0).bytes(array.size // block * size), np.uint8).reshape(
        -1, size
    )
    blocks = blocks.copy()
    for start in _HALVES[type.name]:
        blocks[:, start : start + 2] = np.array([SCALE], np.float16).view(np.uint8)
    return blocks.reshape(len(array), -1)


def random_words(rows: int, columns: int) -> Tensor:
    """[rows, columns] of 32 random bits."""
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns), dtype=torch.int32)


MAKERS: dict[str, Callable[[Shape, Path | None], Path]] = {
    "dense": ensure_checkpoint,
    **{type: partial(ensure_gguf, type) for type in ("Q8_0", "Q4_0", "Q4_K")},
    "GPTQ": ensure_gptq,
    "W4A16": ensure_w4a16,
    "W8A8": ensure_w8a8,
}
"""(shape, cache folder) -> the path of a checkpoint, by the name of its format."""
