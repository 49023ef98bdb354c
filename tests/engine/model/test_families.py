"""Every family against transformers: logits of tiny random models, by every kernel table, in chunks of a prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.loader import load_model
from penstock.engine.model.parse import read_config
from penstock.engine.model.split import split_config
from tests.engine.families import INSIDE, RENAMED, SPARSE, TINY, Tiny, put_inside
from tests.engine.model.test_transformer import device_of, load, logits_of, make_batch, oracle_logits
from tests.engine.rounding_noise import largest

NUM_TOKENS = 90
TOKEN_IDS = [7 * i % 390 + 3 for i in range(NUM_TOKENS)]


@pytest.mark.parametrize("table", ["torch", "native"])
@pytest.mark.parametrize("family", TINY)
def test_logits_are_those_of_transformers(family: str, table: str, tmp_path: Path) -> None:
    path = TINY[family].make(tmp_path)
    expected = oracle_logits(path, TOKEN_IDS)
    model = load(path, table)
    first = logits_of(model, make_batch([(TOKEN_IDS[:37], 0)]))
    second = logits_of(model, make_batch([(TOKEN_IDS, 37)]))
    found = torch.cat([first, second]).to(device_of("cpu"))
    scale = float(expected.abs().max())
    assert scale > 0.1, "the model says something"
    assert largest(found - expected) <= 1e-4 * max(1.0, scale)


@pytest.mark.parametrize("table", ["torch", "native"])
def test_gelu_may_be_exact(table: str, tmp_path: Path) -> None:
    path = TINY["Qwen 2"].make(tmp_path, hidden_act="gelu")
    expected = oracle_logits(path, TOKEN_IDS)
    model = load(path, table)
    found = logits_of(model, make_batch([(TOKEN_IDS, 0)])).to(device_of("cpu"))
    assert largest(found - expected) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("architecture", INSIDE)
def test_the_text_part_of_a_model_that_sees_images_is_served(architecture: str, tmp_path: Path) -> None:
    text = (TINY | SPARSE)[INSIDE[architecture][0]].make(tmp_path / "text")
    model = load(put_inside(text, tmp_path / "whole", architecture), "torch")
    found = logits_of(model, make_batch([(TOKEN_IDS, 0)]))
    expected = oracle_logits(text, TOKEN_IDS)
    assert largest(found - expected) <= 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("architecture", RENAMED)
def test_a_family_that_is_another_by_name_has_its_logits(architecture: str, tmp_path: Path) -> None:
    path = (TINY | SPARSE)[RENAMED[architecture]].make(tmp_path)
    expected = oracle_logits(path, TOKEN_IDS)
    rewrite(path, architectures=[architecture], model_type="unknown")
    found = logits_of(load(path, "torch"), make_batch([(TOKEN_IDS, 0)]))
    assert largest(found - expected) <= 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("is_transposed", [True, False], ids=["published", "transformers 5"])
def test_experts_of_qwen_3_vl_are_stacked_by_inputs_or_by_outputs(
    is_transposed: bool, tmp_path: Path
) -> None:
    text = SPARSE["Qwen 3 MoE"].make(tmp_path / "text", moe_intermediate_size=48)
    expected = oracle_logits(text, TOKEN_IDS)
    tensors = load_file(text / "model.safetensors")
    for prefix in ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts"):
        own = {
            name: [tensors.pop(f"{prefix}.{i}.{name}_proj.weight") for i in range(8)] for name in PROJECTIONS
        }
        gate, up, down = (torch.stack(weights).mT for weights in own.values())
        for name, stack in {"gate_up_proj": torch.cat((gate, up), -1), "down_proj": down}.items():
            tensors[f"{prefix}.{name}"] = (stack if is_transposed else stack.mT).contiguous()
    save_file(tensors, text / "model.safetensors", metadata={"format": "pt"})
    rewrite(text, model_type="qwen3_vl_moe_text")
    whole = put_inside(text, tmp_path / "whole", "Qwen3VLMoeForConditionalGeneration")
    found = logits_of(load(whole, "torch"), make_batch([(TOKEN_IDS, 0)]))
    assert largest(found - expected) <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_a_layer_of_nemotron_super_may_lack_a_part(tmp_path: Path) -> None:
    """A part whose last map is 0 adds nothing, and key heads that are the same are one."""
    plain: Any = {"intermediate_size": 256, "num_key_value_heads": 4}
    path = Tiny("LlamaConfig", plain).make(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].zero_()
    tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
    for name in ("k_proj", "v_proj"):
        heads = tensors[f"model.layers.2.self_attn.{name}.weight"].view(2, 2, 16, 64)
        heads[:, 1] = heads[:, 0]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    expected = oracle_logits(path, TOKEN_IDS)
    for name in ("k_proj", "v_proj"):
        heads = tensors[f"model.layers.2.self_attn.{name}.weight"].view(2, 2, 16, 64)
        tensors[f"model.layers.2.self_attn.{name}.weight"] = heads[:, 0].reshape(32, 64).contiguous()
    missing = ("layers.0.mlp", "layers.0.post_attention", "layers.1.self_attn", "layers.1.input")
    kept = {name: weight for name, weight in tensors.items() if not any(part in name for part in missing)}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    attention, ffn, none = {"n_heads_in_group": 1}, {"ffn_mult": 6.0}, {"no_op": True}
    blocks = [
        {"attention": attention, "ffn": none},
        {"attention": none, "ffn": ffn},
        {"attention": {"n_heads_in_group": 2}, "ffn": ffn},
    ]
    changes: Any = {"num_key_value_heads": None, "intermediate_size": None, "block_configs": blocks}
    rewrite(path, architectures=["DeciLMForCausalLM"], **changes)
    for table in ("torch", "native"):
        found = logits_of(load(path, table), make_batch([(TOKEN_IDS, 0)])).to(device_of("cpu"))
        assert largest(found - expected) <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_queries_keys_and_values_of_a_head_may_lie_together(tmp_path: Path) -> None:
    """InternLM's own names and map, in a file that has Llama's weights."""
    path = Tiny("LlamaConfig").make(tmp_path)
    expected = oracle_logits(path, TOKEN_IDS)
    config = read_config(path)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = load_file(path / "model.safetensors")
    for number in range(config.num_layers):
        prefix = f"model.layers.{number}"
        queries, keys, values = (tensors.pop(f"{prefix}.self_attn.{name}_proj.weight") for name in "qkv")
        rows = [queries.view(kv_heads, heads // kv_heads, dim, -1)]
        rows += [part.view(kv_heads, 1, dim, -1) for part in (keys, values)]
        tensors[f"{prefix}.attention.wqkv.weight"] = torch.cat(rows, 1).flatten(0, 2)
    for theirs, own in names.items():
        tensors = {name.replace(theirs, own): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    rewrite(path, architectures=["InternLM2ForCausalLM"], bias=False)
    for table in ("torch", "native"):
        found = logits_of(load(path, table), make_batch([(TOKEN_IDS, 0)])).to(device_of("cpu"))
        assert largest(found - expected) <= 1e-4 * max(1.0, float(expected.abs().max()))
    with pytest.raises(CheckpointError, match="key-value heads beside their queries, which do not split"):
        split_config(read_config(path), 2 * kv_heads)


PROJECTIONS = ("gate", "up", "down")


def rewrite(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **entries}), encoding="utf-8")


@pytest.mark.parametrize("family", TINY)
def test_fewer_bits_cost_more(family: str, tmp_path: Path) -> None:
    """Weights as wide as these make rounding errors grow from layer to layer; bits that are lost still tell."""
    inner = "shared_intermediate_size" if family == "Granite 4, dense" else "intermediate_size"
    path = TINY[family].make(tmp_path, **{inner: 128})
    options = LoadOptions(device="cpu", dtype="float32", num_blocks=64, num_threads=2)

    def logits(quantize: str | None) -> Tensor:
        model = load_model(path, replace(options, quantize=quantize), lambda _: None, lambda *_: None)
        return logits_of(model, make_batch([(TOKEN_IDS, 0)]))

    exact = logits(None)
    eight, four = (float((logits(bits) - exact).norm() / exact.norm()) for bits in ("int8", "int4"))
    assert 0 < 1.2 * eight < four < 1.4
    assert eight < 0.3
