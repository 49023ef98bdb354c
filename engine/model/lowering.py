"""Makes the program of the native decoder from a model's description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.cpu import native
from penstock.engine.kernels.linear import Linear
from penstock.engine.model.eagle import EagleConfig
from penstock.engine.model.eagle_weights import EagleWeights
from penstock.engine.model.parameters import (
    AttentionWeights,
    ExpertsWeights,
    LayerWeights,
    MlpWeights,
    StateWeights,
    Weights,
)
from penstock.engine.model.prediction import PredictionSource, PredictionWeights
from penstock.engine.model.rotary import RotaryTables
from penstock.engine.spec import Attention, Layer, Mlp, ModelSpec, Norm


def program(
    spec: ModelSpec, weights: Weights, tables: RotaryTables, dtype: torch.dtype
) -> list[native.NativeOp]:
    """The operations of a step, in their order.

    After the last layer that has a state, or keys and values of its own, no rows are wanted but the sampled ones: they
    are gathered after its mixer.

    Args:
        dtype: of the embedding.
    """
    ops = [native.NativeOp(kind="embed", time="embed", scale=embedding_scale(spec, dtype))]
    parts, of_layers = spec.layer_embeddings, weights.layer_embeddings
    if parts is not None and of_layers is not None:
        map = native.NativeOp(
            kind="linear",
            time="embed",
            target="per_layer",
            linear=packed(of_layers.map),
            scale=parts.map_scale,
        )
        combine = replace(map, kind="combine", scale=parts.scale, part=parts.size, norm=of_layers.norm)
        table = of_layers.table
        ops += [map, replace(combine, rows=table if isinstance(table, Tensor) else packed(table))]
    for number, (layer, own) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        ops += _layer(number, layer, own, tables, gathers=number == spec.last_with_keys)
    return [*ops, _finish(spec, weights.final_norm)]


def embedding_scale(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Returns the factor of rows of an embedding of this type: the scale, rounded to it."""
    return float(torch.tensor(spec.embedding_scale, dtype=dtype))


def head_program(
    head: EagleConfig, weights: EagleWeights, features: Tensor, tables: RotaryTables
) -> list[native.NativeOp]:
    """The operations of an EAGLE-3 head: a layer whose first linear map reads two rows, joined.

    The rows are the norm of a token's embedding, and after it the norm of the features of the token before, which are
    the residual of the layer. It sees the tokens from the second one of a sequence on.

    Args:
        features: the features that the target's taps write, of the same width.
    """
    spec = head.layer.spec
    first, *rest = _layer(0, spec.layers[0], weights.layer, tables, gathers=True, first=1)
    join = native.NativeOp(
        kind="join",
        time="norm",
        linear=first.linear,
        norm=first.norm,
        rows=features,
        rows_norm=weights.hidden_norm,
        adds=head.residual_is_normed,
    )
    read = replace(first, source="prepared", norm=None)
    embed = native.NativeOp(kind="embed", time="embed")
    return [embed, join, read, *rest, _finish(spec, weights.final_norm)]


def prediction_program(
    source: PredictionSource, weights: PredictionWeights, features: Tensor, tables: RotaryTables
) -> list[native.NativeOp]:
    """The operations of a model's own layer that drafts: one after a map of two rows, joined as a head's.

    Args:
        features: the model's normed hidden states, which its decoder keeps.
    """
    own, map = source.own, weights.map
    join = native.NativeOp(
        kind="join",
        time="norm",
        linear=packed(map),
        norm=weights.token_norm,
        rows=features,
        rows_norm=weights.features_norm,
        follows_norm=own.follows_norm,
    )
    layer = _layer(0, own.layer, weights.layer, tables, gathers=True, first=1)
    mapped, embed = _linear(0, "other", map, "prepared"), native.NativeOp(kind="embed", time="embed")
    return [embed, join, mapped, *layer, _finish(source.config.spec, weights.final_norm)]


def _finish(spec: ModelSpec, weight: Tensor) -> native.NativeOp:
    return native.NativeOp(
        kind="finish",
        time="norm",
        norm=weight,
        is_centered=spec.final_norm.is_centered,
        layer=len(spec.layers),
    )


def _layer(
    number: int, layer: Layer, own: LayerWeights, tables: RotaryTables, *, gathers: bool, first: int = 0
) -> list[native.NativeOp]:
    *ops, last = _parts(number, layer, own, tables, gathers=gathers, first=first)
    assert own.scalar == 1.0 or last.kind == "norm"
    return [*ops, replace(last, after=own.scalar)]


def _parts(
    number: int, layer: Layer, own: LayerWeights, tables: RotaryTables, *, gathers: bool, first: int
) -> Iterator[native.NativeOp]:
    output = list(_mixer(number, layer, own, tables, gathers=gathers, first=first))
    if own.feed_forward is None:
        yield from output
        return
    early, late = _feed_forward(number, layer, own)
    if layer.is_parallel:
        mixed = next(at for at, op in enumerate(output) if op.source == "attended")
        yield from (*output[:mixed], *early, *output[mixed:], *late)
    else:
        yield from (*output, *early, *late)
    if layer.embedding is not None and own.per_layer_gate is not None and own.per_layer_out is not None:
        yield _linear(number, "other", own.per_layer_gate, "hidden", "gates")
        activation = layer.embedding.activation
        yield _linear(number, "other", own.per_layer_out, "gates", "added", gate=activation, part=number)
        yield native.NativeOp(kind="norm", time="norm", source="added", layer=number, norm=own.per_layer_norm)


def _mixer(
    number: int, layer: Layer, own: LayerWeights, tables: RotaryTables, *, gathers: bool, first: int
) -> Iterator[native.NativeOp]:
    mixer, more = own.mixer, dict[str, Any]()
    if mixer is None:
        return
    read = _reading(layer.input_norm, own.input_norm)
    if isinstance(mixer, StateWeights):
        out = mixer.out
        more["mixer"] = native.NativeMixer(spec=mixer.spec, vectors=mixer.vectors)
        yield _linear(number, "qkv", mixer.into, "hidden", "qkv", **read)
        if mixer.gates is not None:
            if read and _reads_alike(mixer.into, mixer.gates):
                read = {"source": "prepared"}
            yield _linear(number, "gates", mixer.gates, target="gates", **read)
        yield native.NativeOp(kind="recur", time="state", layer=number, **more)
    else:
        attention, out = layer.attention, mixer.o
        assert attention is not None
        more["gates"] = attention.gate_size
        yield _linear(number, "qkv", mixer.qkv, "hidden", "qkv", **read)
        heads = _heads(attention, mixer, tables, first)
        yield native.NativeOp(
            kind="attend", time="attention", heads=heads, layer=number, is_sampled=gathers, **more
        )
    if gathers:
        yield native.NativeOp(kind="gather", time="gather", layer=number)
    made = _linear(number, "o", out, "attended", "added", **more)
    yield from _added(layer, made, layer.attention_norm, own.attention_norm)


def _heads(
    attention: Attention, own: AttentionWeights, tables: RotaryTables, first: int
) -> native.NativeHeads:
    cos, sin, q_scales = tables.of(attention)
    return native.NativeHeads(
        num_heads=attention.num_heads,
        q_norm=own.q_norm,
        k_norm=own.k_norm,
        norms_last=attention.norms_after_rotation,
        norms_values=attention.norms_values,
        shares=attention.shares is not None,
        cos=cos,
        sin=sin,
        q_scales=q_scales,
        sinks=own.sinks,
        scale=attention.scale,
        softcap=attention.softcap,
        window=attention.reach,
        first=first,
    )


def _feed_forward(
    number: int, layer: Layer, own: LayerWeights
) -> tuple[list[native.NativeOp], list[native.NativeOp]]:
    """The operations before, and from, the last one of the feed-forward part; all that there are of experts."""
    is_parallel = layer.is_parallel
    read = (layer.input_norm, own.input_norm) if is_parallel else (layer.post_norm, own.post_norm)
    norm = layer.feed_forward_norm, own.feed_forward_norm
    if isinstance(own.feed_forward, ExpertsWeights):
        run = native.NativeOp(
            kind="experts",
            time="gate_up",
            experts=_experts(own.feed_forward),
            layer=number,
            **_reading(*read),
        )
        return list(_added(layer, run, *norm)), []
    mlp, dense = own.feed_forward, layer.feed_forward
    assert isinstance(mlp, MlpWeights)
    assert isinstance(dense, Mlp)
    gate: dict[str, Any] = {"gate": dense.activation, **_reading(*read)}
    down = _linear(number, "down", mlp.down, "inner", "added")
    return [_linear(number, "gate_up", mlp.gate_up, "hidden", "inner", **gate)], [*_added(layer, down, *norm)]


def _linear(
    number: int, time: str, linear: Linear, source: str = "hidden", target: str = "hidden", **more: Any
) -> native.NativeOp:
    return native.NativeOp(
        kind="linear", time=time, linear=packed(linear), source=source, target=target, layer=number, **more
    )


def _reading(norm: Norm | None, weight: Tensor | None) -> dict[str, Any]:
    return {} if norm is None else {"norm": weight, "is_centered": norm.is_centered}


def _added(
    layer: Layer, made: native.NativeOp, norm: Norm | None, weight: Tensor | None
) -> Iterator[native.NativeOp]:
    """Yields the operations that add the output of a part's last one, or the norm of it, to the stream."""
    scale = layer.residual_scale
    if norm is None:
        yield replace(made, target="hidden", adds=True, scale=scale)
        return
    yield replace(made, target="added")
    yield native.NativeOp(
        kind="norm", time="norm", source="added", scale=scale, layer=made.layer, **_reading(norm, weight)
    )


def _reads_alike(first: Linear, second: Linear) -> bool:
    """Returns whether a linear map reads rows in another one's form: integers have scales of their own."""
    forms = {packed(linear).activation_dtype for linear in (first, second)}
    return len(forms) == 1 and torch.int8 not in forms


def _experts(own: ExpertsWeights) -> native.NativeExperts:
    shared = own.shared
    return native.NativeExperts(
        spec=own.spec,
        router=packed(own.router),
        gate_up=native.packed_experts(own.gate_up),
        down=native.packed_experts(own.down),
        choice_bias=own.choice_bias,
        expert_scale=own.expert_scale,
        shared_gate_up=None if shared is None else packed(shared.gate_up),
        shared_down=None if shared is None else packed(shared.down),
        shared_gate=None if own.shared_gate is None else packed(own.shared_gate),
        router_norm=own.router_norm,
        experts_norm=own.experts_norm,
        experts_out_norm=own.experts_out_norm,
        shared_norm=own.shared_norm,
        shared_out_norm=own.shared_out_norm,
    )


def packed(linear: Linear) -> native.PackedLinear:
    assert isinstance(linear, native.PackedLinear)
    return linear
