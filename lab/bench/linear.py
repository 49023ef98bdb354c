"""The ceiling: the linear operators of a model alone, packed as the server packs them, weights coming from memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.app.measures import measure_linear
from penstock.engine.config import ModelConfig
from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library
from penstock.engine.kernels.linear import DenseLinear
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.dtype import choose_dtype
from penstock.engine.model.tensors import linear_specs
from penstock.engine.quant.formats import Rounding
from penstock.engine.quant.quantization import Quantization

Size = tuple[int, int]
"""(out, in)"""

_WALKED_BYTES = 64 << 20
"""More than the caches hold."""


def measure(
    model: str, dtype: str, rows: list[int], threads: int, quantize: str | None = None
) -> list[float]:
    """GFLOP/s of one pass through all linear operators, for each number of rows."""
    torch.set_num_threads(threads)
    config = read_config(Path(model))
    device = torch.device("cpu")
    quantization = None if quantize is None else Quantization(quantize)
    rate = _rate_function(choose_dtype(dtype, config, device), quantization, config, threads)
    return [_mean_rate(linear_sizes(config), n, rate) for n in rows]


def linear_sizes(config: ModelConfig) -> Counter[Size]:
    """The linear operators that a decoding token passes, and how many of each there are."""
    layer = [(spec.out_features, spec.in_features) for spec in linear_specs(config).values()]
    sizes = Counter(layer * config.num_layers)
    sizes[config.vocab_size, config.hidden_size] += 1
    return sizes


def _mean_rate(sizes: Counter[Size], num_rows: int, rate: Callable[[Size, int], float]) -> float:
    """Over one pass: its arithmetic over its time."""
    flop = {size: 2.0 * num_rows * size[0] * size[1] * count for size, count in sizes.items()}
    seconds = sum(flop[size] / (rate(size, num_rows) * 1e9) for size in sizes)
    return sum(flop.values()) / seconds / 1e9


def _rate_function(
    dtype: torch.dtype, quantization: Quantization | None, config: ModelConfig, threads: int
) -> Callable[[Size, int], float]:
    try:
        team = load_library(lambda _: None).start_team(threads)
    except NativeUnavailable:
        return _torch_rate

    def kept(size: Size) -> torch.dtype | Rounding:
        """The format of most weights of this size: that of the last layer."""
        if quantization is None:
            return dtype
        is_head = size == (config.vocab_size, config.hidden_size)
        return (
            quantization.head_format(size[1])
            if is_head
            else quantization.layer_format(config.num_layers - 1, size[1])
        )

    return lambda size, num_rows: measure_linear(team, size[1], size[0], num_rows, kept(size))


@torch.inference_mode()
def _torch_rate(size: Size, num_rows: int, num_passes: int = 10) -> float:
    """The best of some passes, as the native kernels measure themselves."""
    copies = 1 + _WALKED_BYTES // (4 * size[0] * size[1])
    operators = [DenseLinear(torch.randn(size), None) for _ in range(copies)]
    x = torch.randn(num_rows, size[1])

    def seconds() -> float:
        started = time.perf_counter()
        for operator in operators:
            operator(x)
        return time.perf_counter() - started

    best = min(seconds() for _ in range(num_passes))
    return 2.0 * num_rows * size[0] * size[1] * copies / best / 1e9
