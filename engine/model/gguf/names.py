"""ggml's names of a decoder's tensors, and the names of transformers and of the engine."""

from __future__ import annotations

import re

from penstock.engine.model.gguf import stored_experts
from penstock.engine.model.gguf.kinds import GgufKind
from penstock.engine.quant.stacks import stack_of

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.norm",  # LFM2's
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    **stored_experts.MODULES,
}

_TENSORS = {
    "layer_output_scale.weight": "layer_scalar",
    "attn_sinks.weight": "self_attn.sinks",
    **stored_experts.TENSORS,
}
"""Tensors of a layer that transformers has no module for."""
_BARE = ("ssm_a", "ssm_d", "ssm_dt.bias")
"""Names of kinds that are whole ones: nothing follows them."""

_LAYER, _GGML_LAYER = re.compile(r"model\.layers\.(\d+)\."), re.compile(r"blk\.(0|[1-9]\d{0,5})\.")
_MODULE = re.compile(r"(?P<module>.+)\.(?P<kind>weight|bias)")


class Names:
    """The names of one kind of models."""

    def __init__(self, kind: GgufKind) -> None:
        self._of_a_layer = {**_OF_A_LAYER, **kind.names}
        self._tensors = _TENSORS | {ggml: name for ggml, name in kind.names.items() if ggml in _BARE}
        self._ggml_tensors = {name: ggml for ggml, name in self._tensors.items()}
        common = {name: ggml for table in (_OUTSIDE, _OF_A_LAYER) for ggml, name in table.items()}
        self._ggml = {**common, **{name: ggml for ggml, name in kind.names.items()}}

    def engine_name(self, name: str) -> str | None:
        """The engine's name of ggml's tensor; None if it is none of the decoder's."""
        layer, rest = _split(_GGML_LAYER, name)
        found = _MODULE.fullmatch(rest)
        if layer is not None and rest in self._tensors:
            return f"model.layers.{layer}.{self._tensors[rest]}"
        if found is None:
            return None
        module = _OUTSIDE.get(found["module"]) if layer is None else self._module(found["module"])
        if module is None:
            return None
        return (
            f"{module}.{found['kind']}" if layer is None else f"model.layers.{layer}.{module}.{found['kind']}"
        )

    def _module(self, name: str) -> str | None:
        """The module of a layer; older files have a tensor for each expert, which is the 7 of `ffn_up.7`."""
        part, _, expert = name.partition(".")
        if expert.isdigit() and part in stored_experts.STACKED:
            return f"{stored_experts.PREFIX}.{expert}.{stored_experts.STACKED[part]}"
        return self._of_a_layer.get(name)

    def ggml_name(self, name: str) -> str:
        """Returns ggml's name of the engine's tensor; for a tensor of a single expert, the name of its stack."""
        layer, rest = _split(_LAYER, stack_of(name))
        if layer is not None and rest in self._ggml_tensors:
            return f"blk.{layer}.{self._ggml_tensors[rest]}"
        found = _MODULE.fullmatch(rest)
        if found is None or found["module"] not in self._ggml:
            return name
        module = f"{self._ggml[found['module']]}.{found['kind']}"
        return module if layer is None else f"blk.{layer}.{module}"


def _split(layer: re.Pattern[str], name: str) -> tuple[str | None, str]:
    """Returns the number of the layer that a name begins with, or None, and the rest of the name."""
    found = layer.match(name)
    return (None, name) if found is None else (found[1], name[found.end() :])
