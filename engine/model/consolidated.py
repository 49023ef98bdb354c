"""Checkpoints as Mistral writes them: params.json and consolidated.safetensors, with names of their own.

Queries and keys have the pairs of numbers that are rotated together side by side, where transformers' checkpoints have
the halves of a head one after the other.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.engine.fields import Fields

PARAMS, WEIGHTS = "params.json", "consolidated.safetensors"
INDEX = "consolidated.safetensors.index.json"
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
"""The entries that there must be, and their names in config.json."""
_OTHERS = {
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_MOST_POSITIONS = 128_000
"""Where params.json does not say, as vLLM has it."""
_NOT_SERVED = {"q_lora_rank": "latent attention", "kv_lora_rank": "latent attention"}
_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_PARTS = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_TENSORS = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}


def is_consolidated(folder: Path) -> bool:
    """Returns whether a checkpoint has Mistral's files, and none that transformers reads."""
    has_others = any(
        (folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")
    )
    return (folder / PARAMS).is_file() and not has_others


def read_params(folder: Path) -> Fields:
    """Reads params.json into the entries that a config.json of the same model would have.

    Raises:
        CheckpointError: names the entry that is missing, malformed or not supported.
    """
    params = Fields.read(folder / PARAMS)
    for name, lack in _NOT_SERVED.items():
        if params.has(name):
            raise params.error(f"{name}: {lack} is not served")
    config: dict[str, object] = {
        "architectures": ["MistralForCausalLM"],
        "torch_dtype": "bfloat16",
        "max_position_embeddings": params.size("max_seq_len", _MOST_POSITIONS),
        "sliding_window": None,
        **{theirs: params.size(name) for name, theirs in _SIZES.items()},
        **{theirs: value for name, value in params.items() if (theirs := _OTHERS.get(name))},
        "rope_interleave": True,
    }
    if params.has("moe"):
        moe = params.nested("moe")
        config["architectures"] = ["MixtralForCausalLM"]
        config["num_local_experts"] = moe.size("num_experts")
        config["num_experts_per_tok"] = moe.size("num_experts_per_tok")
    rope: dict[str, object] = {}
    if params.has("llama_4_scaling"):
        scaling = params.nested("llama_4_scaling")
        config["architectures"] = ["Ministral3ForCausalLM"]
        rope["original_max_position_embeddings"] = scaling.size("original_max_position_embeddings")
        rope["llama_4_scaling_beta"] = scaling.number("beta")
    if params.has("yarn"):
        rope |= _yarn(params.nested("yarn"))
    if rope:
        config["rope_parameters"] = rope
    if params.has("quantization"):
        params.nested("quantization").one_of("qformat_weight", "fp8_e4m3")
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    return Fields(params.source, config)


def _yarn(yarn: Fields) -> dict[str, object]:
    found: dict[str, object] = {"rope_type": "yarn"}
    found |= {_YARN[name]: value for name, value in yarn.items() if name in _YARN}
    if not yarn.flag("apply_scale", True):  # the attended values are not scaled
        found |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return found


def transformers_name(name: str) -> str:
    """Returns transformers' name for a tensor; its own name for tensors that are not the text model's."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _NAMES.get(name, name)
    part, _, tensor = layer[2].rpartition(".")
    part, tensor = _PARTS.get(part, part), _TENSORS.get(tensor, tensor)
    if part == "gate" or part.startswith("experts."):
        part = f"block_sparse_moe.{part}"
    return f"model.layers.{layer[1]}.{part}.{tensor}"
