"""A GGUF file of random weights whose layers have a state, for other servers that read it, too.

python -m lab.bench.state_gguf FILE              # the shape of Qwen 3.5 0.8B in Q8_0: 0.8 GB
python -m lab.bench.state_gguf FILE --type F16
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from lab.bench.random_states import QWEN_08B
from lab.bench.sparse_gguf import write_random
from lab.demo.gguf_files import model_metadata, tokenizer_metadata
from penstock.app.bench.checkpoint import Shape, write_all_but_weights

_KIND = "qwen35"
_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
"""The entries of a config.json that a `Shape` has, in its order."""
_ROPE_SECTIONS = (11, 11, 10, 0)
"""Text has the same position in all of them."""


def write_state_gguf(config: dict[str, object], path: Path, type: Type = Type.Q8_0) -> Path:
    """Writes a Qwen 3.5 of a config.json's entries, with a tied output head: matrices in a type, the rest in float32.

    Value heads lie by tiles in such files, with one of each key head; of random weights any order is one.
    """
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    return write_random(path, _KIND, _entries(config, sizes), _tensors(sizes), type)


def _entries(config: dict[str, object], sizes: dict[str, int]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        own = {**config, "model_type": _KIND}
        write_all_but_weights(Shape(_KIND, *(sizes[name] for name in _SHAPE)), own, Path(folder))
        entries = {**model_metadata(own), **tokenizer_metadata(Path(folder), "gpt-2")}
    del entries["general.architecture"]
    values = sizes["linear_num_value_heads"]
    return entries | {
        f"{_KIND}.rope.dimension_count": sizes["head_dim"] // 4,
        f"{_KIND}.rope.dimension_sections": list(_ROPE_SECTIONS),
        f"{_KIND}.full_attention_interval": 4,
        f"{_KIND}.ssm.conv_kernel": 4,
        f"{_KIND}.ssm.state_size": sizes["linear_key_head_dim"],
        f"{_KIND}.ssm.group_count": sizes["linear_num_key_heads"],
        f"{_KIND}.ssm.time_step_rank": values,
        f"{_KIND}.ssm.inner_size": values * sizes["linear_value_head_dim"],
    }


def _tensors(sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, and the sizes of what they stand for."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    yield "token_embd.weight", (sizes["vocab_size"], hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(sizes["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "post_attention_norm.weight": (hidden,),
            "ffn_gate.weight": (inner, hidden),
            "ffn_up.weight": (inner, hidden),
            "ffn_down.weight": (hidden, inner),
            **(_attention(sizes) if layer % 4 == 3 else _delta(sizes)),
        }
        for name, size in own.items():
            yield f"blk.{layer}.{name}", size


def _attention(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, width = sizes["hidden_size"], sizes["head_dim"]
    q_size, kv_size = sizes["num_attention_heads"] * width, sizes["num_key_value_heads"] * width
    return {
        "attn_q.weight": (2 * q_size, hidden),  # and a gate for each
        "attn_k.weight": (kv_size, hidden),
        "attn_v.weight": (kv_size, hidden),
        "attn_output.weight": (hidden, q_size),
        "attn_q_norm.weight": (width,),
        "attn_k_norm.weight": (width,),
    }


def _delta(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, heads, width = (
        sizes["hidden_size"],
        sizes["linear_num_value_heads"],
        sizes["linear_value_head_dim"],
    )
    channels = 2 * sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"] + heads * width
    return {
        "attn_qkv.weight": (channels, hidden),
        "attn_gate.weight": (heads * width, hidden),
        "ssm_beta.weight": (heads, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_conv1d.weight": (channels, 4),
        "ssm_a": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_norm.weight": (width,),
        "ssm_out.weight": (hidden, heads * width),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=("Q8_0", "Q4_0", "F16"), default="Q8_0")
    options = parser.parse_args()
    config = {**QWEN_08B, "num_hidden_layers": 24, "vocab_size": 248_320}
    write_state_gguf(config, options.file, Type[options.type])


if __name__ == "__main__":
    main()
