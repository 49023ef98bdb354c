"""The families of models that are served: one short function each, from config.json to a description.

The sources are the configuration and modeling files of transformers 5; tests compare every family with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.engine.fields import Fields
from penstock.engine.model.families import (
    bamba,
    cohere,
    deepseek,
    ernie,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    internlm,
    lfm2,
    llama,
    llama4,
    mamba,
    minimax,
    mistral,
    nemotron,
    olmo,
    phi,
    qwen,
    qwen3_5,
    seed_oss,
    smollm,
)
from penstock.engine.spec import ModelSpec

_TIED = {"tie_word_embeddings": True}
_COHERE = {**_TIED, "layer_norm_eps": 1e-5}


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one architecture."""

    models: str
    """The well-known models of the architecture."""
    describe: Callable[[Fields], ModelSpec]
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The values of missing entries of a config.json."""


FAMILIES = {
    "LlamaForCausalLM": Family("Llama 2, 3 and their like", llama.llama),
    "DeciLMForCausalLM": Family("Llama Nemotron Super, Ultra", nemotron.decilm),
    "MistralForCausalLM": Family("Mistral 7B, Nemo, Small 3", mistral.mistral),
    "Qwen2ForCausalLM": Family("Qwen 2, 2.5, QwQ", qwen.qwen2),
    "Qwen3ForCausalLM": Family("Qwen 3", qwen.qwen3),
    "MiMoForCausalLM": Family("MiMo 7B", qwen.qwen2),
    "Gemma2ForCausalLM": Family("Gemma 2", gemma.gemma2, gemma.GEMMA2),
    "Gemma3ForCausalLM": Family("Gemma 3 1B", gemma.gemma3, gemma.GEMMA3),
    "Gemma3ForConditionalGeneration": Family("Gemma 3 4B to 27B, text", gemma.gemma3, gemma.GEMMA3),
    "Gemma4ForCausalLM": Family("Gemma 4", gemma4.gemma4, gemma4.GEMMA4),
    "Gemma4ForConditionalGeneration": Family(
        "Gemma 4 E2B, E4B, 31B, 26B-A4B, text", gemma4.gemma4, gemma4.GEMMA4
    ),
    "Gemma4UnifiedForCausalLM": Family("Gemma 4 12B", gemma4.gemma4, gemma4.UNIFIED),
    "Gemma4UnifiedForConditionalGeneration": Family("Gemma 4 12B, text", gemma4.gemma4, gemma4.UNIFIED),
    "Mistral3ForConditionalGeneration": Family("Mistral Small 3.1, Ministral 3, text", mistral.mistral),
    "Ministral3ForCausalLM": Family("Ministral 3", mistral.ministral3),
    "Phi3ForCausalLM": Family("Phi 3, 4, 4 mini", phi.phi3, {"rms_norm_eps": 1e-5}),
    "InternLM2ForCausalLM": Family("InternLM 2, 2.5", internlm.internlm2),
    "Glm4ForCausalLM": Family("GLM-4-0414", glm.glm4, {"head_dim": 128, "rms_norm_eps": 1.5625e-7}),
    "Glm4vForConditionalGeneration": Family("GLM-4.1V, text", glm.glm4, {"rms_norm_eps": 1e-5}),
    "SmolLM3ForCausalLM": Family("SmolLM 3", smollm.smollm3, _TIED),
    "SeedOssForCausalLM": Family("Seed-OSS", seed_oss.seed_oss),
    "GraniteForCausalLM": Family("Granite 3", granite.granite),
    "GraniteMoeHybridForCausalLM": Family("Granite 4, hybrid or attention alone", granite.granite4),
    "GraniteMoeForCausalLM": Family("Granite 3 1B-A400M, 3B-A800M", granite.granite_moe),
    "GraniteMoeSharedForCausalLM": Family("Granite 4 experts, attention alone", granite.granite_moe),
    "Olmo2ForCausalLM": Family("OLMo 2", olmo.olmo2, {"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family("OLMo 3", olmo.olmo3, {"rms_norm_eps": 1e-5}),
    "Exaone4ForCausalLM": Family("EXAONE 4", exaone.exaone4, {"rms_norm_eps": 1e-5}),
    "Exaone4_5_ForConditionalGeneration": Family("EXAONE 4.5, text", exaone.exaone4, {"rms_norm_eps": 1e-5}),
    "CohereForCausalLM": Family("Command R, Aya", cohere.cohere, _COHERE),
    "AyaVisionForConditionalGeneration": Family("Aya Vision, text", cohere.cohere, _COHERE),
    "Cohere2ForCausalLM": Family("Command R7B, Command A", cohere.cohere2, _COHERE),
    "Ernie4_5ForCausalLM": Family("ERNIE 4.5, dense", ernie.ernie4_5, {**_TIED, "rms_norm_eps": 1e-5}),
    "HunYuanDenseV1ForCausalLM": Family("Hunyuan, dense", hunyuan.hunyuan, {"rms_norm_eps": 1e-5}),
    "Qwen3MoeForCausalLM": Family("Qwen 3 30B-A3B, 235B-A22B, Coder", qwen.qwen3_moe),
    "MixtralForCausalLM": Family("Mixtral 8x7B, 8x22B", mistral.mixtral, {"rms_norm_eps": 1e-5}),
    "OlmoeForCausalLM": Family("OLMoE", olmo.olmoe, {"rms_norm_eps": 1e-5}),
    "Qwen2MoeForCausalLM": Family("Qwen 1.5 A2.7B, Qwen 2 57B-A14B", qwen.qwen2_moe),
    "GptOssForCausalLM": Family("gpt-oss 20B, 120B", gpt_oss.gpt_oss, {"rms_norm_eps": 1e-5}),
    "Llama4ForCausalLM": Family("Llama 4, text", llama4.llama4, llama4.LLAMA4),
    "Llama4ForConditionalGeneration": Family("Llama 4 Scout, Maverick, text", llama4.llama4, llama4.LLAMA4),
    "Glm4MoeForCausalLM": Family("GLM-4.5, 4.5 Air, 4.6, 4.7", glm.glm4_moe, {"rms_norm_eps": 1e-5}),
    "DeepseekV2ForCausalLM": Family("DeepSeek V2, V2 Lite", deepseek.deepseek_v2),
    "DeepseekV3ForCausalLM": Family("DeepSeek V3, V3.1, R1", deepseek.deepseek_v3),
    "KimiK2ForCausalLM": Family("Kimi K2", deepseek.deepseek_v3),
    "KimiK25ForConditionalGeneration": Family("Kimi K2.5, K2.6, text", deepseek.deepseek_v3),
    "Glm4MoeLiteForCausalLM": Family("GLM-4.7 Flash", deepseek.glm4_moe_lite, {"rms_norm_eps": 1e-5}),
    "Mistral4ForCausalLM": Family("Mistral Small 4", deepseek.mistral4),
    "MiniMaxM2ForCausalLM": Family("MiniMax M2", minimax.minimax_m2),
    "Ernie4_5_MoeForCausalLM": Family(
        "ERNIE 4.5 21B-A3B, 300B-A47B", ernie.ernie4_5_moe, {**_TIED, "rms_norm_eps": 1e-5}
    ),
    "HunYuanMoEV1ForCausalLM": Family("Hunyuan A13B", hunyuan.hunyuan_moe, {"rms_norm_eps": 1e-5}),
    "Qwen2_5_VLForConditionalGeneration": Family("Qwen 2.5 VL, text", qwen.qwen2),
    "Qwen3VLForConditionalGeneration": Family("Qwen 3 VL, text", qwen.qwen3),
    "Qwen3VLMoeForConditionalGeneration": Family(
        "Qwen 3 VL 30B-A3B, 235B-A22B, text", qwen.qwen3_vl_moe, {"norm_topk_prob": True}
    ),
    "Lfm2VlForConditionalGeneration": Family("LFM2 VL, text", lfm2.lfm2, lfm2.LFM2),
    "Qwen3_5ForCausalLM": Family("Qwen 3.5, 3.6, 3.8, dense", qwen3_5.qwen3_5),
    "Qwen3_5ForConditionalGeneration": Family("Qwen 3.5, 3.6, 3.8, dense, text", qwen3_5.qwen3_5),
    "Qwen3_5MoeForCausalLM": Family("Qwen 3.5 35B-A3B, 122B-A10B", qwen3_5.qwen3_5_moe, qwen3_5.MOE),
    "Qwen3_5MoeForConditionalGeneration": Family(
        "Qwen 3.5 35B-A3B, 122B-A10B, text", qwen3_5.qwen3_5_moe, qwen3_5.MOE
    ),
    "Qwen3NextForCausalLM": Family("Qwen 3 Next 80B-A3B, Coder Next", qwen3_5.qwen3_next),
    "Lfm2ForCausalLM": Family("LFM2, LFM2.5", lfm2.lfm2, lfm2.LFM2),
    "Lfm2MoeForCausalLM": Family("LFM2 8B-A1B", lfm2.lfm2_moe, lfm2.LFM2_MOE),
    "BambaForCausalLM": Family("Bamba", bamba.bamba, {"rms_norm_eps": 1e-5}),
    "NemotronHForCausalLM": Family("Nemotron H, Nemotron 3 Nano", nemotron.nemotron_h, nemotron.NEMOTRON),
    "Mamba2ForCausalLM": Family("Mamba 2, Mamba Codestral", mamba.mamba2, mamba.MAMBA2),
}
"""By the name in a config.json's `architectures`."""

_EXPERTS, _SPARSE = "mixtures of experts", "latent and sparse attention"
_BIASES = "norms with biases"

NOT_YET = {
    "Gemma3nForConditionalGeneration": "its kind of layers",
    "Gemma4AssistantForCausalLM": "it drafts for another model",
    "GlmMoeDsaForCausalLM": _SPARSE,
    "DeepseekV32ForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": _SPARSE,
    "KimiK3ForConditionalGeneration": "latent attention and its kind of states",
    "MiniMaxM3ForCausalLM": "sparse attention",
    "MiniMaxM3SparseForConditionalGeneration": "sparse attention",
    "MiMoV2FlashForCausalLM": "values of another width than keys",
    "Olmo3MoeForCausalLM": _EXPERTS,
    "PhiForCausalLM": _BIASES,
    "NemotronForCausalLM": _BIASES,
    "Qwen2_5OmniForConditionalGeneration": "a text model inside of one for speech",
    "Step3p7FlashForCausalLM": "its kinds of layers",
}
"""Well-known families, and the part of each that is not served yet."""
