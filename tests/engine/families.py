"""Tiny random models of every family, made and written by transformers: one period of their layers, odd sizes."""

from __future__ import annotations

import json
from collections.abc import Set
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)
"""transformers itself has no such entry."""

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SWIGLU_LIMIT = {"swiglu_limit": 1.5} if hasattr(transformers.GptOssConfig, "swiglu_limit") else {}
"""Older releases of transformers compute with 7 whatever the config says."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}

GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}

LLAMA4_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
"""No frequency lies between the low and the high ones."""

GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
}


@dataclass(frozen=True)
class Tiny:
    """A model of a family, and what it has beside COMMON."""

    config: str
    """The class of transformers."""
    entries: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The name in config.json."""
        return f"{self.config.removesuffix('Config').removesuffix('Text')}ForCausalLM"

    def make(self, folder: Path, seed: int = 0, **overrides: Any) -> Path:
        """Writes the model into a folder, in float32, with weights wide enough that attention looks around."""
        torch.manual_seed(seed)
        entries = deepcopy(
            {**COMMON, **self.entries, **overrides}
        )  # some configs write into what they are given
        config = getattr(transformers, self.config)(**entries)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = parameter.dim() == 1 and not name.endswith("bias")
                torch.nn.init.normal_(parameter, 0.0, 0.2 if is_norm else 3.0 / parameter.shape[-1] ** 0.5)
                if is_norm and "gemma" not in self.config.lower().replace("gemma4", ""):
                    parameter += 1.0
                if "embed_tokens" in name:
                    parameter /= 3.0
            for name, numbers in chain(model.named_parameters(), model.named_buffers()):
                if name.endswith("layer_scalar"):
                    numbers.uniform_(0.5, 1.5)
                if name.endswith(("e_score_correction_bias", "expert_bias")):
                    numbers.uniform_(-0.1, 0.1)
        model.save_pretrained(folder)
        return folder


TINY: dict[str, Tiny] = {
    "Qwen 2": Tiny("Qwen2Config"),
    "Qwen 3": Tiny("Qwen3Config", {"head_dim": 24}),
    "Gemma 2": Tiny(
        "Gemma2Config",
        {"head_dim": 24, "sliding_window": 24, "query_pre_attn_scalar": 30, "num_hidden_layers": 4},
    ),
    "Gemma 3": Tiny(
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "sliding_window": 24,
            "query_pre_attn_scalar": 30,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Gemma 4": Tiny(
        "Gemma4TextConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "global_head_dim": 40,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": GEMMA4_ROPES,
            "sliding_window": 24,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma 4 12B": Tiny(
        "Gemma4UnifiedTextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 24,
            "global_head_dim": 48,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": GEMMA4_ROPES,
            "sliding_window": 24,
        },
    ),
    "Gemma 4 E": Tiny(
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "head_dim": 24,
            "global_head_dim": 48,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "rope_parameters": GEMMA4_ROPES,
            "sliding_window": 24,
            "hidden_size_per_layer_input": 20,
            "vocab_size_per_layer_input": 520,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Ministral 3": Tiny(
        "Ministral3Config",
        {
            "head_dim": 32,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "Phi 4": Tiny("Phi3Config", {"rope_theta": 250_000.0}),
    "Phi 4 mini": Tiny(
        "Phi3Config",
        {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 7.0],
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "GLM-4-0414": Tiny("Glm4Config", {"head_dim": 16, "attention_bias": True}),
    "SmolLM 3": Tiny("SmolLM3Config", {"num_hidden_layers": 4}),
    "Seed-OSS": Tiny("SeedOssConfig", {"head_dim": 32}),
    "Granite 3": Tiny(
        "GraniteConfig",
        {
            **GRANITE,
            "tie_word_embeddings": True,
        },
    ),
    "Granite 4, dense": Tiny(
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 112,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "nope",
            **GRANITE,
        },
    ),
    "OLMo 2": Tiny("Olmo2Config"),
    "OLMo 3": Tiny(
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "EXAONE 4": Tiny("Exaone4Config", {"num_hidden_layers": 4, "sliding_window": 24}),
    "Command R": Tiny("CohereConfig"),
    "Command R7B": Tiny("Cohere2Config", {"num_hidden_layers": 4, "sliding_window": 24}),
    "ERNIE 4.5": Tiny("Ernie4_5Config", {"head_dim": 24}),
    "Hunyuan": Tiny("HunYuanDenseV1Config", {"head_dim": 24}),
}

SPARSE: dict[str, Tiny] = {
    "Qwen 3 MoE": Tiny(
        "Qwen3MoeConfig",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "Mixtral": Tiny("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "OLMoE": Tiny("OlmoeConfig", {"num_experts": 7, "num_experts_per_tok": 3}),
    "Qwen 2 MoE": Tiny(
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "GLM-4.5": Tiny(
        "Glm4MoeConfig",
        {
            "head_dim": 24,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gpt-oss": Tiny(
        "GptOssConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            **SWIGLU_LIMIT,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "Llama 4": Tiny(
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "rope_parameters": LLAMA4_ROPE,
            "intermediate_size_mlp": 96,
            "moe_layers": [1, 3],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "Granite 3 MoE": Tiny("GraniteMoeConfig", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "Granite 4 MoE": Tiny(
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 64,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
        },
    ),
    "Granite MoE shared": Tiny(
        "GraniteMoeSharedConfig",
        {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 64},
    ),
    "DeepSeek V2": Tiny(
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "DeepSeek V2, groups": Tiny(
        "DeepseekV2Config",
        {
            **LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
    ),
    "DeepSeek V3": Tiny(
        "DeepseekV3Config",
        {
            **LATENT,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_mtp_layers": 0,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "GLM-4.7 Flash": Tiny(
        "Glm4MoeLiteConfig", {**LATENT, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-6}
    ),
    "Mistral 4": Tiny(
        "Mistral4Config",
        {
            **LATENT,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "MiniMax M2": Tiny(
        "MiniMaxM2Config",
        {
            "head_dim": 24,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "ERNIE 4.5 MoE": Tiny(
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
    ),
    "Hunyuan MoE": Tiny(
        "HunYuanMoEV1Config",
        {
            "head_dim": 24,
            "num_experts": 6,
            "moe_topk": 2,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 100.0},
        },
    ),
    "Gemma 4 MoE": Tiny(
        "Gemma4TextConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "global_head_dim": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": GEMMA4_ROPES,
            "sliding_window": 24,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
}
"""Those with experts, which fewer kernels and formats know."""

_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_QWEN_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2}

STATES: dict[str, Tiny] = {
    "Qwen 3.5": Tiny("Qwen3_5TextConfig", _DELTA),
    "Qwen 3.5 MoE": Tiny("Qwen3_5MoeTextConfig", {**_DELTA, **_QWEN_EXPERTS}),
    "Qwen 3 Next": Tiny("Qwen3NextConfig", {**_DELTA, **_QWEN_EXPERTS, "mlp_only_layers": [1]}),
    "LFM2": Tiny("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}),
    "LFM2 MoE": Tiny(
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "conv_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "Granite 4 H": Tiny(
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 112,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "position_embedding_type": "nope",
        },
    ),
    "Granite 4 H MoE": Tiny(
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            **_MAMBA,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 64,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "position_embedding_type": "rope",
        },
    ),
    "Bamba": Tiny("BambaConfig", {**_MAMBA, "attn_layer_indices": [1]}),
    "Nemotron 3": Tiny(
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "head_dim": 24,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 2.5,
            "time_step_min": 1e-30,  # transformers takes it for the least step, which its makers do not
        },
    ),
    "Mamba 2": Tiny(
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "time_step_limit": [0.1, 2.0]},
    ),
}
"""Those with layers that have a state."""

INSIDE: dict[str, tuple[str, str]] = {
    "Gemma3ForConditionalGeneration": ("Gemma 3", "model.language_model."),
    "Gemma4ForConditionalGeneration": ("Gemma 4 E", "model.language_model."),
    "Gemma4UnifiedForConditionalGeneration": ("Gemma 4 12B", "model.language_model."),
    "Llama4ForConditionalGeneration": ("Llama 4", "language_model.model."),
    "Mistral3ForConditionalGeneration": ("Ministral 3", "language_model.model."),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen 2", "model.language_model."),
    "Qwen3VLForConditionalGeneration": ("Qwen 3", "model.language_model."),
    "Exaone4_5_ForConditionalGeneration": ("EXAONE 4", "model.language_model."),
    "Glm4vForConditionalGeneration": ("GLM-4-0414", "model.language_model."),
    "AyaVisionForConditionalGeneration": ("Command R", "model.language_model."),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen 3 MoE", "model.language_model."),
    "KimiK25ForConditionalGeneration": ("DeepSeek V3", "language_model.model."),
}
"""Models beside an image tower: the text model, and what stands before the names of its tensors."""

STATES_INSIDE = {
    "Qwen3_5ForConditionalGeneration": "Qwen 3.5",
    "Qwen3_5MoeForConditionalGeneration": "Qwen 3.5 MoE",
    "Lfm2VlForConditionalGeneration": "LFM2",
}
"""Those of STATES, whose tensors are named as those of Qwen 3 VL."""

RENAMED = {"MiMoForCausalLM": "Qwen 2", "KimiK2ForCausalLM": "DeepSeek V3"}
"""Those that transformers does not have, and what they are by another name."""

BY_HAND = ("DeciLMForCausalLM", "InternLM2ForCausalLM")
"""Those that transformers does not have, and that tests put together of others."""


def put_inside(text: Path, folder: Path, architecture: str) -> Path:
    """Writes a text model as the part of a larger one that it is."""
    prefix = "model.language_model." if architecture in STATES_INSIDE else INSIDE[architecture][1]
    config = json.loads((text / "config.json").read_text(encoding="utf-8"))
    whole = {"architectures": [architecture], "model_type": "whole", "text_config": config}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    tensors = load_file(text / "model.safetensors")
    head = "language_model.lm_head" if prefix.startswith("language_model.") else "lm_head"
    named = {
        name.replace("lm_head", head)
        if name.startswith("lm_head")
        else name.replace("model.", prefix, 1): tensor
        for name, tensor in tensors.items()
    }
    tower = {"model.visual.norm.weight": torch.ones(3)}
    save_file({**named, **tower}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


UNLIKE = {
    *("Gemma 2", "Gemma 4 E", "GLM-4-0414", "Command R7B", "Phi 4 mini", "Granite 3", "EXAONE 4"),
    *("Qwen 2 MoE", "GLM-4.5", "gpt-oss", "Llama 4", "Gemma 4 MoE", "DeepSeek V3"),
    *("Qwen 3.5", "LFM2", "Granite 4 H"),
}
"""Those that differ most: caps, windows and shared layers, rotations of every kind, norms and multipliers of their own;
of experts a gate of shared ones, groups, biases and limits, weights on inputs, norms; latents; each kind of state."""


def unlike(group: str, without: Set[str] = frozenset()) -> list[Any]:
    """Every family as a parameter; `make test` has those that differ most, `without` some; `group` names the others."""
    long = pytest.mark.long(group)
    return [
        pytest.param(family, marks=[] if family in UNLIKE - without else [long])
        for family in TINY | SPARSE | STATES
    ]
