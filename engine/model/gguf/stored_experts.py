"""Experts in GGUF files: their metadata, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.engine.model.gguf.container import Header
from penstock.engine.model.gguf.kinds import GgufKind
from penstock.engine.spec import Experts, Mlp, Router, default_stacks

PREFIX = "mlp.experts"
"""The prefix of the names of experts, in place of every family's own."""
_SHARED, _ROUTER = "mlp.shared_experts", "mlp.gate"
_SHARED_GATE = "mlp.shared_expert_gate"
_CHOICE_BIAS, _EXPERT_SCALE = f"{_ROUTER}.e_score_correction_bias", f"{_ROUTER}.per_expert_scale"
_ROUTER_NORM = f"{_ROUTER}.scale"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

STACKED = {
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
    "ffn_gate_up": "gate_up_proj",
}
"""The name before `_exps` in ggml's name of a stack, and the name after the prefix of experts in ours."""

MODULES = {
    "ffn_gate_inp": _ROUTER,
    **{f"{ggml}_exps": f"{PREFIX}.{name}" for ggml, name in STACKED.items()},
    **{f"{ggml}_shexp": f"{_SHARED}.{name}" for ggml, name in STACKED.items() if name in _PROJECTIONS},
    "ffn_gate_inp_shexp": _SHARED_GATE,
}
"""ggml's names of a layer's modules, and the names that every family has here."""

TENSORS = {
    "exp_probs_b.bias": _CHOICE_BIAS,
    "ffn_down_exps.scale": _EXPERT_SCALE,
    "ffn_gate_inp.scale": _ROUTER_NORM,
}
"""ggml's names of a layer's other tensors, and the names that every family has here."""

_EXPERTS_OF_MAVERICK = 128
"""The model of Llama 4 with so many experts does not norm queries and keys."""

_ENTRIES = {
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("n_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": (
        "shared_intermediate_size",
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
}
"""The keys of numbers, and the families' names for them in a config.json."""


def expert_entries(header: Header, name: str, kind: GgufKind, depth: int) -> dict[str, object]:
    """The entries of a config.json for a model's experts, if it has any.

    A layer has experts if it has a router, even if the metadata count it among dense layers.

    Raises:
        CheckpointError: the file has experts where the family has none, or in another form.
    """
    fields, key = header.fields, f"{name}.expert_count"
    if not fields.integer(key, 0):
        return {}
    if not kind.sparse:
        raise fields.error(f"{key}: mixtures of experts are not supported for {name}")
    fields.size(f"{name}.expert_used_count")
    gating = fields.integer(f"{name}.expert_gating_func", kind.gating)
    if gating not in (0, kind.gating):
        raise fields.error(f"{name}.expert_gating_func {gating} is not supported; only {kind.gating} is")
    found: dict[str, object] = {
        entry: fields.number(f"{name}.{key}")
        for key, entries in _ENTRIES.items()
        if fields.has(f"{name}.{key}")
        for entry in entries
    }
    if fields.has(f"{name}.expert_weights_norm"):
        found["norm_topk_prob"] = fields.flag(f"{name}.expert_weights_norm")
    if kind.architecture.startswith("Llama4"):  # no key says it
        found["use_qk_norm"] = fields.integer(key) != _EXPERTS_OF_MAVERICK
    return {**found, "enable_moe_block": True, **_layers(header, depth)}


def _layers(header: Header, depth: int) -> dict[str, object]:
    """Which layers have experts, in the ways in which the families say it."""
    sparse = [layer for layer in range(depth) if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors]
    first = min(sparse, default=depth)
    return {
        "mlp_only_layers": [layer for layer in range(depth) if layer not in sparse],
        "moe_layers": sparse,
        "first_k_dense_replace": first,
        "num_dense_layers": first,
        "moe_layer_start_index": first,
    }


def stored_feed_forward(own: Mlp | Experts | None, layer: int, header: Header) -> Mlp | Experts | None:
    """Returns the feed-forward part of a layer with the names and biases of the file, in place of its family's."""

    def has(tensor: str) -> bool:
        return f"blk.{layer}.{tensor}" in header.tensors

    if own is None:
        return None
    if isinstance(own, Mlp):
        if own.gate_up == ("shared_mlp.input_linear",) and has("ffn_gate.weight"):  # Granite's
            own = replace(own, gate_up=_dense(_PROJECTIONS[0:2]), down=_dense(_PROJECTIONS[2:])[0])
        return replace(own, has_bias=has("ffn_gate.bias" if own.is_gated else "ffn_up.bias"))
    shared = own.shared
    if shared is not None and has("ffn_down_shexp.weight"):
        *gate_up, down = (f"{_SHARED}.{name}" for name in _PROJECTIONS[0 if shared.is_gated else 1 :])
        shared = replace(shared, gate_up=tuple(gate_up), down=down, has_bias=has("ffn_down_shexp.bias"))
    return replace(
        own,
        router=_stored_router(own.router, has_bias=has("ffn_gate_inp.bias")),
        has_bias=has("ffn_down_exps.bias"),
        prefix=PREFIX,
        gate_up=_PROJECTIONS[0:2] if own.activation.is_gated else _PROJECTIONS[1:2],
        down=_PROJECTIONS[2],
        stacks=default_stacks(PREFIX),
        shared=shared,
        shared_gate=_SHARED_GATE if own.shared_gate else "",
    )


def _dense(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"mlp.{name}" for name in names)


def _stored_router(router: Router, *, has_bias: bool) -> Router:
    norm = router.norm
    return replace(
        router,
        name=_ROUTER,
        has_bias=has_bias,
        choice_bias=_CHOICE_BIAS if router.choice_bias else "",
        expert_scale=_EXPERT_SCALE if router.expert_scale else "",
        norm=None if norm is None else replace(norm, name=_ROUTER_NORM),
    )


def stacked_maps(name: str) -> Iterator[str]:
    """Yields the linear maps of experts that a stack has, by its name; any other name is its own map."""
    before, found, _ = name.partition(f".{PREFIX}.gate_up_proj")
    yield from (f"{before}.{PREFIX}.{map}" for map in _PROJECTIONS[0:2]) if found else (name,)
