"""GGUF files of models whose layers have a state: logits are those of transformers, whatever order the heads lie in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from penstock.engine.errors import CheckpointError
from penstock.engine.model.gguf.config import read_config
from penstock.engine.spec import GatedDelta
from tests.engine.families import STATES
from tests.engine.gguf_states import write_state_family
from tests.engine.model.gguf.test_model import make_kernels
from tests.engine.model.test_states import EVEN, TOKEN_IDS, Run, check
from tests.engine.model.test_transformer import oracle_logits

CHANGES: dict[str, dict[str, Any]] = {
    "Mamba 2": {"time_step_limit": [0.0, float("inf")]},
    "Qwen 3 Next": {"mlp_only_layers": []},
}
"""No key says what steps are clamped to, and the converter has no names for Qwen's dense layers beside others."""
QUANTIZED = re.compile(r"(in_proj(_qkv|_z)?|out_proj|(q|k|v|o|gate|up|down)_proj|_linear)\.weight")


@pytest.mark.parametrize("family", [family for family in STATES if family != "Bamba"])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = STATES[family].make(tmp_path / "floats", **CHANGES.get(family, {}))
    path = write_state_family(folder, tmp_path / "model.gguf")
    check(Run(path).in_chunks(64), oracle_logits(folder, TOKEN_IDS))


@pytest.mark.parametrize("family", ["Qwen 3.5", "Qwen 3.5 MoE", "Nemotron 3", "Granite 4 H"])
def test_quantized_maps_stand_for_what_they_are(family: str, tmp_path: Path) -> None:
    head_dim = {} if family == "Mamba 2" else {"head_dim": 32}
    folder = STATES[family].make(tmp_path / "floats", **EVEN, **head_dim)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if QUANTIZED.search(name):
            blocks = gguf.quants.quantize(tensor.numpy().reshape(-1, tensor.shape[-1]), Type.Q8_0)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(blocks, Type.Q8_0)).view(tensor.shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = write_state_family(folder, tmp_path / "model.gguf", quantized)
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors} == {"F32", "Q8_0"}
    unpacked = make_kernels(unpacked=True)  # else activations have 8 bits
    check(Run(path, kernels=unpacked).in_chunks(90), oracle_logits(folder, TOKEN_IDS))


def quantized(name: str) -> str:
    part = name.split(".")[2] if name.startswith("blk.") else ""
    stays = ("ssm_alpha", "ssm_beta", "ssm_ba", "ssm_conv1d", "ffn_gate_inp", "ffn_gate_inp_shexp")
    is_map = name.endswith(".weight") and part.startswith(("attn_", "ssm_", "ffn_")) and part not in stays
    return "Q8_0" if is_map and not part.endswith("norm") else "F32"


def test_value_heads_lie_by_tiles(tmp_path: Path) -> None:
    def mixer(family: str) -> GatedDelta:
        path = write_state_family(
            STATES[family].make(tmp_path / family, **CHANGES.get(family, {})), tmp_path / f"{family}.gguf"
        )
        found = read_config(path).layers[0].state
        assert isinstance(found, GatedDelta)
        return found

    assert mixer("Qwen 3.5").is_tiled
    assert not mixer("Qwen 3 Next").is_tiled


@pytest.mark.parametrize(
    ("family", "metadata", "said"),
    [
        ("Qwen 3.5", {"qwen35__ssm__conv_kernel": None}, "qwen35.ssm.conv_kernel is missing"),
        ("Qwen 3.5", {"qwen35__ssm__inner_size": 130}, "does not lie in the 4 heads of ssm.time_step_rank"),
        (
            "Qwen 3.5",
            {"qwen35__ssm__group_count": 3},
            "linear_num_value_heads is 4, which cannot share the 3",
        ),
        ("Mamba 2", {"mamba2__block_count": 4}, "layer 3 has tensors of no kind of layers that is known"),
        ("Nemotron 3", {"nemotron_h_moe__moe_latent_size": 8}, "moe_latent_size is not supported"),
        ("LFM2", {"lfm2__shortconv__l_cache": 0}, "lfm2.shortconv.l_cache must be between 1 and"),
    ],
)
def test_what_is_refused(family: str, metadata: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write_state_family(STATES[family].make(tmp_path), tmp_path / "model.gguf", **metadata)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_config(path)


def test_layers_that_draft_are_not_read(tmp_path: Path) -> None:
    folder = STATES["Qwen 3.5"].make(tmp_path)
    path = write_state_family(
        folder, tmp_path / "model.gguf", qwen35__block_count=5, qwen35__nextn_predict_layers=1
    )
    assert (
        read_config(path).num_layers == json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    )
