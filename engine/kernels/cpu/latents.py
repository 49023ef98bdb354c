"""The matrices of latent attention in the layout of the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.library import Team
from penstock.engine.kernels.cpu.linear import NativeLinear


class NativeLatentMaps:
    """The matrices K and V of each head as linear maps, see `LatentAttention`.

    Args:
        up: [num_heads, plain + value, latent]; it is rounded to `dtype`, float32, float16 or bfloat16.
    """

    def __init__(self, team: Team, up: Tensor, plain_size: int, dtype: torch.dtype) -> None:
        def linears(weights: Tensor) -> list[NativeLinear]:
            return [NativeLinear(team, weight, None, dtype) for weight in weights]

        self.of_queries = linears(up[:, :plain_size].mT)
        """Of each head, the plain numbers of a query -> latent."""
        self.of_latents = linears(up[:, plain_size:])
        """Of each head, latent -> values."""
