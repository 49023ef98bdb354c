"""Where a model runs, and what its weights are kept in there."""

from __future__ import annotations

import torch

from engine.errors import CheckpointError
from engine.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """
    Raises:
        CheckpointError: CUDA is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("device cuda is asked for, and torch sees no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def choose_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """What weights are kept in.

    "auto" never keeps more than 16 bits: those of the checkpoint, or else, of float32 weights, the 16 that lose least
    where the model runs: float16 on a CPU (activations are float32 there, so that only the weights are rounded),
    bfloat16 on a GPU (where activations are of that type too, and may be too large for float16).
    """
    if wanted != "auto":
        return DTYPES[wanted]
    if config.dtype != "float32":
        return DTYPES[config.dtype]
    return torch.float16 if device.type == "cpu" else torch.bfloat16
