"""Sharing a model out among ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.ranks import Ranks
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.files import open_files
from penstock.engine.model.split import TILE, check_split, split_config, splits_whole
from penstock.engine.model.split_files import SplitFiles
from penstock.engine.spec import Experts, Router
from tests.engine.checkpoints import make_checkpoint
from tests.engine.families import SPARSE

BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


@dataclass(frozen=True)
class Place:
    """All that reading has to know of a rank."""

    rank: int
    size: int


def parts_of(folder: Path, size: int) -> list[dict[str, Tensor]]:
    """The tensors of a checkpoint as each rank reads them."""
    whole, found = read_config(folder), []
    part = split_config(whole, size)
    for rank in range(size):
        files = SplitFiles(open_files(folder), whole, part, cast("Ranks", Place(rank, size)))
        tensors = {name: files.read(name) for name in files.entries}
        for name, entry in files.entries.items():
            assert tensors[name].shape == entry.shape
            assert tensors[name].nbytes == entry.num_bytes
        found.append(tensors)
    return found


def whole_of(folder: Path) -> dict[str, Tensor]:
    files = open_files(folder)
    return {name: files.read(name) for name in files.entries}


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_are_the_whole(tmp_path: Path, size: int) -> None:
    folder = make_checkpoint("llama", tmp_path, num_key_value_heads=4, **BIASES)
    parts, whole = parts_of(folder, size), whole_of(folder)
    layer = "model.layers.1."
    outputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    for name in [f"{layer}{name}.{kind}" for name in outputs for kind in ("weight", "bias")]:
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
    for name in (f"{layer}self_attn.o_proj", f"{layer}mlp.down_proj"):
        assert torch.equal(torch.cat([p[f"{name}.weight"] for p in parts], 1), whole[f"{name}.weight"])
        assert torch.equal(parts[0][f"{name}.bias"], whole[f"{name}.bias"])
        assert not any(part[f"{name}.bias"].any() for part in parts[1:])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
    assert all(torch.equal(part["model.norm.weight"], whole["model.norm.weight"]) for part in parts)


def test_fewer_kv_heads_than_ranks_are_read_by_several(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, num_key_value_heads=2)
    parts, whole = parts_of(folder, 4), whole_of(folder)
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.2.self_attn.v_proj.weight"):
        heads = torch.split(whole[name], 16)
        assert [torch.equal(p[name], heads[i]) for p, i in zip(parts, (0, 0, 1, 1), strict=True)] == [
            True
        ] * 4


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_heads_of_latents_which_all_of_them_have(tmp_path: Path, size: int) -> None:
    folder = SPARSE["DeepSeek V2, groups"].make(tmp_path, n_shared_experts=4)
    parts, whole = parts_of(folder, size), whole_of(folder)
    own = "model.layers.1.self_attn."
    for name in ("q_b_proj.weight", "kv_b_proj.weight"):
        assert torch.equal(torch.cat([part[own + name] for part in parts]), whole[own + name])
    assert torch.equal(
        torch.cat([part[f"{own}o_proj.weight"] for part in parts], 1), whole[f"{own}o_proj.weight"]
    )
    assert not any(part[f"{own}o_proj.bias"].any() for part in parts[1:])
    on_all = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    names = [f"{own}{name}.weight" for name in on_all] + [f"{own}kv_a_proj_with_mqa.bias"]
    assert all(torch.equal(part[name], whole[name]) for part in parts for name in names)
    with pytest.raises(
        CheckpointError, match="tensor-parallel 3: the model has 4 attention heads, which do not"
    ):
        check_split(folder, read_config(folder), 3)


def test_a_vocabulary_that_does_not_split_is_padded(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, vocab_size=517)
    name = "model.embed_tokens.weight"
    rows = torch.cat([part[name] for part in parts_of(folder, 4)])
    assert rows.shape == (520, 64)
    assert torch.equal(rows[:517], whole_of(folder)[name])
    assert not rows[517:].any()


@pytest.mark.parametrize(
    ("size", "overrides", "fault"),
    [
        (3, {}, "the model has 4 attention heads, which do not split"),
        (8, {}, "the model has 4 attention heads, which do not split"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3}, "the model has 3 key-value heads"),
        (4, {"intermediate_size": 114}, "an intermediate_size of 114, which does not split"),
        (2, {"quantization_config": {"quant_method": "gptq"}}, "quantized (gptq) is served by one process"),
    ],
)
def test_what_does_not_split_is_refused(
    tmp_path: Path, size: int, overrides: dict[str, Any], fault: str
) -> None:
    folder = make_checkpoint("llama", tmp_path, head_dim=16, **overrides)
    with pytest.raises(CheckpointError) as refused:
        check_split(folder, read_config(folder), size)
    text = str(refused.value)
    assert text.startswith(f"--tensor-parallel {size}: ")
    assert fault in text
    assert "\n" not in text


def test_a_vocabulary_of_fewer_tokens_than_that_is_refused(tmp_path: Path) -> None:
    config = read_config(make_checkpoint("llama", tmp_path, vocab_size=512))
    tiny = replace(config, vocab_size=6)
    with pytest.raises(CheckpointError, match="has 6 tokens, which are too few"):
        split_config(tiny, 4)


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    config = read_config(make_checkpoint("llama", tmp_path))
    with pytest.raises(CheckpointError, match="a GGUF file is served by one process only"):
        check_split(tmp_path / "model.gguf", config, 2)


def test_one_rank_is_no_split(tmp_path: Path) -> None:
    config = read_config(make_checkpoint("llama", tmp_path))
    check_split(tmp_path / "model.gguf", config, 1)


def experts(count: int, inner: int) -> Experts:
    return Experts(hidden_size=64, inner_size=inner, router=Router(num_experts=count, top_k=2))


@pytest.mark.parametrize(
    ("count", "inner", "num_ranks", "is_whole"),
    [
        (128, 768, 2, False),  # Qwen3-30B-A3B
        (128, 768, 8, True),
        (32, 2880, 8, False),  # gpt-oss-20b
        (128, 704, 6, False),  # neither divides, which is refused as rows
        (126, 704, 6, True),
        (5, 32, 2, False),
        (8, TILE * 4, 4, False),
        (8, TILE * 4 - 4, 4, True),
    ],
)
def test_experts_stay_whole_where_their_rows_fill_no_tile(
    count: int, inner: int, num_ranks: int, is_whole: bool
) -> None:
    own = experts(count, inner)
    assert splits_whole(own, num_ranks, "auto") == is_whole
    assert not splits_whole(own, num_ranks, "off")
    if count % num_ranks == 0:
        assert splits_whole(own, num_ranks, "on")


def test_every_expert_is_on_one_rank_and_whole(tmp_path: Path) -> None:
    folder = SPARSE["Qwen 3 MoE"].make(tmp_path)
    whole = read_config(folder)
    found: dict[str, Tensor] = {}
    for rank in range(2):
        part = split_config(whole, 2, rank, "on")
        files = SplitFiles(open_files(folder), whole, part, cast("Ranks", Place(rank, 2)))
        own = {name: files.read(name) for name in files.entries if ".experts." in name}
        assert {int(name.split(".experts.")[1].partition(".")[0]) for name in own} == set(
            range(4 * rank, 4 * rank + 4)
        )
        found |= own
    tensors = {name: tensor for name, tensor in whole_of(folder).items() if ".experts." in name}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("size", "expert_parallel", "overrides", "fault"),
    [
        (
            2,
            "on",
            {"num_experts": 7},
            "--expert-parallel on: the model has 7 experts, which do not split among 2 ranks",
        ),
        (1, "on", {}, "--expert-parallel on: one process has all experts; see --tensor-parallel"),
        (
            4,
            "off",
            {"moe_intermediate_size": 30},
            "--tensor-parallel 4: the model has an intermediate_size of experts of 30, which does not split",
        ),
    ],
)
def test_experts_that_do_not_split_are_refused(
    tmp_path: Path, size: int, expert_parallel: str, overrides: dict[str, Any], fault: str
) -> None:
    folder = SPARSE["Qwen 3 MoE"].make(tmp_path, **overrides)
    with pytest.raises(CheckpointError) as refused:
        check_split(folder, read_config(folder), size, expert_parallel)
    assert str(refused.value) == fault
