"""What ggml calls the tensors of a decoder, and what transformers and the engine call them."""

from __future__ import annotations

import re

from engine.model.gguf.kinds import Kind

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
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
}

_GGML_SCALAR, _SCALAR = "layer_output_scale.weight", "layer_scalar"
"""A layer's one number, which transformers has no module for."""

_GGML_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9]\d{0,5})\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
_ENGINE_NAME = re.compile(r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)")


class Names:
    """The names of one kind of models."""

    def __init__(self, kind: Kind) -> None:
        self._of_a_layer = {**_OF_A_LAYER, **kind.names}
        common = {name: ggml for table in (_OUTSIDE, _OF_A_LAYER) for ggml, name in table.items()}
        self._ggml = {**common, **{name: ggml for ggml, name in kind.names.items()}}

    def engine_name(self, name: str) -> str | None:
        """The engine's name of ggml's tensor; None if it is none of the decoder's."""
        if name.endswith(f".{_GGML_SCALAR}"):
            return f"model.layers.{name.split('.')[1]}.{_SCALAR}"
        found = _GGML_NAME.fullmatch(name)
        if found is None:
            return None
        layer, kind = found["layer"], found["kind"]
        module = (_OUTSIDE if layer is None else self._of_a_layer).get(found["module"])
        if module is None:
            return None
        return f"{module}.{kind}" if layer is None else f"model.layers.{layer}.{module}.{kind}"

    def ggml_name(self, name: str) -> str:
        """ggml's name of the engine's tensor."""
        if name.endswith(f".{_SCALAR}"):
            return f"blk.{name.split('.')[2]}.{_GGML_SCALAR}"
        found = _ENGINE_NAME.fullmatch(name)
        if found is None or found["module"] not in self._ggml:
            return name
        module = f"{self._ggml[found['module']]}.{found['kind']}"
        return module if found["layer"] is None else f"blk.{found['layer']}.{module}"
