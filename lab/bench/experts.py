"""Measures the native decoder's experts: one row, 16 rows and 512 rows, next to memory and dense products.

python -m lab.bench.experts                     # layers of 30B-A3B in int4, int8 and bfloat16
python -m lab.bench.experts --types int4 --layers 12
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from ctypes import c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lab.bench.checkpoints import A3B_30B
from penstock.app.measures import measure_memory
from penstock.app.tables import number, table
from penstock.engine.fields import Fields
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.experts import native_experts
from penstock.engine.kernels.cpu.native import BLOCK_SIZE, NativeLinear, Team, load_library
from penstock.engine.kernels.experts import ExpertLinear
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.select import native_kernels
from penstock.engine.model.parse import parse_config
from penstock.engine.program.decoders import make_decoder
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.parameters import AttentionWeights, ExpertsWeights, LayerWeights, Weights
from penstock.engine.quant.formats import DENSE, Format, NamedTensors, Rounding
from penstock.engine.quant.quantization import Quantization
from penstock.engine.spec import Experts, LinearMap, expert_field

TYPES = ("int4", "int8", "bfloat16")
ROWS = (1, 16, 512)
PARTS = ("route", "prepare", "gate_up", "down", "combine")
"""The kinds of phases that experts consist of, but for the norm of what they read."""
_VOCABULARY = 1024
_LAYERS_OF_8_BITS = 99
"""Stands for a layer that `--quantize int4` keeps in 4 bits."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The experts of one step, on average of the layers."""

    type: str
    rows: int
    parts_ms: dict[str, float]
    touched: float
    """Experts that some row had."""
    gb_per_s: float
    """The weights of the experts used, in the time of a layer."""
    gflop_per_s: float
    dense_gflop_per_s: float
    """Of the products of a dense part with as many active weights."""


class Model:
    """Layers of random experts, which all have the same numbers, though each a copy of its own.

    The numbers are the same in each run, so that a step has the same experts."""

    def __init__(self, team: Team, type: str, num_layers: int) -> None:
        self.team, self.type = team, type
        cut = {"num_hidden_layers": num_layers, "vocab_size": _VOCABULARY}
        self.config = parse_config(Fields("", A3B_30B | cut))
        experts = self.config.layers[0].feed_forward
        assert isinstance(experts, Experts)
        self.experts = experts
        self.kernels = native_kernels(team, torch.bfloat16)
        self._generator = torch.Generator().manual_seed(0)
        layers = [self._layer(number) for number in range(num_layers)]
        embedding = self._normal(_VOCABULARY, self.config.hidden_size).bfloat16()
        weights = Weights(
            embedding, layers, torch.ones(self.config.hidden_size), nn.Identity(), is_tied=False
        )
        layout = KVLayout.of(self.config, BLOCK_SIZE)
        kv = KVCache(layout, max(ROWS) // BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))
        decoder = make_decoder(self.config, weights, self.kernels, kv, max(ROWS))
        assert isinstance(decoder, NativeDecoder)
        self.decoder = decoder

    def _layer(self, number: int) -> LayerWeights:
        maps = self.config.layers[number].maps()
        norm, head_norm = torch.ones(self.config.hidden_size), torch.ones(self.config.head_dim)
        experts = ExpertsWeights(
            spec=self.experts,
            router=self._linear(maps["router"]),
            gate_up=self._experts(maps[expert_field(0, "gate_up")]),
            down=self._experts(maps[expert_field(0, "down")]),
        )
        qkv, o = self._linear(maps["qkv"]), self._linear(maps["o"])
        return LayerWeights(
            mixer=AttentionWeights(qkv=qkv, o=o, q_norm=head_norm, k_norm=head_norm),
            feed_forward=experts,
            input_norm=norm,
            post_norm=norm,
        )

    def _experts(self, map: LinearMap) -> ExpertLinear:
        tensors, format, rows = self._random(map)
        count = self.experts.router.num_experts
        each = ((tensors, None) for _ in range(count))
        return self.kernels.pack_experts(each, format, count, rows, gated=map.is_gated)

    def _linear(self, map: LinearMap) -> Linear:
        tensors, format, _ = self._random(map)
        return self.kernels.linear(tensors, format, None)

    def _random(self, map: LinearMap) -> tuple[NamedTensors, Format, int]:
        rows, columns = sum(part.count for part in map.rows), map.in_features
        weight, kept = self._normal(rows, columns) / columns**0.5, kept_in(self.type, columns)
        if map.stays or isinstance(kept, torch.dtype):
            return {"weight": weight.bfloat16()}, DENSE, rows
        return kept.quantize(weight), kept, rows

    def _normal(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator)

    @property
    def expert_bytes(self) -> int:
        return sum(linears[0].num_bytes for linears in self._first())

    def _first(self) -> list[list[NativeLinear]]:
        """Gates and ups, and the maps after them, of the experts of the first layer."""
        own = next(op.experts for op in self.decoder.program.ops if op.experts is not None)
        return [native_experts(own.gate_up), native_experts(own.down)]

    def dense_seconds(self, rows: int) -> float:
        """The time of so many rows through the linear maps of `top_k` experts, all rows through each."""
        count, total = self.experts.router.top_k, 0.0
        for linears in self._first():
            handles = (c_void_p * count)(*[linear.handle for linear in linears[:count]])
            call = self.team.library.call
            total += call("penstock_measure_products", self.team.handle, handles, count, rows, 1) * count
        return total

    def steps(self, rows: int) -> Iterator[dict[str, float]]:
        """Milliseconds of each part in steps of other tokens, one sequence each of them or one of all."""
        generator = torch.Generator().manual_seed(rows)
        while True:
            batch = self._batch(torch.randint(_VOCABULARY, (rows,), generator=generator).int())
            self.team.time(True)
            self.decoder(batch)
            times = self.team.times()
            self.team.time(False)
            yield {part: times[part].open_ns / 1e6 / self.config.num_layers for part in PARTS}

    def _batch(self, token_ids: Tensor) -> Batch:
        rows = len(token_ids)
        positions = torch.arange(rows, dtype=torch.int32)
        blocks = torch.arange(-(-rows // BLOCK_SIZE), dtype=torch.int32)
        starts, lens = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([rows], dtype=torch.int32)
        return Batch(token_ids, positions, starts, lens, blocks[None], positions)


def kept_in(type: str, in_features: int) -> torch.dtype | Rounding:
    if type == "bfloat16":
        return torch.bfloat16
    return Quantization(type).layer_format(_LAYERS_OF_8_BITS, in_features)


def measure(team: Team, type: str, num_layers: int, repeats: int) -> list[Figure]:
    model = Model(team, type, num_layers)
    return [_figure(model, rows, repeats) for rows in ROWS]


def _figure(model: Model, rows: int, repeats: int) -> Figure:
    """The best step for its experts, and the best dense products, in turns: other processes slow both."""
    experts, steps, taken = model.experts, model.steps(rows), list[tuple[float, float, dict[str, float]]]()
    next(steps)
    dense_s = math.inf
    for _ in range(repeats):
        model.decoder.take_experts_touched()
        parts = next(steps)
        touched, layers = model.decoder.take_experts_touched()
        taken.append((sum(parts.values()), touched / layers, parts))
        dense_s = min(dense_s, model.dense_seconds(rows))
    ms, num_read, parts = min(taken, key=lambda step: step[0] / step[1])
    flop = 2.0 * rows * experts.router.top_k * 3 * model.config.hidden_size * experts.inner_size
    return Figure(
        type=model.type,
        rows=rows,
        parts_ms=parts,
        touched=num_read,
        gb_per_s=num_read * model.expert_bytes / ms / 1e6,
        gflop_per_s=flop / ms / 1e6,
        dense_gflop_per_s=flop / dense_s / 1e9,
    )


def print_figures(figures: list[Figure], memory_gb_per_s: float) -> None:
    print(f"memory: {memory_gb_per_s:.1f} GB/s")
    head = ["experts, rows", *(f"{part} ms" for part in PARTS), "ms a layer", "experts", "GB/s", "of memory"]
    lines = [
        [
            f"{own.type}, {own.rows}",
            *(number(ms) for ms in own.parts_ms.values()),
            number(sum(own.parts_ms.values())),
            number(own.touched),
            number(own.gb_per_s),
            f"{own.gb_per_s / memory_gb_per_s:.0%}",
            number(own.gflop_per_s),
            f"{own.gflop_per_s / own.dense_gflop_per_s:.0%}",
        ]
        for own in figures
    ]
    print(table([*head, "GFLOP/s", "of dense"], lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    team = load_library(print).start_team(options.threads)
    memory = measure_memory(team)
    found = [
        figure for type in options.types for figure in measure(team, type, options.layers, options.repeats)
    ]
    print_figures(found, memory)


if __name__ == "__main__":
    main()
