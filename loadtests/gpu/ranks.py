"""A model of random weights on several GPUs, behind HTTP; skipped where there is one.

`python -m loadtests.gpu.ranks llama-8b|qwen3-0.6b --mode MODE --scratch DIR`; a dry run takes two ranks on a CPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from loadtests.gpu.figures import emit_skip
from loadtests.gpu.serving import Bench
from loadtests.gpu.sizes import Arguments, parse_arguments


class RankedBench(Bench):
    """One stream, prompts and many requests at once, on so many ranks."""

    def __init__(self, name: str, arguments: Arguments, num_ranks: int) -> None:
        super().__init__(name, arguments)
        self.name = f"{name} on {num_ranks} ranks"
        self.sizes = replace(self.sizes, contexts=(), host_streams=0, clients=0)
        self._num_ranks = num_ranks

    def _flags(self) -> list[str]:
        return [*super()._flags(), "--tensor-parallel", str(self._num_ranks)]


def main() -> int:
    arguments = parse_arguments()
    num_ranks = 2 if arguments.is_dry else torch.cuda.device_count()
    (name,) = arguments.names
    if num_ranks < 2:
        emit_skip(f"{name} on several GPUs", "there is one GPU")
        return 0
    bench = RankedBench(name, arguments, 1 << (num_ranks.bit_length() - 1))
    bench.run()
    return int(bench.has_failed)


if __name__ == "__main__":
    sys.exit(main())
