"""Rows of ggml's blocks, of any bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.engine.quant.storages.gguf import TYPES

HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()},
}
"""Where a block has its float16 numbers, if not only at its start."""


def random_rows(name: str, num_rows: int, num_blocks: int, seed: int) -> Tensor:
    """Rows of any bytes but for the float16 numbers, which are finite: of every exponent, 0 and denormal ones too."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_rows * num_blocks, TYPES[name].num_bytes), dtype=np.uint8)
    for start in HALVES.get(name, (0,)):
        exponents = blocks[:, start + 1]
        blocks[:, start + 1] = np.where(exponents & 0x7C == 0x7C, exponents & 0x83, exponents)
    if name == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], 252)  # beyond, some products are infinite
        blocks[:2, 0] = (0, 1)[: len(blocks)]
    return torch.from_numpy(blocks.reshape(num_rows, -1))
