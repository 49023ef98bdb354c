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
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from lab.gguf_files import add_entry, model_metadata, tokenizer_metadata

Types = Callable[[str], str]
"""The type of a matrix by ggml's name of it: "blk.0.attn_q.weight"."""
Array = npt.NDArray[Any]
Encode = Callable[[Array, Type], Array]
"""Makes the blocks of a type of a matrix [rows, columns]."""

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
