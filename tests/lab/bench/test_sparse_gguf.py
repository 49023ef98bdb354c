"""The GGUF files that other servers are compared by are some that the engine takes."""

from __future__ import annotations

from pathlib import Path

from lab.bench.random_states import QWEN_08B
from lab.bench.sparse_files import SparseShape
from lab.bench.sparse_gguf import write_sparse_gguf
from lab.bench.state_gguf import write_state_gguf
from penstock.engine.config import LoadOptions
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.files import open_files
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import check_tensors, make_recipe
from penstock.engine.spec import Attention, Experts, GatedDelta

SHAPE = SparseShape("tiny", 64, 2, 4, 2, 16, 4, 2, 32, 512)


def test_it_has_all_tensors_of_its_description(tmp_path: Path) -> None:
    path = write_sparse_gguf(SHAPE, tmp_path / "tiny.gguf")
    config = read_config(path)
    files = unstacked(open_files(path), config)
    check_tensors(config, files, make_recipe(config, LoadOptions(), files))
    experts = config.layers[1].feed_forward
    assert isinstance(experts, Experts)
    assert (experts.inner_size, experts.router.num_experts, experts.router.top_k) == (32, 4, 2)


def test_one_of_layers_with_a_state_does_too(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 512,
        "num_hidden_layers": 4,
        "head_dim": 32,
    }
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    path = write_state_gguf({**QWEN_08B, **sizes, **heads, **dims}, tmp_path / "tiny.gguf")
    config = read_config(path)
    files = open_files(path)
    check_tensors(config, files, make_recipe(config, LoadOptions(), files))
    assert [type(layer.mixer) for layer in config.layers] == [*[GatedDelta] * 3, Attention]
    delta, attention = config.layers[0].mixer, config.layers[3].attention
    assert isinstance(delta, GatedDelta)
    assert delta.state_shape == (4, 32, 32)
    assert attention is not None
    assert (attention.num_heads, attention.rotated, attention.has_gate) == (8, 8, True)
