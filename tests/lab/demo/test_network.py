"""The demo model's network, its optimiser and its export, on shapes so small that everything can be checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from lab.demo.export import export
from lab.demo.network import Llama, Shape, rope_tables, rotate
from lab.demo.optimiser import Muon, optimisers, orthogonalise
from lab.demo.tokenizer import END, encode_text, special_id
from penstock.engine.model.parse import read_config, read_generation_defaults
from tests.few import examples

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Shape(320, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=12, intermediate_size=40)
SHAPES = {
    "grouped": TINY,
    "as many kv heads": replace(TINY, num_kv_heads=2),
    "wide heads": replace(TINY, head_dim=32),
    "one layer": replace(TINY, num_layers=1),
    "other rope": replace(TINY, rope_theta=500.0, max_positions=64, norm_eps=1e-3),
}
SEEDS = st.integers(0, 2**31)


def speaking(shape: Shape, seed: int = 0) -> Llama:
    """A model whose layers all speak: a fresh one's are silent."""
    torch.manual_seed(seed)
    model = Llama(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim == 2 else 0.1))
            parameter.add_(parameter.ndim == 1)
    return model


def some_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, TINY.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Llama, ids: Tensor) -> Tensor:
    return model.logits(model(ids))


MODEL = speaking(TINY)
TABLES = rope_tables(TINY)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_transformers_computes_the_same_from_what_was_exported(
    shape: Shape, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = speaking(shape)
    export(model, tokenizer, tmp_path)
    halved = Llama(shape)
    halved.load_state_dict({name: value.half().float() for name, value in model.state_dict().items()})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = some_ids(2, 50)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, logits(halved, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_server_reads_the_shape_that_was_exported(
    shape: Shape, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export(Llama(shape), tokenizer, tmp_path)
    config = read_config(tmp_path)
    assert (config.hidden_size, config.num_layers) == (shape.hidden_size, shape.num_layers)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
    )
    assert (config.max_position, config.spec.ropes[0].theta) == (shape.max_positions, shape.rope_theta)
    assert config.spec.norm_eps == shape.norm_eps
    assert config.eos_token_ids == (special_id(tokenizer, END),)
    assert config.spec.ties_embeddings
    assert read_generation_defaults(tmp_path).temperature is not None


def test_an_export_is_the_weights_in_half_precision_and_nothing_else(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = speaking(TINY)
    export(model, tokenizer, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(written[name], value.half())


def test_an_export_replaces_the_one_before(tokenizer: Tokenizer, tmp_path: Path) -> None:
    export(speaking(TINY, seed=1), tokenizer, tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    second = speaking(replace(TINY, num_layers=1), seed=2)
    export(second, tokenizer, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == files
    assert load_file(tmp_path / "model.safetensors").keys() == second.state_dict().keys()
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 1


def test_the_exported_tokenizer_is_the_one_of_the_training(tokenizer: Tokenizer, tmp_path: Path) -> None:
    export(Llama(TINY), tokenizer, tmp_path)
    reloaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("Once upon a time", "12 + 3", "Zoë \U0001f98a\n\n", ""):
        assert encode_text(reloaded, text) == encode_text(tokenizer, text)


@settings(max_examples=examples(30))
@given(SEEDS, st.integers(1, 19))
def test_a_token_is_not_changed_by_what_comes_after_it(seed: int, at: int) -> None:
    ids = some_ids(1, 20, seed=seed)
    other = ids.clone()
    other[:, at:] = some_ids(1, 20 - at, seed=seed + 1)
    before, after = logits(MODEL, ids), logits(MODEL, other)
    torch.testing.assert_close(before[:, :at], after[:, :at], rtol=1e-4, atol=1e-4)


@settings(max_examples=examples(30))
@given(SEEDS, st.integers(1, 12))
def test_one_talk_in_a_row_is_computed_as_without_a_mask(seed: int, length: int) -> None:
    ids = some_ids(2, length, seed=seed)
    with torch.no_grad():
        torch.testing.assert_close(MODEL(ids, torch.ones_like(ids)), MODEL(ids), rtol=1e-4, atol=1e-4)


def test_it_matters_where_a_token_stands() -> None:
    ids = torch.tensor([[5, 6, 7], [6, 5, 7]])
    first, second = logits(MODEL, ids)[:, -1]
    assert not torch.allclose(first, second, atol=1e-3)


def test_a_fresh_model_passes_its_embeddings_through() -> None:
    model = Llama(TINY)
    ids = some_ids(1, 9)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), model.model.norm(model.model.embed_tokens(ids)))


@given(SEEDS, st.integers(0, 1900), st.integers(0, 100))
def test_what_rotated_vectors_say_to_each_other_depends_on_their_distance(
    seed: int, start: int, distance: int
) -> None:
    """Su et al. 2021, the property that the encoding was made for."""
    cos, sin = TABLES
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, TINY.head_dim, generator=generator)

    def product(query_at: int, key_at: int) -> Tensor:
        return rotate(query, cos[query_at], sin[query_at]) @ rotate(key, cos[key_at], sin[key_at])

    torch.testing.assert_close(product(start + distance, start), product(distance, 0), rtol=1e-3, atol=1e-2)


@given(SEEDS, st.integers(2, 24), st.integers(2, 24))
def test_orthogonalising_brings_every_singular_value_near_one(seed: int, rows: int, columns: int) -> None:
    """The matrices are well away from singular; the coefficients leave values between 0.7 and 1.2."""
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
    values = torch.rand(min(rows, columns), generator=generator) + 0.5
    found = torch.linalg.svdvals(orthogonalise((u * values @ vh)[None], steps=6)[0])
    assert found.min() > 0.6
    assert found.max() < 1.3


@given(SEEDS, st.floats(1e-3, 1e3))
def test_orthogonalising_does_not_care_for_scale_or_for_the_batch(seed: int, scale: float) -> None:
    matrices = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(seed))
    whole = orthogonalise(matrices)
    torch.testing.assert_close(orthogonalise(matrices * scale), whole, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(orthogonalise(matrices[1:2])[0], whole[1], rtol=1e-3, atol=1e-3)
    turned = orthogonalise(matrices.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(turned, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(6, 6), (6, 12), (12, 6)])
def test_a_step_of_muon_is_as_long_as_the_learning_rate_in_every_direction(shape: tuple[int, int]) -> None:
    """Tall matrices go further by the root of their ratio, so that outputs change by the same amount."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(1)))[0][
        : shape[0], : shape[1]
    ].contiguous() + 0.5 * torch.eye(*shape)
    Muon([parameter], lr=0.1).step()
    lengths = torch.linalg.svdvals(parameter.detach()) / 0.1
    wanted = max(1.0, shape[0] / shape[1]) ** 0.5
    assert wanted * 0.5 < lengths.min()
    assert lengths.max() < wanted * 1.4
    assert (parameter.detach() * parameter.grad).sum() < 0, "downhill"


def test_muon_remembers_where_it_was_going() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    optimiser = Muon([parameter], lr=0.1)
    parameter.grad = torch.eye(4)
    optimiser.step()
    first = parameter.detach().clone()
    parameter.grad = torch.zeros(4, 4)
    optimiser.step()
    assert (parameter.detach() - first).diagonal().max() < 0


def test_every_parameter_has_one_optimiser() -> None:
    model = Llama(TINY)
    stepped = [
        id(parameter)
        for optimiser in optimisers(model, 0.02, 0.006)
        for group in optimiser.param_groups
        for parameter in group["params"]
    ]
    assert sorted(stepped) == sorted(map(id, model.parameters()))


def test_muon_is_for_the_matrices_of_the_layers_alone() -> None:
    model = Llama(TINY)
    muon, adam = optimisers(model, 0.02, 0.006)
    assert isinstance(muon, Muon)
    matrices = [
        parameter for layer in model.model.layers for parameter in layer.parameters() if parameter.ndim == 2
    ]
    assert {id(p) for group in muon.param_groups for p in group["params"]} == set(map(id, matrices))
    assert [group["lr"] for group in adam.param_groups] == pytest.approx([0.006, 0.0006])
