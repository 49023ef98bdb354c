"""The native decoder: a whole step of all sequences through all layers in one C call, without the GIL.

Activations and sums are float32. Every linear layer, the embedding and the KV cache have types of their own. A row's
result does not depend on the other rows, on the number of threads or on how a prompt was cut into chunks, bit for bit.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu import structs
from penstock.engine.kernels.cpu.experts import address
from penstock.engine.kernels.cpu.library import (
    BLOCK_SIZE,
    DTYPES,
    Team,
    check,
    created,
    expect_ints,
    expect_shape,
    freed_with,
    pointer,
)
from penstock.engine.kernels.cpu.library import KINDS as TIMES
from penstock.engine.kernels.cpu.linear import NativeLinear
from penstock.engine.kernels.kv_cache import KVCache
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.state_cache import StateCache
from penstock.engine.program.native_layers import (
    facts,
    heads_struct,
    latent_maps,
    latents_struct,
    layer_experts,
    layer_mixer,
    mixer_widths,
    native_linear,
)
from penstock.engine.program.ops import Op, OpKind, Program, Stream
from penstock.engine.spec import ACTIVATIONS, Attention, LatentAttention, StateMixer

KINDS, STREAMS = get_args(OpKind), get_args(Stream)
"""program.h has the same orders."""
PACKED_ROWS = -1
"""The `rows_type` of rows that a linear map has."""


class NativeDecoder:
    """Takes a step of every sequence through every layer in one call.

    Calls must come from one thread at a time. The working memory grows with the largest batch seen.

    Args:
        kv: its blocks have BLOCK_SIZE tokens; the layout inside a block is private.
        program: its linear maps are NativeLinears; the attention of each layer has heads of its cache's shape.
        states: the states of the layers that have one; the layout inside a slot is private, too. Without, every
            sequence of a batch is at its first token, and no state is kept.
    """

    def __init__(self, team: Team, kv: KVCache, program: Program, states: StateCache | None = None) -> None:
        self.program, self.hidden_size = program, program.hidden_size
        self._kv, self._states = kv, states
        self._kept: list[object] = [team, kv, states]
        _check_kv(kv, sum(op.heads is not None or op.latent_heads is not None for op in program.ops))
        widths = self._check(program)
        ops = self._made(program)
        model = structs.Model(
            hidden=program.hidden_size,
            qkv=widths["qkv"],
            attended=widths["attended"],
            inner=widths["inner"],
            max_position=program.max_position,
            eps=program.eps,
            kv_type=DTYPES[kv.data.dtype],
            num_blocks=kv.num_blocks,
            num_tables=len(kv.layout.windows),
            kv=kv.data.data_ptr(),
            kv_bytes=kv.data.nbytes,
            ops=ops,
            num_ops=len(ops),
        )
        if states is not None:
            model.num_slots, model.num_pending = states.num_slots, states.layout.num_pending
            model.slot_floats, model.states = states.layout.slot_floats, states.data.data_ptr()
        self._set_embedding(model, program.embedding)
        self._library = library = team.library
        self.handle = created(library.call("penstock_decoder_new", team.handle, ctypes.byref(model)))
        freed_with(self, library, "penstock_decoder_free", self.handle)
        self._run = library.function("penstock_decoder_run")
        self._taken = (ctypes.c_int64 * 2)()

    def set_program(self, program: Program) -> None:
        """Makes later steps run this program, of the same layers."""
        self._check(program)
        self.program, ops = program, self._made(program)
        self._library.call("penstock_decoder_set_program", self.handle, ops, len(ops))

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states of the sample rows after the final norm, float32 [R, hidden].

        Raises:
            ValueError: the batch cannot be.
        """
        tables = batch.tables(len(self._kv.layout.windows))  # must live until the call ends
        step = _step(batch, tables)
        hidden = torch.empty((step.samples, self.hidden_size))
        check(self._run(self.handle, ctypes.byref(step), hidden.data_ptr()))
        return hidden

    def take_experts_touched(self) -> tuple[int, int]:
        """Returns the experts that tokens had, summed over layers, and the number of layers, since the last call."""
        self._library.call("penstock_decoder_take_touched", self.handle, self._taken)
        touched, layers = self._taken
        return touched, layers

    def take_rows_of_experts(self) -> Tensor:
        """The tokens that had each expert, [layers with experts, most experts of one] int64: of all steps since they
        were taken last."""
        parts = [op.experts.spec for op in self.program.ops if op.experts is not None]
        rows = torch.zeros(len(parts), max((len(part.own) for part in parts), default=0), dtype=torch.int64)
        self._library.call("penstock_decoder_take_rows", self.handle, rows.data_ptr())
        return rows

    @property
    def linears(self) -> list[dict[str, NativeLinear]]:
        """The linear maps of each layer by the part of a step that they are."""
        layers: list[dict[str, NativeLinear]] = [{} for _ in range(self.program.ops[-1].layer)]
        for op in self.program.ops:
            if op.kind == "linear":
                layers[op.layer][op.time] = native_linear(op.linear)
        return layers

    def _check(self, program: Program) -> dict[str, int]:
        """The largest width of each stream, which every linear map fits.

        Raises:
            ValueError: one does not.
        """
        hidden = program.hidden_size
        widths = {"hidden": hidden, "added": hidden, "gates": 0}  # of the rows written last
        largest = {"qkv": 0, "attended": 0, "inner": 0}
        for op in program.ops:
            if op.kind == "join":
                widths["prepared"] = 2 * hidden
            elif op.heads is not None:
                widths["attended"] = self._attended(op, op.heads.spec, widths["qkv"])
            elif op.latent_heads is not None:
                widths["attended"] = _attended_latents(op, op.latent_heads.spec, widths)
            elif op.mixer is not None:
                widths["attended"] = _recurred(op, op.mixer.spec, widths)
            elif op.kind == "linear":
                linear, is_gated = native_linear(op.linear), op.target == "inner" and op.gate != "relu2"
                if op.target in ("qkv", "inner", "per_layer", "gates", "prepared", "latents"):
                    widths[op.target] = linear.out_features
                expected = (widths[op.source], widths[op.target], is_gated)
                if facts(linear) != expected:
                    raise ValueError(
                        f"layer {op.layer}: {op.time}: {expected} expected (inputs, outputs, gated), not "
                        f"{facts(linear)}"
                    )
            largest = {stream: max(width, widths.get(stream, 0)) for stream, width in largest.items()}
        _check_taps(program)
        return largest

    def _attended(self, op: Op, spec: Attention, qkv: int) -> int:
        """Returns the width of the attention's output for a layer's queries.

        Raises:
            ValueError: queries, keys and values of this width do not fit the heads.
        """
        shape, num_heads = self._kv.layout.places[op.layer].shape, spec.num_heads
        expected = (num_heads + (2 if spec.shares is None else 0) * shape.num_kv_heads) * shape.head_dim
        if num_heads % shape.num_kv_heads or qkv != expected + spec.gate_size:
            raise ValueError(
                f"layer {op.layer}: qkv has {qkv} outputs, which {num_heads} heads over {shape} do not"
            )
        return num_heads * shape.head_dim

    def _made(self, program: Program) -> ctypes.Array[structs.Op]:
        made = (structs.Op * len(program.ops))(*[self._op(op, program) for op in program.ops])
        mixing = made[0]
        for (op, own), (then, follower) in pairwise(zip(program.ops, made, strict=True)):
            if op.kind == "join":  # prepares the rows that the next operation reads
                own.linear = follower.linear
            mixing = own if op.kind in ("attend", "recur") else mixing
            own.is_sampled = op.kind in ("attend", "attend_latents") and then.kind == "gather"
            if then.source == "attended":  # lets the rows through by gates that come with the mixer's
                follower.mixer, follower.gates = mixing.mixer, mixing.gates
            if _reads_alike(op, then):
                follower.norm, follower.source = None, STREAMS.index("prepared")
        self._kept.append(made)
        return made

    def _op(self, op: Op, program: Program) -> structs.Op:
        hidden, size = program.hidden_size, 0 if op.norm is None else op.norm.numel()
        made = structs.Op(
            kind=KINDS.index(op.kind),
            time=TIMES.index(op.time),
            source=STREAMS.index(op.source),
            target=STREAMS.index(op.target if op.kind != "join" else "hidden"),
            linear=None if op.linear is None else native_linear(op.linear).handle,
            norm=address(op.norm, (_normed_width(op, hidden),), self._kept),
            is_centered=op.is_centered,
            adds=op.part if op.kind == "tap" else op.adds or op.residual_is_normed,
            scale=op.scale,
            after=op.after,
            gate=ACTIVATIONS.index(op.gate),
            part=size if op.kind == "combine" else -1 if op.part is None else op.part,
            follows_norm=op.follows_norm,
            rows_norm=address(op.rows_norm, (hidden,), self._kept),
        )
        self._kept += [op.linear, op.rows]
        if isinstance(op.rows, Tensor):
            made.rows, made.rows_type = op.rows.data_ptr(), DTYPES[op.rows.dtype]
        elif op.rows is not None:
            made.rows, made.rows_type = native_linear(op.rows).handle, PACKED_ROWS
        if op.kind in ("keep", "join"):
            _check_features(op, self._kv.num_blocks, hidden)
        if op.experts is not None:
            made.experts = ctypes.pointer(layer_experts(op.experts, self._kept))
        if op.mixer is not None:
            mixer = layer_mixer(op.mixer, program.eps, self._states, op.layer, self._kept)
            made.mixer = ctypes.pointer(mixer)
        if op.heads is not None:
            place, (keys, values) = self._kv.layout.places[op.layer], self._kv.layer(op.layer)
            shape = heads_struct(op.heads, place.shape, program.eps, program.max_position, self._kept)
            made.shape, made.table = ctypes.pointer(shape), place.table
            made.stride = keys.stride(0) * keys.itemsize
            spec, made.first = op.heads.spec, op.heads.first
            made.window, made.gates = spec.reach, spec.gate_size
            made.keys, made.values = keys.data_ptr(), values.data_ptr()
        if op.latent_heads is not None:
            (latents,) = self._kv.layer(op.layer)
            shape = latents_struct(op.latent_heads, program.eps, program.max_position, self._kept)
            made.shape, made.table = ctypes.pointer(shape), self._kv.layout.places[op.layer].table
            made.stride, made.first = latents.stride(0) * latents.itemsize, op.latent_heads.first
            made.keys = made.values = latents.data_ptr()
            made.of_queries, made.of_latents = latent_maps(op.latent_heads, self._kept)
        return made

    def _set_embedding(self, model: structs.Model, embedding: Tensor | Linear) -> None:
        hidden = self.hidden_size
        if isinstance(embedding, Tensor):
            embedding = embedding.detach().cpu().contiguous()
            model.vocab = embedding.shape[0]
            expect_shape("embedding", embedding, (model.vocab, hidden))
            model.embedding, model.embedding_type = embedding.data_ptr(), DTYPES[embedding.dtype]
        else:
            linear = native_linear(embedding)
            if linear.in_features != hidden or linear.gated:
                raise ValueError(f"embedding: rows of {hidden} expected, not {linear.in_features}")
            model.vocab, model.embedding_linear = linear.out_features, linear.handle
        self._kept.append(embedding)


def _step(batch: Batch, block_tables: Tensor) -> structs.Step:
    """Returns the arguments of a step, which point into the batch and its block tables [tables, S, max blocks]."""
    tokens, sequences = batch.token_ids.shape[0], batch.context_lens.shape[0]
    expect_ints("positions", batch.positions, (tokens,))
    expect_ints("token_ids", batch.token_ids, (tokens,))
    expect_ints("query_starts", batch.query_starts, (sequences + 1,))
    expect_ints("context_lens", batch.context_lens, (sequences,))
    expect_ints("block_tables", block_tables, (len(block_tables), sequences, block_tables.shape[-1]))
    expect_ints("sample_rows", batch.sample_rows, (batch.sample_rows.shape[0],))
    if (rotary := batch.rotary_positions) is not None:
        expect_ints("rotary_positions", rotary, (tokens,))
    slots, saves = batch.state_slots, batch.state_saves
    if slots is not None:
        expect_ints("state_slots", slots, (sequences, 4))
    if saves is not None:
        expect_ints("state_saves", saves, (len(saves), 4))
    return structs.Step(
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
        pointer(rotary),
    )


def _reads_alike(op: Op, then: Op) -> bool:
    """Returns whether a linear map reads the rows of the one before it in its form; integers have own scales."""
    if (op.kind, then.kind, then.source) != ("linear", "linear", "hidden") or then.norm is None:
        return False
    forms = {native_linear(linear).activation_dtype for linear in (op.linear, then.linear)}
    return op.norm is then.norm and len(forms) == 1 and torch.int8 not in forms


def _normed_width(op: Op, hidden: int) -> int:
    """Returns how many numbers the norm of an operation has weights for."""
    if op.kind == "combine" and op.norm is not None:
        return op.norm.numel()
    return native_linear(op.linear).in_features if op.source == "prepared" else hidden


def _attended_latents(op: Op, spec: LatentAttention, widths: dict[str, int]) -> int:
    """Returns the width of the output of attention to latents.

    Raises:
        ValueError: queries or latents of another width do not fit the heads.
    """
    for stream, width in (("qkv", spec.q_size), ("latents", spec.head_dim)):
        if widths[stream] != width:
            raise ValueError(f"layer {op.layer}: {widths[stream]} numbers of {stream}, not {width}")
    return spec.num_heads * spec.value_size


def _recurred(op: Op, spec: StateMixer, widths: dict[str, int]) -> int:
    """Returns the width of a mixer's output.

    Raises:
        ValueError: rows or gates of other widths do not fit it.
    """
    expected = mixer_widths(spec)
    for stream, width in (("qkv", expected["into"]), ("gates", expected.get("gates", widths["gates"]))):
        if widths[stream] != width:
            raise ValueError(f"layer {op.layer}: {widths[stream]} numbers for a mixer that reads {width}")
    return expected["out"]


def _check_kv(kv: KVCache, num_layers: int) -> None:
    shapes = kv.layout.shapes
    if any(s.block_size != BLOCK_SIZE or s.head_dim % 8 or s.latent_size % 8 for s in shapes):
        raise ValueError(f"blocks of {BLOCK_SIZE} tokens and heads of a multiple of 8 expected, not {shapes}")
    if num_layers != len(kv.layout.places):
        raise ValueError(f"{num_layers} layers given, {len(kv.layout.places)} in the KV cache")
    if kv.data.device.type != "cpu" or not kv.data.is_contiguous():
        raise ValueError("a contiguous KV cache on the CPU expected")


def _check_taps(program: Program) -> None:
    num = sum(op.kind == "tap" for op in program.ops)
    for op in program.ops:
        if op.kind == "keep" and op.linear is not None:
            fuse = native_linear(op.linear)
            if fuse.in_features != num * program.hidden_size or fuse.gated:
                raise ValueError(f"fuse: {num} times {program.hidden_size} inputs expected")


def _check_features(op: Op, num_blocks: int, hidden_size: int) -> None:
    features = op.rows
    assert isinstance(features, Tensor)
    width = hidden_size if op.linear is None else native_linear(op.linear).out_features
    expect_shape("features", features, (num_blocks, BLOCK_SIZE, width))
    if features.dtype != torch.bfloat16 or not features.is_contiguous():
        raise ValueError(f"contiguous bfloat16 features expected, not {features.dtype}")
