"""Heads in EAGLE-3's format as others write them, and those that cannot draft for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.loader import load_model
from penstock.engine.fields import Fields
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.drafts import DraftSource
from penstock.engine.model.eagle import check_eagle, is_eagle, read_eagle
from penstock.engine.model.eagle_weights import (
    EagleFiles,
    check_eagle_tensors,
    eagle_specs,
    eagle_tensors,
    load_eagle,
)
from penstock.engine.model.parse import parse_config
from tests.engine.checkpoints import VOCAB_SIZE, make_checkpoint, make_config
from tests.engine.configs import with_spec, with_windows
from tests.engine.eagle_heads import NUM_DRAFTED, TAPS, make_eagle

TARGET = parse_config(Fields("config.json", make_config("llama")))
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def config_of(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((make_eagle(tmp_path, **overrides) / "config.json").read_text())
    return found


def test_heads_are_told_from_models(tmp_path: Path) -> None:
    assert not is_eagle(make_checkpoint("llama", tmp_path / "model"))
    assert is_eagle(make_eagle(tmp_path / "a"))
    assert is_eagle(make_eagle(tmp_path / "b", draft_vocab_size=None))
    assert is_eagle(make_eagle(tmp_path / "c", architectures=["LlamaForCausalLM"]))


def test_what_a_config_says(tmp_path: Path) -> None:
    head = read_eagle(make_eagle(tmp_path))
    assert (head.num_drafted, head.taps, head.residual_is_normed) == (NUM_DRAFTED, TAPS, False)
    assert head.layer.num_layers == 1


def test_layers_counted_as_sglang_counts_them(tmp_path: Path) -> None:
    folder = make_eagle(
        tmp_path, eagle_aux_hidden_state_layer_ids=None, eagle_config={LAYER_IDS: [0, 14, 28]}
    )
    assert read_eagle(folder).taps == (1, 15, 29)


def test_layers_that_nobody_names(tmp_path: Path) -> None:
    head = read_eagle(make_eagle(tmp_path, eagle_aux_hidden_state_layer_ids=None))
    assert head.taps_of(with_spec(TARGET, layers=TARGET.layers[:1] * 32)) == (2, 16, 29)


def test_a_head_of_speculators(tmp_path: Path) -> None:
    written = config_of(tmp_path)
    nested = {
        name: written.pop(name) for name in list(written) if name not in ("draft_vocab_size", LAYER_IDS)
    }
    content = {**written, "architectures": ["Eagle3Speculator"], "transformer_layer_config": nested}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert is_eagle(tmp_path)
    head = read_eagle(tmp_path)
    assert (head.num_drafted, head.taps, head.residual_is_normed) == (NUM_DRAFTED, TAPS, True)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"model_type": "qwen3"}, "model_type qwen3 is not supported in a head"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and a head has one layer"),
        ({"draft_vocab_size": 513}, "draft_vocab_size"),
        ({LAYER_IDS: [1, 2]}, f"{LAYER_IDS} has 2 entries, and 3 are read"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "does not use_aux_hidden_state"),
        ({"target_hidden_size": 128}, "hidden states of 128 numbers, and those of the model have 64"),
        ({"vocab_size": 600}, "the head knows 600 tokens, and the model 512"),
        ({LAYER_IDS: [0, 1, 3]}, "after 3 layers, and the model has 3, of which the last cannot be read"),
    ],
)
def test_heads_that_are_refused(tmp_path: Path, overrides: dict[str, Any], told: str) -> None:
    folder = make_eagle(tmp_path, **overrides)
    with pytest.raises(CheckpointError, match=told):
        check_eagle(TARGET, read_eagle(folder))


def test_a_target_that_gives_blocks_back_has_no_head(tmp_path: Path) -> None:
    head = read_eagle(make_eagle(tmp_path))
    with pytest.raises(CheckpointError, match="forgets all but 24 tokens"):
        check_eagle(with_windows(TARGET, (24,) * 3), head)


@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
def test_tensors_are_called_by_their_own_names(tmp_path: Path, prefix: str) -> None:
    folder = make_eagle(tmp_path, prefix=prefix)
    names = ("self_attn.q_proj", "hidden_norm", "mlp.down_proj", "post_attention_layernorm")
    for name in (*(f"{prefix}.{name}.weight" for name in names), "fc.weight", "norm.weight", "d2t"):
        told_of(folder, name, None, f"tensor {name} is missing")
        told_of(folder, name, torch.zeros(3, 7), rf"{name} has shape \[3, 7\], and config.json says")


def test_an_embedding_as_wide_as_the_head(tmp_path: Path) -> None:
    folder = make_eagle(tmp_path, hidden=48, has_embedding=True)
    told_of(folder, "embed_tokens.weight", None, "tensor embed_tokens.weight is missing")


@pytest.mark.parametrize("sizes", [{}, {"hidden": 48, "has_embedding": True}, {"num_drafted": VOCAB_SIZE}])
def test_the_tensors_that_a_head_must_have_are_those_of_its_file(
    tmp_path: Path, sizes: dict[str, Any]
) -> None:
    folder = make_eagle(tmp_path, **sizes)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    written.pop("t2d", None)
    must = {
        name: tensor.known_shape for name, tensor in eagle_tensors(read_eagle(folder)) if not tensor.optional
    }
    assert must == written


def told_of(folder: Path, name: str, tensor: torch.Tensor | None, told: str) -> None:
    """Checks what is said of a head whose tensor is another one, or missing."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    tensors = {other: value.clone() for other, value in load_file(path).items() if other != name}
    save_file(tensors if tensor is None else {**tensors, name: tensor}, path)
    try:
        with pytest.raises(CheckpointError, match=told):
            check_eagle_tensors(read_eagle(folder), EagleFiles(folder))
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("row", [0, NUM_DRAFTED - 1])
def test_rows_that_lead_to_no_token_or_to_one_twice(tmp_path: Path, row: int) -> None:
    folder = make_eagle(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for wrong in (-row - 1, VOCAB_SIZE - row, int(tensors["d2t"][5]) + 5 - row):
        d2t = tensors["d2t"].clone()
        d2t[row] = wrong
        save_file({**tensors, "d2t": d2t}, folder / "model.safetensors")
        kernels = reference_kernels(torch.device("cpu"), torch.float32)
        with pytest.raises(
            CheckpointError, match="d2t does not lead to tokens of the model, each of them once"
        ):
            load_eagle(read_eagle(folder), EagleFiles(folder), kernels)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_head_is_quantized_as_its_target_is(tmp_path: Path, quantize: str) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", intermediate_size=128)
    head = make_eagle(tmp_path / "head")
    said: list[str] = []
    options = LoadOptions(device="cpu", quantize=quantize, num_blocks=64)
    loaded = load_model(folder, options, said.append, lambda *_: None, DraftSource(head))
    if loaded.draft is None:
        pytest.skip("there is no compiler for the native kernels")
    assert loaded.features is not None
    assert loaded.features.shape == (64, 16, 64)
    assert any(line.startswith("drafts come from the head") for line in said)
    plain = load_model(folder, options, lambda _: None, lambda *_: None)
    head_kv, kept = loaded.draft.kv.data.nbytes // 64, 16 * 64 * 2
    assert loaded.memory.block == plain.memory.block + head_kv + kept
    specs = eagle_specs(read_eagle(head)).values()
    num_weights = sum(spec.out_features * spec.in_features for spec in specs)
    assert num_weights < loaded.memory.draft < 1.6 * num_weights, "a byte each, scales and norms"
