"""Makes checkpoints of every family: tiny, random, and in the very files that Hugging Face ships.

Nothing here uses the engine's own idea of a checkpoint, nor transformers: names and shapes are written out again, and
tests load the result with transformers to prove that it is what it says.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

BOS, EOS, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (BOS, EOS, PAD, *ROLES)
VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}

_FAMILIES: dict[str, dict[str, object]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 32,
        "sliding_window": 24,
        "rope_theta": 10_000.0,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "rope_theta": 1_000_000.0,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 24,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    },
}

Config = dict[str, object]


def make_checkpoint(
    family: str,
    path: Path,
    *,
    seed: int = 0,
    num_shards: int = 1,
    tokenizer: Tokenizer | None = None,
    **overrides: object,
) -> Path:
    """Writes a checkpoint of a family into a directory, and returns the directory.

    Args:
        family: one of FAMILIES.
        num_shards: more than one writes an index file as well.
        tokenizer: `byte_level_tokenizer()` if none is given; its vocabulary must not be larger than the model's.
        overrides: entries of config.json; None leaves an entry out. `dtype` is what the tensors are saved in.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = make_config(family, **overrides)
    _write(path / "config.json", config)
    _write(path / "generation_config.json", {"eos_token_id": [config["eos_token_id"]], "bos_token_id": 0})
    save_tensors(path, random_tensors(config, seed), num_shards)
    write_tokenizer(path, tokenizer or byte_level_tokenizer())
    return path


def make_config(family: str, **overrides: object) -> Config:
    config = {**_COMMON, **_FAMILIES[family], **overrides}
    return {name: value for name, value in config.items() if value is not None}


def random_tensors(config: Config, seed: int) -> dict[str, Tensor]:
    """Weights wide enough that attention looks around and the largest logit leads clearly."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, str(config["dtype"]))
    return {name: _random(name, shape, generator).to(dtype) for name, shape in tensor_shapes(config).items()}


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, vocab = _int(config, "hidden_size"), _int(config, "vocab_size")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(_int(config, "num_hidden_layers")):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def save_tensors(path: Path, tensors: dict[str, Tensor], num_shards: int = 1) -> None:
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        names = list(tensors)[shard::num_shards]
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write(
        path / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map}
    )


def write_tokenizer(path: Path, tokenizer: Tokenizer, **overrides: object) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(path / "tokenizer.json"))
    config: Config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(path / "tokenizer_config.json", {**config, **overrides})


@cache
def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE as Llama 3 and Qwen have it; its post-processor puts BOS first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.post_processor = _bos_first(tokenizer)
    return tokenizer


@cache
def metaspace_tokenizer() -> Tokenizer:
    """SentencePiece-like BPE with byte fallback, as Llama 2 and Mistral have it."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = _metaspace_normalizer()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE + 128,
        special_tokens=[*SPECIAL_TOKENS, "<unk>", *byte_tokens],
        limit_alphabet=64,
        show_progress=False,
    )
    trained.train_from_iterator(training_text(), trainer)
    return _without_special_bytes(trained)


def training_text() -> list[str]:
    """Enough of a language that merges are learnt within words and across bytes of one character."""
    words = [
        "the",
        "river",
        "runs",
        "water",
        "wheel",
        "turns",
        "bright",
        "slow",
        "and",
        "gate",
        "open",
        "light",
    ]
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 9)) for i in range(1, 60)]
    return [*lines, *["naïve café 水車 水門 발전 😀 👩‍👩‍👧 e\u0301", "def run(x):\n    return x + 1\n"] * 4]


def _metaspace_normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _without_special_bytes(trained: Tokenizer) -> Tokenizer:
    """Makes byte tokens ordinary ones: the trainer can add them as special tokens only."""
    content = json.loads(trained.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.post_processor = _bos_first(tokenizer)
    return tokenizer


def _bos_first(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )


def _layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, inner, heads = (
        _int(config, n) for n in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head_dim = _int(config, "head_dim") if "head_dim" in config else hidden // heads
    q, kv = heads * head_dim, _int(config, "num_key_value_heads") * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes | {name.replace("weight", "bias"): shapes[name][:1] for name in _biased(config)}


def _biased(config: Config) -> list[str]:
    names = []
    if config.get("attention_bias") or config["model_type"] == "qwen2":
        names += [f"self_attn.{part}_proj.weight" for part in "qkv"]
    if config.get("attention_bias"):
        names.append("self_attn.o_proj.weight")
    if config.get("mlp_bias"):
        names += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    return names


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed" in name or "lm_head" in name:
        return 0.4 * noise
    return noise * 1.5 / math.sqrt(shape[1])


def _int(config: Config, name: str) -> int:
    value = config[name]
    assert isinstance(value, int)
    return value


def _write(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
