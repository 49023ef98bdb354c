"""Latent attention of GGUF files: both of its forms, the types of its maps, and which family a file is of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.files import open_files
from penstock.engine.model.gguf import container
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import make_recipe
from penstock.engine.model.weights import load_weights
from penstock.engine.program.parameters import LatentWeights
from penstock.engine.spec import Experts, LatentAttention, Router
from tests.engine.families import SPARSE
from tests.engine.gguf_files import write_family
from tests.engine.model.gguf.test_stored_experts import dequantised, refused, rewritten
from tests.engine.model.test_expert_formats import load
from tests.engine.model.test_experts import TOKEN_IDS, check_logits, in_chunks
from tests.engine.model.test_transformer import oracle_logits

FAMILIES = [family for family, tiny in SPARSE.items() if "kv_lora_rank" in tiny.entries]
HEADS = 4


def router_of(config: ModelConfig) -> Router:
    own = config.layers[-1].feed_forward
    assert isinstance(own, Experts)
    return own.router


def attention_of(config: ModelConfig) -> LatentAttention:
    own = config.layers[0].mixer
    assert isinstance(own, LatentAttention)
    return own


def ups(path: Path) -> list[Tensor]:
    """K and V of each layer, [heads, plain + value, latent]."""
    config = read_config(path)
    files = unstacked(open_files(path), config)
    kernels = reference_kernels(torch.device("cpu"), torch.float32)
    recipe = make_recipe(config, LoadOptions(device="cpu"), files)
    layers = load_weights(config, files, kernels, lambda *_: None, recipe).layers
    found = [layer.mixer.up for layer in layers if isinstance(layer.mixer, LatentWeights)]
    return [up for up in found if isinstance(up, Tensor)]


@pytest.mark.parametrize("family", FAMILIES)
def test_older_files_say_the_same_of_heads(family: str, tmp_path: Path) -> None:
    folder = SPARSE[family].make(tmp_path)
    paths = [write_family(folder, tmp_path / f"{is_old}.gguf", is_old=is_old) for is_old in (False, True)]
    newer, older = map(read_config, paths)
    assert attention_of(newer).is_split
    assert not attention_of(older).is_split
    assert all(map(torch.equal, *map(ups, paths)))
    check_logits(in_chunks(load(paths[1])), oracle_logits(folder, TOKEN_IDS))


@pytest.mark.parametrize("type", container.SUPPORTED)
def test_keys_and_values_are_those_of_the_library(type: str, tmp_path: Path) -> None:
    """In the type of the file, whatever kernels there are for it, for they are loaded in floating point."""
    sizes = {"kv_lora_rank": 256, "qk_nope_head_dim": 256, "v_head_dim": 256, "num_hidden_layers": 1}
    folder = SPARSE["DeepSeek V2"].make(tmp_path, **sizes, first_k_dense_replace=0)
    path = write_family(folder, tmp_path / "model.gguf", lambda name: type if "_b.weight" in name else "F32")
    expected = dequantised(path)
    k, v = (expected[f"blk.0.attn_{part}_b.weight"] for part in "kv")
    assert k.shape == v.shape == (HEADS, 256, 256)
    (up,) = ups(path)
    torch.testing.assert_close(up, torch.cat((k.mT, v), 1))


def test_a_file_is_of_the_family_that_its_router_is_of(tmp_path: Path) -> None:
    """Files of GLM-4.7 Flash may not say how experts are scored; those of DeepSeek V2 never say it."""
    for family, architecture, scoring in (
        ("DeepSeek V2", "DeepseekV2ForCausalLM", "softmax"),
        ("DeepSeek V3", "DeepseekV3ForCausalLM", "sigmoid"),
        ("GLM-4.7 Flash", "DeepseekV3ForCausalLM", "sigmoid"),
    ):
        folder = SPARSE[family].make(tmp_path / family)
        unsaid: dict[str, Any] = {"deepseek2__expert_gating_func": None}
        for told in ({}, unsaid):
            config = read_config(write_family(folder, tmp_path / "model.gguf", **told))
            assert config.architecture == architecture
            found, wanted = router_of(config), router_of(read_config(folder))
            assert found.scoring == scoring
            assert found.scale == pytest.approx(wanted.scale)
            assert replace(found, scale=1.0) == replace(wanted, scale=1.0)


def test_what_files_leave_out_is_as_llama_cpp_has_it(tmp_path: Path) -> None:
    folder = SPARSE["DeepSeek V3"].make(tmp_path)

    def read(**metadata: Any) -> Router:
        return router_of(read_config(write_family(folder, tmp_path / "model.gguf", **metadata)))

    assert read().renormalizes
    assert not read(deepseek2__expert_weights_norm=None).renormalizes
    assert read(deepseek2__expert_weights_scale=None).scale == 1.0
    alone = read(deepseek2__expert_group_count=None, deepseek2__expert_group_used_count=None)
    assert (alone.num_groups, alone.top_groups) == (1, 1)


def test_scores_are_scaled_as_the_multiplier_says(tmp_path: Path) -> None:
    """The converter writes a tenth of mscale_all_dim."""
    for family in ("DeepSeek V2", "DeepSeek V3", "Mistral 4"):
        folder = SPARSE[family].make(tmp_path / family)
        (found, wanted) = map(read_config, (write_family(folder, tmp_path / "model.gguf"), folder))
        assert attention_of(found).scale == attention_of(wanted).scale
        assert found.spec.ropes == wanted.spec.ropes
    path = tmp_path / "model.gguf"
    plain = write_family(folder, path, mistral4__rope__scaling__yarn_log_multiplier=None)
    assert attention_of(read_config(plain)).scale == pytest.approx((24 + 16) ** -0.5)


def test_what_is_wrong_is_named_as_the_file_has_it(tmp_path: Path) -> None:
    path = write_family(SPARSE["DeepSeek V3"].make(tmp_path), tmp_path / "model.gguf")

    def cut(arrays: dict[str, Any]) -> None:
        arrays["blk.0.attn_k_b.weight"] = arrays["blk.0.attn_k_b.weight"][:3]

    assert "blk.0.attn_k_b.weight has shape [144, 24], and the metadata says [192, 24]" in refused(path, cut)
    missing = refused(path, lambda arrays: arrays.pop("blk.1.attn_v_b.weight"))
    assert "tensor blk.1.attn_v_b.weight is missing" in missing
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count is 40, and a head has 40 numbers"):
        read_config(rewritten(path, lambda _: None, **{"deepseek2.rope.dimension_count": 40}))
