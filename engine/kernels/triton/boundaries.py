"""The names of the boundaries in the file of tiles: numbers of rows from which on one kernel takes over from another.

They stand apart from the file's reader, for what measures them runs also where there is no Triton.
"""

from __future__ import annotations

import torch

from penstock.engine.kernels.packed import Code

ROUND_KEY = "round to blocks of float8"
"""From there on x is rounded to e4m3 in the blocks of its weight."""


def unpack_key(code: Code) -> str:
    """From there on weights are unpacked before they are multiplied: "unpack int4", say."""
    return f"unpack {code.value}"


def few_key(dtype: torch.dtype) -> str:
    """Below it, a kernel for few rows serves weights in the type of x: "few bfloat16", say."""
    return f"few {str(dtype).removeprefix('torch.')}"
