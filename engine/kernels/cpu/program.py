"""The input of the native decoder: the program that a description of a model becomes, and the steps to run it on.

The structures match program.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.experts import ExpertsFields, NativeExperts
from penstock.engine.kernels.cpu.library import expect_ints, fields, pointer
from penstock.engine.kernels.cpu.linear import PackedLinear
from penstock.engine.kernels.cpu.states import MixerFields, NativeMixer

KINDS = (
    "embed",
    "linear",
    "norm",
    "attend",
    "gather",
    "finish",
    "combine",
    "tap",
    "keep",
    "join",
    "experts",
    "recur",
)
STREAMS = ("hidden", "qkv", "attended", "inner", "added", "prepared", "per_layer", "gates")
GATES = ("silu", "gelu_tanh", "relu2", "gelu")
PACKED_ROWS = -1
"""The `rows_type` of rows that a linear map has."""


class Shape(ctypes.Structure):
    _fields_ = [
        *fields(c_int32, "num_heads num_kv_heads head_dim norms_rows norms_last shares"),
        *fields(c_float, "eps divisor softcap"),
        *fields(c_void_p, "q_norm k_norm v_norm cos sin q_scales sinks"),
    ]


class Op(ctypes.Structure):
    _fields_ = [
        *fields(c_int32, "kind time source target"),
        *fields(c_void_p, "linear norm"),
        *fields(c_int32, "is_centered adds"),
        ("scale", c_float),
        ("after", c_float),
        ("gate", c_int32),
        ("part", c_int32),
        ("shape", ctypes.POINTER(Shape)),
        *fields(c_int32, "window first is_sampled table"),
        ("rows", c_void_p),
        ("rows_type", c_int32),
        *fields(c_void_p, "rows_norm keys values"),
        ("stride", c_int64),
        ("experts", ctypes.POINTER(ExpertsFields)),
        ("mixer", ctypes.POINTER(MixerFields)),
        *fields(c_int32, "gates follows_norm"),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *fields(c_int32, "hidden qkv attended inner vocab max_position"),
        ("eps", c_float),
        ("embedding_type", c_int32),
        *fields(c_void_p, "embedding embedding_linear"),
        *fields(c_int32, "kv_type num_blocks num_tables"),
        ("kv", c_void_p),
        ("kv_bytes", c_int64),
        *fields(c_int32, "num_slots num_pending"),
        ("slot_floats", c_int64),
        ("states", c_void_p),
        ("ops", ctypes.POINTER(Op)),
        ("num_ops", c_int32),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "token_ids positions query_starts context_lens block_tables sample_rows"),
        *fields(c_int32, "tokens sequences max_blocks samples"),
        *fields(c_void_p, "state_slots state_saves"),
        ("saves", c_int32),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeHeads:
    """The heads of one layer's attention, and the preparation of queries and keys; norms are read as float32."""

    num_heads: int
    q_norm: Tensor | None = None
    """[head_dim], or [num_heads * head_dim] where all heads are normed as one row, or None."""
    k_norm: Tensor | None = None
    norms_last: bool = False
    """Whether the norms follow the rotation."""
    norms_values: bool = False
    """Whether each head of values is normed without weights."""
    shares: bool = False
    """Whether keys and values are another layer's: there are queries alone."""
    cos: Tensor
    """float32 [max position, head_dim / 2]"""
    sin: Tensor
    q_scales: Tensor | None = None
    """float32 [max position]: queries are multiplied by them."""
    sinks: Tensor | None = None
    """float32 [num_heads]: one more score of the softmax of each head, which has no value."""
    scale: float
    """Scores are multiplied by it."""
    softcap: float = 0.0
    """c: a score s becomes c tanh(s / c); 0 is none."""
    window: int = 0
    """A token sees itself and at most window - 1 tokens before it; 0 is no bound, -c the token's own chunk of c."""
    first: int = 0
    """No token sees positions before this one, except its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOp:
    """One operation of a decoder's program, over streams of rows; program.h describes each kind."""

    kind: str
    time: str
    """The part of a step that its time counts for."""
    source: str = "hidden"
    target: str = "hidden"
    linear: PackedLinear | None = None
    norm: Tensor | None = None
    """[hidden]: rows that are read go through it; it is read as float32. Of combine: [width of a part]."""
    is_centered: bool = False
    """Whether the mean is subtracted before the norm."""
    adds: int = 0
    """Whether the target is added to. Of a tap, which of the hidden states that a head reads it is; of join, whether
    the norm of the features is the residual."""
    scale: float = 1.0
    """The result is multiplied by it, before it is added."""
    after: float = 1.0
    """Of a norm: the stream is multiplied by it after the addition."""
    gate: str = "silu"
    """The activation of gates; of all outputs where a linear map has no gates."""
    part: int = -1
    """Of a linear map that reads gates: the layer whose part of the embeddings for layers they let through; -1 is none.
    Of combine: the width of a part."""
    rows: Tensor | PackedLinear | None = None
    """Of combine: [vocab, width of all parts] in floating point, which stays where it is; or a linear map with these
    rows. Of keep and join, the features of tokens: bfloat16 [blocks, BLOCK_SIZE, width], in the blocks of the KV cache,
    where they stay."""
    rows_norm: Tensor | None = None
    """[hidden], of features."""
    follows_norm: bool = False
    """Of join: whether a chain goes on from the hidden states after the last norm, and not from the ones before it."""
    heads: NativeHeads | None = None
    gates: int = 0
    """Of attention, and of the linear map that reads its outputs: so many gates come before its queries; their sigmoids
    multiply the outputs."""
    experts: NativeExperts | None = None
    mixer: NativeMixer | None = None
    """Of recur, and of the linear map that reads its outputs."""
    layer: int = 0
    """Of attention and mixers, the layer of the cache; of the others, after how many layers they run."""
    is_sampled: bool = False
    """Of attention: whether no rows are wanted but the sampled ones, which are gathered next."""


def step_of(batch: Batch, block_tables: Tensor) -> Step:
    """Returns the arguments of a step, which point into the batch and its block tables [tables, S, max blocks]."""
    tokens, sequences = batch.token_ids.shape[0], batch.context_lens.shape[0]
    expect_ints("positions", batch.positions, (tokens,))
    expect_ints("token_ids", batch.token_ids, (tokens,))
    expect_ints("query_starts", batch.query_starts, (sequences + 1,))
    expect_ints("context_lens", batch.context_lens, (sequences,))
    expect_ints("block_tables", block_tables, (len(block_tables), sequences, block_tables.shape[-1]))
    expect_ints("sample_rows", batch.sample_rows, (batch.sample_rows.shape[0],))
    slots, saves = batch.state_slots, batch.state_saves
    if slots is not None:
        expect_ints("state_slots", slots, (sequences, 4))
    if saves is not None:
        expect_ints("state_saves", saves, (len(saves), 4))
    return Step(
        batch.token_ids.data_ptr(),
        batch.positions.data_ptr(),
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        block_tables.data_ptr(),
        batch.sample_rows.data_ptr(),
        tokens,
        sequences,
        block_tables.shape[-1],
        batch.sample_rows.shape[0],
        pointer(slots),
        pointer(saves),
        0 if saves is None else len(saves),
    )


def keeping(ops: Sequence[NativeOp], features: Tensor) -> list[NativeOp]:
    """The program with the hidden states of all tokens kept as the last norm makes them.

    For that, every layer has to compute all rows: the sampled ones are gathered at the end.
    """
    *layers, finish = (replace(op, is_sampled=False) for op in ops if op.kind != "gather")
    keep = replace(finish, kind="keep", time="prepare", rows=features)
    return [*layers, keep, NativeOp(kind="gather", time="gather", layer=finish.layer), finish]


def tapped(
    ops: Sequence[NativeOp], after: Sequence[int], fuse: PackedLinear, features: Tensor
) -> list[NativeOp]:
    """The program with taps of the hidden states after so many layers, and the features kept once all are there.

    Args:
        fuse: makes features of the hidden states, one after another.
    """
    found: list[NativeOp] = []
    done = set()
    for op in ops:
        if op.kind != "embed" and op.layer not in done:
            done.add(op.layer)
            numbers = [number for number, layer in enumerate(after) if layer == op.layer]
            found += [NativeOp(kind="tap", time="prepare", adds=number) for number in numbers]
            if numbers and op.layer == max(after):
                found.append(NativeOp(kind="keep", time="prepare", linear=fuse, rows=features))
        found.append(op)
    return found
