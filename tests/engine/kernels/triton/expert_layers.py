"""The experts of a layer in every format that Triton has, beside plain linear maps of the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels import experts as reference
from penstock.engine.kernels.experts import ListedExperts
from penstock.engine.kernels.linear import DenseLinear
from penstock.engine.kernels.triton.expert_weights import pack_experts
from penstock.engine.kernels.triton.experts import TritonExperts
from penstock.engine.kernels.triton.tiles import Card
from penstock.engine.quant.float8 import Float8, Scaling
from penstock.engine.quant.formats import DENSE, Format, NamedTensors
from penstock.engine.quant.integers import Factors, Inputs, Integers
from penstock.engine.quant.storages.mxfp4 import MXFP4
from penstock.engine.spec import Activation, Experts, Router
from tests.engine.integers import any_integers

Made = tuple[NamedTensors, Tensor | None]
FORMATS: dict[str, Format] = {
    "16 bits": DENSE,
    "int4, zeros": Integers(4, 64, has_offset=True, factors=Factors.ZEROS),
    "int4": Integers(4, 32),
    "int4, offsets, permuted": Integers(4, 32, has_offset=True, is_permuted=True),
    "int8": Integers(8, 64),
    "int8, rotated": Integers(8, 64, inputs=Inputs.ROW, rotation=64),
    "int8, permuted": Integers(8, 64, is_permuted=True),
    "mxfp4": MXFP4,
    "fp8, blocks": Float8(Scaling.BLOCK),
    "fp8": Float8(),
}


def sizes(
    hidden: int, inner: int, num_experts: int, top_k: int = 2, activation: Activation | None = None
) -> Experts:
    router = Router(num_experts=num_experts, top_k=top_k, renormalizes=True)
    return Experts(hidden_size=hidden, inner_size=inner, router=router, activation=activation or Activation())


def random(*size: int, seed: int = 0) -> Tensor:
    made: Tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return made


def tensors_of(format: Format, rows: int, inputs: int, seed: int) -> NamedTensors:
    """Random weights whose products have the size of their inputs, roughly."""
    if isinstance(format, Float8):
        return format.quantize(random(rows, inputs, seed=seed) / inputs**0.5)
    if not isinstance(format, Integers):
        return {"weight": random(rows, inputs, seed=seed) / inputs**0.5}
    tensors = any_integers(format, rows, inputs, torch.Generator().manual_seed(seed))
    deviation = float(format.unpack(tensors).std())
    names = [name for name in ("scale", "offset") if name in tensors]
    return tensors | {
        name: (tensors[name] / (deviation * inputs**0.5)).to(tensors[name].dtype) for name in names
    }


class Pair:
    """The experts of a layer, packed for Triton and as plain linear maps."""

    def __init__(
        self,
        format: Format,
        spec: Experts,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        with_bias: bool = False,
    ) -> None:
        self.spec, self.device, self.dtype = spec, device, dtype
        self.run = TritonExperts(Card.of(device))
        count, gated = spec.router.num_experts, spec.activation.is_gated
        width = (1 + gated) * spec.inner_size
        maps = {
            (width, spec.hidden_size, gated): range(100, 100 + count),
            (spec.hidden_size, spec.inner_size, False): range(200, 200 + count),
        }
        packed, plain = [], []
        for (rows, inputs, is_gated), seeds in maps.items():
            made = [
                (tensors_of(format, rows, inputs, seed), random(rows, seed=seed) if with_bias else None)
                for seed in seeds
            ]
            packed.append(pack_experts(iter(made), format, count, rows, device, dtype, gated=is_gated))
            plain.append(ListedExperts([self._dense(format, each) for each in made], rows))
        self.packed, self.plain = (packed[0], packed[1]), (plain[0], plain[1])

    def _dense(self, format: Format, own: Made) -> DenseLinear:
        tensors, bias = own
        weight = format.unpack(tensors).to(self.device, self.dtype)
        return DenseLinear(weight, None if bias is None else bias.to(self.device, self.dtype))

    def step(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, their experts and the weights of those."""
        router = self.spec.router
        ids, weights = reference.route(random(rows, router.num_experts, seed=rows).to(self.device), router)
        x = random(rows, self.spec.hidden_size, seed=rows + 1).to(self.device, self.dtype)
        return x, ids, weights

    def triton(self, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
        return self.run(x, ids, weights, *self.packed, self.spec.activation, **options)

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
        return reference.run_experts(x, ids, weights, *self.plain, self.spec.activation, **options)

    def check(self, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> None:
        found = self.triton(x, ids, weights, **options)
        self.assert_near(found, self.expected(x, ids, weights, **options))

    @staticmethod
    def assert_near(found: Tensor, expected: Tensor) -> None:
        """Within a few roundings to the type of x, of numbers as large as the largest."""
        assert found.dtype == expected.dtype
        tolerance = 1e-5 if found.dtype == torch.float32 else 6 * torch.finfo(found.dtype).eps
        largest = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * largest)
