"""GGUF files of the checkpoints of tests/engine/checkpoints.py; K-quants have random blocks.

Tests read the files with the `gguf` library and with transformers to prove that they are what they say.
"""

from __future__ import annotations

from functools import partial

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from lab.demo import gguf_files
from lab.demo.gguf_files import Array, ggml_name, same, tokenizer_metadata

__all__ = ["ggml_name", "same", "tokenizer_metadata", "write_file", "write_gguf"]


def encode(array: Array, type: Type) -> Array:
    if type.name.endswith("_K"):
        return k_blocks(array, type)
    return gguf.quants.quantize(array, type)


def k_blocks(array: Array, type: Type, seed: int = 0) -> Array:
    """Random blocks with weights about as large as those of the array: any bytes are integers and scales."""
    block, size = gguf.GGML_QUANT_SIZES[type]
    rng = np.random.default_rng([seed, *array.shape])
    blocks = rng.integers(0, 256, (len(array), array.shape[1] // block, size), dtype=np.uint8)
    spread = float(array.std())
    if type == Type.Q6_K:
        blocks[..., -2:] = _halves(
            spread / 32 / 74, blocks
        )  # the deviations of the integers and of the scales
        return blocks.reshape(len(array), -1)
    steps = 15 if type == Type.Q4_K else 31
    blocks[..., :2] = _halves(spread / steps * 3 / 32, blocks)
    blocks[..., 2:4] = _halves(spread * 1.5 / 32, blocks)
    return blocks.reshape(len(array), -1)


def _halves(value: float, blocks: Array) -> Array:
    return np.full((*blocks.shape[:2], 1), value, np.float16).view(np.uint8)


write_gguf = partial(gguf_files.write_gguf, encode=encode)
write_file = partial(gguf_files.write_file, encode=encode)
