"""Cutting a model into stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.kv_cache import KVLayout
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.files import open_files
from penstock.engine.model.split import split_config
from penstock.engine.model.stage_files import StageFiles
from penstock.engine.model.stages import check_stages, cut_config, stage_starts
from penstock.engine.model.tensors import expected_shapes, linear_specs, make_recipe
from tests.engine.checkpoints import make_checkpoint
from tests.engine.families import STATES, TINY


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_the_largest_stage_is_as_small_as_can_be(sizes: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(sizes)))

    def largest(starts: tuple[int, ...]) -> int:
        return max(sum(sizes[first:end]) for first, end in pairwise((*starts, len(sizes))))

    starts = stage_starts(sizes, num_stages)
    assert len(starts) == num_stages
    assert starts[0] == 0
    assert all(first < end for first, end in pairwise((*starts, len(sizes))))
    others = combinations(range(1, len(sizes)), num_stages - 1)
    assert largest(starts) == min(largest((0, *other)) for other in others)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_stages_are_the_whole(tmp_path: Path, num_stages: int, ties: bool) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=4, tie_word_embeddings=ties)
    config, files = read_config(folder), open_files(folder)
    stages = [cut_config(config, num_stages, number) for number in range(num_stages)]
    assert tuple(layer for stage in stages for layer in stage.layers) == config.layers
    embedding, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    for number, stage in enumerate(stages):
        own = StageFiles(files, stage)
        assert own.entries.keys() == expected_shapes(stage).keys()
        is_first, is_last = number == 0, number == num_stages - 1
        assert (embedding in own.entries) == (is_first or (is_last and ties))
        assert (norm in own.entries) == is_last
        assert (head in own.entries) == (is_last and not ties)
        name = "self_attn.q_proj.weight"
        for layer in range(stage.num_layers):
            whole = f"model.layers.{stage.spec.first_layer + layer}.{name}"
            assert own.own_name(f"model.layers.{layer}.{name}") == whole
            assert torch.equal(own.read(f"model.layers.{layer}.{name}"), files.read(whole))


def test_a_layer_is_quantized_by_its_number_in_the_model(tmp_path: Path) -> None:
    """The first layer has 8 bits where int4 is asked for, and the next ones have wide groups."""
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=12, hidden_size=128, intermediate_size=128)
    config = read_config(folder)
    recipe = make_recipe(config, LoadOptions(device="cpu", quantize="int4"))
    for number in range(2):
        stage = cut_config(config, 2, number)
        for layer in range(stage.num_layers):
            whole = linear_specs(config, stage.spec.first_layer + layer, recipe)
            own = linear_specs(stage, layer, recipe)
            assert {field: spec.format for field, spec in own.items()} == {
                field: spec.format for field, spec in whole.items()
            }


def check_tables(stage: ModelConfig, windows: tuple[int, ...]) -> None:
    layout = KVLayout.of(stage, 16)
    assert layout.windows == windows
    for number, attention in stage.spec.attentions.items():
        assert windows[layout.places[number].table] == attention.window
        assert layout.places[number].plane < layout.num_planes
    places = [(place.table, place.plane, place.part) for place in layout.places.values()]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("windows", [(24, 0), (24, 24, 0), (24, 24, 24, 24, 24, 0), (8, 8, 24, 0)])
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_a_stage_has_the_block_tables_of_the_model(
    tmp_path: Path, windows: tuple[int, ...], num_stages: int
) -> None:
    config = read_config(make_checkpoint("llama", tmp_path, num_hidden_layers=1))
    (layer,) = config.layers
    layers = tuple(layer.with_attention(window=window) for window in 4 * windows)
    config = replace(config, spec=replace(config.spec, layers=layers))
    whole = KVLayout.of(config, 16).windows
    for number in range(num_stages):
        check_tables(cut_config(config, num_stages, number), whole)


def test_a_stage_without_attention_has_them_too(tmp_path: Path) -> None:
    config = read_config(STATES["Qwen 3.5"].make(tmp_path))
    first, last = (cut_config(config, 4, number) for number in (0, 3))
    assert (len(first.spec.attentions), len(last.spec.attentions)) == (0, 1)
    for stage in (first, last):
        check_tables(stage, KVLayout.of(config, 16).windows)
        assert stage.context_window == 0


def test_what_ranks_have_of_layers_is_cut(tmp_path: Path) -> None:
    config = split_config(read_config(make_checkpoint("llama", tmp_path, num_hidden_layers=4)), 2, 1)
    stage = cut_config(config, 2, 1)
    assert stage.layers == config.layers[stage.spec.first_layer :]
    assert stage.num_ranks == 2


@pytest.mark.parametrize(
    ("num_stages", "overrides", "fault"),
    [
        (5, {}, "the model has 4 layers, which are too few"),
        (2, {"quantization_config": {"quant_method": "gptq"}}, "quantized (gptq) is served by one process"),
        (33, {}, "with --tensor-parallel 2 there would be 66 processes, and 64 are the most"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    tmp_path: Path, num_stages: int, overrides: dict[str, Any], fault: str
) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=4, **overrides)
    with pytest.raises(CheckpointError) as refused:
        check_stages(folder, read_config(folder), num_stages, 2)
    text = str(refused.value)
    assert text.startswith(f"--pipeline-parallel {num_stages}: ")
    assert fault in text
    assert "\n" not in text


def test_layers_that_belong_together_are_refused(tmp_path: Path) -> None:
    folder = TINY["Gemma 4 E"].make(tmp_path)
    config = read_config(folder)
    with pytest.raises(CheckpointError, match=r"^--pipeline-parallel 2: .* embeddings of their own"):
        check_stages(folder, config, 2)
    without = replace(config, spec=replace(config.spec, layer_embeddings=None))
    with pytest.raises(CheckpointError, match=r"^--pipeline-parallel 2: .* read the keys of others"):
        cut_config(without, 2, 0)


def test_one_stage_is_no_cut(tmp_path: Path) -> None:
    config = read_config(make_checkpoint("llama", tmp_path))
    check_stages(tmp_path / "model.gguf", config, 1)
    with pytest.raises(CheckpointError, match="a GGUF file is served by one process only"):
        check_stages(tmp_path / "model.gguf", config, 2)
