"""A GGUF file of random weights with experts, for servers that read no other: a layer's blocks are held at a time.

python -m lab.bench.sparse_gguf FILE --layers 12  # 30 B, of which 3 B work, cut: 4.4 GB
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from lab.bench.format_files import random_blocks
from lab.bench.sparse_files import A3B_30B, SparseShape, as_dense, sparse_config
from lab.demo.gguf_files import add_entry, model_metadata, tokenizer_metadata
from penstock.app.bench.checkpoint import write_all_but_weights

_KIND = "qwen3moe"


_WIDE = ("ffn_gate_inp.weight", "ssm_conv1d.weight")
"""Matrices of 32 bits in every file."""


def write_sparse_gguf(shape: SparseShape, path: Path, type: Type = Type.Q4_0) -> Path:
    """Writes a Qwen 3 MoE: its linear maps in a type, routers and norms in float32."""
    return write_random(path, _KIND, _entries(shape), _tensors(shape), type)


def write_random(
    path: Path,
    kind: str,
    entries: Mapping[str, object],
    tensors: Iterable[tuple[str, tuple[int, ...]]],
    type: Type,
) -> Path:
    """Writes a file of random weights, and returns its path.

    Args:
        kind: general.architecture.
        tensors: names, and the sizes of what they stand for; vectors are 1, or -1 where they say how a state decays.
        type: of matrices.
    """
    writer = gguf.GGUFWriter(path, kind)
    for key, value in entries.items():
        add_entry(writer, key, value)
    blocks: dict[tuple[int, ...], npt.NDArray[Any]] = {}
    for name, size in tensors:
        if len(size) == 1 or name.endswith(_WIDE):
            one = -1.0 if name.endswith("ssm_a") else 1.0
            numbers = (
                np.full(size, one) if len(size) == 1 else np.random.default_rng(0).normal(0.0, 0.02, size)
            )
            writer.add_tensor(name, numbers.astype(np.float32))
            continue
        if size not in blocks:  # layers have the same: speed does not depend on what weights say
            blocks[size] = _random_matrix(size, type)
        writer.add_tensor(name, blocks[size], raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_matrix(size: tuple[int, ...], type: Type) -> npt.NDArray[Any]:
    if type == Type.F16:
        return np.random.default_rng(0).standard_normal(size, np.float32).astype(np.float16) * np.float16(
            0.02
        )
    matrix = np.broadcast_to(np.float32(0), (int(np.prod(size[:-1])), size[-1]))
    return random_blocks(matrix, type).reshape(*size[:-1], -1)


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
