"""Measures each kernel at the shapes of an 8 B Llama, beside what the card reaches at copying and multiplying."""

from __future__ import annotations

import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from loadtests.gpu.figures import emit, emit_fact, emit_skip, say
from loadtests.gpu.sizes import KERNELS, Arguments, KernelSizes, latent_config, parse_arguments, serving
from loadtests.gpu.timing import Ceilings, seconds
from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.fields import Fields
from penstock.engine.kernels import ops
from penstock.engine.kernels.batch import Batch, blank_batch
from penstock.engine.kernels.kv_cache import (
    QUANTIZED,
    KVCache,
    KVFormat,
    KVLayout,
    KVShape,
    is_quantized,
    numbers_and_scales,
)
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.select import select
from penstock.engine.model.parse import parse_config
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.sampling.sampler import Sampler

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Bench:
    """The kernels, sizes and device that all measurements share."""

    config: ModelConfig
    kernels: Kernels
    sizes: KernelSizes
    device: torch.device
    kv: str = ""
    """The end of the names of figures whose KV cache is quantized: ", KV int8", or has latents: ", latents"."""
    mode: str = "dry"

    @property
    def shape(self) -> KVShape:
        return KVLayout.of(self.config, BLOCK_SIZE).places[0].shape

    @property
    def kv_bytes(self) -> int:
        """Of a token in one layer."""
        return KVLayout.even(self.shape, 1).block_bytes(self.kernels.kv_dtype) // BLOCK_SIZE

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.kernels.activation_dtype)

    def seconds(self, run: Callable[[], object]) -> float:
        return seconds(self.device, run)

    def in_turn(self, tensors: ListLike[Tensor], run: Callable[[Tensor], object]) -> float:
        """Seconds of one call, when every call has the next of the tensors."""

        def runs() -> None:
            for tensor in tensors:
                run(tensor)

        return self.seconds(runs) / len(tensors)

    def copies(self, *size: int) -> list[Tensor]:
        """As many random tensors of a size as must be read in turn, so that none is left in a cache."""
        one = self.random(*size)
        num = max(1, min(64, self.sizes.walked_bytes // one.nbytes))
        return [one, *(one.clone() for _ in range(num - 1))]


@torch.inference_mode()
def main() -> int:
    arguments = parse_arguments()
    if arguments.is_dry:
        torch.set_num_threads(1)
    shape, _ = serving("llama-8b", arguments.mode)
    config = parse_config(Fields("config.json", shape.config))
    dtype = torch.float32 if arguments.is_dry else torch.bfloat16
    sizes, device = KERNELS[arguments.mode], arguments.device
    bench = Bench(config, _table(config, device, dtype), sizes, device, mode=arguments.mode)
    emit_fact("kernels", bench.kernels.name)
    all_of_them = (ceilings, decode, slope, prefill, elementwise, sampler, kv_int8, latents)
    measures = {m.__name__: m for m in all_of_them}
    names = list(arguments.names or measures)
    while names:
        name = names.pop(0)
        say(f"kernels: {name}")
        try:
            measures[name](bench)
        except Exception as error:  # whatever a kernel does wrong, the others are measured
            traceback.print_exc()
            emit_skip(f"kernels: {name}", f"{type(error).__name__}: {error}")
            return _measure_elsewhere(names, arguments)
    return 0


def _measure_elsewhere(names: ListLike[str], arguments: Arguments) -> int:
    """The rest, in a process of its own: a device that failed once serves this one no more."""
    if names:
        options = ["--mode", arguments.mode, "--scratch", str(arguments.scratch)]
        subprocess.run([sys.executable, "-m", "loadtests.gpu.kernels", *names, *options], check=False)
    return 1


def _table(config: ModelConfig, device: torch.device, dtype: torch.dtype, kv_dtype: str = "auto") -> Kernels:
    """Selects the kernels that a server on this device would use; plain torch on a CPU."""
    if device.type == "cpu":
        return replace(ops.reference_kernels(device, dtype), kv_dtype=QUANTIZED.get(kv_dtype, dtype))
    kernels = select(config, device, dtype, LoadOptions(block_size=BLOCK_SIZE, kv_dtype=kv_dtype), say)
    return replace(kernels, kv_dtype=QUANTIZED.get(kv_dtype, kernels.kv_dtype))


def ceilings(bench: Bench) -> None:
    """The device's limits."""
    size, copied, dtype = bench.sizes.matmul, bench.sizes.copied_bytes, bench.kernels.activation_dtype
    found = Ceilings.measured(size, copied, dtype, bench.device)
    how = f"{dtype}, {size:,} x {size:,} x {size:,}, random numbers"
    emit("matmul rate", found.flop_per_s / 1e12, "TFLOP/s", how)
    how = f"read and written, a copy of {copied >> 20:,} MiB"
    emit("copy bandwidth", found.bytes_per_s / 1e9, "GB/s", how)


def decode(bench: Bench) -> None:
    """One token of each sequence against its whole context; bytes are those of its keys and values."""
    for num_sequences, context in bench.sizes.decode:
        num_bytes = num_sequences * context * bench.kv_bytes
        num_layers = max(1, min(bench.config.num_layers, bench.sizes.walked_bytes // num_bytes))
        time_s = _decode_seconds(bench, num_sequences, context, num_layers)
        emit(
            f"attention decode{bench.kv}, batch {num_sequences}, context {context:,}",
            num_layers * num_bytes / time_s / 1e9,
            "GB/s",
            f"of keys and values, {time_s / num_layers * 1e6:.1f} us a layer",
        )


def slope(bench: Bench) -> None:
    """Measures what another token of context costs a step of one sequence, in attention, over all layers."""
    contexts = bench.sizes.slope
    num_layers = bench.config.num_layers
    times_ms = [_decode_seconds(bench, 1, context, num_layers) * 1000 for context in contexts]
    value = statistics.linear_regression(contexts, times_ms).slope
    how = f"batch 1, a line through {', '.join(f'{context:,}' for context in contexts)}"
    emit(f"llama-8b: attention, KV slope of all layers{bench.kv}", value, "ms per token", how)


def _decode_seconds(bench: Bench, num_sequences: int, context: int, num_layers: int) -> float:
    """Attention of all layers of one step."""
    batch, kv = _scattered(bench, num_layers, num_sequences, context)
    queries = bench.random(num_sequences, bench.config.num_heads, bench.shape.head_dim)

    def step() -> None:
        attention = bench.kernels.attention(batch, bench.shape)
        for layer in range(num_layers):
            attention(queries, kv.layer(layer), 0, None, 0.0, None)

    return bench.seconds(step)


def prefill(bench: Bench) -> None:
    """Attention of a chunk; only arithmetic that is needed counts."""
    heads, shape = bench.config.num_heads, bench.shape
    numbers = shape.head_dim + (shape.latent_size or shape.head_dim)
    for num_tokens, context in bench.sizes.prefill:
        of = "tokens" if num_tokens == context else f"after {context - num_tokens:,}"
        batch, kv = _scattered(bench, 1, 1, context, num_tokens=num_tokens)
        attend = bench.kernels.attention(batch, bench.shape)
        queries = bench.random(num_tokens, heads, shape.head_dim)
        time_s = bench.seconds(partial(attend, queries, kv.layer(0), 0, None, 0.0, None))
        flop = 1.0 * heads * numbers * num_tokens * (2 * context - num_tokens + 1)
        name = f"attention prefill{bench.kv}, {num_tokens:,} {of}"
        emit(name, flop / time_s / 1e12, "TFLOP/s", f"{time_s * 1000:.2f} ms a layer")


def _scattered(
    bench: Bench, num_layers: int, num_sequences: int, context: int, num_tokens: int = 1
) -> tuple[Batch, KVCache]:
    """Sequences with the last `num_tokens` of their context in the step, their blocks in no order."""
    per_sequence = -(-context // BLOCK_SIZE)
    layout = KVLayout.even(bench.shape, num_layers)
    kv = KVCache(layout, 1 + num_sequences * per_sequence, bench.kernels.kv_dtype, bench.device)
    if is_quantized(bench.kernels.kv_dtype):
        kv.data.random_()
        format = KVFormat.of(bench.kernels.kv_dtype)
        _, scales = numbers_and_scales(kv.data)
        assert scales is not None
        num_scales = bench.shape.num_kv_heads * BLOCK_SIZE * bench.shape.num_scales(format)
        scales[..., -num_scales:] = 0.01
    else:
        kv.data.normal_()
    order = torch.randperm(num_sequences * per_sequence, generator=torch.Generator().manual_seed(0)) + 1
    tables = order.to(torch.int32).view(num_sequences, per_sequence)
    batch = blank_batch([num_tokens] * num_sequences, [context] * num_sequences, tables)
    return batch.to(bench.device), kv


def elementwise(bench: Bench) -> None:
    """Measures the kernels between the linear maps; bytes are those that must be read and written."""
    config, kernels, rows = bench.config, bench.kernels, bench.sizes.norm_rows
    hidden = bench.copies(rows, config.hidden_size)
    weight = bench.random(config.hidden_size)
    num_bytes = hidden[0].nbytes
    time_s = bench.in_turn(hidden, lambda x: kernels.rms_norm(x, weight, 1e-5))
    _emit_rate("rms_norm", rows, 2 * num_bytes, time_s)
    delta = bench.random(rows, config.hidden_size)
    time_s = bench.in_turn(hidden, lambda x: kernels.add_rms_norm(x, delta, weight, 1e-5))
    _emit_rate("add_rms_norm", rows, 4 * num_bytes, time_s)
    del hidden
    gate_up = bench.copies(rows, 2 * config.intermediate_size)
    time_s = bench.in_turn(gate_up, lambda x: kernels.glu(x, "silu"))
    _emit_rate("silu_mul", rows, gate_up[0].nbytes * 3 // 2, time_s)
    del gate_up
    _rotate(bench, rows)


def _rotate(bench: Bench, rows: int) -> None:
    config, kernels = bench.config, bench.kernels
    batch, kv = _scattered(bench, 1, 1, rows, num_tokens=rows)
    angles = torch.randn(rows, config.head_dim // 2, device=bench.device)
    slots = kernels.kv_places(batch, BLOCK_SIZE)
    places = TokenPlaces(batch.positions, slots, angles.cos(), angles.sin())
    qkv = bench.copies(rows, config.q_size + 2 * config.kv_size)
    layer = kv.layer(0)
    time_s = bench.in_turn(
        qkv, lambda x: kernels.rotate_and_write(x, None, None, 1e-5, places, layer, bench.shape)
    )
    written = config.q_size * qkv[0].itemsize + bench.kv_bytes
    _emit_rate(f"rotate_and_write{bench.kv}", rows, qkv[0].nbytes + rows * written, time_s)


def kv_int8(bench: Bench) -> None:
    """Attention with a KV cache in int8, and what writes it; bytes are those that are stored, scales among them."""
    table = _table(bench.config, bench.device, bench.kernels.activation_dtype, "int8")
    quantized = replace(bench, kernels=table, kv=", KV int8")
    decode(quantized)
    slope(quantized)
    prefill(quantized)
    _rotate(quantized, bench.sizes.norm_rows)


def latents(bench: Bench) -> None:
    """Attention to latents, at the shapes of DeepSeek V3; bytes are those of its latents."""
    config = parse_config(Fields("config.json", latent_config(bench.mode)))
    table = _table(config, bench.device, bench.kernels.activation_dtype)
    of_latents = replace(bench, config=config, kernels=table, kv=", latents")
    decode(of_latents)
    prefill(of_latents)


def _emit_rate(name: str, rows: int, num_bytes: int, time_s: float) -> None:
    emit(f"{name}, {rows:,} rows", num_bytes / time_s / 1e9, "GB/s", f"{time_s * 1e6:.1f} us")


def sampler(bench: Bench) -> None:
    """Logits to tokens, for rows that are greedy and for rows that draw."""
    wishes = {
        "greedy": SamplingParams(temperature=0),
        "drawn": SamplingParams(),
        "min-p 0.05": SamplingParams(min_p=0.05),
        "top-k 40": SamplingParams(top_k=40),
        "top-p 0.9": SamplingParams(top_p=0.9),
        "top-k 40, top-p 0.9": SamplingParams(top_k=40, top_p=0.9),
    }
    for rows in bench.sizes.sampler_rows:
        logits = torch.randn(rows, bench.config.vocab_size, device=bench.device) * 4
        for name, params in wishes.items():
            time_s = bench.seconds(_sampling(bench, logits, params))
            emit(f"sampler, {rows} rows, {name}", time_s * 1e6, "us", f"{bench.config.vocab_size:,} tokens")


def _sampling(bench: Bench, logits: Tensor, params: SamplingParams) -> Callable[[], object]:
    rows, vocabulary = logits.shape
    sampler = Sampler(rows, vocabulary, (), bench.device, bench.kernels.choose)
    for seat in range(rows):
        sampling = replace(params, seed=seat)
        request = Request(request_id=str(seat), prompt_token_ids=(0,), sampling=sampling)
        sampler.assign(seat, Sequence(request))
    seats = torch.arange(rows, dtype=torch.int32, device=bench.device)
    return partial(sampler.sample, logits, seats, torch.zeros_like(seats), sampler.filters(range(rows)))


if __name__ == "__main__":
    sys.exit(main())
