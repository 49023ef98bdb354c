"""Measures from which number of rows on one kernel of a linear map is quicker than another: for the file of tiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loadtests.gpu.figures import emit
from loadtests.gpu.quantized import LAYOUTS, Bench, Layout, map_sizes, start_bench
from loadtests.gpu.sizes import parse_arguments
from loadtests.gpu.timing import measure_each
from penstock.engine.kernels.linear import DenseLinear, Linear
from penstock.engine.kernels.triton.boundaries import ROUND_KEY, few_key, unpack_key

Way = Callable[[Linear, Tensor], Tensor]
"""Runs a map in one of its ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A place in the file of tiles, see `Card.boundary`, and the ways on its sides."""

    key: str
    layout: Layout
    below: dict[str, Way]
    """The quickest of them serves fewer rows."""
    above: dict[str, Way]
    rows: tuple[int, ...]
    """They are measured with so many."""

    def measure(self, bench: Bench) -> None:
        """Emits the times of all ways by rows, and the boundary."""
        faster: list[bool] = []
        for rows in self.rows:
            below, above = (
                {name: _seconds(bench, self.layout, way, rows) for name, way in ways.items()}
                for ways in (self.below, self.above)
            )
            faster.append(min(above.values()) < min(below.values()))
            times = ", ".join(f"{name} {time_s * 1e6:,.0f} us" for name, time_s in (below | above).items())
            gain = min(below.values()) / min(above.values())
            emit(f"{self.key}, {self.layout.name}, {rows:,} rows", gain, "times as fast", times)
        emit(f'boundary "{self.key}", {self.layout.name}', boundary(self.rows, faster), "rows", "or more")


def boundary(rows: tuple[int, ...], faster: list[bool]) -> int:
    """The number of rows from which on the ways above are faster at all that was measured; beyond it, if nowhere."""
    first = rows[-1] + 1
    for num, is_faster in zip(reversed(rows), reversed(faster), strict=True):
        if not is_faster:
            break
        first = num
    return first


def _way(name: str) -> Way:
    """A method of the map, where it has that: it has one way alone on a CPU."""
    return lambda linear, x: getattr(linear, name, linear)(x)


def _torch(linear: Linear, x: Tensor) -> Tensor:
    return linear(x)


def _few_rows(linear: Linear, x: Tensor) -> Tensor:
    if not x.is_cuda or not isinstance(linear, DenseLinear):
        return linear(x)
    # Not above: there is no triton where nothing is measured.
    from penstock.engine.kernels.triton.few_rows import multiply_few

    return multiply_few(x, linear.weight, None)


def _seconds(bench: Bench, layout: Layout, way: Way, rows: int) -> float:
    """The four maps of a layer, with weights from memory."""
    total_s = 0.0
    for out_features, in_features in map_sizes(bench.config):
        maps, _ = bench.copies(layout, out_features, in_features)
        x = torch.randn(rows, in_features, device=bench.device).to(bench.dtype)
        total_s += bench.seconds([partial(way, linear) for linear in maps], x)
    return total_s


def boundaries(bench: Bench) -> list[Boundary]:
    """The places that the file has for the type of x."""
    many = bench.sizes.many_rows
    tiled, unpacked, rounded = (_way(name) for name in ("tiled", "unpacked", "rounded"))
    found = [
        Boundary(
            key=few_key(bench.dtype),
            layout=LAYOUTS[0],
            below={"few rows": _few_rows},
            above={"torch": _torch},
            rows=bench.sizes.few_rows,
        )
    ]
    found += [
        Boundary(
            key=unpack_key(layout.code),
            layout=layout,
            below={"by tiles": tiled},
            above={"unpacked": unpacked},
            rows=many,
        )
        for layout in LAYOUTS
        if layout.code is not None and layout.group_size is not None
    ]
    return [
        *found,
        Boundary(
            key=ROUND_KEY,
            layout=LAYOUTS[-1],
            below={"by tiles": tiled, "unpacked": unpacked},
            above={"rounded": rounded},
            rows=many,
        ),
    ]


@torch.inference_mode()
def main() -> int:
    arguments = parse_arguments()
    bench = start_bench("boundaries", arguments)
    measures = {f"{each.key}, {each.layout.name}": partial(each.measure, bench) for each in boundaries(bench)}
    return measure_each("boundaries", "boundaries", measures)


if __name__ == "__main__":
    sys.exit(main())
