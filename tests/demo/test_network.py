"""The demo model's network, its optimiser and its export, on shapes so small that everything can be checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor

from demo.export import export
from demo.network import Llama, Shape
from demo.optimiser import Muon, optimisers, orthogonalise
from tests.few import examples

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


@settings(max_examples=examples(30))
@given(SEEDS, st.integers(1, 19))
def test_a_token_is_not_changed_by_what_comes_after_it(seed: int, at: int) -> None:
    ids = some_ids(1, 20, seed=seed)
    other = ids.clone()
    other[:, at:] = some_ids(1, 20 - at, seed=seed + 1)
    before, after = logits(MODEL, ids), logits(MODEL, other)
    torch.testing.assert_close(before[:, :at], after[:, :at], rtol=1e-4, atol=1e-4)


@given(SEEDS, st.integers(2, 24), st.integers(2, 24))
def test_orthogonalising_brings_every_singular_value_near_one(seed: int, rows: int, columns: int) -> None:
    """The matrices are well away from singular; the coefficients leave values between 0.7 and 1.2."""
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
    values = torch.rand(min(rows, columns), generator=generator) + 0.5
    found = torch.linalg.svdvals(orthogonalise((u * values @ vh)[None], steps=6)[0])
    assert found.min() > 0.6
    assert found.max() < 1.3


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


def test_every_parameter_has_one_optimiser() -> None:
    model = Llama(TINY)
    stepped = [
        id(parameter)
        for optimiser in optimisers(model, 0.02, 0.006)
        for group in optimiser.param_groups
        for parameter in group["params"]
    ]
    assert sorted(stepped) == sorted(map(id, model.parameters()))
