"""Checkpoints of random weights are whole, and the engine takes them as they were meant."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from lab.bench import checkpoints
from lab.bench.checkpoints import MODELS, write_gguf
from penstock.engine.config import LoadOptions
from penstock.engine.fields import Fields
from penstock.engine.model.checkpoint import read_config, read_tokenizer
from penstock.engine.model.files import open_files
from penstock.engine.model.parse import parse_config
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import check_tensors, expected_tensors, layer_specs, make_recipe
from penstock.engine.quant.integers import Integers
from penstock.engine.spec import Attention, Experts, GatedDelta

_CUT = {"vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = MODELS["30b-a3b"] | _CUT | {
    "num_hidden_layers": 2, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
}  # fmt: skip
STATES = MODELS["qwen3.5-0.8b"] | _CUT | {
    "num_hidden_layers": 4, "head_dim": 32, "intermediate_size": 96, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip


def test_the_command_writes_a_checkpoint_of_the_format_in_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "30b-a3b", EXPERTS)
    monkeypatch.setattr(sys, "argv", ["checkpoints", "30b-a3b", str(tmp_path), "--layers", "1"])
    checkpoints.main()
    config, files = read_config(tmp_path), open_files(tmp_path)
    recipe = make_recipe(config, LoadOptions(device="cpu"), files)
    check_tensors(config, files, recipe)
    assert files.read("model.layers.0.mlp.experts.3.down_proj.weight_shape").tolist() == [128, 128]
    formats = [spec.format for spec in layer_specs(config, recipe)]
    assert sum(isinstance(format, Integers) and format.bits == 4 for format in formats) == 2 + 2 * 4
    assert read_tokenizer(tmp_path).encode("a b")


def test_the_large_one_is_of_17_gigabytes() -> None:
    config = parse_config(Fields("", MODELS["30b-a3b"]))
    tensors = expected_tensors(config, make_recipe(config, LoadOptions(device="cpu")))
    bytes_of = {"BF16": 2, "I32": 4, "I64": 8}
    sizes = (
        math.prod(tensor.known_shape) * next(size for name, size in bytes_of.items() if name in tensor.dtypes)
        for _, tensor in tensors
    )
    assert 16e9 < sum(sizes) < 17.5e9


@pytest.mark.parametrize("type", [Type.Q8_0, Type.Q4_0, Type.F16])
def test_a_gguf_file_has_all_tensors_of_its_experts(type: Type, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(EXPERTS, path, type)
    config = read_config(path)
    files = unstacked(open_files(path), config)
    check_tensors(config, files, make_recipe(config, LoadOptions(), files))
    experts = config.layers[1].feed_forward
    assert isinstance(experts, Experts)
    assert (experts.inner_size, experts.router.num_experts, experts.router.top_k) == (128, 4, 2)


def test_a_gguf_file_has_all_tensors_of_layers_with_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    monkeypatch.setitem(MODELS, "qwen3.5-0.8b", STATES)
    monkeypatch.setattr(sys, "argv", ["checkpoints", "qwen3.5-0.8b", str(path)])
    checkpoints.main()
    config, files = read_config(path), open_files(path)
    check_tensors(config, files, make_recipe(config, LoadOptions(), files))
    assert [type(layer.mixer) for layer in config.layers] == [*[GatedDelta] * 3, Attention]
    delta, attention = config.layers[0].mixer, config.layers[3].mixer
    assert isinstance(delta, GatedDelta)
    assert delta.state_shape == (4, 32, 32)
    assert isinstance(attention, Attention)
    assert (attention.num_heads, attention.rotated, attention.has_gate) == (2, 8, True)
