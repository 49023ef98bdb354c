"""Models whose layers have a state against transformers: logits, continuations, and what is wrong with a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.memory import weight_bytes
from penstock.engine.fields import Fields
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.ranks import Ranks
from penstock.engine.kernels.state_cache import StateCache, StateLayout
from penstock.engine.model.files import open_files
from penstock.engine.model.gguf import config as gguf
from penstock.engine.model.gguf.container import is_gguf
from penstock.engine.model.parse import parse_config, read_config
from penstock.engine.model.quantizing import Scheme
from penstock.engine.model.split import split_config
from penstock.engine.model.split_files import SplitFiles
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import make_recipe
from penstock.engine.model.weights import load_weights
from penstock.engine.program.decoders import make_decoder
from penstock.engine.quant.float8 import Float8, Scaling
from tests.engine.families import STATES, STATES_INSIDE, put_inside
from tests.engine.model.test_expert_ranks import Meeting, Thread
from tests.engine.model.test_experts import in_the_other_form
from tests.engine.model.test_quantizing_experts import made
from tests.engine.model.test_transformer import make_batch, oracle_logits
from tests.engine.rounding_noise import largest
from tests.engine.test_family_runs import MAX_TOKENS, check_greedy

CPU = torch.device("cpu")
TOKEN_IDS = [7 * i % 390 + 3 for i in range(90)]
NUM_PENDING = 4
LATER = pytest.mark.long("quantization of layers with a state")
OPTIONS, KERNELS = LoadOptions(device="cpu"), reference_kernels(CPU, torch.float32)
EVEN = dict.fromkeys(
    (
        "intermediate_size",
        "moe_intermediate_size",
        "shared_intermediate_size",
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    64,
)
"""Sizes that groups divide."""


class Run:
    """A model, and some sequences with a slot each; sequence s has the s-th dozen of KV blocks."""

    def __init__(
        self,
        folder: Path,
        options: LoadOptions = OPTIONS,
        ranks: Thread | None = None,
        kernels: Kernels = KERNELS,
        num_slots: int = 8,
    ) -> None:
        config = gguf.read_config(folder) if is_gguf(folder) else read_config(folder)
        files = unstacked(open_files(folder), config)
        if ranks is not None:
            part = split_config(config, ranks.size, ranks.rank)
            files = SplitFiles(files, config, part, cast("Ranks", ranks))
            config, kernels = part, replace(kernels, ranks=cast("Ranks", ranks))
        recipe = make_recipe(config, options, files)
        self.weights = load_weights(config, files, kernels, lambda *_: None, recipe)
        self.states = StateCache(StateLayout.of(config, NUM_PENDING), num_slots, CPU)
        kv = KVCache(KVLayout.of(config, 16), 49, kernels.kv_dtype, CPU)
        self.decoder = make_decoder(config, self.weights, kernels, kv, 512, self.states)

    def logits(
        self,
        parts: Sequence[tuple[list[int], int]],
        slots: Sequence[Sequence[int]],
        saves: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """Of all rows of a step: (known tokens, those of them that are computed) of each sequence."""
        own = replace(
            make_batch(list(parts)),
            state_slots=torch.tensor(slots, dtype=torch.int32),
            state_saves=torch.tensor(saves, dtype=torch.int32).view(-1, 4),
        )
        hidden = self.decoder(own)
        return self.weights.lm_head(hidden)

    def in_chunks(self, size: int, slot: int = 1) -> Tensor:
        found = []
        for start in range(0, len(TOKEN_IDS), size):
            end = min(start + size, len(TOKEN_IDS))
            source = slot if start else 0
            found.append(self.logits([(TOKEN_IDS[:end], start)], [[source, slot, 0, end - start]]))
        return torch.cat(found)


def check(found: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 0.1, "the model says something"
    assert largest(found - expected) <= 2e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", STATES)
def test_logits_are_those_of_transformers_however_a_prompt_is_cut(family: str, tmp_path: Path) -> None:
    path = STATES[family].make(tmp_path)
    expected, run = oracle_logits(path, TOKEN_IDS), Run(path)
    check(run.weights.lm_head(run.decoder(make_batch([(TOKEN_IDS, 0)]))), expected)
    for size in (1, 7, 64):
        check(run.in_chunks(size), expected)


@pytest.mark.parametrize("family", STATES)
def test_a_continuation_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    path = STATES[family].make(tmp_path)
    run, known = Run(path), TOKEN_IDS[:20]
    logits = run.logits([(known, 0)], [[0, 1, 0, 20]])
    for _ in range(MAX_TOKENS):
        known = [*known, int(logits[-1].argmax())]
        logits = run.logits([(known, len(known) - 1)], [[1, 1, 0, 1]])
    check_greedy(path, (known[:20], known[20:]))


@pytest.mark.parametrize("family", STATES)
def test_drafts_forks_snapshots_and_neighbours_change_nothing(family: str, tmp_path: Path) -> None:
    """A prompt beside another, with a snapshot; drafts of which one turns out right; two branches; the snapshot."""
    path = STATES[family].make(tmp_path)
    run, expected = Run(path), oracle_logits(path, TOKEN_IDS)
    other = [5 * i % 390 + 3 for i in range(33)]
    found = run.logits([(TOKEN_IDS[:30], 0), (other, 0)], [[0, 1, 0, 30], [0, 2, 0, 33]], [[0, 17, 3, 2]])
    check(found[:30], expected[:30])
    check(found[30:], oracle_logits(path, other))
    drafted = [*TOKEN_IDS[:32], 3, 4]  # the last two are wrong
    check(run.logits([(drafted, 30)], [[1, 1, 0, 1]])[:2], expected[30:32])
    check(run.logits([(TOKEN_IDS[:50], 32)], [[1, 4, 1, 18]]), expected[32:50])
    check(run.logits([(TOKEN_IDS[:40], 32)], [[1, 5, 1, 8]]), expected[32:40])
    check(run.logits([(TOKEN_IDS, 50)], [[4, 6, 0, 40]]), expected[50:])
    for again in range(3):
        start = 17 + again
        check(run.logits([(TOKEN_IDS[:40], start)], [[3, 0, again, 0]]), expected[start:40])


@pytest.mark.parametrize("architecture", STATES_INSIDE)
def test_the_text_model_beside_an_image_tower_is_the_same(architecture: str, tmp_path: Path) -> None:
    text = STATES[STATES_INSIDE[architecture]].make(tmp_path / "text")
    whole = put_inside(text, tmp_path / "whole", architecture)
    assert torch.equal(Run(whole).in_chunks(40), Run(text).in_chunks(40))


@pytest.mark.parametrize("family", ["Qwen 3.5 MoE", "Qwen 3 Next", "LFM2 MoE", "Granite 4 H MoE"])
def test_experts_are_the_same_in_both_forms_on_disk(family: str, tmp_path: Path) -> None:
    """Published checkpoints of Qwen 3.5 have them stacked, and transformers writes them one by one."""
    path = STATES[family].make(tmp_path)
    found = Run(path).in_chunks(90)
    assert torch.equal(Run(in_the_other_form(path)).in_chunks(90), found)


def test_experts_without_gates_may_be_stacked(tmp_path: Path) -> None:
    path = STATES["Nemotron 3"].make(tmp_path)
    found, file = Run(path).in_chunks(90), path / "model.safetensors"
    tensors, prefix = load_file(file), "backbone.layers.1.mixer.experts"
    for name in ("up_proj", "down_proj"):
        experts = [tensors.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(8)]
        tensors[f"{prefix}.{name}"] = torch.stack(experts)
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(Run(path).in_chunks(90), found)


@pytest.mark.parametrize("family", STATES)
def test_two_ranks_make_what_one_process_does(family: str, tmp_path: Path) -> None:
    path, meeting = STATES[family].make(tmp_path), Meeting(2)
    batch = make_batch([(TOKEN_IDS[:40], 0)])

    def run(rank: int) -> Tensor:
        return Run(path, ranks=Thread(rank, meeting)).decoder(batch)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(2)))
    expected = Run(path).decoder(batch)
    assert torch.equal(*found)
    assert largest(found[0] - expected) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("Qwen 3.5", "the model has 2 key heads of a gated delta net, which do not split"),
        ("LFM2", "the model has 64 channels of a convolution, which do not split"),
        ("Granite 4 H", "the model has 2 groups of Mamba heads, which do not split"),
    ],
)
def test_heads_that_do_not_split_are_refused(family: str, said: str, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    config = read_config(STATES[family].make(tmp_path, **heads))
    with pytest.raises(CheckpointError, match=f"--tensor-parallel 3: {said}"):
        split_config(config, 3)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("Qwen 3.5", "Granite 4 H MoE", "LFM2") else LATER)
        for family in STATES
    ],
)
def test_all_linear_maps_but_the_gates_are_quantized_at_load(family: str, tmp_path: Path) -> None:
    path = STATES[family].make(tmp_path, **EVEN, **({} if family == "Mamba 2" else {"head_dim": 32}))
    exact = Run(path).in_chunks(90)
    eight, four = (
        float((Run(path, replace(OPTIONS, quantize=bits)).in_chunks(90) - exact).norm() / exact.norm())
        for bits in ("int8", "int4")
    )
    assert 0 < 1.2 * eight < four < 1.5
    assert eight < 0.5


@pytest.mark.parametrize(
    ("family", "grouped"),
    [("Qwen 3.5", "self_attn.q_proj"), ("Qwen 3 Next", "linear_attn.in_proj_qkvz")],
)
def test_blocks_of_8_bits_go_with_rows_that_are_put_in_order(
    family: str, grouped: str, tmp_path: Path
) -> None:
    """Heads of 24 rows, or a key head's of all kinds, lie across blocks of 128."""
    dense = STATES[family].make(tmp_path)
    quantized = Path(shutil.copytree(dense, tmp_path / "fp8"))
    tensors, format = load_file(dense / "model.safetensors"), Float8(Scaling.BLOCK)
    stored = dict(tensors)
    wanted = [name for name in tensors if re.search(r"_proj\.weight|in_proj_qkvz?\.weight", name)]
    wanted = [name for name in wanted if tensors[name].dim() == 2 and "in_proj_ba" not in name]
    assert any(grouped in name and len(tensors[name]) > 128 for name in wanted)
    for name in wanted:
        made = format.quantize(tensors[name])
        stored[name], stored[f"{name}_scale_inv"] = made["weight"], made["scale"]
        tensors[name] = format.unpack(made)
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    others = {name.removesuffix(".weight") for name in tensors if name not in wanted}
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [*others]}
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": fields}))
    found = [Run(folder).in_chunks(64) for folder in (quantized, dense)]
    check(found[0], found[1])


@pytest.mark.parametrize("family", STATES)
def test_the_plan_counts_every_number(family: str, tmp_path: Path) -> None:
    path = STATES[family].make(tmp_path)
    tensors = load_file(path / "model.safetensors").values()
    assert weight_bytes(read_config(path), KERNELS) == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("Qwen 3.5", "gptq"),
        ("LFM2 MoE", "rtn"),
        pytest.param("Qwen 3.5", "awq", marks=LATER),
        pytest.param("Granite 4 H", "awq", marks=LATER),
    ],
)
def test_layers_with_a_state_are_calibrated(family: str, method: str, tmp_path: Path) -> None:
    path = STATES[family].make(tmp_path / "floats", **EVEN, head_dim=32)
    before, after = made(path, tmp_path / "made", Scheme(method=method, bits=8))
    assert before != after
    assert after < 1.2 * before
    quantized, exact = Run(tmp_path / "made").in_chunks(90), Run(path).in_chunks(90)
    assert 0 < float((quantized - exact).norm() / exact.norm()) < 0.3


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        pytest.param("Nemotron 3", "backbone.", marks=LATER),
        ("Mamba 2", "backbone."),
        pytest.param("Qwen 3.5", "model.language_model.", marks=LATER),
    ],
)
def test_a_quantized_copy_keeps_the_names_and_what_is_no_decoder(
    family: str, prefix: str, tmp_path: Path
) -> None:
    path = STATES[family].make(
        tmp_path / "floats", **EVEN, **({} if family == "Mamba 2" else {"head_dim": 32})
    )
    if family == "Qwen 3.5":
        path = put_inside(path, tmp_path / "whole", "Qwen3_5ForConditionalGeneration")
    before, after = made(path, tmp_path / "made", Scheme(method="gptq", group_size=32))
    assert before != after
    assert after < 1.5 * before
    names, kept = (load_file(where / "model.safetensors").keys() for where in (path, tmp_path / "made"))
    packed = [name for name in kept if name.endswith(".weight_packed")]
    assert packed
    assert all(name.startswith(f"{prefix}layers.") for name in packed)
    assert names - kept == {name.replace("weight_packed", "weight") for name in packed}
    quantized, exact = Run(tmp_path / "made").in_chunks(90), Run(path).in_chunks(90)
    assert 0 < float((quantized - exact).norm() / exact.norm()) < 0.5


def entries_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Qwen 3.5", {"layer_types": ["wormhole"] * 4}, "layer_types wormhole is not supported; only"),
        ("Qwen 3.5", {"layer_types": ["linear_attention"]}, "layer_types has 1 entries for 4 layers"),
        ("Qwen 3.5", {"linear_num_value_heads": 5}, "linear_num_value_heads is 5, which cannot share the 2"),
        ("Qwen 3.5", {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim must be between 1 and 64"),
        ("Qwen 3.5", {"hidden_act": "gelu_new"}, "hidden_act gelu_new is not supported; only silu"),
        ("LFM2", {"layer_types": ["conv", "mamba", "conv"]}, "layer_types mamba is not supported"),
        ("LFM2", {"conv_L_cache": 0}, "conv_L_cache must be between 1 and 64"),
        (
            "Granite 4 H",
            {"mamba_d_head": 15},
            "mamba_n_heads is 8 and mamba_d_head 15, and mamba_expand says 128",
        ),
        ("Granite 4 H", {"mamba_n_groups": 3}, "8 Mamba heads do not lie in 3 groups"),
        ("Granite 4 H", {"layer_types": ["mamba", "conv", "mamba"]}, "layer_types conv is not supported"),
        ("Granite 4 H", {"time_step_limit": [2.0, 1.0]}, "time_step_limit must be a list of two numbers"),
        (
            "Nemotron 3",
            {"layers_block_type": ["moe", "mystery"]},
            "layers_block_type mystery is not supported",
        ),
        ("Nemotron 3", {"layers_block_type": []}, "layers_block_type has 0 entries"),
        ("Nemotron 3", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern has a layer 'X'"),
        ("Nemotron 3", {"hybrid_override_pattern": ""}, "hybrid_override_pattern has 0 layers"),
        ("Nemotron 3", {"moe_latent_size": 16}, "moe_latent_size is not supported"),
        ("Nemotron 3", {"mlp_hidden_act": "silu"}, "mlp_hidden_act silu is not supported; only relu2 is"),
        ("Mamba 2", {"conv_kernel": 0}, "conv_kernel must be between 1 and 64"),
    ],
)
def test_what_is_refused(family: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    entries = entries_of(STATES[family].make(tmp_path))
    with pytest.raises(CheckpointError, match=re.escape(said)):
        parse_config(Fields("config.json", {**entries, **changes}))


def test_published_checkpoints_may_say_it_otherwise(tmp_path: Path) -> None:
    """Older programs have letters for Nemotron's layers, names of their own for Granite's, and lists for LFM2's."""
    nemotron, granite, lfm2 = (tmp_path / name for name in ("nemotron", "granite", "lfm2"))
    entries = entries_of(STATES["Nemotron 3"].make(nemotron))
    del entries["layers_block_type"]
    assert parse_config(Fields("", {**entries, "hybrid_override_pattern": "ME*-M"})) == read_config(nemotron)
    entries = entries_of(STATES["Granite 4 H"].make(granite))
    kinds = {"layer_types": ["mamba", "attention", "mamba"], "mamba_d_head": "auto"}
    assert parse_config(Fields("", {**entries, **kinds})) == read_config(granite)
    entries = entries_of(STATES["LFM2"].make(lfm2))
    del entries["layer_types"], entries["tie_word_embeddings"]
    published = {
        "full_attn_idxs": [1],
        "block_ff_dim": entries.pop("intermediate_size"),
        "tie_embedding": True,
    }
    assert parse_config(Fields("", {**entries, **published, "intermediate_size": 1})) == read_config(lfm2)


@pytest.mark.parametrize(
    ("family", "name", "shape", "said"),
    [
        ("Qwen 3.5", "linear_attn.A_log", None, "tensor model.layers.0.linear_attn.A_log is missing"),
        (
            "Qwen 3.5",
            "linear_attn.conv1d.weight",
            [190, 1, 4],
            "has shape [190, 1, 4], and config.json says [192, 4] (the channels of a convolution, its kernel)",
        ),
        (
            "Qwen 3.5",
            "linear_attn.in_proj_b.weight",
            [5, 64],
            "config.json says [4, 64] (heads and head sizes",
        ),
        ("LFM2", "conv.in_proj.weight", None, "tensor model.layers.0.conv.in_proj.weight is missing"),
        (
            "Granite 4 H",
            "mamba.D",
            [7],
            "has shape [7], and config.json says [8] (the heads of a layer with a",
        ),
        ("Mamba 2", "mixer.norm.weight", None, "tensor backbone.layers.0.mixer.norm.weight is missing"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    family: str, name: str, shape: list[int] | None, said: str, tmp_path: Path
) -> None:
    file = STATES[family].make(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    full = next(own_name for own_name in tensors if own_name.endswith(f"layers.0.{name}"))
    del tensors[full]
    save_file({**tensors, **({} if shape is None else {full: torch.zeros(shape)})}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(said)):
        Run(tmp_path)


def test_a_missing_embedding_has_its_own_name(tmp_path: Path) -> None:
    file = STATES["Mamba 2"].make(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["backbone.embeddings.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor backbone\.embeddings\.weight is missing"):
        Run(tmp_path)
