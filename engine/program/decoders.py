"""What runs a program: the native kernels where there are any, else the interpreter over the kernel table."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVCache
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.state_cache import StateCache
from penstock.engine.program.interpreter import Interpreter
from penstock.engine.program.lowering import decoder_program
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.ops import Program
from penstock.engine.program.parameters import Weights

ForwardPass = Callable[[Batch], Tensor]
"""The layers of a decoder: batch -> hidden states [R, hidden] of its sample rows after the final norm. Those of a stage
before the last make the hidden states [T, hidden] of all rows, with which the next stage goes on.

The step's keys and values go into the KV cache. The output head makes logits of the hidden states.
"""


def make_decoder(
    config: ModelConfig,
    weights: Weights,
    kernels: Kernels,
    kv: KVCache,
    max_position: int,
    states: StateCache | None = None,
) -> Interpreter | NativeDecoder:
    """The decoder of a model.

    Args:
        max_position: no token will ever have this position or a higher one.
        states: see `Interpreter`.
    """
    program = decoder_program(config.spec, weights, max_position, kernels.embedding_dtype)
    return run_by(kernels, kv, program, states)


def run_by(
    kernels: Kernels, kv: KVCache, program: Program, states: StateCache | None = None
) -> Interpreter | NativeDecoder:
    """What runs a program with these kernels."""
    if kernels.team is None:
        return Interpreter(kernels, kv, program, states)
    return NativeDecoder(kernels.team, kv, program, states)
