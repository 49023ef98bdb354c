"""Measures prompts through layers with a state: the kernels by tiles and row by row, and a model beside a dense one."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.bench.random_states import QWEN_08B, dense, random_layer, random_linear, random_vectors
from loadtests.gpu.figures import emit
from loadtests.gpu.sizes import parse_arguments
from loadtests.gpu.timing import measure_each, seconds
from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.fields import Fields
from penstock.engine.kernels import recurrent
from penstock.engine.kernels.batch import Batch, blank_batch
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.kernels.select import triton_kernels
from penstock.engine.kernels.state_cache import StateCache, StateLayout, StatePlace
from penstock.engine.model.parse import parse_config
from penstock.engine.program.decoders import make_decoder
from penstock.engine.program.parameters import Weights
from penstock.engine.spec import GatedDelta, Mamba2, StateMixer

QWEN = GatedDelta(hidden_size=1024, num_key_heads=16, num_value_heads=16, key_dim=128, value_dim=128)
GRANITE = Mamba2(hidden_size=1536, num_heads=48, head_dim=64, num_groups=1, state_size=128)
SMALL = GatedDelta(hidden_size=16, num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=8)
LAYERS: dict[str, StateMixer] = {
    "gated delta net of Qwen 3.5 0.8B": QWEN,
    "Mamba-2 of Granite 4 H": GRANITE,
}
PROMPTS = (512, 2048, 8192)
TINY = {
    **QWEN_08B,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
BLOCK_SIZE = 16
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Bench:
    """The device, type and prompts of all measurements."""

    device: torch.device
    dtype: torch.dtype
    prompts: tuple[int, ...]

    def layer(self, name: str, spec: StateMixer) -> None:
        """One layer between its linear maps, by tiles and row by row."""
        run, own = self._kernel(spec), random_vectors(spec, self.device)
        place = StatePlace.at(0, spec, 0)
        cache = StateCache(
            StateLayout(places={0: place}, num_pending=0, slot_floats=place.end), 2, self.device
        )
        for num_rows in self.prompts:
            rows, *gates = (
                torch.randn(num_rows, width, device=self.device, dtype=self.dtype)
                for width in (
                    sum(part.count for part in spec.maps()[map].rows)
                    for map in ("into", "gates")
                    if map in spec.maps()
                )
            )
            batch = prompt(num_rows, self.device)
            for how, own_batch in (("", batch), (", row by row", replace(batch, max_query_len=1))):
                call = partial(run, rows, *gates, spec, own, 1e-6, cache.layer(0), own_batch)
                time_s = seconds(self.device, call)
                emit(
                    f"{name}, a prompt of {num_rows:,}{how}",
                    time_s * 1e6,
                    "us",
                    f"one layer without its linear maps; {time_s * 1e6 / num_rows:.3f} us a row",
                )

    def model(self, name: str, config: ModelConfig) -> None:
        """Prompts of a whole model, beside one of the same linear maps with attention in all layers."""
        decoders = [self._decoder(own) for own in (config, dense(config))]
        for num_rows in self.prompts:
            batch = prompt(num_rows, self.device)
            rates = [num_rows / self._launched(partial(decoder, batch)) for decoder in decoders]
            for what, rate in zip(("", ", dense"), rates, strict=True):
                emit(f"{name}{what}, a prompt of {num_rows:,}", rate, "tokens/s", "all layers, no logits")
            emit(f"{name}, a prompt of {num_rows:,}, of the dense one", 100 * rates[0] / rates[1], "%")

    def _launched(self, run: Any) -> float:
        """One call's share of some that are launched one after another, as prompts are: without graphs."""
        run()
        best = float("inf")
        for _ in range(_REPEATS):
            self._synchronize()
            started_s = time.perf_counter()
            for _ in range(_REPEATS):
                run()
            self._synchronize()
            best = min(best, (time.perf_counter() - started_s) / _REPEATS)
        return best

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _kernel(self, spec: StateMixer) -> Any:
        if self.device.type == "cuda":
            from penstock.engine.kernels.triton import states

            return states.gated_delta if isinstance(spec, GatedDelta) else states.mamba2
        return recurrent.gated_delta if isinstance(spec, GatedDelta) else recurrent.mamba2

    def _decoder(self, config: ModelConfig) -> Any:
        """A decoder of random weights, with the memory of one sequence."""
        longest = max(self.prompts)
        options = LoadOptions(max_num_seqs=1, block_size=BLOCK_SIZE, max_batch_tokens=longest)
        if self.device.type == "cuda":
            kernels = triton_kernels(config, self.device, self.dtype, options)
        else:
            kernels = reference_kernels(self.device, self.dtype)
        layers = [random_layer(kernels, layer, random_linear, self._ones) for layer in config.layers]
        embedding = torch.randn(config.vocab_size, config.hidden_size, device=self.device, dtype=self.dtype)
        weights = Weights(embedding, layers, self._ones(config.hidden_size), nn.Identity(), is_tied=False)
        kv = KVCache(
            KVLayout.of(config, BLOCK_SIZE), -(-longest // BLOCK_SIZE) + 1, kernels.kv_dtype, self.device
        )
        states = StateCache(StateLayout.of(config), 2, self.device) if config.spec.states else None
        return make_decoder(config, weights, kernels, kv, longest, states)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self.device, dtype=self.dtype)


def prompt(num_rows: int, device: torch.device) -> Batch:
    """A prompt that begins a sequence, whose state is kept."""
    blocks = 1 + torch.arange(-(-num_rows // BLOCK_SIZE), dtype=torch.int32)[None]
    own = blank_batch([num_rows], [num_rows], blocks)
    slots = torch.tensor([[0, 1, 0, num_rows]], dtype=torch.int32)
    return replace(own, token_ids=own.positions % 1024, state_slots=slots).to(device)


@torch.inference_mode()
def main() -> int:
    arguments = parse_arguments()
    dtype = torch.float32 if arguments.is_dry else torch.bfloat16
    layers = {"gated delta net": SMALL} if arguments.is_dry else LAYERS
    bench = Bench(arguments.device, dtype, (40,) if arguments.is_dry else PROMPTS)
    config = parse_config(Fields("", TINY if arguments.is_dry else QWEN_08B))
    measures = {name: partial(bench.layer, name, spec) for name, spec in layers.items()}
    name = "a model" if arguments.is_dry else "Qwen 3.5 0.8B"
    return measure_each("states", "states", {**measures, name: partial(bench.model, name, config)})


if __name__ == "__main__":
    sys.exit(main())
