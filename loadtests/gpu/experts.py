"""Measures experts and their routing at the sizes of a layer of Qwen3-30B-A3B, beside the card's own ceilings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loadtests.gpu.figures import emit, say
from loadtests.gpu.quantized import Layout, random_weight
from loadtests.gpu.sizes import KERNELS, parse_arguments
from loadtests.gpu.timing import Ceilings, measure_each, seconds
from penstock.engine.kernels import experts as plain
from penstock.engine.kernels.experts import ExpertLinear, ListedExperts, Route, RunExperts
from penstock.engine.kernels.linear import DenseLinear
from penstock.engine.kernels.packed import Code, PackedWeight, UnpackedLinear
from penstock.engine.spec import Experts, Router

LAYOUTS = (
    Layout("16 bits"),
    Layout("int8, groups of 128", Code.INT8, 128),
    Layout("int4, groups of 128", Code.INT4, 128),
    Layout("int4, groups of 128 with zeros", Code.UINT4, 128, zero=True),
    Layout("fp8, blocks of 128", Code.FLOAT8, 128),
    Layout("mxfp4", Code.FLOAT4, 32),
)
QWEN3_30B = Experts(
    hidden_size=2048, inner_size=768, router=Router(num_experts=128, top_k=8, renormalizes=True)
)
SMALL = Experts(hidden_size=128, inner_size=128, router=Router(num_experts=8, top_k=2, renormalizes=True))

Pack = Callable[[PackedWeight | Tensor, int, bool], ExpertLinear]
"""Makes the maps of so many experts of the rows of all of them; gates and ups if they are gated."""


@dataclass(frozen=True, slots=True)
class Table:
    """The operations of a device."""

    route: Route
    run_experts: RunExperts
    pack: Pack


def table(device: torch.device) -> Table:
    """Returns the kernels of a server on this device; plain torch on a CPU."""
    if device.type != "cuda":
        return Table(plain.route, plain.run_experts, _listed)
    # Not above: there is no triton where nothing is measured.
    from penstock.engine.kernels.triton.expert_weights import PackedExperts
    from penstock.engine.kernels.triton.experts import TritonExperts
    from penstock.engine.kernels.triton.routing import route
    from penstock.engine.kernels.triton.tiles import Card

    def packed(weight: PackedWeight | Tensor, num_experts: int, gated: bool) -> ExpertLinear:
        num_rows, in_features = sizes_of(weight)
        return PackedExperts(
            num_experts=num_experts,
            out_features=num_rows // num_experts,
            in_features=in_features,
            weight=weight,
            bias=None,
            permutation=None,
            is_gated=gated,
        )

    return Table(route, TritonExperts(Card.of(device)), packed)


def sizes_of(weight: PackedWeight | Tensor) -> tuple[int, int]:
    """(outputs, inputs)"""
    if isinstance(weight, Tensor):
        return weight.shape[0], weight.shape[1]
    return weight.out_features, weight.in_features


def _listed(weight: PackedWeight | Tensor, num_experts: int, gated: bool) -> ExpertLinear:  # noqa: ARG001
    rows = sizes_of(weight)[0] // num_experts
    starts = range(0, num_experts * rows, rows)
    if isinstance(weight, Tensor):
        return ListedExperts([DenseLinear(weight[start : start + rows], None) for start in starts], rows)
    return ListedExperts(
        [UnpackedLinear(weight.outputs(start, start + rows), None) for start in starts], rows
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """The experts of a layer, of random numbers."""

    spec: Experts
    run_experts: RunExperts
    gate_up: ExpertLinear
    down: ExpertLinear
    num_bytes: int
    """Of all weights."""

    @classmethod
    def random(
        cls, spec: Experts, layout: Layout, own: Table, dtype: torch.dtype, device: torch.device
    ) -> Layer:
        count = spec.router.num_experts

        def weight(out_features: int, in_features: int) -> PackedWeight | Tensor:
            if layout.code is None:
                return torch.randn(count * out_features, in_features, device=device, dtype=dtype)
            return random_weight(layout, layout.code, count * out_features, in_features, device)

        gate_up = weight(2 * spec.inner_size, spec.hidden_size)
        down = weight(spec.hidden_size, spec.inner_size)
        num_bytes = sum(
            each.nbytes if isinstance(each, Tensor) else each.num_bytes for each in (gate_up, down)
        )
        pack = own.pack
        return cls(spec, own.run_experts, pack(gate_up, count, True), pack(down, count, False), num_bytes)

    def runs(self, x: Tensor) -> tuple[Callable[[], None], int]:
        """Runs x [rows, hidden] through experts that are chosen evenly, and how many times it does so.

        Experts of few rows differ from one time to the next, so that none is left in a cache.
        """
        choices = chosen(self.spec.router, len(x), x.device)
        weights = torch.full_like(choices[0], 1 / self.spec.router.top_k, dtype=torch.float32)

        def run() -> None:
            for ids in choices:
                self.run_experts(x, ids, weights, self.gate_up, self.down, self.spec.activation)

        return run, len(choices)


def chosen(router: Router, num_rows: int, device: torch.device) -> list[Tensor]:
    """Experts [rows, k] of several steps: all experts are chosen before one is chosen again."""
    generator = torch.Generator().manual_seed(0)
    rounds = -(-num_rows * router.top_k // router.num_experts)
    orders = [torch.randperm(router.num_experts, generator=generator) for _ in range(rounds)]
    rows = torch.cat(orders).int().view(-1, router.top_k).to(device)
    return [ids for ids in torch.split(rows, num_rows) if len(ids) == num_rows]


@dataclass(frozen=True, slots=True)
class Bench:
    """The layer, numbers of rows and device that all measurements share."""

    spec: Experts
    rows: tuple[int, ...]
    table: Table
    dtype: torch.dtype
    device: torch.device
    ceilings: Ceilings

    def routing(self) -> None:
        """Measures the choice of experts, whose logits are there."""
        router = self.spec.router
        for rows in self.rows:
            logits = torch.randn(rows, router.num_experts, device=self.device, dtype=self.dtype)
            time_s = seconds(self.device, partial(self.table.route, logits, router, None, None))
            emit(
                f"routing, {rows:,} rows",
                time_s * 1e6,
                "us",
                f"{router.top_k} of {router.num_experts} experts",
            )

    def experts(self, layout: Layout) -> None:
        """Measures the experts of each number of rows; bytes are those of the weights of chosen experts."""
        spec = self.spec
        layer = Layer.random(spec, layout, self.table, self.dtype, self.device)
        for rows in self.rows:
            run, times = layer.runs(torch.randn(rows, spec.hidden_size, device=self.device, dtype=self.dtype))
            time_s = seconds(self.device, run) / times
            num_pairs = rows * spec.router.top_k
            num_chosen = min(num_pairs, spec.router.num_experts)
            flop = 6 * num_pairs * spec.hidden_size * spec.inner_size
            emit(
                f"experts, {layout.name}, {rows:,} rows",
                layer.num_bytes * num_chosen / spec.router.num_experts / time_s / 1e9,
                "GB/s",
                f"of the weights of {num_chosen} experts, {time_s * 1e6:,.0f} us a layer, "
                f"{flop / time_s / 1e12:.1f} TFLOP/s; a copy reaches {self.ceilings.bytes_per_s / 1e9:,.0f} GB/s, "
                f"a large product {self.ceilings.flop_per_s / 1e12:,.0f} TFLOP/s",
            )


@torch.inference_mode()
def main() -> int:
    arguments = parse_arguments()
    if arguments.is_dry:
        torch.set_num_threads(1)
    device, sizes = arguments.device, KERNELS[arguments.mode]
    dtype = torch.float32 if arguments.is_dry else torch.bfloat16
    say("experts: ceilings")
    ceilings = Ceilings.measured(sizes.matmul, sizes.copied_bytes, dtype, device)
    spec = SMALL if arguments.is_dry else QWEN3_30B
    bench = Bench(spec, sizes.quantized_rows, table(device), dtype, device, ceilings)
    measures = {"routing": bench.routing} | {each.name: partial(bench.experts, each) for each in LAYOUTS}
    return measure_each("experts", "experts", measures)


if __name__ == "__main__":
    sys.exit(main())
