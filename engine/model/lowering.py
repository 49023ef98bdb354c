"""Makes the program of the native decoder from a model's description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.kernels.cpu import native
from engine.kernels.linear import Linear
from engine.model.eagle import EagleConfig
from engine.model.eagle_weights import EagleWeights
from engine.model.parameters import LayerWeights, MlpWeights, Weights
from engine.model.rotary import RotaryTables
from engine.spec import GatedMlp, Layer, ModelSpec, Norm


def program(
    spec: ModelSpec, weights: Weights, tables: RotaryTables, dtype: torch.dtype
) -> list[native.NativeOp]:
    """The operations of a step, in their order.

    After the last layer that has keys and values of its own, no rows are wanted but the sampled ones: they are gathered
    after its attention.

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
    """What rows of an embedding of this type are multiplied by: the scale, rounded to it."""
    return float(torch.tensor(spec.embedding_scale, dtype=dtype))


def head_program(
    head: EagleConfig, weights: EagleWeights, features: Tensor, tables: RotaryTables
) -> list[native.NativeOp]:
    """The operations of an EAGLE-3 head: a layer whose first linear map reads two rows, joined.

    These are the norm of a token's embedding, and behind it that of the features of the token before, which are the
    residual of the layer. It sees the tokens from the second one of a sequence on.

    Args:
        features: those that the target's taps write, of the same width.
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
    attention, mlp = layer.attention, own.feed_forward
    assert isinstance(mlp, MlpWeights)
    assert isinstance(layer.feed_forward, GatedMlp)
    cos, sin, q_scales = tables.of(attention)
    heads = native.NativeHeads(
        num_heads=attention.num_heads,
        q_norm=own.q_norm,
        k_norm=own.k_norm,
        norms_last=attention.norms_after_rotation,
        norms_values=attention.norms_values,
        shares=attention.shares is not None,
        cos=cos,
        sin=sin,
        q_scales=q_scales,
        scale=attention.scale,
        softcap=attention.softcap,
        window=attention.window,
        first=first,
    )

    def linear(time: str, linear: Linear, source: str, target: str, **more: Any) -> native.NativeOp:
        return native.NativeOp(
            kind="linear",
            time=time,
            linear=packed(linear),
            source=source,
            target=target,
            layer=number,
            **more,
        )

    def reading(norm: Norm | None, weight: Tensor | None) -> dict[str, Any]:
        return {} if norm is None else {"norm": weight, "is_centered": norm.is_centered}

    def adding(
        time: str, made_by: Linear, source: str, norm: Norm | None, weight: Tensor | None
    ) -> Iterator[native.NativeOp]:
        """The operations that add what a part's last linear map makes, or the norm of it, to the stream."""
        scale = layer.residual_scale
        if norm is None:
            yield linear(time, made_by, source, "hidden", adds=True, scale=scale)
            return
        yield linear(time, made_by, source, "added")
        yield native.NativeOp(
            kind="norm", time="norm", source="added", scale=scale, layer=number, **reading(norm, weight)
        )

    yield linear("qkv", own.qkv, "hidden", "qkv", **reading(layer.input_norm, own.input_norm))
    yield native.NativeOp(kind="attend", time="attention", heads=heads, layer=number, is_sampled=gathers)
    if gathers:
        yield native.NativeOp(kind="gather", time="gather", layer=number)
    output = adding("o", own.o, "attended", layer.attention_norm, own.attention_norm)
    read = (layer.input_norm, own.input_norm) if layer.is_parallel else (layer.post_norm, own.post_norm)
    inner = linear(
        "gate_up", mlp.gate_up, "hidden", "inner", gate=layer.feed_forward.activation, **reading(*read)
    )
    yield from (inner, *output) if layer.is_parallel else (*output, inner)
    yield from adding("down", mlp.down, "inner", layer.feed_forward_norm, own.feed_forward_norm)
    if layer.embedding is not None and own.per_layer_gate is not None and own.per_layer_out is not None:
        yield linear("other", own.per_layer_gate, "hidden", "gates")
        activation, norm = layer.embedding.activation, own.per_layer_norm
        yield linear("other", own.per_layer_out, "gates", "added", gate=activation, part=number)
        yield native.NativeOp(kind="norm", time="norm", source="added", layer=number, norm=norm)


def packed(linear: Linear) -> native.PackedLinear:
    assert isinstance(linear, native.PackedLinear)
    return linear
