"""Measures linear maps with quantized weights at the shapes of an 8 B Llama, beside the card's own ceilings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from loadtests.gpu.figures import emit, say
from loadtests.gpu.sizes import KERNELS, Arguments, KernelSizes, parse_arguments, serving
from loadtests.gpu.timing import Ceilings, measure_each, seconds
from penstock.engine.config import ModelConfig
from penstock.engine.fields import Fields
from penstock.engine.kernels.linear import DenseLinear, Linear
from penstock.engine.kernels.packed import NARROW, UNIT, Code, PackedWeight, UnpackedLinear
from penstock.engine.model.parse import parse_config


@dataclass(frozen=True, slots=True)
class Layout:
    """One kind of weights."""

    name: str
    code: Code | None = None
    """None: the weights are in 16 bits."""
    group_size: int | None = None
    """None: a whole row."""
    zero: bool = False
    offset: bool = False


LAYOUTS = (
    Layout("16 bits"),
    Layout("int8", Code.INT8),
    Layout("int8, groups of 128", Code.INT8, 128),
    Layout("int4, groups of 128", Code.INT4, 128),
    Layout("int4, groups of 128 with zeros", Code.UINT4, 128, zero=True),
    Layout("int4, groups of 32", Code.INT4, 32),
    Layout("int4, groups of 32 with offsets", Code.UINT4, 32, offset=True),
    Layout("fp8", Code.FLOAT8),
    Layout("fp8, blocks of 128", Code.FLOAT8, 128),
)


def random_weight(
    layout: Layout, code: Code, out_features: int, in_features: int, device: torch.device
) -> PackedWeight:
    """A weight of random numbers, made on the device."""
    group_size = layout.group_size or in_features
    groups = -(-in_features // group_size), out_features
    padded = -(-in_features // UNIT) * UNIT
    codes = torch.randint(0, 64, (out_features, padded * code.bits // 8), device=device)
    return PackedWeight(
        code=code,
        codes=codes.to(torch.int8 if code is Code.INT8 else torch.uint8),
        scale=torch.full(groups, 0.01, device=device).to(NARROW[code is Code.FLOAT4]),
        zero=torch.full(groups, 8, dtype=torch.int8, device=device) if layout.zero else None,
        offset=torch.full(groups, -0.08, device=device).half() if layout.offset else None,
        in_features=in_features,
        group_size=group_size,
        permutation=None,
    )


def make_linear(dtype: torch.dtype, device: torch.device) -> Callable[[PackedWeight], Linear]:
    """Returns the function that makes the linear maps of packed weights on a device."""
    if device.type != "cuda":
        return lambda weight: UnpackedLinear(weight, None)
    # Not above: there is no triton where nothing is measured.
    from penstock.engine.kernels.triton.packed_linear import LinearChooser, multiplies_float8
    from penstock.engine.kernels.triton.tiles import Card

    linears = LinearChooser(Card.of(device), multiplies_float8(device, dtype))
    return lambda weight: linears(weight, None)


def map_sizes(config: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of the four linear maps of a layer."""
    return [
        (config.q_size + 2 * config.kv_size, config.hidden_size),
        (config.hidden_size, config.q_size),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]


@dataclass(frozen=True, slots=True)
class Bench:
    """The model, sizes and device that all measurements share."""

    config: ModelConfig
    sizes: KernelSizes
    dtype: torch.dtype
    device: torch.device
    make_linear: Callable[[PackedWeight], Linear]
    ceilings: Ceilings

    def measure(self, layout: Layout) -> None:
        """The four maps of a layer, with weights from memory, for each number of rows."""
        times_s = dict.fromkeys(self.sizes.quantized_rows, 0.0)
        num_bytes = num_weights = 0
        for out_features, in_features in map_sizes(self.config):
            maps, size = self.copies(layout, out_features, in_features)
            num_bytes += size
            num_weights += out_features * in_features
            for rows in times_s:
                x = torch.randn(rows, in_features, device=self.device).to(self.dtype)
                times_s[rows] += self.seconds(maps, x)
            del maps
        for rows, time_s in times_s.items():
            flop_per_s = 2 * rows * num_weights / time_s
            emit(
                f"linear maps, {layout.name}, {rows:,} rows",
                num_bytes / time_s / 1e9,
                "GB/s",
                f"of weights, {time_s * 1e6:,.0f} us for the four maps of a layer, {flop_per_s / 1e12:.1f} TFLOP/s; "
                f"a copy reaches {self.ceilings.bytes_per_s / 1e9:,.0f} GB/s, "
                f"a large product {self.ceilings.flop_per_s / 1e12:,.0f} TFLOP/s",
            )

    def copies(self, layout: Layout, out_features: int, in_features: int) -> tuple[list[Linear], int]:
        """As many maps as must be used in turn, so that no weight is left in a cache, and the bytes of a weight."""
        first, size = self._map(layout, out_features, in_features)
        others = range(min(64, self.sizes.walked_bytes // size) - 1)
        return [first, *(self._map(layout, out_features, in_features)[0] for _ in others)], size

    def _map(self, layout: Layout, out_features: int, in_features: int) -> tuple[Linear, int]:
        if layout.code is None:
            dense = torch.randn(out_features, in_features, device=self.device, dtype=self.dtype)
            return DenseLinear(dense, None), dense.nbytes
        weight = random_weight(layout, layout.code, out_features, in_features, self.device)
        return self.make_linear(weight), weight.num_bytes

    def seconds(self, maps: ListLike[Linear], x: Tensor) -> float:
        """Seconds of one map, when every call has the next of them."""

        def runs() -> None:
            for linear in maps:
                linear(x)

        return seconds(self.device, runs) / len(maps)


def start_bench(part: str, arguments: Arguments) -> Bench:
    """Measures the device's ceilings, and returns the bench of a part."""
    if arguments.is_dry:
        torch.set_num_threads(1)
    device, sizes = arguments.device, KERNELS[arguments.mode]
    shape, _ = serving("llama-8b", arguments.mode)
    if arguments.is_dry:
        shape = replace(shape, hidden=128, intermediate=256, head_dim=32)  # whole groups
    dtype = torch.float32 if arguments.is_dry else torch.bfloat16
    config = parse_config(Fields("config.json", shape.config))
    say(f"{part}: ceilings")
    ceilings = Ceilings.measured(sizes.matmul, sizes.copied_bytes, dtype, device)
    return Bench(config, sizes, dtype, device, make_linear(dtype, device), ceilings)


@torch.inference_mode()
def main() -> int:
    bench = start_bench("quantized", parse_arguments())
    measures = {layout.name: partial(bench.measure, layout) for layout in LAYOUTS}
    return measure_each("quantized", "linear maps", measures)


if __name__ == "__main__":
    sys.exit(main())
