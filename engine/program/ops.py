"""The operations that a description of a model becomes, whatever runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from penstock.engine.kernels.linear import Linear
from penstock.engine.program.parameters import AttentionWeights, ExpertsWeights, LatentWeights, StateWeights
from penstock.engine.spec import Attention, LatentAttention

OpKind = Literal[
    "embed",  # token ids -> hidden, times `scale`
    "linear",  # a norm of `source`, or `source` itself -> `target`, or added to it
    "norm",  # the norm of `source`, times `scale`, is added to `target`
    "attend",  # qkv -> attended; keys and values go into the cache
    "gather",  # from here on, only the sampled rows are wanted
    "finish",  # the norm of the sampled rows of hidden -> what the caller gets
    "combine",  # the token's own embeddings for all layers, times `scale`, and the norms of per_layer -> per_layer
    "tap",  # hidden is one of the hidden states that a head reads
    "keep",  # writes the features that a head reads: what `linear` makes of all taps; without one, the norm of hidden
    "join",  # the norms of hidden and of the features of the token before -> prepared; these features -> hidden
    "experts",  # what experts make of a norm of `source`, or of `source` -> `target`, or added to it
    "recur",  # qkv, and gates -> attended, by a state of the tokens before
    "attend_latents",  # qkv, which is queries, and latents -> attended; latents go into the cache
]
Stream = Literal["hidden", "qkv", "attended", "inner", "added", "prepared", "per_layer", "gates", "latents"]
"""The rows that operations read and write. Rows other than hidden and per_layer are read once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The tables of positions of a layer's attention."""

    cos: Tensor
    """float32 [max position, rotated numbers / 2]"""
    sin: Tensor
    q_scales: Tensor | None = None
    """float32 [max position]: queries are multiplied by them."""
    first: int = 0
    """No token sees positions before this one, except its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads(Positions):
    """The heads of a layer's attention."""

    spec: Attention
    own: AttentionWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads(Positions):
    """The heads of a layer's attention to latents."""

    spec: LatentAttention
    own: LatentWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of a program; what reads and writes which rows, see `OpKind`."""

    kind: OpKind
    time: str
    """The part of a step that its time counts for."""
    source: Stream = "hidden"
    target: Stream = "hidden"
    linear: Linear | None = None
    norm: Tensor | None = None
    """[hidden], or as wide as other rows: rows that are read go through it. Of combine: [width of a part]."""
    is_centered: bool = False
    """Whether the mean is subtracted before the norm."""
    adds: bool = False
    """Whether the result is added to the target."""
    scale: float = 1.0
    """The result is multiplied by it, before it is added."""
    after: float = 1.0
    """The stream is multiplied by it after the addition."""
    gate: str = "silu"
    """The activation of gates; of all outputs where a linear map has no gates."""
    part: int | None = None
    """Of a linear map that reads gates: the layer whose part of the embeddings for layers they let through. Of a tap:
    which of the hidden states that a head reads it is."""
    rows: Tensor | Linear | None = None
    """Of combine: [vocab, width of all parts] in floating point, which stays where it is; or a linear map with these
    rows. Of keep and join, the features of tokens: bfloat16 [blocks, block size, width], in the blocks of the KV cache,
    where they stay. Of finish, and of join in a chain: [most rows, hidden], the rows of the pass before."""
    rows_norm: Tensor | None = None
    """[hidden], of features."""
    residual_is_normed: bool = False
    """Of join: whether the norm of the features is the residual."""
    follows_norm: bool = False
    """Of join and finish: whether a chain goes on from the hidden states after the last norm, not from those before."""
    is_chained: bool = False
    """Of join: whether the features are the hidden states of the pass before."""
    heads: Heads | None = None
    latent_heads: LatentHeads | None = None
    experts: ExpertsWeights | None = None
    mixer: StateWeights | None = None
    layer: int = 0
    """Of attention and mixers, the layer of the cache; of the others, after how many layers they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A decoder: what it computes in a step, and the facts that all of its operations share."""

    ops: tuple[Op, ...]
    hidden_size: int
    eps: float
    """Of norms."""
    embedding: Tensor | Linear
    """[vocab, hidden], or a linear map whose rows it is."""
    max_position: int
    """No token will ever have this position or a higher one."""

    def keeping(self, features: Tensor) -> Program:
        """The program with the hidden states of all tokens kept as the last norm makes them.

        For that, every layer has to compute all rows: the sampled ones are gathered at the end.

        Args:
            features: bfloat16 [blocks, block size, hidden]
        """
        *layers, finish = (op for op in self.ops if op.kind != "gather")
        keep = replace(finish, kind="keep", time="prepare", rows=features)
        gather = Op(kind="gather", time="gather", layer=finish.layer)
        return replace(self, ops=(*layers, keep, gather, finish))

    def chained(self, rows: Tensor) -> tuple[Program, Program]:
        """A head's program with its last hidden states left in `rows`, and the program of the passes after that, whose
        tokens each follow the sampled row of the same number.

        The native decoder has rows of its own for that.
        """
        *ops, finish = self.ops
        follows_norm = any(op.follows_norm for op in ops)
        first = (*ops, replace(finish, rows=rows, follows_norm=follows_norm))
        later = (replace(op, rows=rows, is_chained=True) if op.kind == "join" else op for op in first)
        return replace(self, ops=first), replace(self, ops=tuple(later))

    def tapped(self, after: Sequence[int], fuse: Linear, features: Tensor) -> Program:
        """The program with taps of the hidden states after so many layers, and the features kept once all are there.

        Args:
            fuse: makes features of the hidden states, one after another.
            features: bfloat16 [blocks, block size, outputs of fuse]
        """
        ops: list[Op] = []
        done = set()
        for op in self.ops:
            if op.kind != "embed" and op.layer not in done:
                done.add(op.layer)
                numbers = [number for number, layer in enumerate(after) if layer == op.layer]
                ops += [Op(kind="tap", time="prepare", part=number) for number in numbers]
                if numbers and op.layer == max(after):
                    ops.append(Op(kind="keep", time="prepare", linear=fuse, rows=features))
            ops.append(op)
        return replace(self, ops=tuple(ops))
