"""The native decoder: a whole step of all sequences through all layers in one C call, without the GIL.

Activations and sums are float32. Every linear layer, the embedding and the KV cache have types of their own. A row's
result does not depend on the other rows, on the number of threads or on how a prompt was cut into chunks, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.library import (
    DTYPES,
    Team,
    check,
    created,
    expect_shape,
    float32,
    freed_with,
)
from penstock.engine.kernels.cpu.library import KINDS as TIMES
from penstock.engine.kernels.cpu.linear import PackedLinear
from penstock.engine.kernels.cpu.program import (
    GATES,
    KINDS,
    PACKED_ROWS,
    STREAMS,
    Model,
    NativeHeads,
    NativeOp,
    Op,
    Shape,
    keeping,
    step_of,
    tapped,
)
from penstock.engine.kernels.cpu.states import NativeMixer
from penstock.engine.kernels.kv_cache import KVCache
from penstock.engine.kernels.state_cache import StateCache

BLOCK_SIZE = 16
"""Tokens per KV block; the layout of the cache is made for it."""
MAX_ROW = 1 << 15
"""The numbers of the widest row that goes through the scratch of a thread, `kWidestRow`."""


class NativeDecoder:
    """Takes a step of every sequence through every layer in one call.

    Calls must come from one thread at a time. The working memory grows with the largest batch seen.

    Args:
        kv: its blocks have BLOCK_SIZE tokens; the layout inside a block is private.
        ops: the program; the attention of each layer has heads of its cache's shape.
        embedding: [vocab, hidden], or a linear layer whose rows it is.
        max_position: no token will ever have this position or a higher one.
        states: the states of the layers that have one; the layout inside a slot is private, too. Without, every
            sequence of a batch is at its first token, and no state is kept.
    """

    def __init__(
        self,
        team: Team,
        kv: KVCache,
        ops: Sequence[NativeOp],
        *,
        hidden_size: int,
        eps: float,
        embedding: Tensor | PackedLinear,
        max_position: int,
        states: StateCache | None = None,
    ) -> None:
        self.hidden_size = hidden_size
        self.ops = tuple(ops)
        self._eps = eps
        self._kv = kv
        self._states = states
        self._max_position = max_position
        self._kept: list[object] = [team, kv, states]
        _check_kv(kv, sum(op.heads is not None for op in ops))
        widths = self._check()
        made = self._made(self.ops)
        model = Model(
            hidden=hidden_size,
            qkv=widths["qkv"],
            attended=widths["attended"],
            inner=widths["inner"],
            max_position=max_position,
            eps=eps,
            kv_type=DTYPES[kv.data.dtype],
            num_blocks=kv.num_blocks,
            num_tables=len(kv.layout.windows),
            kv=kv.data.data_ptr(),
            kv_bytes=kv.data.nbytes,
            ops=made,
            num_ops=len(made),
        )
        if states is not None:
            model.num_slots, model.num_pending = states.num_slots, states.layout.num_pending
            model.slot_floats, model.states = states.layout.slot_floats, states.data.data_ptr()
        self._set_embedding(model, embedding)
        self._library = library = team.library
        self.handle = created(library.call("penstock_decoder_new", team.handle, ctypes.byref(model)))
        freed_with(self, library, "penstock_decoder_free", self.handle)
        self._run = library.function("penstock_decoder_run")
        self._taken = (ctypes.c_int64 * 2)()

    def _check(self) -> dict[str, int]:
        """The largest width of each stream, which every linear map fits.

        Raises:
            ValueError: one does not.
        """
        hidden = self.hidden_size
        widths = {"hidden": hidden, "added": hidden, "gates": 0}  # of the rows written last
        largest = {"qkv": 0, "attended": 0, "inner": 0}
        for op in self.ops:
            linear = op.linear
            if op.norm is not None:
                widths["prepared"] = hidden
            if op.kind == "join":
                widths["prepared"] = 2 * hidden
            elif op.heads is not None:
                widths["attended"] = self._attended(op, op.heads, widths["qkv"])
            elif op.mixer is not None and op.kind == "recur":
                widths["attended"] = _made_by(op, op.mixer, widths)
            elif linear is not None and op.kind == "linear":
                is_gated, inputs = op.target == "inner" and op.gate != "relu2", widths[op.source]
                if op.target in ("qkv", "inner", "per_layer", "gates"):
                    widths[op.target] = linear.out_features
                facts = (inputs, widths[op.target], is_gated)
                if (linear.in_features, linear.out_features, linear.gated) != facts:
                    raise ValueError(
                        f"layer {op.layer}: {op.time}: {facts} expected (inputs, outputs, gated), not "
                        f"{(linear.in_features, linear.out_features, linear.gated)}"
                    )
            largest = {stream: max(width, widths.get(stream, 0)) for stream, width in largest.items()}
        return largest

    def _attended(self, op: NativeOp, heads: NativeHeads, qkv: int) -> int:
        """Returns the width of the attention's output for a layer's queries.

        Raises:
            ValueError: queries, keys and values of this width do not fit the heads.
        """
        shape, num_heads = self._kv.layout.places[op.layer].shape, heads.num_heads
        expected = (num_heads + (0 if heads.shares else 2 * shape.num_kv_heads)) * shape.head_dim + op.gates
        if num_heads % shape.num_kv_heads or qkv != expected:
            raise ValueError(
                f"layer {op.layer}: qkv has {qkv} outputs, which {num_heads} heads over {shape} do not"
            )
        return num_heads * shape.head_dim

    def _made(self, ops: Sequence[NativeOp]) -> ctypes.Array[Op]:
        made = (Op * len(ops))(*[self._op(op) for op in ops])
        self._kept.append(made)
        return made

    def _op(self, op: NativeOp) -> Op:
        norm_size = op.part if op.kind == "combine" else self.hidden_size
        made = Op(
            kind=KINDS.index(op.kind),
            time=TIMES.index(op.time),
            source=STREAMS.index(op.source),
            target=STREAMS.index(op.target),
            linear=None if op.linear is None else op.linear.handle,
            norm=None if op.norm is None else self._address(op.norm, norm_size),
            is_centered=op.is_centered,
            adds=op.adds,
            scale=op.scale,
            after=op.after,
            gate=GATES.index(op.gate),
            part=op.part,
            is_sampled=op.is_sampled,
            gates=op.gates,
            follows_norm=op.follows_norm,
        )
        self._kept += [op.linear, op.rows]
        if isinstance(op.rows, PackedLinear):
            made.rows, made.rows_type = op.rows.handle, PACKED_ROWS
        elif op.rows is not None:
            made.rows, made.rows_type = op.rows.data_ptr(), DTYPES[op.rows.dtype]
        if op.kind in ("keep", "join"):
            _check_features(op, self._kv.num_blocks, self.hidden_size)
        if op.rows_norm is not None:
            made.rows_norm = self._address(op.rows_norm, self.hidden_size)
        if op.experts is not None:
            made.experts = ctypes.pointer(op.experts.made(self._kept))
        if op.mixer is not None:
            made.mixer = ctypes.pointer(op.mixer.made(self._eps, self._states, op.layer, self._kept))
        if op.heads is not None:
            keys, values = self._kv.layer(op.layer)
            made.shape = ctypes.pointer(self._shape(op.heads, op.layer))
            made.stride = keys.stride(0) * keys.itemsize
            made.table = self._kv.layout.places[op.layer].table
            made.window, made.first = op.heads.window, op.heads.first
            made.keys, made.values = keys.data_ptr(), values.data_ptr()
        return made

    def _shape(self, heads: NativeHeads, layer: int) -> Shape:
        shape, positions = self._kv.layout.places[layer].shape, self._max_position
        for name, table in (("cos", heads.cos), ("sin", heads.sin)):
            expect_shape(name, table, (positions, shape.head_dim // 2))
        of_rows = heads.q_norm is not None and heads.q_norm.numel() != shape.head_dim
        counts = (heads.num_heads, shape.num_kv_heads) if of_rows else (1, 1)

        def norm(weight: Tensor | None, count: int) -> int | None:
            return None if weight is None else self._address(weight, count * shape.head_dim)

        return Shape(
            num_heads=heads.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            norms_rows=of_rows,
            norms_last=heads.norms_last,
            shares=heads.shares,
            eps=self._eps,
            divisor=1.0 / heads.scale,
            softcap=heads.softcap,
            q_norm=norm(heads.q_norm, counts[0]),
            k_norm=norm(heads.k_norm, counts[1]),
            v_norm=norm(torch.ones(shape.head_dim) if heads.norms_values else None, 1),
            cos=self._address(heads.cos, *heads.cos.shape),
            sin=self._address(heads.sin, *heads.sin.shape),
            q_scales=None if heads.q_scales is None else self._address(heads.q_scales, positions),
            sinks=None if heads.sinks is None else self._address(heads.sinks, heads.num_heads),
        )

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states of the sample rows after the final norm, float32 [R, hidden].

        Raises:
            ValueError: the batch cannot be.
        """
        tables = self.tables_of(batch)
        step = step_of(batch, tables)
        hidden = torch.empty((step.samples, self.hidden_size))
        check(self._run(self.handle, ctypes.byref(step), hidden.data_ptr()))
        return hidden

    def tables_of(self, batch: Batch) -> Tensor:
        """[tables, S, max blocks]"""
        return batch.tables(len(self._kv.layout.windows))

    def take_experts_touched(self) -> tuple[int, int]:
        """Returns the experts that tokens had, summed over layers, and the number of layers, since the last call."""
        self._library.call("penstock_decoder_take_touched", self.handle, self._taken)
        touched, layers = self._taken
        return touched, layers

    def take_rows_of_experts(self) -> Tensor:
        """The tokens that had each expert, [layers with experts, most experts of one] int64: of all steps since they
        were taken last."""
        parts = [op.experts.spec for op in self.ops if op.experts is not None]
        rows = torch.zeros(len(parts), max((len(part.own) for part in parts), default=0), dtype=torch.int64)
        self._library.call("penstock_decoder_take_rows", self.handle, rows.data_ptr())
        return rows

    @property
    def linears(self) -> list[dict[str, PackedLinear]]:
        """The linear maps of each layer by the part of a step that they are."""
        layers: list[dict[str, PackedLinear]] = [{} for _ in range(self._num_layers)]
        for op in self.ops:
            if op.kind == "linear" and op.linear is not None:
                layers[op.layer][op.time] = op.linear
        return layers

    def tap(self, after: Sequence[int], fuse: PackedLinear, features: Tensor) -> None:
        """Makes every later step write the features of its tokens; see `tapped`."""
        if fuse.in_features != len(after) * self.hidden_size or fuse.gated:
            raise ValueError(f"fuse: {len(after)} times {self.hidden_size} inputs expected")
        num_layers = self._num_layers
        if not all(0 <= number < num_layers for number in after):
            raise ValueError(f"hidden states after {after} layers, and there are {num_layers}")
        self._run_program(tapped(self.ops, after, fuse, features))

    def keep(self, features: Tensor) -> None:
        """Makes every later step write the normed hidden states of its tokens; see `keeping`.

        Args:
            features: bfloat16 [blocks, BLOCK_SIZE, hidden]
        """
        self._run_program(keeping(self.ops, features))

    def _run_program(self, ops: Sequence[NativeOp]) -> None:
        made = self._made(ops)
        self._library.call("penstock_decoder_set_program", self.handle, made, len(made))

    @property
    def _num_layers(self) -> int:
        return self.ops[-1].layer

    def _set_embedding(self, model: Model, embedding: Tensor | PackedLinear) -> None:
        if isinstance(embedding, Tensor):
            embedding = embedding.detach().cpu().contiguous()
            model.vocab = embedding.shape[0]
            expect_shape("embedding", embedding, (model.vocab, self.hidden_size))
            model.embedding, model.embedding_type = embedding.data_ptr(), DTYPES[embedding.dtype]
        elif embedding.in_features != self.hidden_size or embedding.gated:
            raise ValueError(f"embedding: rows of {self.hidden_size} expected, not {embedding.in_features}")
        else:
            model.vocab, model.embedding_linear = embedding.out_features, embedding.handle
        self._kept.append(embedding)

    def _address(self, weight: Tensor, *shape: int) -> int:
        """The address of the tensor in float32, which stays valid as long as the decoder lives."""
        weight = float32(weight)
        expect_shape("norm or table", weight, shape)
        self._kept.append(weight)
        return weight.data_ptr()


def _made_by(op: NativeOp, mixer: NativeMixer, widths: dict[str, int]) -> int:
    """Returns the width of a mixer's output.

    Raises:
        ValueError: rows or gates of these widths do not fit it.
    """
    expected = {"qkv": mixer.row_width, "gates": mixer.gates_width or widths["gates"]}
    for stream, width in expected.items():
        if widths[stream] != width:
            raise ValueError(f"layer {op.layer}: {widths[stream]} numbers for a mixer that reads {width}")
    return mixer.width


def _check_kv(kv: KVCache, num_layers: int) -> None:
    shapes = kv.layout.shapes
    if any(s.block_size != BLOCK_SIZE or s.head_dim % 8 for s in shapes):
        raise ValueError(f"blocks of {BLOCK_SIZE} tokens and heads of a multiple of 8 expected, not {shapes}")
    if num_layers != len(kv.layout.places):
        raise ValueError(f"{num_layers} layers given, {len(kv.layout.places)} in the KV cache")
    if kv.data.device.type != "cpu" or not kv.data.is_contiguous():
        raise ValueError("a contiguous KV cache on the CPU expected")


def _check_features(op: NativeOp, num_blocks: int, hidden_size: int) -> None:
    features, linear = op.rows, op.linear
    assert isinstance(features, Tensor)
    width = linear.out_features if linear is not None and op.kind == "keep" else hidden_size
    expect_shape("features", features, (num_blocks, BLOCK_SIZE, width))
    if features.dtype != torch.bfloat16 or not features.is_contiguous():
        raise ValueError(f"contiguous bfloat16 features expected, not {features.dtype}")
