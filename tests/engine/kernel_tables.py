"""Kernel tables that are only asked what they keep in memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.engine.kernels.ops import Kernels, reference_kernels


def stored_in(dtype: torch.dtype) -> Kernels:
    """Kernels of a CPU that keep weights of this type, and integers widened."""
    return replace(reference_kernels(torch.device("cpu"), torch.float32), embedding_dtype=dtype)
