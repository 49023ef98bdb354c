"""A GGUF file of random weights with experts, for servers that read no other: a layer's blocks are held at a time.

python -m lab.bench.sparse_gguf FILE --layers 12  # 30 B, of which 3 B work, cut: 4.4 GB
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from app.bench.checkpoint import write_all_but_weights
from lab.bench.format_files import random_blocks
from lab.bench.sparse_files import A3B_30B, SparseShape, as_dense, sparse_config
from lab.demo.gguf_files import add_entry, model_metadata, tokenizer_metadata

_KIND = "qwen3moe"


def write_sparse_gguf(shape: SparseShape, path: Path, type: Type = Type.Q4_0) -> Path:
    """Writes a Qwen 3 MoE: its linear maps in a type, routers and norms in float32."""
    writer = gguf.GGUFWriter(path, _KIND)
    for key, value in _entries(shape).items():
        add_entry(writer, key, value)
    blocks: dict[tuple[int, ...], npt.NDArray[np.uint8]] = {}
    for name, size in _tensors(shape):
        if len(size) == 1 or name.endswith("ffn_gate_inp.weight"):
            numbers = np.ones(size) if len(size) == 1 else np.random.default_rng(0).normal(0.0, 0.02, size)
            writer.add_tensor(name, numbers.astype(np.float32))
            continue
        if size not in blocks:  # layers have the same: speed does not depend on what weights say
            matrix = np.broadcast_to(np.float32(0), (int(np.prod(size[:-1])), size[-1]))
            blocks[size] = random_blocks(matrix, type).reshape(*size[:-1], -1)
        writer.add_tensor(name, blocks[size], raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _entries(shape: SparseShape) -> dict[str, object]:
    config = {**sparse_config(shape), "model_type": _KIND}
    with tempfile.TemporaryDirectory() as folder:
        write_all_but_weights(as_dense(shape), config, Path(folder))
        entries = {**model_metadata(config), **tokenizer_metadata(Path(folder), "gpt-2")}
    del entries["general.architecture"]
    return entries | {
        f"{_KIND}.expert_count": shape.num_experts,
        f"{_KIND}.expert_used_count": shape.top_k,
        f"{_KIND}.expert_feed_forward_length": shape.inner,
    }


def _tensors(shape: SparseShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, and the sizes of what they stand for."""
    hidden, q_size, kv_size = (
        shape.hidden,
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
    )
    yield "token_embd.weight", (shape.vocabulary, hidden)
    yield "output.weight", (shape.vocabulary, hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(shape.num_layers):
        sizes: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q_norm": (shape.head_dim,),
            "attn_k_norm": (shape.head_dim,),
            "attn_q": (q_size, hidden),
            "attn_k": (kv_size, hidden),
            "attn_v": (kv_size, hidden),
            "attn_output": (hidden, q_size),
            "ffn_gate_inp": (shape.num_experts, hidden),
            "ffn_gate_exps": (shape.num_experts, shape.inner, hidden),
            "ffn_up_exps": (shape.num_experts, shape.inner, hidden),
            "ffn_down_exps": (shape.num_experts, hidden, shape.inner),
        }
        for name, size in sizes.items():
            yield f"blk.{layer}.{name}.weight", size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=A3B_30B.num_layers)
    options = parser.parse_args()
    write_sparse_gguf(replace(A3B_30B, num_layers=options.layers), options.file)


if __name__ == "__main__":
    main()
