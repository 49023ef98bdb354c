"""Checkpoints of random weights in formats that people have, for this server and for others.

python -m lab.bench.checkpoints 30b-a3b DIR               # 30 B in 4 bits, of which 3 B work: 17 GB
python -m lab.bench.checkpoints 30b-a3b FILE.gguf --layers 12 --type Q4_0
python -m lab.bench.checkpoints qwen3.5-0.8b FILE.gguf    # layers with a state, in Q8_0: 0.8 GB
python -m lab.bench.checkpoints demo-256k FILE.gguf       # the demo model's widths and 262,144 positions: 37 MB in F16
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from lab.bench.random_states import QWEN_08B
from lab.gguf_files import add_entry, model_metadata, tokenizer_metadata
from penstock.app.bench.checkpoint import (
    Shape,
    config_of,
    ensure_checkpoint,
    ensure_folder,
    write_all_but_weights,
    write_checkpoint,
)
from penstock.engine.model.parse import read_config
from penstock.engine.model.tensors import expected_shapes

_GROUP_SIZES = (128, 64)
"""For 4 bits; the first that divides the inputs is taken."""
_HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_K": (0, 2)}
"""Where the blocks of a type have float16 numbers."""
_SCALE = 1e-3
_KINDS = {"qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35"}
"""By a config.json's model_type, general.architecture where it is another name."""
_WIDE = ("ffn_gate_inp.weight", "ssm_conv1d.weight")
"""Matrices of 32 bits in every file."""

Config = dict[str, Any]


def w4a16(group_size: int) -> Config:
    """The quantization_config of compressed-tensors' 4 bits, symmetric, in groups."""
    return _compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
    )


def _w8a8(_: int) -> Config:
    """Compressed-tensors' 8 bits, with a scale for each row."""
    return _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"})


def _gptq(group_size: int) -> Config:
    """GPTQ's 4 bits, symmetric, its groups in order."""
    return {"quant_method": "gptq", "bits": 4, "group_size": group_size, "sym": True, "desc_act": False}


def _compressed(format: str, weights: Config) -> Config:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


A3B_30B: Config = {
    **config_of(Shape("30b-a3b", 2048, 48, 32, 4, 6144, 151_936, max_length=8192)),
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""The shape of Qwen3-30B-A3B."""
DEMO_256K: Config = {
    **config_of(Shape("demo-256k", 256, 4, 4, 2, 640, 16_384, max_length=262_144)),
    "rope_theta": 1e7,
}
"""The widths of the demo model, which has 2,048 positions, and a larger vocabulary."""
MODELS: dict[str, Config] = {
    "demo-256k": DEMO_256K,
    "30b-a3b": A3B_30B | {"quantization_config": w4a16(128)},
    "qwen3.5-0.8b": {
        **QWEN_08B,
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "tie_word_embeddings": True,
    },
}


def write_gguf(config: Config, path: Path, type: Type) -> None:
    """Writes a GGUF file of random weights: its matrices have the type, routers and vectors are in float32."""
    kind = _KINDS.get(config["model_type"]) or str(config["model_type"])
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    writer = gguf.GGUFWriter(path, kind)
    with tempfile.TemporaryDirectory() as folder:
        write_all_but_weights(plain, Path(folder))
        own = {**plain, "model_type": kind}
        entries = {
            **model_metadata(own),
            **tokenizer_metadata(Path(folder), "gpt-2"),
            **_entries(kind, plain),
        }
        shapes = expected_shapes(read_config(Path(folder)))
    del entries["general.architecture"]  # which the writer has written
    for key, value in entries.items():
        add_entry(writer, key, value)
    blocks: dict[tuple[int, ...], npt.NDArray[Any]] = {}
    for name, size in _ggml_shapes(kind, config["num_hidden_layers"], shapes):
        if len(size) == 1 or name.endswith(_WIDE):
            writer.add_tensor(name, _floats(name, size))
            continue
        if size not in blocks:  # layers have the same: speed does not depend on what weights say
            blocks[size] = random_blocks(size, type)
        writer.add_tensor(name, blocks[size], raw_dtype=_type(size, type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _entries(kind: str, config: Config) -> Config:
    """The entries of experts and of layers with a state."""
    found: Config = {}
    if "num_experts" in config:
        found |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if (values := config.get("linear_num_value_heads")) is not None:
        found |= {
            "rope.dimension_count": config["head_dim"] // 4,
            "rope.dimension_sections": [11, 11, 10, 0],  # text has the same position in all of them
            "full_attention_interval": 4,
            "ssm.conv_kernel": 4,
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": values,
            "ssm.inner_size": values * config["linear_value_head_dim"],
        }
    return {f"{kind}.{key}": value for key, value in found.items()}


def _ggml_shapes(
    kind: str, num_layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """ggml's names and sizes of tensors; the experts of a layer are one."""
    architecture = next(found for found, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, num_layers)
    experts: dict[str, int] = {}
    sizes = dict[str, tuple[int, ...]]()
    for name, size in shapes.items():
        stack = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        experts[stack] = experts.get(stack, 0) + (stack != name)
        sizes[stack] = size
    for name, size in sizes.items():
        found = names.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        assert found is not None, name
        yield found, (experts[name], *size) if experts[name] else size


def _floats(name: str, size: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Vectors are 1, or -1 where they say how a state decays."""
    if len(size) == 1:
        return np.full(size, -1.0 if name.endswith("ssm_a") else 1.0, np.float32)
    return np.random.default_rng(0).normal(0.0, 0.02, size).astype(np.float32)


def _type(size: tuple[int, ...], type: Type) -> Type:
    """As llama.cpp has it: Q5_0 stands in for Q4_K in rows that blocks of 256 do not divide."""
    return Type.Q5_0 if type == Type.Q4_K and size[-1] % 256 else type


def random_blocks(size: tuple[int, ...], wanted: Type) -> npt.NDArray[Any]:
    """[..., bytes of a row]"""
    type, rng = _type(size, wanted), np.random.default_rng(0)
    if type == Type.F16:
        return (rng.standard_normal(size, np.float32) * 0.02).astype(np.float16)
    block, num_bytes = gguf.GGML_QUANT_SIZES[type]
    blocks = rng.integers(0, 256, (int(np.prod(size)) // block, num_bytes), np.uint8)
    for start in _HALVES[type.name]:
        blocks[:, start : start + 2] = np.array([_SCALE], np.float16).view(np.uint8)
    return blocks.reshape(*size[:-1], -1)


def _ensure(format: str, shape: Shape, root: Path | None) -> Path:
    config = config_of(shape)
    if format in Type.__members__:

        def write(folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            write_gguf(config, folder / "model.gguf", Type[format])

        return ensure_folder(f"{shape.name}-{format}", write, root) / "model.gguf"
    inputs = (shape.hidden, shape.intermediate)
    group_size = next(size for size in _GROUP_SIZES if all(columns % size == 0 for columns in inputs))
    quantized = config | {"quantization_config": _QUANTIZED[format](group_size)}
    name = f"{shape.name}-{format.lower()}"
    return ensure_folder(name, lambda folder: write_checkpoint(quantized, folder), root)


_QUANTIZED: dict[str, Callable[[int], Config]] = {"GPTQ": _gptq, "W4A16": w4a16, "W8A8": _w8a8}
MAKERS: dict[str, Callable[[Shape, Path | None], Path]] = {
    "dense": ensure_checkpoint,
    **{format: partial(_ensure, format) for format in ("Q8_0", "Q4_0", "Q4_K", *_QUANTIZED)},
}
"""(shape, cache folder) -> the path of a checkpoint, by the name of its format."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("path", type=Path, help="a folder, or a file that ends in .gguf")
    parser.add_argument("--layers", type=int, help="as many of them alone")
    parser.add_argument("--type", choices=("Q8_0", "Q4_0", "F16"), default="Q8_0", help="of a GGUF file")
    options = parser.parse_args()
    config = dict(MODELS[options.model])
    if options.layers is not None:
        config["num_hidden_layers"] = options.layers
    if options.path.suffix == ".gguf":
        write_gguf(config, options.path, Type[options.type])
    else:
        write_checkpoint(config, options.path)


if __name__ == "__main__":
    main()
