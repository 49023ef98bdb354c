"""The metadata of a model and of its tokenizer in a GGUF file, as llama.cpp's convert_hf_to_gguf writes them.

Nothing here uses the engine's own idea of a GGUF file: tests read the entries with transformers, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import tokenizers

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6

_PARAMETERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.freq_base": "rope_theta",
}


def model_metadata(config: dict[str, Any]) -> dict[str, object]:
    kind = "llama" if config["model_type"] == "mistral" else config["model_type"]
    rope = config.get("rope_parameters") or {}
    known = {"head_dim": config["hidden_size"] // config["num_attention_heads"], **config}
    known["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    entries: dict[str, object] = {"general.architecture": kind}
    entries |= {f"{kind}.{key}": known[name] for key, name in _PARAMETERS.items()}
    if config.get("sliding_window") and config["model_type"] == "mistral":
        entries[f"{kind}.attention.sliding_window"] = config["sliding_window"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        entries |= {f"{kind}.rope.scaling.type": "linear", f"{kind}.rope.scaling.factor": scaling["factor"]}
    return {**entries, f"{kind}.rope.dimension_count": known["head_dim"]}


def tokenizer_metadata(folder: Path, pre: str | None) -> dict[str, object]:
    """Returns the entries of a directory's tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [str(made.id_to_token(i)) for i in range(made.get_vocab_size())]
    num_rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    padding = [f"[PAD{i}]" for i in range(len(texts), num_rows)]
    special = {token["content"] for token in content["added_tokens"]}
    unknown = content["model"].get("unk_token")
    types = [
        UNKNOWN if text == unknown else CONTROL if text in special else BYTE if _is_byte(text) else NORMAL
        for text in texts
    ] + [UNUSED] * len(padding)
    texts += padding
    merges = [
        tuple(merge) if isinstance(merge, list) else tuple(merge.split(" "))
        for merge in content["model"]["merges"]
    ]
    entries: dict[str, object] = {
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": config["chat_template"],
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if f"{name}_token" in config:
            entries[f"tokenizer.ggml.{key}_token_id"] = made.token_to_id(config[f"{name}_token"])
    if not content["model"]["byte_fallback"]:
        return entries | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        }
    ranks = {left + right: float(-rank) for rank, (left, right) in enumerate(merges, 1)}
    return entries | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [ranks.get(text, -1e6) for text in texts],
    }


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x")


def add_entry(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Adds an entry by the type of its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise TypeError(f"{key} is {value!r}")
