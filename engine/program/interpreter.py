"""Runs a program operation by operation over the kernel table, on any device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVCache, KVShape, is_quantized
from penstock.engine.kernels.latents import absorb, values_of
from penstock.engine.kernels.ops import Attend, Kernels
from penstock.engine.kernels.ranks import embed
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.state_cache import StateCache
from penstock.engine.program.expert_layer import activate, run_experts, run_routed
from penstock.engine.program.ops import Op, OpKind, Positions, Program, Stream
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv


class Interpreter:
    """A ForwardPass over the kernel table.

    Args:
        states: the states of the layers that have one. Without, every sequence of a batch is at its first token, and no
            state is kept.
    """

    def __init__(
        self, kernels: Kernels, kv: KVCache, program: Program, states: StateCache | None = None
    ) -> None:
        self.kernels, self.kv, self.states = kernels, kv, states
        self.program = program
        self.times: dict[str, float] | None = None
        """Where there is one, the seconds of each part of the steps, by `Op.time`, are added to it."""

    def set_program(self, program: Program) -> None:
        """Makes later steps run this program, of the same layers."""
        self.program = program

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        return Run(self, batch, batch.hidden).through(self.program.ops)

    @torch.inference_mode()
    def run_for_others(self, rows_by_rank: tuple[int, ...]) -> None:
        """Runs this rank's experts in a step in which it has no rows of its own."""
        kernels = self.kernels
        for own in (op.experts for op in self.program.ops if op.experts is not None):
            none = torch.empty(0, own.spec.hidden_size, dtype=kernels.activation_dtype, device=kernels.device)
            run_routed(own, none, kernels, self.program.eps, rows_by_rank)


class Run:
    """One step. The residual stream is `hidden` plus, once something is added to it, `delta`: who reads the stream
    next can add the two and take the norm in one kernel.

    Args:
        hidden: the stream, if it does not begin with an embedding.
    """

    def __init__(self, interpreter: Interpreter, batch: Batch, hidden: Tensor | None = None) -> None:
        self._kernels, self._program = interpreter.kernels, interpreter.program
        self._kv, self._states, self._times = interpreter.kv, interpreter.states, interpreter.times
        self._batch = batch
        self._hidden = torch.empty(0) if hidden is None else hidden
        self._delta: Tensor | None = None
        self._normed: tuple[Tensor, Tensor] | None = None
        """The weight of the stream's last norm, and its rows, as long as the stream has not changed."""
        self._rows: dict[Stream, Tensor] = {}
        self._tables = batch.tables(len(interpreter.kv.layout.windows))
        self._taps: dict[int, Tensor] = {}
        self._in_cache: dict[int, Tensor] = {}
        self._attention: dict[KVShape, Attend] = {}

    def through(self, ops: Iterable[Op]) -> Tensor:
        """Runs operations one after another; the stream after them."""
        for op in ops:
            if self._times is None:
                _RUN[op.kind](self, op)
            else:
                self._timed(op, self._times)
        return self._read(None)

    def _timed(self, op: Op, times: dict[str, float]) -> None:
        is_on_gpu = self._kernels.device.type == "cuda"
        started = time.perf_counter()
        _RUN[op.kind](self, op)
        if is_on_gpu:
            torch.cuda.synchronize(self._kernels.device)
        times[op.time] = times.get(op.time, 0.0) + time.perf_counter() - started

    # Rows

    def _read(self, norm: Tensor | None, is_centered: bool = False) -> Tensor:
        """The stream, with all that was added to it, or a norm of it."""
        if norm is not None and self._normed is not None and self._normed[0] is norm:
            return self._normed[1]
        kernels, eps = self._kernels, self._program.eps
        if norm is not None and not is_centered and self._delta is not None:
            self._hidden, x = kernels.add_rms_norm(self._hidden, self._delta, norm, eps)
        else:
            self._hidden = self._hidden if self._delta is None else self._hidden + self._delta
            x = self._hidden if norm is None else self._norm(self._hidden, norm, is_centered)
        self._delta = None
        if norm is not None:
            self._normed = norm, x
        return x

    def _norm(self, x: Tensor, norm: Tensor, is_centered: bool) -> Tensor:
        kernel = self._kernels.layer_norm if is_centered else self._kernels.rms_norm
        return kernel(x, norm, self._program.eps)

    def _input(self, op: Op) -> Tensor:
        if op.source == "hidden":
            return self._read(op.norm, op.is_centered)
        rows = self._rows.pop(op.source)
        return rows if op.norm is None else self._norm(rows, op.norm, op.is_centered)

    def _put(self, op: Op, made: Tensor) -> None:
        made = made if op.scale == 1.0 else made * op.scale
        if op.target != "hidden":
            self._rows[op.target] = made
            return
        self._normed = None
        if not op.adds:
            self._hidden = made
            return
        self._delta = made if self._delta is None else self._delta + made
        if op.after != 1.0:
            self._hidden = self._read(None) * op.after

    # Operations

    def embed(self, op: Op) -> None:
        assert isinstance(self._program.embedding, Tensor)
        rows = embed(self._batch.token_ids, self._program.embedding, self._kernels.ranks)
        self._put(op, rows.to(self._kernels.activation_dtype))

    def linear(self, op: Op) -> None:
        assert op.linear is not None
        x = self._input(op)
        if op.part is not None:
            x = self._kernels.glu(torch.cat((x, self._rows["per_layer"][:, op.part]), dim=-1), op.gate)
        made = op.linear(x)
        self._put(op, activate(self._kernels, made, op.gate) if op.target == "inner" else made)

    def norm(self, op: Op) -> None:
        self._put(op, self._input(op))

    def attend(self, op: Op) -> None:
        assert op.heads is not None
        spec, own, place = op.heads.spec, op.heads.own, self._kv.layout.places[op.layer]
        layer_kv = self._kv.layer(op.layer)
        made = self._rows.pop("qkv")
        gates, qkv = made[:, : spec.gate_size], made[:, spec.gate_size :]
        queries = self._kernels.rotate_and_write(
            qkv,
            own.q_norm,
            own.k_norm,
            self._program.eps,
            self._places(op.heads, place.table),
            layer_kv if spec.shares is None else None,
            place.shape,
            norms_last=spec.norms_after_rotation,
            norms_values=spec.norms_values,
            spreads=is_quantized(layer_kv.dtype),
        )
        attended = self._attend(place.shape)(
            queries,
            layer_kv,
            spec.reach,
            spec.scale,
            spec.softcap,
            self._tables[place.table],
            own.sinks,
            op.heads.first,
        )
        self._rows["attended"] = attended * gates.sigmoid() if spec.has_gate else attended

    def attend_latents(self, op: Op) -> None:
        assert op.latent_heads is not None
        spec, own, place = op.latent_heads.spec, op.latent_heads.own, self._kv.layout.places[op.layer]
        assert isinstance(own.up, Tensor)
        layer_kv, plain = self._kv.layer(op.layer), spec.plain_size
        queries = self._kernels.rotate_and_write_latents(
            torch.unflatten(self._rows.pop("qkv"), -1, (spec.num_heads, spec.query_size)),
            self._rows.pop("latents"),
            own.latent_norm,
            self._program.eps,
            self._places(op.latent_heads, place.table),
            layer_kv,
            place.shape,
        )
        attended = self._attend(place.shape)(
            absorb(queries, own.up, plain),
            layer_kv,
            0,
            spec.scale,
            block_tables=self._tables[place.table],
            first=op.latent_heads.first,
        )
        self._rows["attended"] = values_of(attended, own.up, plain)

    def _attend(self, shape: KVShape) -> Attend:
        if shape not in self._attention:
            self._attention[shape] = self._kernels.attention(self._batch, shape)
        return self._attention[shape]

    def _places(self, heads: Positions, table: int) -> TokenPlaces:
        in_cache = self._kv_places(table)
        return TokenPlaces(self._batch.rotated_by, in_cache, heads.cos, heads.sin, heads.q_scales)

    def _kv_places(self, table: int) -> Tensor:
        if table not in self._in_cache:
            batch = replace(self._batch, block_tables=self._tables[table])
            self._in_cache[table] = self._kernels.kv_places(batch, self._kv.block_size)
        return self._in_cache[table]

    def recur(self, op: Op) -> None:
        assert op.mixer is not None
        kernels, batch, eps, rows = self._kernels, self._batch, self._program.eps, self._rows.pop("qkv")
        spec, vectors = op.mixer.spec, op.mixer.vectors
        states = None if self._states is None else self._states.layer(op.layer)
        if isinstance(spec, GatedDelta):
            made = kernels.gated_delta(rows, self._rows.pop("gates"), spec, vectors, eps, states, batch)
        elif isinstance(spec, Mamba2):
            made = kernels.mamba2(rows, spec, vectors, eps, states, batch)
        else:
            assert isinstance(spec, ShortConv)
            made = kernels.short_conv(rows, spec, vectors, states, batch)
        self._rows["attended"] = made

    def experts(self, op: Op) -> None:
        assert op.experts is not None
        x, eps = self._input(op), self._program.eps
        self._put(op, run_experts(op.experts, x, self._kernels, eps, self._batch.rows_by_rank))

    def combine(self, op: Op) -> None:
        assert op.norm is not None
        assert isinstance(op.rows, Tensor)
        mapped = torch.unflatten(self._rows.pop("per_layer"), -1, (-1, op.norm.shape[0]))
        normed = self._kernels.rms_norm(mapped.flatten(0, 1), op.norm, self._program.eps)
        rows = F.embedding(self._batch.token_ids, op.rows).to(mapped.dtype) * op.scale
        self._rows["per_layer"] = (rows.view(mapped.shape) + normed.view(mapped.shape)) * 0.5**0.5

    def tap(self, op: Op) -> None:
        assert op.part is not None
        self._taps[op.part] = self._read(None)

    def keep(self, op: Op) -> None:
        assert isinstance(op.rows, Tensor)
        if op.linear is None:
            made = self._read(op.norm, op.is_centered)
        else:
            made = op.linear(torch.cat([self._taps[number] for number in sorted(self._taps)], dim=-1))
        places = self._kv_places(0).clamp(min=0)  # rows that pad go into block 0, which nobody reads
        op.rows.flatten(0, 1).index_copy_(0, places, made.to(op.rows.dtype))

    def join(self, op: Op) -> None:
        assert isinstance(op.rows, Tensor)
        assert op.norm is not None
        assert op.rows_norm is not None
        embedded = self._read(op.norm)
        found = op.rows[: len(embedded)] if op.is_chained else self._features_before(op.rows)
        features = found.to(embedded.dtype)
        normed = self._norm(features, op.rows_norm, is_centered=False)
        self._rows["prepared"] = torch.cat((embedded, normed), dim=-1)
        self._hidden, self._normed = normed if op.residual_is_normed else features, None

    def _features_before(self, features: Tensor) -> Tensor:
        """[T, hidden]: those of the token before each; zeros before the first."""
        batch = replace(self._batch, positions=self._batch.positions - 1, block_tables=self._tables[0])
        places = self._kernels.kv_places(batch, self._kv.block_size)
        rows = features.flatten(0, 1).index_select(0, places.clamp(min=0))
        return torch.where(places[:, None] >= 0, rows, 0.0)

    def gather(self, op: Op) -> None:
        """The rows of a batch stay whole until the end: a kernel's results may depend on their number."""

    def finish(self, op: Op) -> None:
        rows, is_all = self._batch.sample_rows, self._batch.max_query_len == 1
        if rows.numel() != self._hidden.shape[0] or not is_all:  # else they are all rows, in order
            self._hidden = self._hidden.index_select(0, rows)
            self._delta = None if self._delta is None else self._delta.index_select(0, rows)
            if self._normed is not None:
                self._normed = self._normed[0], self._normed[1].index_select(0, rows)
        made = self._read(op.norm, op.is_centered)
        if isinstance(op.rows, Tensor):
            op.rows[: len(made)] = made if op.follows_norm else self._hidden
        self._hidden = made


_RUN: Mapping[OpKind, Callable[[Run, Op], None]] = {
    "embed": Run.embed,
    "linear": Run.linear,
    "norm": Run.norm,
    "attend": Run.attend,
    "attend_latents": Run.attend_latents,
    "gather": Run.gather,
    "finish": Run.finish,
    "combine": Run.combine,
    "tap": Run.tap,
    "keep": Run.keep,
    "join": Run.join,
    "experts": Run.experts,
    "recur": Run.recur,
}
