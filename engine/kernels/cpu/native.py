"""The native CPU decoder: a whole step of all sequences through all layers in one C call, without the GIL.

Activations and sums are float32; weights and the KV cache are float32, float16 or bfloat16. A row's result does not
depend on the rows beside it, on the number of threads or on how a prompt was cut into chunks, bit for bit.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kernels.batch import Batch
from engine.kernels.cpu.build import NativeUnavailable, build
from engine.model.config import ModelConfig
from engine.sampling.batch import SampledRows, SamplingBatch

__all__ = [
    "BLOCK_SIZE",
    "NativeDecoder",
    "NativeLayer",
    "NativeLibrary",
    "NativeUnavailable",
    "PackedLinear",
    "Team",
    "load_library",
    "measure_fma",
    "measure_linear",
    "sample",
]

BLOCK_SIZE = 16
"""Tokens per KV block; the layout of the cache is made for it."""

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

ERRORS = {
    1: "a token id is outside the vocabulary",
    2: "a position is outside its sequence, its block table or the model's context",
    3: "a block table names a block that does not exist",
    4: "query_starts does not divide the tokens",
    5: "a sample row is not a token of the batch",
}
NO_MEMORY = 6


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
        ("type", c_int32),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("lm_head", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("kv", c_void_p),
        ("num_blocks", c_int32),
        ("layers", POINTER(_Layer)),
    ]


class _Step(ctypes.Structure):
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


class _Sample(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("vocab", c_int64),
        ("rows", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("uniform", c_void_p),
        ("repetition", c_void_p),
        ("presence", c_void_p),
        ("frequency", c_void_p),
        ("bias_starts", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("seen_starts", c_void_p),
        ("seen_ids", c_void_p),
        ("seen_counts", c_void_p),
        ("want_logprobs", c_int32),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
    ]


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "penstock_team_new": (c_void_p, (c_int32,)),
    "penstock_team_free": (None, (c_void_p,)),
    "penstock_linear_new": (c_void_p, (c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p)),
    "penstock_linear_free": (None, (c_void_p,)),
    "penstock_linear_bytes": (c_int64, (c_void_p,)),
    "penstock_linear_apply": (c_int32, (c_void_p, c_void_p, c_void_p, c_int32, c_void_p)),
    "penstock_decoder_new": (c_void_p, (c_void_p, POINTER(_Model))),
    "penstock_decoder_free": (None, (c_void_p,)),
    "penstock_decoder_run": (c_int32, (c_void_p, POINTER(_Step), c_void_p)),
    "penstock_sample": (c_int32, (c_void_p, POINTER(_Sample))),
    "penstock_measure_fma": (c_double, (c_void_p,)),
    "penstock_measure_products": (c_double, (c_void_p, POINTER(c_void_p), c_int32, c_int32, c_int32)),
}


class NativeLibrary:
    """The compiled kernels."""

    def __init__(self, path: str) -> None:
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as error:
            raise NativeUnavailable(f"cannot load {path}: {error}") from error
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._dll, name)
            function.restype = result
            function.argtypes = arguments

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._dll, name)(*arguments)

    def function(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._dll, name)
        return found

    def start_team(self, num_threads: int | None = None) -> Team:
        """Threads for decoders, packing and sampling; by default one for every core this process may use."""
        return Team(self, num_threads or available_cores())


def load_library(say: Callable[[str], None]) -> NativeLibrary:
    """The library, built first if need be; `say` gets a line when that takes a while.

    Raises NativeUnavailable where there is no compiler or it fails: plain torch can do the same work.
    """
    return _loaded(str(build(say)))


@functools.cache
def _loaded(path: str) -> NativeLibrary:
    return NativeLibrary(path)


def available_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


class Team:
    """Threads that work on one call at a time, the caller as one of them, and sleep in between.

    Owned by whoever started it; close() joins the threads, and so does the end of the interpreter.
    """

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"a team needs at least 1 thread, not {num_threads}")
        self.library = library
        self.num_threads = num_threads
        self.handle = _created(library.call("penstock_team_new", num_threads))
        self._close = weakref.finalize(self, library.call, "penstock_team_free", self.handle)

    def close(self) -> None:
        """Nothing may use the team any more."""
        self._close()


class PackedLinear:
    """A linear layer in the layout of the kernels; the weight given can be freed.

    weight: [N, K]; bias: [N] or None. With `gated`, the first half of N are gates and the second ups, and the
    layer's N / 2 outputs are silu(gate) * up.
    """

    def __init__(
        self, team: Team, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, gated: bool = False
    ) -> None:
        rows, self.in_features = weight.shape
        if gated and rows % 2:
            raise ValueError(f"gates and ups must be equally many, not {rows} together")
        if bias is not None and bias.shape != (rows,):
            raise ValueError(f"a bias of shape {tuple(bias.shape)} for {rows} outputs")
        self.out_features = rows // 2 if gated else rows
        self.dtype = dtype
        self.gated = gated
        self._team = team
        source = weight.detach().to("cpu", dtype).contiguous()
        biases = None if bias is None else _float32(bias)
        call = team.library.call
        self.handle = _created(
            call(
                "penstock_linear_new",
                team.handle,
                DTYPES[dtype],
                rows,
                self.in_features,
                gated,
                source.data_ptr(),
                _pointer(biases),
            )
        )
        weakref.finalize(self, call, "penstock_linear_free", self.handle)

    @property
    def num_bytes(self) -> int:
        return int(self._team.library.call("penstock_linear_bytes", self.handle))

    def __call__(self, x: Tensor) -> Tensor:
        """x: float32 [M, K]; float32 [M, outputs]."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"float32 [M, {self.in_features}] expected, not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.out_features)
        _check(
            self._team.library.call(
                "penstock_linear_apply",
                self._team.handle,
                self.handle,
                x.data_ptr(),
                x.shape[0],
                out.data_ptr(),
            )
        )
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """The weights of one layer; norms are float32."""

    attention_norm: Tensor
    """[H]"""
    qkv: PackedLinear
    """Rows: queries, keys, values."""
    q_norm: Tensor | None
    """[head_dim], with config.qk_norm."""
    k_norm: Tensor | None
    o: PackedLinear
    mlp_norm: Tensor
    """[H]"""
    gate_up: PackedLinear
    """Gated."""
    down: PackedLinear


class NativeDecoder:
    """Every layer of every sequence of a step in one call.

    embedding: [vocab, H], or None where lm_head's rows are it; cos, sin: float32 [max position, head_dim / 2];
    kv: [layers, 2, blocks, kv heads * BLOCK_SIZE * head_dim] in the weights' dtype, what is in a block is private.
    All weights have one dtype. For one thread at a time. Its working memory grows with the largest batch seen.
    """

    def __init__(
        self,
        team: Team,
        config: ModelConfig,
        *,
        embedding: Tensor | None,
        layers: Sequence[NativeLayer],
        final_norm: Tensor,
        lm_head: PackedLinear,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
    ) -> None:
        dtype = lm_head.dtype
        _check_shapes(config, layers, lm_head, cos, sin, kv)
        self._vocab = config.vocab_size
        self._keep: list[object] = [team, lm_head, kv, *layers]
        self._norms: list[Tensor] = []
        structs = (_Layer * len(layers))(*[self._layer(config, i, layer) for i, layer in enumerate(layers)])
        if embedding is not None:
            embedding = embedding.detach().to("cpu", dtype).contiguous()
            _expect("embedding", embedding, (config.vocab_size, config.hidden_size))
            self._keep.append(embedding)
        model = _Model(
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            num_layers=config.num_layers,
            max_position=cos.shape[0],
            eps=config.rms_norm_eps,
            type=DTYPES[dtype],
            embedding=_pointer(embedding),
            final_norm=self._norm(final_norm, config.hidden_size),
            lm_head=lm_head.handle,
            cos=self._norm(cos, *cos.shape),
            sin=self._norm(sin, *cos.shape),
            kv=kv.data_ptr(),
            num_blocks=kv.shape[2],
            layers=structs,
        )
        library = team.library
        self.handle = _created(library.call("penstock_decoder_new", team.handle, ctypes.byref(model)))
        weakref.finalize(self, library.call, "penstock_decoder_free", self.handle)
        self._run = library.function("penstock_decoder_run")

    def __call__(self, batch: Batch) -> Tensor:
        """float32 logits [R, vocab] of the sample rows. Raises ValueError for a batch that cannot be."""
        step = _step(batch)
        logits = torch.empty((step.samples, self._vocab))
        _check(self._run(self.handle, step, logits.data_ptr()))
        return logits

    def _layer(self, config: ModelConfig, index: int, layer: NativeLayer) -> _Layer:
        head = config.head_dim
        return _Layer(
            attention_norm=self._norm(layer.attention_norm, config.hidden_size),
            qkv=layer.qkv.handle,
            q_norm=None if layer.q_norm is None else self._norm(layer.q_norm, head),
            k_norm=None if layer.k_norm is None else self._norm(layer.k_norm, head),
            o=layer.o.handle,
            mlp_norm=self._norm(layer.mlp_norm, config.hidden_size),
            gate_up=layer.gate_up.handle,
            down=layer.down.handle,
            window=config.window(index),
        )

    def _norm(self, weight: Tensor, *shape: int) -> int:
        """The address of it in float32, alive as long as the decoder."""
        weight = _float32(weight)
        _expect("norm or table", weight, shape)
        self._norms.append(weight)
        return weight.data_ptr()


def sample(team: Team, logits: Tensor, batch: SamplingBatch, logprobs: bool = True) -> SampledRows:
    """Chooses a token from each row of float32 logits [R, vocab]; the rules are SamplingBatch's.

    What ties with a token that top-k or top-p keeps is kept as well. Without `logprobs` those are NaN.
    Raises ValueError where a biased or seen id is not a token.
    """
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError("contiguous float32 logits expected")
    result = SampledRows(np.empty(rows, np.int32), np.empty(rows, np.float32))
    arrays = {name: _array(batch, name, rows) for name in _SAMPLE_DTYPES}
    arguments = _Sample(
        logits=logits.data_ptr(),
        vocab=vocab,
        rows=rows,
        want_logprobs=logprobs,
        token_ids=result.token_ids.ctypes.data,
        logprobs=result.logprobs.ctypes.data,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    _check(team.library.call("penstock_sample", team.handle, arguments))
    return result


def measure_linear(
    team: Team, in_features: int, out_features: int, rows: int, dtype: torch.dtype, repeats: int = 10
) -> float:
    """GFLOP/s of the bare product [rows, K] x [K, N], weights coming from memory; the best of `repeats`."""
    copies = max(1, int(64e6 / (in_features * out_features * dtype.itemsize)))
    weight = torch.full((out_features, in_features), 0.01, dtype=dtype)
    linears = [PackedLinear(team, weight, None, dtype) for _ in range(copies)]
    handles = (c_void_p * copies)(*[linear.handle for linear in linears])
    seconds = team.library.call("penstock_measure_products", team.handle, handles, copies, rows, repeats)
    return float(2.0 * rows * in_features * out_features / seconds / 1e9)


def measure_fma(team: Team) -> float:
    """GFLOP/s of multiply-adds that never leave the registers: what no product can exceed."""
    return float(team.library.call("penstock_measure_fma", team.handle))


_SAMPLE_DTYPES: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "uniform": np.float64,
    "repetition": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
    "bias_starts": np.int32,
    "bias_ids": np.int32,
    "bias_values": np.float32,
    "seen_starts": np.int32,
    "seen_ids": np.int32,
    "seen_counts": np.int32,
}


def _array(batch: SamplingBatch, name: str, rows: int) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.ascontiguousarray(getattr(batch, name), dtype=_SAMPLE_DTYPES[name])
    listed = name in ("bias_ids", "bias_values", "seen_ids", "seen_counts")
    if listed:
        starts = batch.bias_starts if name.startswith("bias") else batch.seen_starts
        expected = int(starts[rows]) if len(starts) == rows + 1 else -1
    else:
        expected = rows + 1 if name.endswith("_starts") else rows
    if array.shape != (expected,):
        raise ValueError(f"{name}: {array.shape} for {rows} rows")
    return array


def _step(batch: Batch) -> _Step:
    tokens, sequences = batch.token_ids.shape[0], batch.context_lens.shape[0]
    _expect_ints("positions", batch.positions, (tokens,))
    _expect_ints("token_ids", batch.token_ids, (tokens,))
    _expect_ints("query_starts", batch.query_starts, (sequences + 1,))
    _expect_ints("context_lens", batch.context_lens, (sequences,))
    _expect_ints("block_tables", batch.block_tables, (sequences, batch.block_tables.shape[-1]))
    _expect_ints("sample_rows", batch.sample_rows, (batch.sample_rows.shape[0],))
    return _Step(
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


def _expect_ints(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int32 or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: contiguous int32 {shape} expected, not {tensor.dtype} {tuple(tensor.shape)}"
        )


def _check_shapes(
    config: ModelConfig,
    layers: Sequence[NativeLayer],
    lm_head: PackedLinear,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
) -> None:
    hidden, dtype = config.hidden_size, lm_head.dtype
    if config.head_dim % 8 or config.num_heads % config.num_kv_heads:
        raise ValueError("head_dim must be a multiple of 8, num_heads one of num_kv_heads")
    if len(layers) != config.num_layers:
        raise ValueError(f"{len(layers)} layers given, {config.num_layers} configured")
    _expect("sin", sin, (cos.shape[0], config.head_dim // 2))
    _expect("kv", kv, (config.num_layers, 2, kv.shape[2], config.kv_size * BLOCK_SIZE))
    if kv.dtype != dtype or not kv.is_contiguous():
        raise ValueError(f"kv: contiguous {dtype} expected, not {kv.dtype}")
    expected = {
        "qkv": (hidden, config.q_size + 2 * config.kv_size, False),
        "o": (config.q_size, hidden, False),
        "gate_up": (hidden, config.intermediate_size, True),
        "down": (config.intermediate_size, hidden, False),
    }
    linears = [("lm_head", lm_head, (hidden, config.vocab_size, False))]
    linears += [(name, getattr(layer, name), facts) for layer in layers for name, facts in expected.items()]
    for name, linear, facts in linears:
        if (linear.in_features, linear.out_features, linear.gated) != facts or linear.dtype != dtype:
            raise ValueError(f"{name}: {facts} in {dtype} expected (inputs, outputs, gated)")


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: {shape} expected, not {tuple(tensor.shape)}")


def _float32(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _created(handle: int | None) -> int:
    if handle is None:
        raise MemoryError("the native kernels could not get their memory")
    return handle


def _check(status: int) -> None:
    if status == NO_MEMORY:
        raise MemoryError("the native kernels could not get their memory")
    if status:
        raise ValueError(ERRORS[status])
