"""The kinds of models in GGUF files: for each, how its metadata become the entries of a config.json.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A family's own function describes the
model; a row lists the entries that llama.cpp's converter renames, leaves out, or stores in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.engine.model.gguf import stored_latents, stored_states
from penstock.engine.model.gguf.container import Header

_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FOUR_NORMS = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_SOFTCAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_EVERY_LAYER_SLIDES = {"use_sliding_window": True, "max_window_layers": 0}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


_QWEN_NEXTN = {"nextn_predict_layers": "mtp_num_hidden_layers"}
_LFM2 = {
    **stored_states.SHORT_CONV,
    "token_embd_norm": "model.norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_EPS = ("attention.layer_norm_rms_epsilon", "norm_eps")
_NEMOTRON = {
    **stored_states.mamba_names("mixer"),
    "attn_norm": "norm",
    **{f"attn_{name}": f"mixer.{name}_proj" for name in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_NEMOTRON_EPS = ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufKind:
    """A row of KINDS."""

    architecture: str
    """The family, one of FAMILIES."""
    windowed: str = ""
    """The family where the metadata give a sliding window, if that is another one."""
    sparse: str = ""
    """The family where the metadata count experts; "" is none."""
    unbiased: GgufKind | None = None
    """The row for models whose choice of experts has no biases, if they are another family's."""
    gating: int = 1
    """The `expert_gating_func` of the kind's files: 1 is softmax, 2 sigmoid."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Numbers besides the common ones: the entry of a config.json by the key."""
    entries: Mapping[str, object] = field(default_factory=dict)
    """Entries that no key stands for."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer that have another name than usual."""
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    """The key of the norms' epsilon, and its entry."""
    window: int = 0
    """The sliding window where the metadata give none; 0 is none."""
    is_interleaved: bool = False
    """Whether the converter puts the rows of queries and keys in the order of neighbouring pairs."""
    rotates_in_part: bool = False
    rope: Mapping[str, object] = field(default_factory=dict)
    """Entries of `rope_parameters` that no key stands for."""
    log_unit: float = 1.0
    """The factor by which `yarn_log_multiplier` is larger than `mscale_all_dim`."""
    has_states: bool = False
    """Whether layers may have a state: where a layer has no attention or feed-forward part, its counts are 0."""
    wide_depth: int = 0
    """Gemma's model with so many layers scales scores by hidden_size / heads, and all others by the size of a head."""

    @classmethod
    def of(cls, header: Header) -> GgufKind:
        """The kind that a file's metadata name.

        Raises:
            CheckpointError: it is not supported.
        """
        found = KINDS[header.fields.one_of("general.architecture", *KINDS)]
        is_biased = any(tensor.endswith(".exp_probs_b.bias") for tensor in header.tensors)
        return found if is_biased or found.unbiased is None else found.unbiased


_LOGIT_SCALE = {"logit_scale": "logit_scale"}
_LAYER_NORM_EPS = ("attention.layer_norm_epsilon", "layer_norm_eps")

_QWEN3_MOE = GgufKind(
    architecture="Qwen3MoeForCausalLM",
    sparse="Qwen3MoeForCausalLM",
    entries={**_EVERY_LAYER_SLIDES, "norm_topk_prob": True},
)

_QWEN35 = GgufKind(
    architecture="Qwen3_5ForCausalLM",
    keys=_QWEN_NEXTN,
    names=stored_states.DELTA,
    rotates_in_part=True,
    has_states=True,
)

_RENORMALIZES_IF_TOLD = {"norm_topk_prob": False}
_DEEPSEEK_V2 = GgufKind(
    architecture="DeepseekV2ForCausalLM",
    sparse="DeepseekV2ForCausalLM",
    entries={**_RENORMALIZES_IF_TOLD, "topk_method": "group_limited_greedy"},
    names=stored_latents.NAMES,
    rotates_in_part=True,
    log_unit=0.1,
)

KINDS = {
    "llama": GgufKind(
        architecture="LlamaForCausalLM",
        windowed="MistralForCausalLM",
        sparse="MixtralForCausalLM",
        is_interleaved=True,
    ),
    "qwen2": GgufKind(architecture="Qwen2ForCausalLM", entries=_EVERY_LAYER_SLIDES),
    "qwen3": GgufKind(architecture="Qwen3ForCausalLM", entries=_EVERY_LAYER_SLIDES),
    # Sections of a rotation are for images: text has the same position in all of them.
    "qwen2vl": GgufKind(architecture="Qwen2_5_VLForConditionalGeneration", entries=_EVERY_LAYER_SLIDES),
    "qwen3vl": GgufKind(architecture="Qwen3VLForConditionalGeneration", entries=_EVERY_LAYER_SLIDES),
    "gemma2": GgufKind(
        architecture="Gemma2ForCausalLM",
        keys=_SOFTCAPS,
        window=4096,
        names=_FOUR_NORMS,
        wide_depth=46,
    ),
    "gemma3": GgufKind(architecture="Gemma3ForCausalLM", keys=_SOFTCAPS, names=_FOUR_NORMS, wide_depth=62),
    "gemma4": GgufKind(
        architecture="Gemma4ForCausalLM",
        sparse="Gemma4ForCausalLM",
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        },
        entries={"hidden_size_per_layer_input": 0},
        names={
            **_FOUR_NORMS,
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
    ),
    "mistral3": GgufKind(architecture="Ministral3ForCausalLM", is_interleaved=True),
    "phi3": GgufKind(
        architecture="Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        rotates_in_part=True,
    ),
    "glm4": GgufKind(
        architecture="Glm4ForCausalLM",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        rotates_in_part=True,
    ),
    "smollm3": GgufKind(architecture="SmolLM3ForCausalLM", is_interleaved=True),
    "seed_oss": GgufKind(
        architecture="SeedOssForCausalLM", names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "granite": GgufKind(architecture="GraniteForCausalLM", keys=_GRANITE, is_interleaved=True),
    "olmo2": GgufKind(architecture="Olmo2ForCausalLM", windowed="Olmo3ForCausalLM", names=_POST_NORMS),
    "exaone4": GgufKind(architecture="Exaone4ForCausalLM", names=_POST_NORMS),
    "command-r": GgufKind(architecture="CohereForCausalLM", keys=_LOGIT_SCALE, eps=_LAYER_NORM_EPS),
    "cohere2": GgufKind(architecture="Cohere2ForCausalLM", keys=_LOGIT_SCALE, eps=_LAYER_NORM_EPS),
    "ernie4_5": GgufKind(architecture="Ernie4_5ForCausalLM"),
    "hunyuan-dense": GgufKind(
        architecture="HunYuanDenseV1ForCausalLM",
        names=_HUNYUAN_NORMS,
    ),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "qwen2moe": GgufKind(
        architecture="Qwen2MoeForCausalLM", sparse="Qwen2MoeForCausalLM", entries=_EVERY_LAYER_SLIDES
    ),
    "olmoe": GgufKind(architecture="OlmoeForCausalLM", sparse="OlmoeForCausalLM"),
    "gpt-oss": GgufKind(
        architecture="GptOssForCausalLM",
        sparse="GptOssForCausalLM",
        gating=3,
        names={"post_attention_norm": "post_attention_layernorm"},
        rope={"truncate": False},
    ),
    "granitemoe": GgufKind(
        architecture="GraniteMoeForCausalLM",
        sparse="GraniteMoeForCausalLM",
        keys=_GRANITE,
        is_interleaved=True,
    ),
    "glm4moe": GgufKind(
        architecture="Glm4MoeForCausalLM",
        sparse="Glm4MoeForCausalLM",
        gating=2,
        keys={"nextn_predict_layers": "num_nextn_predict_layers"},
        names={"post_attention_norm": "post_attention_layernorm"},
        rotates_in_part=True,
    ),
    "llama4": GgufKind(
        architecture="Llama4ForConditionalGeneration",
        sparse="Llama4ForConditionalGeneration",
        gating=2,
        keys={
            "expert_feed_forward_length": "intermediate_size",
            "feed_forward_length": "intermediate_size_mlp",
        },
        entries={"layer_types": None},
        names={f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    ),
    "ernie4_5-moe": GgufKind(architecture="Ernie4_5_MoeForCausalLM", sparse="Ernie4_5_MoeForCausalLM"),
    "hunyuan-moe": GgufKind(
        architecture="HunYuanMoEV1ForCausalLM", sparse="HunYuanMoEV1ForCausalLM", names=_HUNYUAN_NORMS
    ),
    "minimax-m2": GgufKind(
        architecture="MiniMaxM2ForCausalLM",
        sparse="MiniMaxM2ForCausalLM",
        gating=2,
        rotates_in_part=True,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(_QWEN35, architecture="Qwen3_5MoeForCausalLM", sparse="Qwen3_5MoeForCausalLM"),
    "qwen3next": replace(_QWEN35, architecture="Qwen3NextForCausalLM", sparse="Qwen3NextForCausalLM"),
    "lfm2": GgufKind(architecture="Lfm2ForCausalLM", names=_LFM2, eps=_LFM2_EPS, has_states=True),
    "lfm2moe": GgufKind(
        architecture="Lfm2MoeForCausalLM",
        sparse="Lfm2MoeForCausalLM",
        gating=2,
        names=_LFM2,
        eps=_LFM2_EPS,
        has_states=True,
    ),
    "granitehybrid": GgufKind(
        architecture="GraniteMoeHybridForCausalLM",
        sparse="GraniteMoeHybridForCausalLM",
        keys=_GRANITE,
        entries={"num_local_experts": 0},
        names=stored_states.mamba_names("mamba"),
        is_interleaved=True,
        has_states=True,
    ),
    "nemotron_h": GgufKind(
        architecture="NemotronHForCausalLM", names=_NEMOTRON, eps=_NEMOTRON_EPS, has_states=True
    ),
    "nemotron_h_moe": GgufKind(
        architecture="NemotronHForCausalLM",
        sparse="NemotronHForCausalLM",
        gating=2,
        keys={"nextn_predict_layers": "num_nextn_predict_layers", "moe_latent_size": "moe_latent_size"},
        names=_NEMOTRON,
        eps=_NEMOTRON_EPS,
        has_states=True,
    ),
    "deepseek2": replace(
        _DEEPSEEK_V2,
        architecture="DeepseekV3ForCausalLM",
        sparse="DeepseekV3ForCausalLM",
        gating=2,
        keys={"nextn_predict_layers": "num_nextn_predict_layers"},
        entries=_RENORMALIZES_IF_TOLD,
        unbiased=_DEEPSEEK_V2,
    ),
    "mistral4": replace(
        _DEEPSEEK_V2,
        architecture="Mistral4ForCausalLM",
        sparse="Mistral4ForCausalLM",
        entries=_RENORMALIZES_IF_TOLD,
    ),
    "mamba2": GgufKind(architecture="Mamba2ForCausalLM", names=_NEMOTRON, eps=_NEMOTRON_EPS, has_states=True),
}
"""By `general.architecture`. Mistral's older models are of the kind llama, OLMo 3 is of olmo2, and Kimi K2 and GLM-4.7
Flash are of deepseek2."""
