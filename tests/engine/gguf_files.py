"""GGUF files of the checkpoints of tests/engine/checkpoints.py and families.py.

Types that are only read have random blocks.

Tests read the files with the `gguf` library and with transformers to prove that they are what they say.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from lab.gguf_files import tokenizer_metadata
from tests.engine import gguf_writing
from tests.engine.gguf_writing import FLOAT32, Array, Types, ggml_name, same

__all__ = ["ggml_name", "same", "tokenizer_metadata", "write_family", "write_file", "write_gguf"]


def encode(array: Array, type: Type) -> Array:
    if array.ndim == 3:  # experts
        rows = encode(array.reshape(-1, array.shape[-1]), type)
        return rows.reshape(*array.shape[:2], -1)
    if type in _UNITS or type.name not in _WRITTEN:
        return random_blocks(array, type)
    return gguf.quants.quantize(array, type)


_WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0")
_UNITS = {
    Type.Q2_K: {80: 1.0, 82: 1.5},
    Type.Q3_K: {108: 1.0},
    Type.Q4_K: {0: 1.0, 2: 7.5},
    Type.Q5_K: {0: 1.0, 2: 15.5},
    Type.Q6_K: {208: 1.0},
    Type.IQ4_NL: {0: 1.0},
    Type.IQ4_XS: {0: 1.0},
}
"""Where a block has its float16 numbers, and how large they are beside each other for weights about 0."""


def random_blocks(array: Array, type: Type, seed: int = 0) -> Array:
    """Random blocks with weights about as large as those of the array: any bytes are integers and scales."""
    block, size = gguf.GGML_QUANT_SIZES[type]
    rng = np.random.default_rng([seed, *array.shape])
    blocks = rng.integers(0, 256, (len(array), array.shape[1] // block, size), dtype=np.uint8)
    spread = float(array.std())
    if type == Type.MXFP4:
        blocks[..., 0] = 126 + np.rint(np.log2(spread)) - rng.integers(0, 2, blocks.shape[:2])
    elif type in _UNITS:
        _scale(blocks, type, 1.0)
        _scale(blocks, type, spread / float(gguf.quants.dequantize(blocks, type).std()))
    return blocks.reshape(len(array), -1)


def _scale(blocks: Array, type: Type, unit: float) -> None:
    for start, share in _UNITS[type].items():
        blocks[..., start : start + 2] = np.array([unit * share], np.float16).view(np.uint8)


write_gguf = partial(gguf_writing.write_gguf, encode=encode)
write_file = partial(gguf_writing.write_file, encode=encode)


KINDS = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "ministral3": "mistral3",
    "phi3": "phi3",
    "glm4": "glm4",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "granite": "granite",
    "granitemoehybrid": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "glm4_moe": "glm4moe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "mistral4": "mistral4",
}
"""By a config.json's `model_type`, the architecture that llama.cpp's converter makes of it."""

_NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
}
_OF_EXPERTS = {
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("n_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval", "interleave_moe_layer_step"),
}
_OF_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
}


def write_family(
    folder: Path,
    path: Path,
    types: Types = FLOAT32,
    kind: str = "",
    *,
    is_old: bool = False,
    **metadata: Any,
) -> Path:
    """Writes a model of tests/engine/families.py as llama.cpp's converter does, with the `gguf` library's names.

    Args:
        kind: the architecture that the converter makes of it, where that does not follow from its type.
        is_old: latent attention is described by its heads, as it was before llama.cpp attended to latents.
    """
    config = json.loads((folder / "config.json").read_text())
    has_experts = any(config.get(name) for name in _OF_EXPERTS["expert_count"])
    if config["model_type"] == "granitemoehybrid" and has_experts:
        kind = "granitemoe"
    kind = kind or KINDS[config["model_type"]]
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    arrays: dict[str, Array] = {}
    parts = fused_parts_apart(load_file(folder / "model.safetensors"), has_experts=has_experts)
    if "kv_lora_rank" in config and not is_old:
        parts = {
            name: tensor for own in parts.items() for name, tensor in _keys_and_values(*own, config).items()
        }
    for name, tensor in _rows_first(stacked_experts(parts), config).items():
        found = _own_name(name, names)
        arrays[found] = _converted(name, tensor, config, kind).numpy()
    rope = config["rope_parameters"]
    factors = gguf_writing.rope_factors({**config, "rope_scaling": rope, **rope})
    arrays |= {} if factors is None else {"rope_freqs.weight": factors}
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            arrays[f"rope_factors_{which}.weight"] = np.array(rope[f"{which}_factor"], np.float32)
    if kind == "gemma4":
        num = _of_full_layers(config)["head_dim"] // 2
        num_rotated = int(num * rope["full_attention"]["partial_rotary_factor"])
        arrays["rope_freqs.weight"] = np.where(np.arange(num) < num_rotated, 1, 1e30).astype(np.float32)
    tokens = [f"<{number}>" for number in range(config["vocab_size"])]
    described = _metadata(config, rope)
    if "kv_lora_rank" in config:
        described |= _of_latents(config, rope, is_old=is_old)
    entries = {f"{kind}.{key}": value for key, value in described.items()}
    entries |= {name.replace("__", "."): value for name, value in metadata.items()}
    common = {"general.architecture": kind, "tokenizer.ggml.tokens": tokens}
    write_file(path, {**common, **entries}, arrays, types)
    return path


def _own_name(name: str, names: gguf.TensorNameMap) -> str:
    """ggml's name of a tensor, which the converter renames before it is looked up."""
    layer = "".join(re.findall(r"layers\.(\d+)\.", name))
    for end, own in {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}.items():
        if name.endswith(end):
            return f"blk.{layer}.{own}.scale"
    behind = re.fullmatch(
        r"model\.layers\.\d+\.(?P<module>eh_proj|enorm|hnorm|shared_head\.norm)\.weight", name
    )
    if behind:  # which the library does not have in all kinds that converters write it in
        return f"blk.{layer}.nextn.{behind['module'].replace('.', '_')}.weight"
    named = name.replace("e_score_correction_bias", "e_score_correction.bias")
    is_bare = not named.endswith((".weight", ".bias"))
    found = names.get_name(f"{named}.weight" if is_bare else named, (".weight", ".bias"))
    assert found is not None, name
    return str(found)


def fused_parts_apart(tensors: dict[str, Tensor], *, has_experts: bool) -> dict[str, Tensor]:
    """Granite's fused maps of gates and ups are taken apart, and other families' names stand for its own."""
    shared = "mlp.shared_experts" if has_experts else "mlp"
    modules = {"shared_mlp": shared, "block_sparse_moe": "mlp.experts"}
    parts = {}
    for name, tensor in tensors.items():
        module = next((module for module in modules if f".{module}.input_linear" in name), None)
        if module is not None:
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=-2), strict=True):
                parts[name.replace(f"{module}.input_linear", f"{modules[module]}.{part}")] = half.contiguous()
            continue
        for module, own in modules.items():
            name = name.replace(f"{module}.output_linear", f"{own}.down_proj")
        parts[name] = tensor.flatten() if name.endswith("e_score_correction_bias") else tensor
    return parts


_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.\d+\.(?P<map>.+)")


def stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all experts of a layer in one."""
    stacks: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        if found := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{found['experts']}.{found['map']}", []).append(tensors[name])
    others = {name: tensor for name, tensor in tensors.items() if not _EXPERT.fullmatch(name)}
    return others | {name: torch.stack(experts) for name, experts in stacks.items()}


def _rows_first(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The stacks of gpt-oss and Llama 4, which are [experts, in, rows], as all others are; gates and ups apart."""
    if config["model_type"] not in ("gpt_oss", "llama4_text"):
        return tensors
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stack, is_stack, kind = name.partition("_proj") if ".experts." in name else (name, "", "")
        rows = tensor.mT if is_stack and not kind else tensor
        if stack.endswith(".gate_up"):
            alternate = config["model_type"] == "gpt_oss"
            gates, ups = (rows[:, 0::2], rows[:, 1::2]) if alternate else rows.chunk(2, 1)
            halves = {stack.replace("gate_up", "gate"): gates, stack.replace("gate_up", "up"): ups}
        else:
            halves = {stack: rows}
        parts |= {
            f"{own}{is_stack}{kind.replace('_', '.')}": half.contiguous() for own, half in halves.items()
        }
    return parts


def _converted(name: str, tensor: Tensor, config: dict[str, Any], kind: str) -> Tensor:
    """Gemma's norms with what the model adds; queries and keys of llama's like with neighbours that rotate together."""
    if kind in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if kind not in ("llama", "mistral3", "smollm3", "granite", "granitemoe") or heads is None:
        return tensor
    halves = tensor.view(config[heads], 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _metadata(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    model, full = config["model_type"], rope.get("full_attention", rope)
    entries = {key: config[name] for key, name in _NUMBERS.items() if config.get(name) is not None}
    entries |= _of_experts(config)
    entries["rope.freq_base"] = full["rope_theta"]
    if "logits_scaling" in config:
        entries["logit_scale"] = config["logits_scaling"]
    if "sliding_attention" in rope:
        entries["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    if model not in ("smollm3", "qwen2", "qwen3") and (window := config.get("sliding_window")) is not None:
        entries["attention.sliding_window"] = window
        if model in ("olmo3", "exaone4") or model.startswith("gemma4"):
            slides = [kind == "sliding_attention" for kind in config["layer_types"]]
            entries["attention.sliding_window_pattern"] = slides
    if full["rope_type"] == "dynamic":  # Hunyuan's
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        entries["rope.freq_base"] *= full["alpha"] ** (head_dim / (head_dim - 2))
    if full["rope_type"] in ("linear", "yarn"):
        scaling = {key: full[name] for key, name in _OF_YARN.items() if full.get(name) is not None}
        entries |= {
            f"rope.scaling.{key}": value for key, value in {"type": full["rope_type"], **scaling}.items()
        }
    if model.startswith("gemma4"):
        entries |= _of_gemma4(config)
    if "llama_4_scaling_beta" in rope:
        entries["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if model in ("phi3", "glm4", "glm4_moe", "minimax_m2"):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        entries["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if full["rope_type"] == "longrope":
        old = rope["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / old
        entries["rope.scaling.original_context_length"] = old
        entries["rope.scaling.attn_factor"] = float((1 + np.log(stretch) / np.log(old)) ** 0.5)
    return entries


def _of_experts(config: dict[str, Any]) -> dict[str, Any]:
    entries = {
        key: config[name]
        for key, names in _OF_EXPERTS.items()
        for name in names
        if config.get(name) is not None
    }
    if config["model_type"] in ("glm4_moe", "minimax_m2", "deepseek_v3", "glm4_moe_lite"):
        entries["expert_gating_func"] = 2
    if config["model_type"] == "glm4_moe" or ("kv_lora_rank" in config and config.get("norm_topk_prob")):
        entries["expert_weights_norm"] = config["norm_topk_prob"]
    if config["model_type"] in ("gpt_oss", "llama4_text"):
        entries["expert_feed_forward_length"] = config["intermediate_size"]
    if config["model_type"] == "llama4_text":
        entries["feed_forward_length"] = config["intermediate_size_mlp"]
    return entries


def _of_latents(config: dict[str, Any], rope: dict[str, Any], *, is_old: bool) -> dict[str, Any]:
    """What the converter says of latent attention: of one head of latents, or as it did before, of all heads."""
    rotated, latent, value = (config[name] for name in ("qk_rope_head_dim", "kv_lora_rank", "v_head_dim"))
    key = config["qk_nope_head_dim"] + rotated
    entries: dict[str, Any] = {"attention.kv_lora_rank": latent, "rope.dimension_count": rotated}
    if config.get("q_lora_rank") is not None:
        entries["attention.q_lora_rank"] = config["q_lora_rank"]
    if (multiplier := rope.get("mscale_all_dim")) is not None:
        entries["rope.scaling.yarn_log_multiplier"] = 0.1 * multiplier
    if is_old:
        return {**entries, "attention.key_length": key, "attention.value_length": value}
    return {
        **entries,
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": key,
        "attention.value_length_mla": value,
    }


def _keys_and_values(name: str, tensor: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    """K of each head, transposed, and V in place of the map that has both."""
    if not name.endswith("kv_b_proj.weight"):
        return {name: tensor}
    sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
    k, v = torch.split(torch.unflatten(tensor, 0, (config["num_attention_heads"], -1)), sizes, 1)
    return {name.replace("kv_b", "k_b"): k.mT.contiguous(), name.replace("kv_b", "v_b"): v.contiguous()}


def _of_full_layers(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes of layers without a window, the last of which is one."""
    return {**config, **config["per_layer_config"][str(config["num_hidden_layers"] - 1)]}


def _of_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """Heads of two sizes, and what is said of each layer."""
    slides, full = [kind == "sliding_attention" for kind in config["layer_types"]], _of_full_layers(config)
    entries: dict[str, Any] = {
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input", 0),
    }
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        entries |= {key: full["head_dim"], f"{key}_swa": config["head_dim"]}
    if config["use_double_wide_mlp"]:
        inner, num_own = config["intermediate_size"], len(slides) - config["num_kv_shared_layers"]
        entries["feed_forward_length"] = [inner * (1 + (layer >= num_own)) for layer in range(len(slides))]
    if config["attention_k_eq_v"]:
        counts = full["num_key_value_heads"], config["num_key_value_heads"]
        entries["attention.head_count_kv"] = [counts[is_windowed] for is_windowed in slides]
    return entries
