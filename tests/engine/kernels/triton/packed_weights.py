"""Random packed weights of every kind, and between which numbers products with them must lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.kernels.packed import UNIT as INPUTS_OF_A_UNIT
from penstock.engine.kernels.packed import Code, PackedWeight, narrowest, pack_nibbles, padded
from penstock.engine.kernels.triton.packed_linear import MIN_UNPACKED_ROWS
from penstock.engine.quant.float8 import FLOAT8
from penstock.engine.quant.storages.mxfp4 import DOUBLED
from tests.engine.ranges import UNIT, Range, gamma


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A packed weight, and what it stands for without any rounding."""

    weight: PackedWeight
    exact: Tensor
    """[out, in] float64, in the order of x"""
    magnitude: Tensor
    """[out, in] float64: |(number - zero) * scale| + |offset|"""

    def product(self, x: Tensor, bias: Tensor | None) -> Range:
        """x [M, in] @ weight.T + bias, with the roundings that a TritonLinear may make.

        Sums are float32 in any order, with two roundings more for each group. Where weights are unpacked, they are
        rounded to the type of x, after three roundings in float32; so are floats of 4 bits that have groups.
        """
        weight, wide = self.weight, x.double()
        relative = gamma(weight.in_features + 2 * len(weight.scale) + 4)
        is_unpacked = weight.offset is not None or weight.group_size % INPUTS_OF_A_UNIT > 0
        is_unpacked |= weight.code is Code.FLOAT4 and len(weight.scale) > 1
        if is_unpacked or len(x) >= MIN_UNPACKED_ROWS:
            relative += torch.finfo(x.dtype).eps / 2 * (1 + relative)
        product, error = wide @ self.exact.T, relative * (wide.abs() @ self.magnitude.T)
        result = Range(product - error, product + error).widened(0)
        if bias is not None:
            added = bias.double()
            result = Range(result.low + added, result.high + added).widened(UNIT)
        return result.rounded(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The format of a weight; its sizes are given later."""

    code: Code
    group_size: int | None = None
    """None: a whole row."""
    zero: bool = False
    offset: bool = False
    permuted: bool = False

    def random(self, out_features: int, in_features: int, device: torch.device, seed: int = 0) -> Example:
        generator = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *size: int) -> Tensor:
            return torch.randint(low, high, size, generator=generator)

        group_size = self.group_size or in_features
        num_groups = -(-in_features // group_size)
        codes, numbers = self._numbers(integers(0, 256, out_features, in_features))
        scale = (torch.rand(num_groups, out_features, generator=generator) + 0.5).half().float()
        zero = integers(-16, 16, num_groups, out_features).to(torch.int8) if self.zero else None
        offset = torch.randn(num_groups, out_features, generator=generator) if self.offset else None
        permutation = torch.randperm(in_features, generator=generator) if self.permuted else None

        def spread(of_groups: Tensor | None) -> Tensor:
            if of_groups is None:
                return torch.zeros(out_features, in_features, dtype=torch.float64)
            return of_groups.double().repeat_interleave(group_size, 0)[:in_features].T

        scaled = (numbers - spread(zero)) * spread(scale)
        exact, magnitude = scaled + spread(offset), scaled.abs() + spread(offset).abs()
        order = torch.arange(in_features) if permutation is None else permutation
        weight = PackedWeight(
            code=self.code,
            codes=codes.to(device),
            scale=narrowest(scale).to(device),
            zero=None if zero is None else zero.to(device),
            offset=None if offset is None else narrowest(offset).to(device),
            in_features=in_features,
            group_size=group_size,
            permutation=None if permutation is None else permutation.int().to(device),
        )
        return Example(
            weight=weight,
            exact=torch.empty_like(exact).index_copy_(1, order, exact).to(device),
            magnitude=torch.empty_like(exact).index_copy_(1, order, magnitude).to(device),
        )

    def _numbers(self, random_bytes: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of random numbers, and the numbers in float64."""
        match self.code:
            case Code.INT4:
                return pack_nibbles(random_bytes % 16), (random_bytes % 16 - 8).double()
            case Code.UINT4:
                return pack_nibbles(random_bytes % 16), (random_bytes % 16).double()
            case Code.FLOAT4:
                places = random_bytes % 16
                return pack_nibbles(places), torch.tensor(DOUBLED).double()[places]
            case Code.INT8:
                return padded((random_bytes - 128).to(torch.int8)), (random_bytes - 128).double()
            case Code.FLOAT8:
                finite = torch.where(random_bytes % 128 == 127, 0, random_bytes).to(torch.uint8)
                return padded(finite), finite.view(FLOAT8).double()
