"""The native decoder: a whole step of all sequences through all layers in one C call, without the GIL.

Activations and sums are float32. Every linear layer, the embedding and the KV cache have types of their own. A row's
result does not depend on the rows beside it, on the number of threads or on how a prompt was cut into chunks, bit for
bit.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.batch import Batch
from engine.kernels.cpu.library import DTYPES, Team, check, created, expect_ints, expect_shape, float32
from engine.kernels.cpu.linear import PackedLinear
from engine.kernels.kv_cache import KVCache

BLOCK_SIZE = 16
"""Tokens per KV block; the layout of the cache is made for it."""


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("qkv", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("o", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("window", c_int32),
    ]


class _Taps(ctypes.Structure):
    _fields_ = [
        ("after", c_int32 * 3),
        ("width", c_int32),
        ("fuse", c_void_p),
        ("features", c_void_p),
    ]


class _HeadInput(ctypes.Structure):
    _fields_ = [
        ("norm", c_void_p),
        ("features", c_void_p),
        ("residual_is_normed", c_int32),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("hidden", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("vocab", c_int32),
        ("num_layers", c_int32),
        ("max_position", c_int32),
        ("eps", c_float),
        ("embedding_type", c_int32),
        ("embedding", c_void_p),
        ("embedding_linear", c_void_p),
        ("final_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("kv_type", c_int32),
        ("num_blocks", c_int32),
        ("kv", c_void_p),
        ("layers", ctypes.POINTER(_Layer)),
        ("head", ctypes.POINTER(_HeadInput)),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("sample_rows", c_void_p),
        ("tokens", c_int32),
        ("sequences", c_int32),
        ("max_blocks", c_int32),
        ("samples", c_int32),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """The weights of one layer; norms are read as float32."""

    attention_norm: Tensor
    """[hidden]"""
    qkv: PackedLinear
    """Rows: queries, keys, values."""
    q_norm: Tensor | None
    """[head_dim], or None where queries and keys are not normed."""
    k_norm: Tensor | None
    o: PackedLinear
    mlp_norm: Tensor
    """[hidden]"""
    gate_up: PackedLinear
    """Gated."""
    down: PackedLinear
    window: int = 0
    """How many tokens a token sees, itself included; 0 is all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTaps:
    """What a target keeps of each token for a head: hidden states after some of its layers, fused."""

    after: tuple[int, int, int]
    """So many layers."""
    fuse: PackedLinear
    """Reads the three one after another."""
    features: Tensor
    """bfloat16 [blocks, BLOCK_SIZE, width], in the blocks of the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeHeadInput:
    """What a decoder of one layer reads beside the embeddings of its tokens, which makes it a head: EAGLE-3.

    Its qkv reads the norm of a token's embedding, and behind it that of the features of the token before; the features
    are the residual of the layer. It sees the tokens from the second one of a sequence on.
    """

    norm: Tensor
    """[hidden]"""
    features: Tensor
    """Those that the target's taps write, of the same width."""
    residual_is_normed: bool
    """Whether the norm of the features is the residual."""


class NativeDecoder:
    """Takes a step of every sequence through every layer in one call.

    Calls must come from one thread at a time. The working memory grows with the largest batch seen.

    Args:
        kv: its blocks have BLOCK_SIZE tokens; what is inside a block is private.
        embedding: [vocab, hidden], or a linear layer whose rows it is.
        final_norm: [hidden]
        cos, sin: float32 [max position, head_dim / 2]
        head: what a head reads; None for an ordinary decoder.
    """

    def __init__(
        self,
        team: Team,
        kv: KVCache,
        layers: Sequence[NativeLayer],
        *,
        embedding: Tensor | PackedLinear,
        final_norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        head: NativeHeadInput | None = None,
    ) -> None:
        self.hidden_size = final_norm.shape[0]
        self.layers = tuple(layers)
        self._num_blocks = kv.num_blocks
        self._kept: list[object] = [team, kv]
        _check_kv(kv, len(layers))
        for index, layer in enumerate(layers):
            _check_layer(index, layer, kv, self.hidden_size, is_head=head is not None)
        expect_shape("cos", cos, (cos.shape[0], kv.shape.head_dim // 2))
        model = _Model(
            hidden=self.hidden_size,
            num_heads=layers[0].o.in_features // kv.shape.head_dim,
            num_kv_heads=kv.shape.num_kv_heads,
            head_dim=kv.shape.head_dim,
            intermediate=max(layer.down.in_features for layer in layers),
            num_layers=len(layers),
            max_position=cos.shape[0],
            eps=eps,
            final_norm=self._address(final_norm, self.hidden_size),
            cos=self._address(cos, *cos.shape),
            sin=self._address(sin, *cos.shape),
            kv_type=DTYPES[kv.data.dtype],
            num_blocks=kv.num_blocks,
            kv=kv.data.data_ptr(),
            layers=(_Layer * len(layers))(*[self._layer(layer, kv.shape.head_dim) for layer in layers]),
        )
        self._set_embedding(model, embedding)
        if head is not None:
            model.head = ctypes.pointer(self._head_input(head))
        self._library = library = team.library
        self.handle = created(library.call("penstock_decoder_new", team.handle, ctypes.byref(model)))
        weakref.finalize(self, library.call, "penstock_decoder_free", self.handle)
        self._run = library.function("penstock_decoder_run")

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states of the sample rows after the final norm, float32 [R, hidden].

        Raises:
            ValueError: the batch cannot be.
        """
        step = step_of(batch)
        hidden = torch.empty((step.samples, self.hidden_size))
        check(self._run(self.handle, ctypes.byref(step), hidden.data_ptr()))
        return hidden

    def tap(self, taps: NativeTaps) -> None:
        """From now on every step writes the features of its tokens."""
        width = taps.fuse.out_features
        if taps.fuse.in_features != len(taps.after) * self.hidden_size or taps.fuse.gated:
            raise ValueError(f"fuse: {len(taps.after)} times {self.hidden_size} inputs expected")
        if not all(0 <= number < len(self.layers) for number in taps.after):
            raise ValueError(f"hidden states after {taps.after} layers, and there are {len(self.layers)}")
        _check_features(taps.features, self._num_blocks, width)
        self._kept.append(taps)
        arguments = _Taps((c_int32 * 3)(*taps.after), width, taps.fuse.handle, taps.features.data_ptr())
        self._library.call("penstock_decoder_tap", self.handle, ctypes.byref(arguments))

    def _head_input(self, head: NativeHeadInput) -> _HeadInput:
        _check_features(head.features, self._num_blocks, self.hidden_size)
        self._kept.append(head)
        norm = self._address(head.norm, self.hidden_size)
        return _HeadInput(norm, head.features.data_ptr(), head.residual_is_normed)

    def _set_embedding(self, model: _Model, embedding: Tensor | PackedLinear) -> None:
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

    def _layer(self, layer: NativeLayer, head_dim: int) -> _Layer:
        return _Layer(
            attention_norm=self._address(layer.attention_norm, self.hidden_size),
            qkv=layer.qkv.handle,
            q_norm=None if layer.q_norm is None else self._address(layer.q_norm, head_dim),
            k_norm=None if layer.k_norm is None else self._address(layer.k_norm, head_dim),
            o=layer.o.handle,
            mlp_norm=self._address(layer.mlp_norm, self.hidden_size),
            gate_up=layer.gate_up.handle,
            down=layer.down.handle,
            window=layer.window,
        )

    def _address(self, weight: Tensor, *shape: int) -> int:
        """The address of the tensor in float32, which stays valid as long as the decoder lives."""
        weight = float32(weight)
        expect_shape("norm or table", weight, shape)
        self._kept.append(weight)
        return weight.data_ptr()


def step_of(batch: Batch) -> Step:
    tokens, sequences = batch.token_ids.shape[0], batch.context_lens.shape[0]
    expect_ints("positions", batch.positions, (tokens,))
    expect_ints("token_ids", batch.token_ids, (tokens,))
    expect_ints("query_starts", batch.query_starts, (sequences + 1,))
    expect_ints("context_lens", batch.context_lens, (sequences,))
    expect_ints("block_tables", batch.block_tables, (sequences, batch.block_tables.shape[-1]))
    expect_ints("sample_rows", batch.sample_rows, (batch.sample_rows.shape[0],))
    return Step(
        batch.token_ids.data_ptr(),
        batch.positions.data_ptr(),
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.sample_rows.data_ptr(),
        tokens,
        sequences,
        batch.block_tables.shape[1],
        batch.sample_rows.shape[0],
    )


def _check_kv(kv: KVCache, num_layers: int) -> None:
    if kv.shape.block_size != BLOCK_SIZE or kv.shape.head_dim % 8:
        raise ValueError(
            f"blocks of {BLOCK_SIZE} tokens and heads of a multiple of 8 expected, not {kv.shape}"
        )
    if num_layers != kv.shape.num_layers:
        raise ValueError(f"{num_layers} layers given, {kv.shape.num_layers} in the KV cache")
    if kv.data.device.type != "cpu" or not kv.data.is_contiguous():
        raise ValueError("a contiguous KV cache on the CPU expected")


def _check_features(features: Tensor, num_blocks: int, width: int) -> None:
    expect_shape("features", features, (num_blocks, BLOCK_SIZE, width))
    if features.dtype != torch.bfloat16 or not features.is_contiguous():
        raise ValueError(f"contiguous bfloat16 features expected, not {features.dtype}")


def _check_layer(index: int, layer: NativeLayer, kv: KVCache, hidden: int, *, is_head: bool) -> None:
    head_dim, kv_heads = kv.shape.head_dim, kv.shape.num_kv_heads
    q_size, inner = layer.o.in_features, layer.down.in_features
    if q_size % (head_dim * kv_heads):
        raise ValueError(
            f"layer {index}: {q_size} columns of o are no multiple of {kv_heads} heads of {head_dim}"
        )
    expected = {
        "qkv": (2 * hidden if is_head else hidden, q_size + 2 * kv_heads * head_dim, False),
        "o": (q_size, hidden, False),
        "gate_up": (hidden, inner, True),
        "down": (inner, hidden, False),
    }
    for name, facts in expected.items():
        linear: PackedLinear = getattr(layer, name)
        if (linear.in_features, linear.out_features, linear.gated) != facts:
            raise ValueError(f"layer {index}: {name}: {facts} expected (inputs, outputs, gated)")
