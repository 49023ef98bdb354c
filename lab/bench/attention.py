"""Measures attention alone on this CPU, beside the rates that bound it: multiplying and adding, and reading memory.

    python -m lab.bench.attention [--shapes 9x3x64] [--kv float16,int8] [--contexts 512,8192,32768] [--seconds 1]

A shape is heads x kv heads x the size of a head. Each line is a step of one sequence: a prompt's last 512 tokens, or
one decoded token, at the end of a context. Keys and values are zeros, which take as long as any. A time is the median
of the steps, a share that of the best rate of float32 products in registers, or of reading memory on all threads.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import monotonic

import torch

from penstock.app.arguments import count, listed
from penstock.app.measures import measure_memory, measure_peak
from penstock.engine.cores import num_cores
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import BLOCK_SIZE, NativeLinear, Team, load_library
from penstock.engine.kernels.kv_cache import KVCache, KVLayout, KVShape
from penstock.engine.model.dtype import KV_DTYPES
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.ops import Heads, Op, Program
from penstock.engine.program.parameters import AttentionWeights
from penstock.engine.spec import Attention

PROMPT = 512
_HIDDEN = 16
_VOCAB = 64


class AttentionBench:
    """A layer whose attention is timed.

    Args:
        shape: heads, kv heads, and the size of a head.
        context: the most tokens of a sequence.
    """

    def __init__(self, team: Team, shape: tuple[int, int, int], kv_dtype: torch.dtype, context: int) -> None:
        heads, kv_heads, head_dim = shape
        self.team, self.q_size = team, heads * head_dim
        self.num_blocks = -(-context // BLOCK_SIZE) + 1
        kv_shape = KVShape(num_kv_heads=kv_heads, head_dim=head_dim, block_size=BLOCK_SIZE)
        self.kv = KVCache(KVLayout.even(kv_shape, 1), self.num_blocks, kv_dtype, torch.device("cpu"))
        self.kv.data.zero_()
        spec = Attention(
            hidden_size=_HIDDEN,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
        )
        qkv_size = (heads + 2 * kv_heads) * head_dim
        own = AttentionWeights(qkv=_random(team, qkv_size, _HIDDEN), o=_random(team, _HIDDEN, self.q_size))
        angles, norm = torch.zeros(context, head_dim // 2), torch.ones(_HIDDEN)
        attended = Heads(spec=spec, own=own, cos=angles.cos(), sin=angles.sin())
        program = Program(
            ops=(
                Op(kind="embed", time="embed"),
                Op(kind="linear", time="qkv", target="qkv", linear=own.qkv, norm=norm),
                Op(kind="attend", time="attention", heads=attended),
                Op(kind="linear", time="o", source="attended", linear=own.o, adds=True),
                Op(kind="gather", time="gather"),
                Op(kind="finish", time="norm", norm=norm),
            ),
            hidden_size=_HIDDEN,
            eps=1e-5,
            embedding=torch.randn(_VOCAB, _HIDDEN),
            max_position=context,
        )
        self.decoder = NativeDecoder(team, self.kv, program)

    def seconds(self, batch: Batch) -> float:
        """The time of one step's attention."""
        self.team.time(True)
        self.decoder(batch)
        times = self.team.times()
        self.team.time(False)
        return times["attention"].open_ns / 1e9

    def batch(self, tokens: int, context: int) -> Batch:
        """The last tokens of a context whose blocks lie scattered."""
        blocks = torch.randperm(self.num_blocks - 1) + 1
        return Batch(
            token_ids=torch.randint(_VOCAB, (tokens,)).int(),
            positions=torch.arange(context - tokens, context).int(),
            query_starts=torch.tensor([0, tokens]).int(),
            context_lens=torch.tensor([context]).int(),
            block_tables=blocks[None, : -(-context // BLOCK_SIZE)].int(),
            sample_rows=torch.tensor([tokens - 1]).int(),
        )

    def median_s(self, tokens: int, context: int, seconds: float) -> float:
        batch, end, taken = self.batch(tokens, context), monotonic() + seconds, list[float]()
        while len(taken) < 3 or monotonic() < end:
            taken.append(self.seconds(batch))
        return median(taken)

    def flop(self, tokens: int, context: int) -> float:
        return 4 * self.q_size * tokens * (context - (tokens - 1) / 2)

    def bytes(self, context: int) -> float:
        return self.kv.data.nbytes / self.num_blocks * context / BLOCK_SIZE


def main() -> None:
    arguments = _arguments()
    team = load_library(print).start_team(num_cores())
    for shape in arguments.shapes:
        for kv in arguments.kv:
            products, memory = (
                max(measure_peak(team, name) for name in ("fma8", "fma16")),
                measure_memory(team),
            )
            bench = AttentionBench(team, shape, KV_DTYPES[kv], max(arguments.contexts))
            for context in arguments.contexts:
                seconds = bench.median_s(min(PROMPT, context), context, arguments.seconds)
                rate = bench.flop(min(PROMPT, context), context) / seconds / 1e9
                _say(shape, kv, f"prompt at {context}", seconds, rate, "GFLOP/s", products)
                seconds = bench.median_s(1, context, arguments.seconds)
                _say(
                    shape,
                    kv,
                    f"token at {context}",
                    seconds,
                    bench.bytes(context) / seconds / 1e9,
                    "GB/s",
                    memory,
                )


def _say(
    shape: tuple[int, ...], kv: str, what: str, seconds: float, rate: float, unit: str, most: float
) -> None:
    name = "x".join(map(str, shape))
    print(
        f"{name:9} {kv:8} {what:16} {seconds * 1e3:9.3f} ms {rate:6.1f} {unit:7} {rate / most:4.0%}",
        flush=True,
    )


def _random(team: Team, num_rows: int, num_columns: int) -> NativeLinear:
    return NativeLinear(team, torch.randn(num_rows, num_columns), None, torch.float32)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=listed(_shape), default=[(9, 3, 64), (32, 8, 64), (16, 8, 128)])
    parser.add_argument("--kv", type=listed(str), default=["float16", "int8"])
    parser.add_argument("--contexts", type=listed(count), default=[512, 8192, 32_768])
    parser.add_argument("--seconds", type=float, default=1.0)
    return parser.parse_args()


def _shape(text: str) -> tuple[int, int, int]:
    heads, kv_heads, head_dim = map(int, text.split("x"))
    return heads, kv_heads, head_dim


if __name__ == "__main__":
    main()
