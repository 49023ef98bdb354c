"""GGUF files of models whose layers have a state, tests/engine/families.py, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.gguf_files import fused_parts_apart, stacked_experts, write_file
from tests.engine.gguf_writing import FLOAT32, Types

KINDS = {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "mamba2": "mamba2",
}
"""By a config.json's `model_type`, the architecture that llama.cpp's converter makes of it."""

_NUMBERS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("num_dense_layers",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"),
    "ssm.state_size": ("linear_key_head_dim", "ssm_state_size", "state_size", "mamba_d_state"),
    "ssm.group_count": ("linear_num_key_heads", "n_groups", "mamba_n_groups"),
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_num_heads", "num_heads", "mamba_n_heads"),
    "shortconv.l_cache": ("conv_L_cache",),
}
_HEAD_DIMS = ("linear_value_head_dim", "mamba_head_dim", "mamba_d_head", "head_dim")


def write_state_family(folder: Path, path: Path, types: Types = FLOAT32, **metadata: Any) -> Path:
    """Writes a model with the `gguf` library's names."""
    config = json.loads((folder / "config.json").read_text())
    kind = KINDS[config["model_type"]]
    if kind == "nemotron_h" and "moe" in config["layers_block_type"]:
        kind = "nemotron_h_moe"
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, _depth(config))
    has_experts = bool(config.get("num_local_experts"))
    parts = stacked_experts(
        fused_parts_apart(load_file(folder / "model.safetensors"), has_experts=has_experts)
    )
    arrays = {
        _own_name(own, names): part.contiguous().numpy()
        for name, tensor in parts.items()
        for own, part in _converted(name, tensor, config, kind).items()
    }
    tokens = [f"<{number}>" for number in range(config["vocab_size"])]
    entries = {f"{kind}.{key}": value for key, value in _metadata(config, kind).items()}
    entries |= {name.replace("__", "."): value for name, value in metadata.items()}
    write_file(
        path, {"general.architecture": kind, "tokenizer.ggml.tokens": tokens, **entries}, arrays, types
    )
    return path


def _depth(config: dict[str, Any]) -> int:
    return len(config.get("layers_block_type", ())) or int(config["num_hidden_layers"])


def _own_name(name: str, names: gguf.TensorNameMap) -> str:
    found = names.get_name(name, (".weight", ".bias"))
    if (predicting := _PREDICTING.fullmatch(name)) is not None:  # some releases have no names of these
        return f"blk.{predicting[1]}.nextn.{predicting[2].replace('.', '_')}.weight"
    assert found is not None, name
    return str(found)


_PREDICTING = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight")


def _converted(name: str, tensor: Tensor, config: dict[str, Any], kind: str) -> dict[str, Tensor]:
    """The tensors that the converter makes of one, by the names that it looks up."""
    if kind.startswith("qwen"):
        tensor = _of_qwen(name, tensor, config, kind)
    if "in_proj_qkvz" in name:
        prefix, halves = name.removesuffix("in_proj_qkvz.weight"), _by_kinds(tensor, config)
        return {f"{prefix}in_proj_{part}.weight": half for part, half in halves.items()}
    name = name.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if kind.startswith("nemotron") and ".experts." in name:
        name = name.replace("backbone.layers", "model.layers").replace(".mixer.", ".mlp.")
    if kind == "lfm2moe":
        name = name.replace("model.layers", "layers") if ".experts." in name else name
    if ".conv1d.weight" in name or ".conv.conv.weight" in name:
        tensor = tensor.squeeze(1)
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith(("A_log", ".D")) and not kind.startswith("qwen"):
        tensor = tensor[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.view(int(config.get("n_groups") or config["mamba_n_groups"]), -1)
    if kind == "granitehybrid" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return {name: tensor}


def _of_qwen(name: str, tensor: Tensor, config: dict[str, Any], kind: str) -> Tensor:
    """Norms have what the model adds. But for Qwen 3 Next, value heads lie by tiles, with one of each key head."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor + 1
    if kind == "qwen3next" or ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return tensor
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if "out_proj" in name:
        return _tiled(tensor.T, config).T
    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat((tensor[:keys], _tiled(tensor[keys:], config)))
    return _tiled(tensor, config)


def _tiled(rows: Tensor, config: dict[str, Any]) -> Tensor:
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = rows.view(num_keys, num_values // num_keys, -1, *rows.shape[1:])
    return heads.transpose(0, 1).reshape(rows.shape)


def _by_kinds(rows: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    """The rows of queries, keys and values, and those of z, of a map that has them by key heads."""
    num_keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    width = config["linear_num_value_heads"] // num_keys * config["linear_value_head_dim"]
    groups = torch.split(rows.view(num_keys, -1, rows.shape[1]), [key_dim, key_dim, width, width], dim=1)
    *qkv, z = (part.flatten(0, 1) for part in groups)
    return {"qkv": torch.cat(qkv), "z": z}


def _metadata(config: dict[str, Any], kind: str) -> dict[str, Any]:
    depth, kinds = _depth(config), config.get("layers_block_type") or config.get("layer_types") or []
    entries: dict[str, Any] = {"block_count": depth}
    for key, names in _NUMBERS.items():
        if (name := next((name for name in names if config.get(name) is not None), None)) is not None:
            entries[key] = config[name]
    if "ssm.time_step_rank" in entries:
        head_dim = next(config[name] for name in _HEAD_DIMS if name in config)
        entries["ssm.inner_size"] = entries["ssm.time_step_rank"] * head_dim
    if kind == "mamba2":
        return {**entries, "attention.head_count": 0, "feed_forward_length": 0}
    entries |= _of_attention(config, kind, kinds)
    is_dense = kind == "granitehybrid" and not config["num_local_experts"]
    inner = config["shared_intermediate_size" if is_dense else "intermediate_size"]
    if kind == "lfm2":
        multiple = config["block_multiple_of"]
        inner = -(-int(2 * inner / 3) // multiple) * multiple
    is_part = [own in ("moe", "mlp") for own in kinds]
    entries["feed_forward_length"] = [inner * own for own in is_part] if "nemotron" in kind else inner
    if kind in ("lfm2moe", "nemotron_h_moe"):
        entries["expert_gating_func"] = 2
        entries["expert_weights_norm"] = config["norm_topk_prob"]
    return entries


def _of_attention(config: dict[str, Any], kind: str, kinds: list[str]) -> dict[str, Any]:
    entries: dict[str, Any] = {"attention.head_count": config["num_attention_heads"]}
    num_kv_heads = config["num_key_value_heads"]
    entries["attention.head_count_kv"] = num_kv_heads
    if not kind.startswith("qwen"):
        entries["attention.head_count_kv"] = [num_kv_heads * (own == "full_attention") for own in kinds]
    if (head_dim := config.get("head_dim")) is not None:
        entries |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if (rope := config.get("rope_parameters")) is not None:
        entries["rope.freq_base"] = rope["rope_theta"]
    if kind.startswith("qwen"):
        entries["rope.dimension_count"] = int(
            config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]
        )
        entries["full_attention_interval"] = 4
    if kind == "granitehybrid":
        entries["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
    return entries
