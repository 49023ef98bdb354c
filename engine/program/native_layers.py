"""The parts of layers as the native kernels read them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p

import torch

from penstock.engine.kernels.cpu import structs
from penstock.engine.kernels.cpu.experts import address, experts_struct, native_experts, router_struct
from penstock.engine.kernels.cpu.latents import NativeLatentMaps
from penstock.engine.kernels.cpu.linear import NativeLinear
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.state_cache import StateCache
from penstock.engine.program.ops import Heads, LatentHeads
from penstock.engine.program.parameters import ExpertsWeights, StateWeights
from penstock.engine.spec import EXPERT_ACTIVATIONS, GatedDelta, Mamba2, ShortConv, StateMixer

MIXERS: tuple[type[StateMixer], ...] = (GatedDelta, Mamba2, ShortConv)
"""program.h has the same order."""


def native_linear(linear: Linear | None) -> NativeLinear:
    assert isinstance(linear, NativeLinear)
    return linear


def facts(linear: NativeLinear) -> tuple[int, int, bool]:
    return linear.in_features, linear.out_features, linear.gated


def heads_struct(
    heads: Heads, shape: KVShape, eps: float, positions: int, kept: list[object]
) -> structs.Shape:
    """The fields of a layer's attention; objects that they point to join `kept`.

    Raises:
        ValueError: a norm or table has another shape than the heads.
    """
    spec, own, head_dim = heads.spec, heads.own, shape.head_dim
    of_rows = own.q_norm is not None and own.q_norm.numel() != head_dim
    counts = (spec.num_heads, shape.num_kv_heads) if of_rows else (1, 1)
    ones, angles = torch.ones(head_dim) if spec.norms_values else None, (positions, head_dim // 2)
    return structs.Shape(
        num_heads=spec.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=head_dim,
        norms_rows=of_rows,
        norms_last=spec.norms_after_rotation,
        shares=spec.shares is not None,
        eps=eps,
        divisor=1.0 / spec.scale,
        softcap=spec.softcap,
        q_norm=address(own.q_norm, (counts[0] * head_dim,), kept),
        k_norm=address(own.k_norm, (counts[1] * head_dim,), kept),
        v_norm=address(ones, (head_dim,), kept),
        cos=address(heads.cos, angles, kept),
        sin=address(heads.sin, angles, kept),
        q_scales=address(heads.q_scales, (positions,), kept),
        sinks=address(own.sinks, (spec.num_heads,), kept),
    )


def latents_struct(heads: LatentHeads, eps: float, positions: int, kept: list[object]) -> structs.Shape:
    """The fields of a layer's attention to latents; objects that they point to join `kept`.

    Raises:
        ValueError: the norm or a table has another shape than the heads.
    """
    spec, angles = heads.spec, (positions, heads.spec.rotated_size // 2)
    return structs.Shape(
        num_heads=spec.num_heads,
        num_kv_heads=1,
        head_dim=spec.head_dim,
        latent=spec.latent_size,
        plain=spec.plain_size,
        eps=eps,
        divisor=1.0 / spec.scale,
        k_norm=address(heads.own.latent_norm, (spec.latent_size,), kept),
        cos=address(heads.cos, angles, kept),
        sin=address(heads.sin, angles, kept),
        q_scales=address(heads.q_scales, (positions,), kept),
    )


def latent_maps(heads: LatentHeads, kept: list[object]) -> tuple[int, int]:
    """The addresses of the linear maps K and V of each head, as lists; what they point to joins `kept`.

    Raises:
        ValueError: one has another shape than the description says.
    """
    spec, up = heads.spec, heads.own.up
    assert isinstance(up, NativeLatentMaps)
    if not len(up.of_queries) == len(up.of_latents) == spec.num_heads:
        raise ValueError(f"linear maps of {spec.num_heads} heads expected")
    _expect("K", up.of_queries, (spec.plain_size, spec.latent_size, False))
    _expect("V", up.of_latents, (spec.latent_size, spec.value_size, False))
    lists = [(c_void_p * len(maps))(*(map.handle for map in maps)) for maps in (up.of_queries, up.of_latents)]
    kept += [up, *lists]
    of_queries, of_latents = map(ctypes.addressof, lists)
    return of_queries, of_latents


def layer_experts(own: ExpertsWeights, kept: list[object]) -> structs.Experts:
    """The fields of a layer's experts; objects that they point to join `kept`.

    Raises:
        ValueError: a part has another shape than the description says.
    """
    spec, hidden = own.spec, own.spec.hidden_size
    gate_up, down = native_experts(own.gate_up), native_experts(own.down)
    if not len(gate_up) == len(down) == len(spec.own):
        raise ValueError(f"{len(spec.own)} experts expected")
    _expect("router", [native_linear(own.router)], (hidden, spec.router.num_experts, False))
    _expect("gate_up", gate_up, (hidden, spec.inner_size, spec.activation.is_gated))
    _expect("down", down, (spec.inner_size, hidden, False))
    made = experts_struct(gate_up, down, spec.activation, spec.router.weighs_inputs, kept)
    made.router = router_struct(spec.router, own.choice_bias, own.expert_scale, kept)
    made.first, made.logits = spec.first, native_linear(own.router).handle
    if spec.shared is not None:
        assert own.shared is not None
        wide = spec.shared.inner_size
        shared = native_linear(own.shared.gate_up), native_linear(own.shared.down)
        _expect("shared_gate_up", shared[:1], (hidden, wide, spec.shared.is_gated))
        _expect("shared_down", shared[1:], (wide, hidden, False))
        made.shared_activation = EXPERT_ACTIVATIONS.index(spec.shared.activation)
        made.shared_gate_up, made.shared_down = (linear.handle for linear in shared)
        made.shared_gate = None if own.shared_gate is None else native_linear(own.shared_gate).handle
    for norm in structs.EXPERT_NORMS:
        setattr(made, norm, address(getattr(own, norm), (hidden,), kept))
    kept.append(own)
    return made


def _expect(name: str, linears: Sequence[NativeLinear], expected: tuple[int, int, bool]) -> None:
    if any(facts(linear) != expected for linear in linears):
        raise ValueError(f"{name}: {expected} expected (inputs, outputs, gated)")


def layer_mixer(
    own: StateWeights, eps: float, states: StateCache | None, layer: int, kept: list[object]
) -> structs.Mixer:
    """The fields of a mixer with a state; objects that they point to join `kept`.

    Args:
        layer: the layer whose part of the slots it has.

    Raises:
        ValueError: a vector has another shape than the description says.
    """
    spec = own.spec
    heads, keys, values = spec.state_shape
    made = structs.Mixer(
        kind=MIXERS.index(type(spec)),
        heads=heads,
        keys=keys,
        values=values,
        kernel=spec.kernel,
        channels=spec.history_channels,
        eps=eps,
    )
    if isinstance(spec, GatedDelta):
        made.key_heads, made.is_tiled = spec.num_key_heads, spec.is_tiled
    elif isinstance(spec, Mamba2):
        made.key_heads = spec.num_groups
        made.least_step, made.most_step = spec.step_limits
    shapes = {field: vector.shape for field, vector in spec.vectors().items()}
    shapes |= {field: (norm.size,) for field, norm in spec.norms().items()}
    for field, shape in shapes.items():
        vector = getattr(own.vectors, field)
        taps = field == "conv"
        setattr(made, field, address(vector.T if taps else vector, shape[::-1] if taps else shape, kept))
    if states is not None:
        place, start = states.layout.places[layer], states.data.data_ptr()
        for part in ("state", "history", "pending"):
            setattr(made, part, start + states.data.itemsize * getattr(place, part))
    return made


def mixer_widths(spec: StateMixer) -> dict[str, int]:
    """The numbers of a row that a mixer reads: by its linear maps; and `out`, those that it makes."""
    widths = {name: sum(rows.count for rows in map.rows) for name, map in spec.maps().items()}
    return widths | {"out": spec.maps()["out"].in_features}
