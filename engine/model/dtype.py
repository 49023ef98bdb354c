"""Chooses the device that a model runs on, and the type that its weights have there."""

from __future__ import annotations

import torch

from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.cpu.levels import multiplies_bfloat16
from penstock.engine.kernels.kv_cache import QUANTIZED, KVFormat, is_quantized
from penstock.engine.spec import LatentAttention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, **QUANTIZED}


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

    "auto" never takes more than 16 bits. On a CPU with instructions for bfloat16 that are quicker than anything else
    in 16 bits, it is that. Elsewhere a checkpoint of 16 bits keeps its type. A checkpoint in float32 becomes float16 on
    a CPU, where activations are float32 and only the weights are rounded, and bfloat16 on a GPU, where activations have
    the type of the weights and may be too large for float16.
    """
    if wanted != "auto":
        return DTYPES[wanted]
    if device.type == "cpu" and multiplies_bfloat16():
        return torch.bfloat16
    if config.dtype != "float32":
        return DTYPES[config.dtype]
    return torch.float16 if device.type == "cpu" else torch.bfloat16


def choose_kv_dtype(wanted: str, own: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of the KV cache.

    Args:
        wanted: a name of KV_DTYPES, or "auto", which is the kernels' own.
        own: the type that the kernels of the device keep KV in by default; on CUDA, all others are quantized.

    Raises:
        CheckpointError: the kernels of the device cannot serve the type.
    """
    dtype = own if wanted == "auto" else KV_DTYPES[wanted]
    if device.type == "cuda" and dtype != own and not is_quantized(dtype):
        own_name = str(own).removeprefix("torch.")
        raise CheckpointError(
            f"--kv-dtype {wanted} is served on the CPU; on CUDA it is that of the weights, {own_name}, int8 or int4"
        )
    return dtype


def check_kv_heads(wanted: str, config: ModelConfig) -> None:
    """Checks that a cache of the type of this name can store a model's heads.

    Raises:
        CheckpointError: it cannot; the message names another type that can.
    """
    if wanted == "auto" or not KVFormat.of(KV_DTYPES[wanted]).is_packed:
        return
    for attention in config.attentions:
        if isinstance(attention, LatentAttention):
            raise CheckpointError(f"--kv-dtype {wanted} is not served for latent attention; int8 is")
        if not KVFormat.of(KV_DTYPES[wanted]).takes(attention.head_dim):
            raise CheckpointError(
                f"--kv-dtype {wanted} is served for heads of a multiple of 32 numbers, and these have "
                f"{attention.head_dim}; int8 is served for all"
            )


def kv_dtype_name(dtype: torch.dtype) -> str:
    """The name that --kv-dtype has for a type."""
    return next(name for name, each in KV_DTYPES.items() if each == dtype)
