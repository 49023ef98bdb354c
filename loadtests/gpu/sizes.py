"""The shapes of the models that are measured, and how much of each in a full, a quick and a dry run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.app.bench.checkpoint import MOST_TOKENS, Shape, config_of, text_token_ids

MODES = ("full", "quick", "dry")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of every part."""

    mode: str
    scratch: Path
    names: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.mode == "dry" else torch.device("cuda", 0)

    @property
    def is_dry(self) -> bool:
        return self.mode == "dry"


def parse_arguments() -> Arguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    return Arguments(options.mode, options.scratch, tuple(options.names))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(Shape):
    """A decoder's sizes, as they are known."""

    architecture: str = "LlamaForCausalLM"
    head_dim: int
    tied: bool
    quantization: str | None = None
    """The format of its linear maps: "fp8", "int4", or None for bfloat16."""

    @property
    def config(self) -> dict[str, object]:
        """Its config.json."""
        quantized = {} if self.quantization is None else {"quantization_config": self._quantization_config}
        return quantized | {
            **config_of(self),
            "architectures": [self.architecture],
            "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
            "head_dim": self.head_dim,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": self.tied,
        }

    @property
    def _quantization_config(self) -> dict[str, object]:
        """FP8 is as AutoFP8 has it, a scale for a weight; int4 as compressed-tensors does, in groups."""
        if self.quantization == "fp8":
            return {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": 128 if self.hidden % 128 == 0 else 32,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }

    def prefill_flop(self, num_tokens: int) -> float:
        """Counts one prompt: linear maps of all its tokens, causal attention, logits of the last token."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linear = self.hidden * (2 * q + 2 * kv) + 3 * self.hidden * self.intermediate
        attention = q * num_tokens * (num_tokens + 1)
        return 2.0 * (self.num_layers * (linear * num_tokens + attention) + self.hidden * self.vocabulary)


LLAMA_8B = ModelShape(
    name="llama-8b",
    hidden=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    vocabulary=128_256,
    tied=False,
    max_length=65_536,
)
LLAMA_1B = replace(LLAMA_8B, hidden=2048, num_layers=16, head_dim=64, intermediate=8192, tied=True)
QWEN3_06B = ModelShape(
    name="qwen3-0.6b",
    architecture="Qwen3ForCausalLM",
    hidden=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate=3072,
    vocabulary=151_936,
    tied=True,
    max_length=40_960,
)


def latent_config(mode: str) -> dict[str, object]:
    """A config.json of DeepSeek V3's attention, without its experts."""
    is_dry = mode == "dry"
    hidden, num_layers, num_heads, latent, rotated = (
        (64, 2, 4, 48, 16) if is_dry else (7168, 61, 128, 512, 64)
    )
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "q_lora_rank": 3 * latent,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": 2 * rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": 2 * rotated,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    }


def _small(shape: ModelShape, head_dim: int) -> ModelShape:
    """Shrinks a model to what a CPU wants, in its own architecture."""
    return replace(
        shape, hidden=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=head_dim, intermediate=96,
        vocabulary=MOST_TOKENS + 64, max_length=1024,
    )  # fmt: skip


TEXT_TOKENS = text_token_ids(QWEN3_06B.config)
"""Tokens that are text in every checkpoint here, for prompts."""

_HEAD_LAYERS = 8
"""Of so many layers, a head that does not say which it reads can read three."""

LLAMA_SMALL, QWEN3_SMALL = _small(LLAMA_8B, 16), _small(QWEN3_06B, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSizes:
    """The sizes of the part `kernels`."""

    copied_bytes: int = 4 << 30
    matmul: int = 8192
    """Rows, columns and depth."""
    decode: tuple[tuple[int, int], ...] = (
        (1, 1024), (1, 8192), (1, 32_768), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 1024),
    )  # fmt: skip
    """(sequences, tokens of context of each)"""
    slope: tuple[int, ...] = (2048, 8192, 16_384, 32_768)
    prefill: tuple[tuple[int, int], ...] = ((2048, 2048), (8192, 8192), (4096, 32_768))
    """(tokens of a chunk, tokens of its context)"""
    norm_rows: int = 8192
    quantized_rows: tuple[int, ...] = (1, 4, 16, 64, 256, 2048)
    few_rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    """On the one side of the boundaries between kernels, or the other."""
    many_rows: tuple[int, ...] = (64, 128, 256, 512, 1024)
    sampler_rows: tuple[int, ...] = (1, 64, 256)
    walked_bytes: int = 1 << 30
    """Read in turn by what is to come from memory and not from a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSizes:
    """The sizes of a part that serves a model."""

    tpot_tokens: int = 512
    contexts: tuple[int, ...] = ()
    """Prompt tokens at which the slope of a step is taken."""
    slope_tokens: int = 128
    prefill_tokens: int = 0
    rounds: int = 3
    requests: tuple[int, int, int] | None = None
    """The requests at once, and the prompt tokens and output tokens of each."""
    host_streams: int = 64
    """0: the engine alone is not measured."""
    host_tokens: int = 256
    clients: int = 0
    client_tokens: int = 512
    max_batch_tokens: int = 8192
    max_num_seqs: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """The sizes of the part `drafts`."""

    streams: tuple[int, ...] = (1, 8, 32)
    length: int = 4
    """Drafts of each stream in every step."""
    rightness: float = 0.8
    """The share of drafts that are right, of those after right ones."""
    num_tokens: int = 256
    """The length of each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedModel:
    """A model and what drafts for it."""

    name: str
    drafter: str
    """In words."""
    config: dict[str, object]
    draft: dict[str, object] | None
    """The config.json of what drafts; None for a layer of the model's own."""
    reads_model: bool = True
    """Whether it drafts from the model's hidden states, which the model then keeps in every step."""


KERNELS = {
    "full": KernelSizes(),
    "quick": KernelSizes(
        decode=((1, 8192), (64, 1024)), slope=(2048, 16_384), quantized_rows=(1, 64, 2048), sampler_rows=(64,)
    ),
    "dry": KernelSizes(
        copied_bytes=1 << 20,
        matmul=64,
        decode=((1, 32), (2, 64)),
        slope=(32, 64),
        prefill=((32, 32), (16, 64)),
        norm_rows=16,
        quantized_rows=(1, 4),
        few_rows=(1, 2),
        many_rows=(2, 4),
        sampler_rows=(2,),
        walked_bytes=1 << 16,
    ),
}

_LLAMA = ServingSizes(contexts=(1024, 8192, 16_384, 32_768), prefill_tokens=8192)
_QWEN3 = ServingSizes(requests=(500, 512, 128), clients=256, max_num_seqs=512)
_SMALL = ServingSizes(
    tpot_tokens=32, rounds=1, host_streams=4, client_tokens=24, max_batch_tokens=128, max_num_seqs=16
)  # fmt: skip


def speculation(mode: str) -> tuple[tuple[DraftedModel, ...], DraftSizes]:
    """Models with what drafts for them, one after another, and how much of them in a run of this mode."""
    target, draft, sizes = LLAMA_8B, LLAMA_1B, DraftSizes()
    if mode == "dry":
        target, draft = replace(LLAMA_SMALL, num_layers=_HEAD_LAYERS), replace(LLAMA_SMALL, num_layers=1)
        sizes = DraftSizes(streams=(1, 3), num_tokens=40)
    elif mode == "quick":
        sizes = replace(sizes, num_tokens=128)
    llama = DraftedModel(
        name="llama-8b",
        drafter="a draft model",
        config=target.config,
        draft=draft.config,
        reads_model=False,
    )
    head = replace(llama, drafter="an EAGLE-3 head", draft=_head_of(target), reads_model=True)
    own = DraftedModel(name="qwen3.5-8b", drafter="its own layer", config=_with_own_layer(target), draft=None)
    return (llama, head, own), sizes


def _head_of(target: ModelShape) -> dict[str, object]:
    """An EAGLE-3 head like those of Llama 3.1 8B: as wide as its target, with logits of a quarter of the tokens."""
    return {
        **replace(target, num_layers=1).config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": target.vocabulary // 4,
    }


def _with_own_layer(shape: ModelShape) -> dict[str, object]:
    """A Qwen 3.5 of these sizes, with plain attention in all layers, and its layer of multi-token prediction."""
    return {
        **shape.config,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "full_attention_interval": 1,
        "attn_output_gate": False,
        "mtp_num_hidden_layers": 1,
    }


def serving(name: str, mode: str) -> tuple[ModelShape, ServingSizes]:
    """Returns the shape and sizes of a model in a run of this mode; of "llama-8b-int4", one stream is measured."""
    if name.startswith("llama-8b-"):
        shape, sizes = serving("llama-8b", mode)
        quantized = replace(shape, quantization=name.removeprefix("llama-8b-"))
        return quantized, replace(sizes, contexts=(), prefill_tokens=0, host_streams=0, max_num_seqs=16)
    if name == "llama-8b":
        if mode == "dry":
            return LLAMA_SMALL, replace(
                _SMALL, contexts=(32, 128), slope_tokens=24, prefill_tokens=128, host_streams=0
            )
        quick = replace(_LLAMA, tpot_tokens=128, contexts=(1024, 16_384), slope_tokens=64, rounds=1)
        return LLAMA_8B, quick if mode == "quick" else _LLAMA
    if mode == "dry":
        return QWEN3_SMALL, replace(_SMALL, requests=(8, 32, 8), clients=8)
    quick = replace(_QWEN3, tpot_tokens=256, client_tokens=256, rounds=1)
    return QWEN3_06B, quick if mode == "quick" else _QWEN3
