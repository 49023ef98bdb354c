"""Makes the program of a decoder from its description and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.linear import Linear
from penstock.engine.program.ops import Heads, LatentHeads, Op, Program
from penstock.engine.program.parameters import (
    EagleWeights,
    ExpertsWeights,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    PredictionWeights,
    StateWeights,
    Weights,
)
from penstock.engine.program.rotary import RotaryTables
from penstock.engine.spec import Attention, LatentAttention, Layer, Mlp, ModelSpec, Norm, Prediction


def decoder_program(spec: ModelSpec, weights: Weights, max_position: int, dtype: torch.dtype) -> Program:
    """The program of a model, or of a stage: one after the first goes on from the hidden states of a batch, and one
    before the last ends with those of all rows.

    After the last layer that has a state, or keys and values of its own, no rows are wanted but the sampled ones: they
    are gathered after its mixer.

    Args:
        max_position: no token will ever have this position or a higher one.
        dtype: of the embedding.
    """
    scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))  # rows are multiplied by it in their type
    ops = [Op(kind="embed", time="embed", scale=scale)] if spec.has_embedding else []
    parts, of_layers = spec.layer_embeddings, weights.layer_embeddings
    if parts is not None and of_layers is not None:
        map = Op(kind="linear", time="embed", target="per_layer", linear=of_layers.map, scale=parts.map_scale)
        combine = replace(map, kind="combine", scale=parts.scale, norm=of_layers.norm, rows=of_layers.table)
        ops += [map, combine]
    tables = RotaryTables(spec, max_position, weights.final_norm.device)
    for number, (layer, own) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        ops += _Lowering(number, layer, own, tables, gathers=number == spec.last_with_keys).ops()
    if spec.has_head:
        ops.append(_finish(spec, weights.final_norm))
    return _program(spec, ops, weights.rows, max_position)


def head_program(
    spec: ModelSpec,
    weights: EagleWeights,
    embedding: Tensor | Linear,
    features: Tensor,
    max_position: int,
    *,
    residual_is_normed: bool,
) -> Program:
    """The program of an EAGLE-3 head: a layer whose first linear map reads two rows, joined.

    The rows are the norm of a token's embedding, and after it the norm of the features of the token before, which are
    the residual of the layer. It sees the tokens from the second one of a sequence on.

    Args:
        embedding: [vocab, hidden], or a linear map whose rows it is.
        features: the features that the target's taps write, of the same width.
    """
    first, *rest = _draft_layer(spec, spec.layers[0], weights.layer, max_position)
    join = Op(
        kind="join",
        time="norm",
        target="prepared",
        norm=first.norm,
        rows=features,
        rows_norm=weights.hidden_norm,
        residual_is_normed=residual_is_normed,
    )
    read = replace(first, source="prepared", norm=None)
    ops = [Op(kind="embed", time="embed"), join, read, *rest, _finish(spec, weights.final_norm)]
    return _program(spec, ops, embedding, max_position)


def prediction_program(
    spec: ModelSpec,
    own: Prediction,
    weights: PredictionWeights,
    embedding: Tensor | Linear,
    features: Tensor,
    max_position: int,
) -> Program:
    """The program of a model's own layer that drafts: one after a map of two rows, joined as a head's.

    Args:
        spec: of the layer, as a model of its own.
        features: the model's normed hidden states, which its decoder keeps.
    """
    join = Op(
        kind="join",
        time="norm",
        target="prepared",
        norm=weights.token_norm,
        rows=features,
        rows_norm=weights.features_norm,
        follows_norm=own.follows_norm,
    )
    mapped = Op(kind="linear", time="other", linear=weights.map, source="prepared")
    layer = _draft_layer(spec, own.layer, weights.layer, max_position)
    ops = [Op(kind="embed", time="embed"), join, mapped, *layer, _finish(spec, weights.final_norm)]
    return _program(spec, ops, embedding, max_position)


def _program(spec: ModelSpec, ops: list[Op], embedding: Tensor | Linear, max_position: int) -> Program:
    return Program(
        ops=tuple(ops),
        hidden_size=spec.hidden_size,
        eps=spec.norm_eps,
        embedding=embedding,
        max_position=max_position,
    )


def _finish(spec: ModelSpec, weight: Tensor) -> Op:
    return Op(kind="finish", time="norm", layer=len(spec.layers), **_reading(spec.final_norm, weight))


def _draft_layer(spec: ModelSpec, layer: Layer, own: LayerWeights, max_position: int) -> list[Op]:
    assert own.input_norm is not None
    tables = RotaryTables(spec, max_position, own.input_norm.device)
    return _Lowering(0, layer, own, tables, gathers=True, first=1).ops()


def _reading(norm: Norm | None, weight: Tensor | None) -> dict[str, Any]:
    return {} if norm is None else {"norm": weight, "is_centered": norm.is_centered}


@dataclass(frozen=True, slots=True)
class _Lowering:
    """The making of the operations of one layer."""

    number: int
    layer: Layer
    own: LayerWeights
    tables: RotaryTables
    gathers: bool
    """Whether the sampled rows are gathered after the mixer."""
    first: int = 0
    """See `Heads`."""

    def ops(self) -> list[Op]:
        *ops, last = self._parts()
        assert self.own.scalar == 1.0 or last.kind == "norm"
        return [*ops, replace(last, after=self.own.scalar)]

    def _parts(self) -> Iterator[Op]:
        mixing, out = self._mixer()
        early, late = self._feed_forward()
        if self.layer.is_parallel:
            yield from (*mixing, *early, *out, *late)
        else:
            yield from (*mixing, *out, *early, *late)
        embedding, own = self.layer.embedding, self.own
        if embedding is not None and own.per_layer_gate is not None and own.per_layer_out is not None:
            activation = embedding.activation
            yield self._linear("other", own.per_layer_gate, target="gates")
            yield self._linear(
                "other", own.per_layer_out, "gates", target="added", gate=activation, part=self.number
            )
            yield self._op("norm", "norm", source="added", adds=True, norm=own.per_layer_norm)

    def _mixer(self) -> tuple[list[Op], list[Op]]:
        """The operations before, and from, the last linear map of the mixer."""
        mixer, layer = self.own.mixer, self.layer
        if mixer is None:
            return [], []
        read = _reading(layer.input_norm, self.own.input_norm)
        if isinstance(mixer, StateWeights):
            out, ops = mixer.out, [self._linear("qkv", mixer.into, target="qkv", **read)]
            if mixer.gates is not None:
                ops.append(self._linear("gates", mixer.gates, target="gates", **read))
            ops.append(self._op("recur", "state", mixer=mixer))
        elif isinstance(mixer, LatentWeights):
            out, ops = mixer.o, self._latent_attention(mixer, read)
        else:
            assert isinstance(layer.mixer, Attention)
            heads = Heads(spec=layer.mixer, own=mixer, **self._positions(layer.mixer))
            out, ops = mixer.o, [self._linear("qkv", mixer.qkv, target="qkv", **read)]
            ops.append(self._op("attend", "attention", heads=heads))
        if self.gathers:
            ops.append(self._op("gather", "gather"))
        made = self._linear("o", out, "attended")
        return ops, self._added(made, layer.attention_norm, self.own.attention_norm)

    def _latent_attention(self, own: LatentWeights, read: dict[str, Any]) -> list[Op]:
        spec = self.layer.mixer
        assert isinstance(spec, LatentAttention)
        if own.q_a is None:
            queries = [self._linear("qkv", own.q, target="qkv", **read)]
        else:
            first = self._linear("qkv", own.q_a, target="prepared", **read)
            queries = [first, self._linear("qkv", own.q, "prepared", target="qkv", norm=own.q_norm)]
        heads = LatentHeads(spec=spec, own=own, **self._positions(spec))
        return [
            *queries,
            self._linear("qkv", own.latent, target="latents", **read),
            self._op("attend_latents", "attention", latent_heads=heads),
        ]

    def _positions(self, spec: Attention | LatentAttention) -> dict[str, Any]:
        cos, sin, q_scales = self.tables.of(spec)
        return {"cos": cos, "sin": sin, "q_scales": q_scales, "first": self.first}

    def _feed_forward(self) -> tuple[list[Op], list[Op]]:
        """The operations before, and from, the last one of the feed-forward part; all that there are of experts."""
        layer, own, weights = self.layer, self.own, self.own.feed_forward
        if weights is None:
            return [], []
        read = _reading(
            *(layer.input_norm, own.input_norm) if layer.is_parallel else (layer.post_norm, own.post_norm)
        )
        norm = layer.feed_forward_norm, own.feed_forward_norm
        if isinstance(weights, ExpertsWeights):
            return self._added(self._op("experts", "gate_up", experts=weights, **read), *norm), []
        assert isinstance(weights, MlpWeights)
        assert isinstance(layer.feed_forward, Mlp)
        gate = layer.feed_forward.activation
        gated = self._linear("gate_up", weights.gate_up, target="inner", gate=gate, **read)
        return [gated], self._added(self._linear("down", weights.down, "inner"), *norm)

    def _linear(self, time: str, linear: Linear, source: str = "hidden", **more: Any) -> Op:
        return self._op("linear", time, linear=linear, source=source, **more)

    def _op(self, kind: Any, time: str, **more: Any) -> Op:
        return Op(kind=kind, time=time, layer=self.number, **more)

    def _added(self, made: Op, norm: Norm | None, weight: Tensor | None) -> list[Op]:
        """The operations that add the output of a part's last one, or the norm of it, to the stream."""
        scale = self.layer.residual_scale
        if norm is None:
            return [replace(made, target="hidden", adds=True, scale=scale)]
        more = _reading(norm, weight)
        return [
            replace(made, target="added"),
            self._op("norm", "norm", source="added", adds=True, scale=scale, **more),
        ]
