"""The decoder of every architecture, written over the kernel table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu import native
from penstock.engine.kernels.kv_cache import KVCache, KVShape, is_quantized
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Attend, Kernels
from penstock.engine.kernels.ranks import embed
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.state_cache import StateCache
from penstock.engine.model.eagle import EagleConfig
from penstock.engine.model.eagle_weights import EagleWeights
from penstock.engine.model.lowering import embedding_scale, head_program, packed, prediction_program, program
from penstock.engine.model.parameters import AttentionWeights, LayerWeights, StateWeights, Weights
from penstock.engine.model.prediction import PredictionSource, PredictionWeights
from penstock.engine.model.rotary import RotaryTables
from penstock.engine.spec import Attention, Layer, LayerEmbedding, Mamba2, ModelSpec, Norm, ShortConv

ForwardPass = Callable[[Batch], Tensor]
"""The layers of a decoder: batch -> hidden states [R, hidden] of its sample rows after the final norm.

The step's keys and values go into the KV cache. The output head makes logits of the hidden states.
"""


def make_decoder(
    config: ModelConfig,
    weights: Weights,
    kernels: Kernels,
    kv: KVCache,
    max_position: int,
    states: StateCache | None = None,
) -> ForwardPass:
    """The decoder that runs whole passes natively if there are kernels for that, else the one below.

    Args:
        max_position: no token will ever have this position or a higher one.
        states: see `Decoder`.
    """
    if kernels.team is None:
        return Decoder(config, weights, kernels, kv, max_position, states)
    ops = program(config.spec, weights, RotaryTables(config.spec, max_position), kernels.embedding_dtype)
    return _native_decoder(kernels.team, kv, config.spec, ops, weights.rows, max_position, states)


def make_head(
    head: EagleConfig,
    weights: EagleWeights,
    embedding: Tensor | Linear,
    kernels: Kernels,
    kv: KVCache,
    features: Tensor,
    max_position: int,
) -> native.NativeDecoder:
    """The layer of an EAGLE-3 head, which native kernels run.

    Args:
        embedding: [vocab, hidden], or a linear map whose rows it is.
        features: bfloat16 [blocks, block size, hidden], the target's features of its tokens.
    """
    assert kernels.team is not None
    spec = head.layer.spec
    ops = head_program(head, weights, features, RotaryTables(spec, max_position))
    return _native_decoder(kernels.team, kv, spec, ops, embedding, max_position)


def make_predictor(
    source: PredictionSource,
    weights: PredictionWeights,
    embedding: Tensor | Linear,
    kernels: Kernels,
    kv: KVCache,
    features: Tensor,
    max_position: int,
) -> native.NativeDecoder:
    """A model's own layer of multi-token prediction; see `make_head`."""
    assert kernels.team is not None
    spec = source.config.spec
    ops = prediction_program(source, weights, features, RotaryTables(spec, max_position))
    return _native_decoder(kernels.team, kv, spec, ops, embedding, max_position)


def _native_decoder(
    team: native.Team,
    kv: KVCache,
    spec: ModelSpec,
    ops: Sequence[native.NativeOp],
    embedding: Tensor | Linear,
    max_position: int,
    states: StateCache | None = None,
) -> native.NativeDecoder:
    return native.NativeDecoder(
        team,
        kv,
        ops,
        hidden_size=spec.hidden_size,
        eps=spec.norm_eps,
        embedding=embedding if isinstance(embedding, Tensor) else packed(embedding),
        max_position=max_position,
        states=states,
    )


class Decoder:
    """A ForwardPass over the kernel table, on any device.

    Args:
        states: the states of the layers that have one. Without, every sequence of a batch is at its first token, and no
            state is kept.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        kv: KVCache,
        max_position: int,
        states: StateCache | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.kv = kv
        self.states = states
        self.tables = RotaryTables(config.spec, max_position, kernels.device)
        self.embedding_scale = embedding_scale(config.spec, kernels.embedding_dtype)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        hidden, delta = self.layers(self.embedded(batch), batch)
        rows = batch.sample_rows
        if rows.numel() != hidden.shape[0] or batch.max_query_len != 1:  # else they are all rows, in order
            hidden = hidden.index_select(0, rows)
            delta = None if delta is None else delta.index_select(0, rows)
        return self.normed(hidden, delta)

    def embedded(self, batch: Batch) -> Tensor:
        """The residual stream [T, hidden] before the first layer."""
        assert isinstance(self.weights.embedding, Tensor)
        hidden = embed(batch.token_ids, self.weights.embedding, self.kernels.ranks)
        hidden = hidden.to(self.kernels.activation_dtype)
        return hidden if self.embedding_scale == 1.0 else hidden * self.embedding_scale

    def layers(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Takes the residual stream [T, hidden] through all layers.

        Returns:
            The stream, and the output of the last layer's last part, if that is not added to it yet.
        """
        spec, step = self.config.spec, _Step(batch, self)
        parts = self._layer_embeddings(batch.token_ids, hidden)
        delta: Tensor | None = None
        for i, (layer, own) in enumerate(zip(spec.layers, self.weights.layers, strict=True)):
            hidden, made = self._layer(i, hidden, delta, step)
            if parts is not None and layer.embedding is not None:
                hidden = hidden + made
                made = self._of_embedding(layer.embedding, own, hidden, parts[:, i])
            hidden, delta = (hidden, made) if own.scalar == 1.0 else ((hidden + made) * own.scalar, None)
        return hidden, delta

    def _layer(self, index: int, hidden: Tensor, delta: Tensor | None, step: _Step) -> tuple[Tensor, Tensor]:
        """Takes the stream, and the last part's output that is still to be added, through the parts of a layer."""
        layer, own = self.config.spec.layers[index], self.weights.layers[index]
        if own.mixer is not None:
            hidden, x = self._read(hidden, delta, layer.input_norm, own.input_norm)
            made = self._mix(index, own.mixer, x, step)
            delta = self._added(layer, layer.attention_norm, own.attention_norm, made)
        if own.feed_forward is None:
            assert delta is not None
            return hidden, delta
        if layer.is_parallel:
            assert delta is not None
            return hidden, delta + self._added(layer, None, None, own.feed_forward(x))
        hidden, x = self._read(hidden, delta, layer.post_norm, own.post_norm)
        made = own.feed_forward(x)
        return hidden, self._added(layer, layer.feed_forward_norm, own.feed_forward_norm, made)

    def _layer_embeddings(self, token_ids: Tensor, hidden: Tensor) -> Tensor | None:
        """Returns [T, layers, size], the embedding of every token for each layer; None if no layer reads one."""
        spec, own = self.config.spec.layer_embeddings, self.weights.layer_embeddings
        if spec is None or own is None:
            return None
        mapped = (own.map(hidden) * spec.map_scale).view(-1, spec.size)
        normed = self.kernels.rms_norm(mapped, own.norm, self.config.spec.norm_eps)
        assert isinstance(own.table, Tensor)
        rows = F.embedding(token_ids, own.table).to(hidden.dtype) * spec.scale
        both: Tensor = (rows + normed.view(rows.shape)) * 0.5**0.5
        return both.view(-1, spec.num_layers, spec.size)

    def _of_embedding(self, spec: LayerEmbedding, own: LayerWeights, hidden: Tensor, part: Tensor) -> Tensor:
        """Returns a layer's addition from the embedding that its tokens have for it, [T, size]."""
        assert own.per_layer_gate is not None
        assert own.per_layer_out is not None
        gated = self.kernels.glu(torch.cat((own.per_layer_gate(hidden), part), dim=-1), spec.activation)
        return self._norm(own.per_layer_out(gated), spec.norm, own.per_layer_norm)

    def normed(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """Returns the final norm of rows of the residual stream plus `delta`."""
        return self._read(hidden, delta, self.config.spec.final_norm, self.weights.final_norm)[1]

    def _read(
        self, hidden: Tensor, delta: Tensor | None, norm: Norm | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream plus the last part's output, and the input of the next part."""
        kernels, eps = self.kernels, self.config.spec.norm_eps
        if norm is not None and weight is not None and not norm.is_centered and delta is not None:
            return kernels.add_rms_norm(hidden, delta, weight, eps)
        hidden = hidden if delta is None else hidden + delta
        return hidden, self._norm(hidden, norm, weight)

    def _norm(self, x: Tensor, norm: Norm | None, weight: Tensor | None) -> Tensor:
        if norm is None or weight is None:
            return x
        kernel = self.kernels.layer_norm if norm.is_centered else self.kernels.rms_norm
        return kernel(x, weight, self.config.spec.norm_eps)

    def _added(self, layer: Layer, norm: Norm | None, weight: Tensor | None, made: Tensor) -> Tensor:
        """Returns the rows that a part adds to the stream, given the output of its last linear map."""
        made = self._norm(made, norm, weight)
        return made if layer.residual_scale == 1.0 else made * layer.residual_scale

    def _mix(self, index: int, own: AttentionWeights | StateWeights, x: Tensor, step: _Step) -> Tensor:
        attention = self.config.spec.layers[index].attention
        if isinstance(own, StateWeights):
            return own.out(self._recur(index, own, x, step.batch))
        assert attention is not None
        return own.o(self._attend(index, attention, own, x, step))

    def _attend(
        self, index: int, attention: Attention, own: AttentionWeights, x: Tensor, step: _Step
    ) -> Tensor:
        layer_kv, place = self.kv.layer(index), self.kv.layout.places[index]
        made = own.qkv(x)
        gates, qkv = made[:, : attention.gate_size], made[:, attention.gate_size :]
        queries = self.kernels.rotate_and_write(
            qkv,
            own.q_norm,
            own.k_norm,
            self.config.spec.norm_eps,
            step.places(attention, place.table),
            layer_kv if attention.shares is None else None,
            place.shape,
            norms_last=attention.norms_after_rotation,
            norms_values=attention.norms_values,
            spreads=is_quantized(layer_kv.dtype),
        )
        attended = step.attend[place.shape](
            queries,
            layer_kv,
            attention.reach,
            attention.scale,
            attention.softcap,
            step.tables[place.table],
            own.sinks,
        )
        return attended * gates.sigmoid() if attention.has_gate else attended

    def _recur(self, index: int, own: StateWeights, x: Tensor, batch: Batch) -> Tensor:
        kernels, spec, eps = self.kernels, own.spec, self.config.spec.norm_eps
        states = None if self.states is None else self.states.layer(index)
        rows = own.into(x)
        if isinstance(spec, Mamba2):
            return kernels.mamba2(rows, spec, own.vectors, eps, states, batch)
        if isinstance(spec, ShortConv):
            return kernels.short_conv(rows, spec, own.vectors, states, batch)
        assert own.gates is not None
        return kernels.gated_delta(rows, own.gates(x), spec, own.vectors, eps, states, batch)


class _Step:
    """The data that all layers of one step share."""

    def __init__(self, batch: Batch, decoder: Decoder) -> None:
        kernels, kv = decoder.kernels, decoder.kv
        self.batch, self._rotary = batch, decoder.tables
        self.tables = batch.tables(len(kv.layout.windows))
        self._in_cache = [
            kernels.kv_places(replace(batch, block_tables=table), kv.block_size) for table in self.tables
        ]
        self.attend: dict[KVShape, Attend] = {
            shape: kernels.attention(batch, shape) for shape in kv.layout.shapes
        }

    def places(self, attention: Attention, table: int) -> TokenPlaces:
        return TokenPlaces(self.batch.positions, self._in_cache[table], *self._rotary.of(attention))
