"""Any tensors that a format of integers can have."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.quant.integers import Factors, Integers


def any_integers(
    format: Integers,
    rows: int,
    in_features: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float16,
) -> dict[str, Tensor]:
    """Random numbers from the least to the largest.

    Args:
        dtype: of scales and offsets, where they are kept in 16 bits.
    """
    found: dict[str, Tensor] = {}
    for name, shape in format.shapes(rows, in_features):
        match name:
            case "weight":
                steps = torch.randint(0, 1 << format.bits, shape, generator=generator)
                if format.table:
                    found[name] = torch.tensor(format.table, dtype=torch.int8)[steps % 16]
                else:
                    found[name] = (steps + format.lowest).to(torch.int8)
            case "zero":
                found[name] = torch.randint(0, 17, shape, generator=generator).to(torch.int8)
            case "permutation":
                found[name] = torch.randperm(in_features, generator=generator).int()
            case "scale_unit" | "offset_unit":
                found[name] = torch.randn(shape, generator=generator).half()
            case _ if format.factors is Factors.COUNTS:
                found[name] = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
            case _:
                kept = torch.float32 if format.factors is Factors.FLOAT32 else dtype
                found[name] = torch.randn(shape, generator=generator).to(kept)
    return found
