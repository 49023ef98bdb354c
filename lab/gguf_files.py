"""Writes the checkpoints of a directory as GGUF files, as llama.cpp's convert_hf_to_gguf does.

Nothing here uses the engine's own idea of a GGUF file: names and orders are written out again, the container is written
by the `gguf` library, and tests read the files with it and with transformers to prove that they are what they say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

Types = Callable[[str], str]
"""The type of a matrix by ggml's name of it: "blk.0.attn_q.weight"."""
Array = npt.NDArray[Any]
Encode = Callable[[Array, Type], Array]
"""Makes the blocks of a type of a matrix [rows, columns]."""

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

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


def same(type: str) -> Types:
    """All matrices have this type."""
    return lambda _: type


FLOAT32 = same("F32")


def write_gguf(
    folder: Path,
    path: Path,
    types: Types = FLOAT32,
    *,
    encode: Encode,
    num_parts: int = 1,
    pre: str = "gpt-2",
    **metadata: Any,
) -> Path:
    """Writes a checkpoint's directory as a GGUF file, and returns it: the first one, if there are several parts.

    Args:
        types: norms and biases are F32 whatever it says.
        encode: makes blocks of a matrix.
        pre: tokenizer.ggml.pre, if the tokenizer has bytes.
        metadata: entries beside or instead of those of the checkpoint, with __ for dots; None leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: tensor
        for part in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(part).items()
    }
    entries = {**model_metadata(config), **tokenizer_metadata(folder, pre)}
    entries |= {name.replace("__", "."): value for name, value in metadata.items()}
    arrays = {ggml_name(name): as_ggml(name, tensor.float(), config) for name, tensor in tensors.items()}
    factors = rope_factors(config)
    arrays |= {} if factors is None else {"rope_freqs.weight": factors}
    names = list(arrays)
    stem = path.stem
    for part in range(num_parts):
        if num_parts > 1:
            entries |= {"split.no": part, "split.count": num_parts}
            path = path.with_name(f"{stem}-{part + 1:05}-of-{num_parts:05}.gguf")
        own = {name: arrays[name] for name in names[part::num_parts]}
        write_file(path, entries if part == 0 else {**_split(entries)}, own, types, encode)
    return path.with_name(f"{stem}-00001-of-{num_parts:05}.gguf") if num_parts > 1 else path


def write_file(
    path: Path, entries: dict[str, object], arrays: dict[str, Array], types: Types, encode: Encode
) -> None:
    writer = gguf.GGUFWriter(path, str(entries.get("general.architecture", "llama")))
    for key, value in entries.items():
        if key != "general.architecture" and value is not None:
            add_entry(writer, key, value)
    for name, array in arrays.items():
        type = Type[types(name)] if array.ndim > 1 else Type.F32
        writer.add_tensor(name, encode(array, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ggml_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def as_ggml(name: str, tensor: Tensor, config: dict[str, Any]) -> Array:
    """A tensor in the order of ggml: the rows of llama's queries and keys are permuted."""
    array: Array = tensor.numpy()
    if config["model_type"] not in ("llama", "mistral"):
        return array
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
        name.split(".")[-2]
    )
    if heads is None:
        return array
    halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


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


def rope_factors(config: dict[str, Any]) -> Array | None:
    """Returns Llama 3.1's scaling as convert_hf_to_gguf writes it: a factor for each frequency."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / (config["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high, old = (
        scaling[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for frequency in frequencies.tolist():
        wavelength = 2 * np.pi / frequency
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(scaling["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def _split(entries: dict[str, object]) -> dict[str, object]:
    """Returns the entries that the later parts of a model repeat."""
    return {key: value for key, value in entries.items() if key.startswith(("split.", "general."))}


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
