"""Measures the native decoder's layers with a state: a prompt next to the same linear maps without, and one stream.

python -m lab.bench.states                     # layers of Qwen 3.5 0.8B in int8 and bfloat16
python -m lab.bench.states --types int4 --layers 24
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from lab.bench.experts import kept_in
from lab.bench.random_states import QWEN_08B, dense, random_layer, random_linear, random_weight
from penstock.app.measures import measure_memory
from penstock.app.tables import number, table
from penstock.engine.config import ModelConfig
from penstock.engine.fields import Fields
from penstock.engine.kernels.batch import Batch, blank_batch
from penstock.engine.kernels.cpu.native import BLOCK_SIZE, Team, load_library
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.select import native_kernels
from penstock.engine.kernels.state_cache import StateCache, StateLayout
from penstock.engine.model.parse import parse_config
from penstock.engine.program.decoders import make_decoder
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.native_layers import native_linear
from penstock.engine.program.parameters import Weights
from penstock.engine.spec import LinearMap

PROMPT, NUM_SLOTS = 512, 3


@dataclass(frozen=True, slots=True)
class Figure:
    """The best steps of one type."""

    type: str
    prompt_ms: float
    dense_prompt_ms: float
    """Of the model whose layers with a state have attention in their place, of the same linear maps."""
    parts_ms: dict[str, float]
    """Of the prompt."""
    token_ms: float
    gb_per_s: float
    """The weights, and the state that one sequence has, in the time of a token."""


class Model:
    """A model of random weights, and the memory of one sequence and of a snapshot.

    Args:
        num_own: the first layers that have weights of their own, if not all; the others have the same in turn.
        num_pending: the rows that a slot keeps after a state.
    """

    def __init__(
        self, team: Team, type: str, config: ModelConfig, num_own: int | None = None, num_pending: int = 0
    ) -> None:
        self.type, self.team, kernels = type, team, native_kernels(team, torch.bfloat16)
        own = [random_layer(kernels, layer, self._linear, torch.ones) for layer in config.layers[:num_own]]
        layers = list(islice(cycle(own), config.num_layers))
        embedding = torch.randn(config.vocab_size, config.hidden_size).bfloat16()
        weights = Weights(embedding, layers, torch.ones(config.hidden_size), nn.Identity(), is_tied=False)
        num_blocks = PROMPT // BLOCK_SIZE + 2
        kv = KVCache(KVLayout.of(config, BLOCK_SIZE), num_blocks, torch.bfloat16, torch.device("cpu"))
        self.states = StateCache(StateLayout.of(config, num_pending), NUM_SLOTS, torch.device("cpu"))
        decoder = make_decoder(config, weights, kernels, kv, 2 * PROMPT, self.states)
        assert isinstance(decoder, NativeDecoder)
        self.decoder, self.blocks = decoder, torch.arange(num_blocks, dtype=torch.int32)[None]

    def _linear(self, kernels: Kernels, map: LinearMap) -> Linear:
        kept = kept_in(self.type, map.in_features)
        if map.stays or isinstance(kept, torch.dtype):
            return random_linear(kernels, map)
        return kernels.linear(kept.quantize(random_weight(map)), kept, None, gated=map.is_gated)

    @property
    def num_bytes(self) -> int:
        """The bytes that a token reads."""
        weights = sum(
            native_linear(op.linear).num_bytes for op in self.decoder.program.ops if op.linear is not None
        )
        return weights + self.states.layout.slot_bytes

    def batch(
        self, num_tokens: int, end: int, slots: Tensor | None = None, saves: Tensor | None = None
    ) -> Batch:
        """Returns a step of some tokens that end there, in slot 1 unless `slots` are given."""
        own = blank_batch([num_tokens], [end], self.blocks)
        slots = ints([int(end > num_tokens), 1, 0, num_tokens]) if slots is None else slots
        return replace(own, token_ids=own.positions % 1024, state_slots=slots, state_saves=saves)

    def seconds(self, batch: Batch) -> float:
        started = time.perf_counter()
        self.decoder(batch)
        return time.perf_counter() - started

    def parts_ms(self, batch: Batch) -> dict[str, float]:
        self.team.time(True)
        self.decoder(batch)
        times = self.team.times()
        self.team.time(False)
        return {kind: spent.open_ns / 1e6 for kind, spent in times.items() if spent.num_phases}


def ints(row: list[int]) -> Tensor:
    """[1, row]"""
    return torch.tensor([row], dtype=torch.int32)


def measure(team: Team, type: str, config: ModelConfig, repeats: int) -> Figure:
    """The best of some steps of both models, in turns: other processes slow both."""
    model, other = Model(team, type, config), Model(team, type, dense(config))
    prompt, token = model.batch(PROMPT, PROMPT), model.batch(1, PROMPT + 1)
    best = [math.inf] * 3
    for _ in range(repeats + 1):
        found = model.seconds(prompt), other.seconds(prompt), min(model.seconds(token) for _ in range(20))
        best = [min(*both) for both in zip(best, found, strict=True)]
    return Figure(
        type=type,
        prompt_ms=1e3 * best[0],
        dense_prompt_ms=1e3 * best[1],
        parts_ms=model.parts_ms(prompt),
        token_ms=1e3 * best[2],
        gb_per_s=model.num_bytes / best[2] / 1e9,
    )


def print_figures(figures: list[Figure], memory_gb_per_s: float) -> None:
    print(f"memory: {memory_gb_per_s:.1f} GB/s")
    head = [
        f"{PROMPT} tokens, ms",
        "dense, ms",
        "tokens/s of dense",
        "conv ms",
        "state ms",
        "a token, ms",
        "GB/s",
    ]
    lines = [
        [
            own.type,
            number(own.prompt_ms),
            number(own.dense_prompt_ms),
            f"{own.dense_prompt_ms / own.prompt_ms:.0%}",
            number(own.parts_ms["conv"]),
            number(own.parts_ms["state"]),
            number(own.token_ms),
            number(own.gb_per_s),
            f"{own.gb_per_s / memory_gb_per_s:.0%}",
        ]
        for own in figures
    ]
    print(table(["", *head, "of memory"], lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--types", nargs="+", choices=("int4", "int8", "bfloat16"), default=("int8", "bfloat16")
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    team = load_library(print).start_team(options.threads)
    config = parse_config(Fields("", {**QWEN_08B, "num_hidden_layers": options.layers}))
    memory = measure_memory(team)
    figures = [measure(team, type, config, options.repeats) for type in options.types]
    print_figures(figures, max(memory, measure_memory(team)))


if __name__ == "__main__":
    main()
