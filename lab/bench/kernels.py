"""What the native decoder does on this machine, beside what the machine could do.

    python -m lab.bench.kernels [--shape 135m|0.5b|demo] [--dtype float16] [--threads N] [--repeats 10]

Weights are random. Every figure is the best of the repeats: other processes only ever make it worse.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from app.bench.measures import measure_fma, measure_linear
from engine.cores import num_cores
from engine.kernels.batch import Batch
from engine.kernels.cpu.native import (
    BLOCK_SIZE,
    NativeDecoder,
    NativeLayer,
    PackedLinear,
    Team,
    load_library,
)
from engine.kernels.kv_cache import KVCache, KVShape
from engine.model.config import ModelConfig, RopeConfig

MAX_POSITION = 2048
NUM_BLOCKS = 1280
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _config(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int
) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        intermediate_size=intermediate,
        rms_norm_eps=1e-5,
        max_position=MAX_POSITION,
        rope=RopeConfig(),
        tie_word_embeddings=True,
    )


SHAPES = {
    "135m": _config(30, 576, 9, 3, 1536, 16_384),
    "0.5b": _config(24, 896, 14, 2, 4864, 32_768),
    "demo": _config(6, 256, 4, 2, 768, 4096),
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    sequences: int
    queries: int
    """Tokens of each sequence in this step."""
    context: int
    """Tokens of each sequence before this step."""


CASES = (
    Case("1 decode, context 128", 1, 1, 128),
    Case("4 decodes, context 300", 4, 1, 300),
    Case("16 decodes, context 300", 16, 1, 300),
    Case("64 decodes, context 150", 64, 1, 150),
    Case("prefill 256, context 0", 1, 256, 0),
    Case("prefill 256, context 512", 1, 256, 512),
    Case("1 decode, context 1900", 1, 1, 1900),
)


def main() -> None:
    arguments = _arguments()
    library = load_library(print)
    team = library.start_team(arguments.threads)
    config, dtype = SHAPES[arguments.shape], DTYPES[arguments.dtype]
    peak = measure_fma(team)
    print(f"{team.num_threads} threads; multiply-adds in registers: {peak:.0f} GFLOP/s")
    for line in _linears(team, config, dtype, peak, arguments.repeats):
        print(line, flush=True)
    decoder = random_decoder(team, config, dtype)
    for case in CASES:
        batch = make_batch(config, case)
        seconds = best_of(arguments.repeats, lambda batch=batch: decoder(batch))  # type: ignore[misc]
        flops = case_flops(config, case)
        print(
            f"{case.name:26} {seconds * 1e3:8.2f} ms   {case.sequences * case.queries / seconds:7.0f} tokens/s   "
            f"{flops / seconds / 1e9:5.0f} GFLOP/s   {weight_bytes(config, dtype) / seconds / 1e9:5.1f} GB/s",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--repeats", type=int, default=10)
    return parser.parse_args()


def _linears(team: Team, config: ModelConfig, dtype: torch.dtype, peak: float, repeats: int) -> Iterator[str]:
    k, n = config.hidden_size, 2 * config.intermediate_size
    yield f"bare product, K = {k}, N = {n}:"
    for rows in (1, 4, 16, 64, 256):
        speed = measure_linear(team, k, n, rows, dtype, repeats)
        memory = speed / (2 * rows) * dtype.itemsize
        yield f"  M = {rows:3} {speed:8.0f} GFLOP/s  {100 * speed / peak:4.0f} % of peak  {memory:5.1f} GB/s of weights"


def best_of(repeats: int, call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def case_flops(config: ModelConfig, case: Case) -> float:
    """Of the products a step needs; the head only for one token of each sequence."""
    c, tokens = config, case.sequences * case.queries
    linear = c.hidden_size * (2 * c.q_size + 2 * c.kv_size + 3 * c.intermediate_size)
    attention = 2 * c.q_size * (case.context + (case.queries + 1) / 2)
    return 2.0 * (
        c.num_layers * tokens * (linear + attention) + case.sequences * c.vocab_size * c.hidden_size
    )


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return int(case_flops(config, Case("", 1, 1, -1)) / 2) * dtype.itemsize


def make_batch(config: ModelConfig, case: Case) -> Batch:
    generator = torch.Generator().manual_seed(0)
    end, tokens = case.context + case.queries, case.sequences * case.queries
    width = -(-end // BLOCK_SIZE)
    blocks = torch.randperm(NUM_BLOCKS, generator=generator)[: case.sequences * width]
    starts = torch.arange(0, tokens + 1, case.queries)
    return Batch(
        token_ids=torch.randint(config.vocab_size, (tokens,), generator=generator).int(),
        positions=torch.arange(case.context, end).repeat(case.sequences).int(),
        query_starts=starts.int(),
        context_lens=torch.full((case.sequences,), end).int(),
        block_tables=blocks.view(case.sequences, width).int(),
        sample_rows=(starts[1:] - 1).int(),
    )


def random_decoder(team: Team, config: ModelConfig, dtype: torch.dtype) -> Callable[[Batch], Tensor]:
    """A decoder with its output head: batch -> logits."""

    def linear(rows: int, k: int, gated: bool = False) -> PackedLinear:
        return PackedLinear(team, (torch.rand(rows, k) - 0.5) * (2 * k**-0.5), None, dtype, gated)

    hidden, ones = config.hidden_size, torch.ones(config.hidden_size)
    layers = [
        NativeLayer(
            attention_norm=ones,
            qkv=linear(config.q_size + 2 * config.kv_size, hidden),
            q_norm=None,
            k_norm=None,
            o=linear(hidden, config.q_size),
            mlp_norm=ones,
            gate_up=linear(2 * config.intermediate_size, hidden, gated=True),
            down=linear(hidden, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    ]
    angles = torch.outer(
        torch.arange(MAX_POSITION).float(), 10_000.0 ** -torch.linspace(0, 1, config.head_dim // 2)
    )
    lm_head = linear(config.vocab_size, hidden)
    decoder = NativeDecoder(
        team,
        KVCache(_kv_shape(config), NUM_BLOCKS, dtype, torch.device("cpu")),
        layers,
        embedding=lm_head,
        final_norm=ones,
        eps=config.rms_norm_eps,
        cos=angles.cos(),
        sin=angles.sin(),
    )
    return lambda batch: lm_head(decoder(batch))


def _kv_shape(config: ModelConfig) -> KVShape:
    return KVShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
    )


if __name__ == "__main__":
    main()
