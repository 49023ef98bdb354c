"""Which models draft by a layer of their own, what it takes, and what is said of layers that are not whole."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.config import LoadOptions
from penstock.engine.errors import NotEnoughMemory
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.files import open_files
from penstock.engine.model.prediction import find_prediction, prediction_tensors
from penstock.engine.model.quantize_cache import Checkpoint
from penstock.engine.model.quantizing import Scheme, left_out, quantize
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import make_recipe
from penstock.engine.model.texts import Texts
from tests.engine.families import STATES, put_inside
from tests.engine.predictions import (
    make_predicting,
    one_by_one,
    with_entries,
    without_tensors,
    write_predicting,
)

LINE = "drafts come from the model's own layer for multi-token prediction"
UNUSED = "the model's own layer for multi-token prediction is not used: "


def load(folder: Path, **options: Any) -> tuple[LoadedModel, list[str]]:
    """A model, and what is said of its layer."""
    said: list[str] = []
    own = LoadOptions(device="cpu", dtype="float32", num_blocks=64, max_num_seqs=8)
    model = load_model(folder, replace(own, **options), said.append, lambda *_: None)
    return model, [line for line in said if "multi-token" in line]


def drafting(folder: Path, **options: Any) -> LoadedModel:
    model, said = load(folder, **options)
    if model.kernels.team is None:
        pytest.skip("there is no compiler for the native kernels")
    assert said == [LINE]
    assert model.draft is not None
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_predicting("Qwen 3.5", tmp_path / "model")


@pytest.mark.parametrize("name", ["fc", "norm", "layers.0.self_attn.q_proj", "layers.0.mlp.down_proj", ""])
def test_tensors_that_are_missing_are_named_and_the_model_is_served(folder: Path, name: str) -> None:
    without_tensors(folder, f"mtp.{name}")
    model, (line,) = load(folder)
    assert (model.draft, model.features) == (None, None)
    assert line.startswith(UNUSED)
    assert f"tensor mtp.{name or 'fc'}.weight is missing" in line


@pytest.mark.parametrize("name", ["eh_proj", "hnorm", "shared_head.norm", "mlp.experts.5.up_proj"])
def test_tensors_behind_the_layers_that_are_missing(tmp_path: Path, name: str) -> None:
    folder = make_predicting("GLM-4.5", tmp_path / "model")
    assert load(folder)[1] == [LINE]
    without_tensors(folder, f"model.layers.3.{name}")
    assert f"tensor model.layers.3.{name}.weight is missing" in load(folder)[1][0]
    without_tensors(folder, "model.layers.3.")  # as many who quantize leave them out
    model, (line,) = load(folder)
    assert model.draft is None
    assert f"{UNUSED}{folder}: tensor model.layers.3.eh_proj.weight is missing" in line


def test_a_gguf_file_that_counts_a_layer_without_tensors(folder: Path, tmp_path: Path) -> None:
    without_tensors(folder, "mtp.pre_fc_norm_hidden")
    model, (line,) = load(write_predicting(folder, tmp_path / "model.gguf"))
    assert model.draft is None
    assert "tensor blk.4.nextn.hnorm.weight is missing" in line


def test_a_quantized_copy_keeps_the_layer_as_it_is(folder: Path, tmp_path: Path) -> None:
    scheme = Scheme(method="rtn", bits=8, group_size=None)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    device = torch.device("cpu")
    quantize(folder, copy / "model.safetensors", scheme, Texts([], []), device)
    config = read_config(folder)
    with_entries(
        copy, quantization_config=scheme.config(config.num_layers, left_out(config, open_files(folder)))
    )
    before, after = (load_file(where / "model.safetensors") for where in (folder, copy))
    own = [name for name in before if name.startswith("mtp.")]
    assert own
    assert all(torch.equal(after[name], before[name]) for name in own)
    drafting(copy)


def test_a_tensor_of_another_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({**tensors, "mtp.fc.weight": tensors["mtp.fc.weight"][:, :100].clone()}, path)
    model, (line,) = load(folder)
    assert model.draft is None
    assert "mtp.fc.weight has shape [64, 100], and config.json says [64, 128]" in line


def test_a_config_that_tells_of_none(folder: Path) -> None:
    with_entries(folder, mtp_num_hidden_layers=0)
    model, said = load(folder)
    assert (model.draft, said) == (None, [])
    with_entries(folder, mtp_num_hidden_layers=None)
    drafting(folder)  # the tensors tell
    without_tensors(folder, "mtp.")
    assert load(folder)[1] == []


@pytest.mark.parametrize("options", [{"max_drafts": 0}, {"own_drafts": False}])
def test_nothing_of_it_is_loaded_where_it_is_not_wanted(folder: Path, options: dict[str, Any]) -> None:
    model, said = load(folder, **options)
    assert (model.draft, model.features, model.memory.draft, said) == (None, None, 0, [])


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_what_it_takes_is_planned(tmp_path: Path, quantize: str | None) -> None:
    even = {"intermediate_size": 128, "head_dim": 32}
    model = drafting(make_predicting("Qwen 3.5", tmp_path, **even), quantize=quantize)
    plain, _ = load(tmp_path, quantize=quantize, own_drafts=False)
    assert model.draft is not None
    assert model.features is not None
    assert model.features.shape == (64, 16, 64)
    of_draft = (model.draft.kv.data.nbytes + model.features.nbytes) // 64
    assert model.memory.block == plain.memory.block + of_draft
    tensors = load_file(tmp_path / "model.safetensors")
    numbers = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("mtp."))
    each = 4 if quantize is None else 1
    assert each * numbers <= model.memory.draft < 1.8 * each * numbers, "scales and norms beside them"


def test_a_model_that_fits_alone_is_served_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = drafting(folder, kv_bytes=1).memory.needed
    monkeypatch.setattr("penstock.engine.execution.memory.available_bytes", lambda: needed - 1)
    model, said = load(folder)
    assert model.draft is None
    assert (
        said[-1] == "there is no room for the model's own layer for multi-token prediction, which is not used"
    )
    monkeypatch.setattr("penstock.engine.execution.memory.available_bytes", lambda: 1)
    with pytest.raises(NotEnoughMemory):
        load(folder, kv_bytes=1)


def test_a_text_model_beside_an_image_tower(folder: Path, tmp_path: Path) -> None:
    inside = put_inside(folder, tmp_path / "whole", "Qwen3_5ForConditionalGeneration")
    drafting(inside)
    without_tensors(inside, "mtp.norm")
    assert "tensor mtp.norm.weight is missing" in load(inside)[1][0]


def test_experts_that_lie_one_by_one(tmp_path: Path) -> None:
    """As transformers writes them for some families, and those who quantize for all."""
    folder = make_predicting("Qwen 3.5 MoE", tmp_path)
    path, before = folder / "model.safetensors", find(folder)
    save_file(one_by_one(load_file(path)), path)
    assert find(folder) == before


def find(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a layer."""
    config = read_config(folder)
    files = unstacked(open_files(folder), config)
    source = find_prediction(Checkpoint(config, files, make_recipe(config, LoadOptions(), files)))
    assert source is not None
    return {name: source.files.entries[name].shape for name, _ in source.expected()}


@pytest.mark.parametrize(
    ("family", "prefix", "shared"),
    [
        ("Qwen 3.5", "mtp.", ()),
        ("GLM-4.5", "model.layers.3.", ("embed_tokens", "shared_head.head")),
        ("DeepSeek V3", "model.layers.3.", ("embed_tokens", "shared_head.head")),
    ],
)
def test_the_tensors_that_a_layer_must_have_are_those_of_its_files(
    family: str, prefix: str, shared: tuple[str, ...], tmp_path: Path
) -> None:
    folder = make_predicting(family, tmp_path)
    config, files = read_config(folder), load_file(folder / "model.safetensors")
    own = {name: tuple(tensor.shape) for name, tensor in files.items() if name.startswith(prefix)}
    for name in shared:  # which are the model's once more
        del own[f"{prefix}{name}.weight"]
    tensors = prediction_tensors(config, make_recipe(config, LoadOptions()))
    assert {name: tensor.known_shape for name, tensor in tensors} == own
    with_entries(folder, mtp_num_hidden_layers=0, num_nextn_predict_layers=0)
    assert not [*prediction_tensors(read_config(folder), make_recipe(config, LoadOptions()))]


def test_families_without_one(tmp_path: Path) -> None:
    assert read_config(STATES["LFM2"].make(tmp_path)).spec.prediction is None
