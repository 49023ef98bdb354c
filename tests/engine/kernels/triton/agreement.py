"""How close a kernel must come to its reference, and in which dtypes it is tried."""

from __future__ import annotations

import torch
from torch import Tensor

# In the interpreter bfloat16 is silently wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
_ULPS = 3
"""Units in the last place: a sum in another order may round the other way, and so may what is made of it."""


def assert_agree(found: Tensor, expected: Tensor, scale: float | None = None) -> None:
    """Close; and, in half precision, nearly always the same, which takes the same roundings in the same places.

    Args:
        scale: of the numbers that were added up; the largest one expected, if not given.
    """
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if not expected.numel():
        return
    half = expected.dtype != torch.float32
    unit = torch.finfo(expected.dtype).eps if half else 1e-6
    scale = float(expected.float().abs().max()) if scale is None else scale
    torch.testing.assert_close(found, expected, rtol=_ULPS * unit, atol=unit * scale)
    if half:
        assert (found != expected).sum() <= max(2, 0.02 * expected.numel())
