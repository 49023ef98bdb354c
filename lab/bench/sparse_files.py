"""Checkpoints of random weights with experts in 4 bits, written in shards, of which one tensor at a time is held.

python -m lab.bench.sparse_files DIR              # 30 B, of which 3 B work: 17 GB
python -m lab.bench.sparse_files DIR --layers 12  # the same, cut
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lab.bench.format_files import SCALE, random_words, w4a16_config
from penstock.app.bench.checkpoint import Shape, config_of, write_all_but_weights
from penstock.engine.model.safetensors import INDEX
from penstock.engine.model.tensor_writer import TensorWriter

GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class SparseShape:
    """The sizes of a Qwen 3 MoE."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    inner: int
    """Of one expert."""
    vocabulary: int
    max_length: int = 8192


A3B_30B = SparseShape("30b-a3b", 2048, 48, 32, 4, 128, 128, 8, 768, 151_936)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor to be written."""

    size: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    says: tuple[int, ...] = ()
    """Its numbers, if they are not random."""


def write_sparse(shape: SparseShape, folder: Path) -> Path:
    """Writes a checkpoint of compressed-tensors' W4A16, a shard for each layer, and one for what is outside."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = [_outside(shape), *(dict(_layer(shape, number)) for number in range(shape.num_layers))]
    files = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for file, tensors in zip(files, shards, strict=True):
        announced = {name: (stored.size, stored.dtype) for name, stored in tensors.items()}
        with TensorWriter(folder / file, announced) as writer:
            for name, stored in tensors.items():
                writer.write(name, _random(name, stored))
    weight_map = {name: file for file, tensors in zip(files, shards, strict=True) for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    write_all_but_weights(as_dense(shape), sparse_config(shape), folder)
    return folder


def sparse_config(shape: SparseShape) -> dict[str, object]:
    quantization = w4a16_config(GROUP_SIZE)
    return {
        **config_of(as_dense(shape)),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "quantization_config": {**quantization, "ignore": ["lm_head", "re:.*mlp.gate$"]},
    }


def as_dense(shape: SparseShape) -> Shape:
    inner = shape.top_k * shape.inner
    sizes = (shape.hidden, shape.num_layers, shape.num_heads, shape.num_kv_heads, inner, shape.vocabulary)
    return Shape(shape.name, *sizes, shape.max_length)


def _outside(shape: SparseShape) -> dict[str, Stored]:
    table, norm = Stored((shape.vocabulary, shape.hidden)), Stored((shape.hidden,))
    return {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": norm}


def _layer(shape: SparseShape, number: int) -> Iterator[tuple[str, Stored]]:
    prefix, hidden = f"model.layers.{number}.", shape.hidden
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {f"self_attn.{name}_norm": shape.head_dim for name in ("q", "k")}
    for name, size in norms.items():
        yield f"{prefix}{name}.weight", Stored((size,))
    yield f"{prefix}mlp.gate.weight", Stored((shape.num_experts, hidden))
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    for name, count in rows.items():
        yield from _quantized(f"{prefix}self_attn.{name}", count, hidden)
    yield from _quantized(f"{prefix}self_attn.o_proj", hidden, q_size)
    for expert in range(shape.num_experts):
        for name in ("gate_proj", "up_proj"):
            yield from _quantized(f"{prefix}mlp.experts.{expert}.{name}", shape.inner, hidden)
        yield from _quantized(f"{prefix}mlp.experts.{expert}.down_proj", hidden, shape.inner)


def _quantized(name: str, rows: int, columns: int) -> Iterator[tuple[str, Stored]]:
    yield f"{name}.weight_packed", Stored((rows, columns // 8), torch.int32)
    yield f"{name}.weight_scale", Stored((rows, columns // GROUP_SIZE))
    yield f"{name}.weight_shape", Stored((2,), torch.int64, (rows, columns))


def _random(name: str, stored: Stored) -> Tensor:
    size, dtype = stored.size, stored.dtype
    if stored.says:
        return torch.tensor(stored.says)
    if dtype == torch.int32:
        return random_words(*size)
    if name.endswith("_scale"):
        return torch.full(size, SCALE, dtype=dtype)
    return (
        torch.ones(size, dtype=dtype) if len(size) == 1 else torch.empty(size, dtype=dtype).normal_(0.0, 0.02)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=A3B_30B.num_layers)
    options = parser.parse_args()
    write_sparse(replace(A3B_30B, num_layers=options.layers), options.folder)


if __name__ == "__main__":
    main()
