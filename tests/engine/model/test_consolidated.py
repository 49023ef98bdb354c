"""Checkpoints as Mistral writes them: the logits of the same model as transformers has it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock.engine.errors import CheckpointError
from penstock.engine.model.consolidated import is_consolidated, read_params, transformers_name
from penstock.engine.model.parse import read_config
from tests.engine.families import SPARSE, Tiny
from tests.engine.model.test_experts import TOKEN_IDS, check_logits, in_chunks, load
from tests.engine.model.test_transformer import oracle_logits

YARN = {"factor": 4.0, "original_max_position_embeddings": 128, "beta": 32, "alpha": 1}
MODELS: dict[str, tuple[Tiny, dict[str, Any]]] = {
    "Mistral": (Tiny("MistralConfig", {"head_dim": 24, "sliding_window": None}), {}),
    "Mixtral": (SPARSE["Mixtral"], {}),
    "Ministral 3": (
        Tiny(
            "Ministral3Config",
            {
                "head_dim": 24,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            },
        ),
        {
            "yarn": {**YARN, "apply_scale": False},
            "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 128},
            "rope_theta": 1e6,
        },
    ),
}
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.": "",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.experts": "experts",
    "block_sparse_moe.": "",
}


def consolidated(folder: Path, into: Path, entries: dict[str, Any]) -> Path:
    """Writes a checkpoint of transformers as Mistral would."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads, hidden = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "hidden_size")
    )
    head_dim = config.get("head_dim") or hidden // heads
    into.mkdir()
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2], 0)
        if count:
            tensor = tensor.view(count, 2, head_dim // 2, hidden).transpose(1, 2).reshape(-1, hidden)
        for theirs, own in NAMES.items():
            name = name.replace(theirs, own)
        tensors[name] = tensor.contiguous()
    save_file(tensors, into / "consolidated.safetensors")
    params = {
        "dim": hidden,
        "n_layers": config["num_hidden_layers"],
        "head_dim": head_dim,
        "hidden_dim": config["intermediate_size"],
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "max_seq_len": config["max_position_embeddings"],
        "rope_theta": (config.get("rope_parameters") or config).get("rope_theta", 1e4),
        "vision_encoder": {"hidden_size": 8},
        **entries,
    }
    if "num_local_experts" in config:
        params["moe"] = {
            "num_experts": config["num_local_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
        }
    (into / "params.json").write_text(json.dumps(params))
    return into


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_as_transformers_has_it(name: str, tmp_path: Path) -> None:
    tiny, entries = MODELS[name]
    path = tiny.make(tmp_path / "theirs")
    own = consolidated(path, tmp_path / "own", entries)
    assert is_consolidated(own)
    assert not is_consolidated(path)
    check_logits(in_chunks(load(own)), oracle_logits(path, TOKEN_IDS))


def test_the_length_and_the_scaling_are_those_of_params(tmp_path: Path) -> None:
    params = {"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 32, "vocab_size": 8, "norm_eps": 1e-5}
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert read_config(tmp_path).max_position == 128_000
    (tmp_path / "params.json").write_text(json.dumps({**params, "yarn": YARN, "max_seq_len": 256}))
    [rope] = read_config(tmp_path).spec.ropes
    assert (rope.scaling, rope.factor) == ("yarn", 4.0)
    assert rope.magnitude == pytest.approx(1.1386, abs=1e-4)
    assert read_config(tmp_path).max_position == 512


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"q_lora_rank": 8}, "q_lora_rank: latent attention is not served"),
        ({"quantization": {"qformat_weight": "int4"}}, "qformat_weight"),
        ({"moe": {"num_experts": 4}}, "num_experts_per_tok"),
        ({"dim": "wide"}, "dim"),
        ({"n_layers": None}, "n_layers is missing"),
        ({"norm_eps": "small"}, "rms_norm_eps"),
        ({"yarn": 3}, "yarn"),
    ],
)
def test_what_is_not_served_is_named(entries: dict[str, Any], said: str, tmp_path: Path) -> None:
    params = {"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 32, "vocab_size": 8, "norm_eps": 1e-5}
    (tmp_path / "params.json").write_text(json.dumps(params | entries))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path))}/params\.json: .*{said}"):
        read_config(tmp_path)


def test_scales_of_eight_bits_have_transformers_names(tmp_path: Path) -> None:
    assert (
        transformers_name("layers.3.attention.wq.qscale_weight")
        == "model.layers.3.self_attn.q_proj.weight_scale"
    )
    assert transformers_name("vision_encoder.norm.weight") == "vision_encoder.norm.weight"
    params: dict[str, Any] = {"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 32, "vocab_size": 8}
    params |= {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert read_params(tmp_path).nested("quantization_config").text("quant_method") == "fp8"
