"""Chooses the device that a model runs on, and the type that its weights have there."""

from __future__ import annotations

import torch

from engine.errors import CheckpointError
from engine.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device of a name: "cpu", "cuda", or "auto", which is CUDA where torch sees a GPU.

    Raises:
        CheckpointError: CUDA is asked for, and torch sees no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("device cuda is asked for, and torch sees no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def choose_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of the weights.

    "auto" never takes more than 16 bits. A checkpoint of 16 bits keeps its type. A checkpoint in float32 becomes
    float16 on a CPU, where activations are float32 and only the weights are rounded, and bfloat16 on a GPU, where
    activations have the type of the weights and may be too large for float16.
    """
    if wanted != "auto":
        return DTYPES[wanted]
    if config.dtype != "float32":
        return DTYPES[config.dtype]
    return torch.float16 if device.type == "cpu" else torch.bfloat16
