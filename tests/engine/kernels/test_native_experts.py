"""Native experts at every level against plain torch: activations, formats, odd sizes, and rows in any company."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels.cpu.native import NativeLinear, NativeRoute, NativeRunExperts, Team
from penstock.engine.kernels.experts import ListedExperts, route, run_experts
from penstock.engine.quant.codebook import NF4, Codebook
from penstock.engine.quant.float8 import Float8
from penstock.engine.quant.integers import Inputs, Integers
from penstock.engine.spec import SCORINGS, Activation, Router
from tests.engine.kernels.test_experts import routers
from tests.few import examples

HIDDEN, INNER, EXPERTS, CHOSEN = 80, 48, 6, 3
"""Five panels and three, neither of which fills whole tiles."""
ROWS = 67
SWIGLU = Activation(limit=0.7, alpha=1.702, shift=1.0)
RELU2 = Activation(kind="relu2", is_gated=False)
Kept = torch.dtype | Integers | Float8 | Codebook
FORMATS: list[Kept] = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    Integers(8, 0, inputs=Inputs.ROW, rotation=16),
    Integers(8, 0, inputs=Inputs.FINE),
    Integers(8, 16),
    Integers(4, 16, has_offset=True),
    Integers(6, 16),
    Float8(),
    Codebook("nf4", NF4, 16),
]
NAMES = [
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "fine int8",
    "int8 in groups",
    "int4",
    "int6",
    "fp8",
    "nf4",
]


def packed(team: Team, kept: Kept, weight: Tensor, bias: Tensor | None, *, gated: bool) -> NativeLinear:
    match kept:
        case torch.dtype():
            return NativeLinear(team, weight, bias, kept, gated)
        case Integers():
            kept = replace(kept, group_size=kept.group_size or weight.shape[1])
            tensors = kept.quantize(weight) if kept.bits in (4, 8) else in_groups(weight, kept)
            return NativeLinear.of(team, tensors, kept, bias, gated)
        case Float8():
            scale = weight.abs().amax(1, keepdim=True) / 448
            tensors = {"weight": (weight / scale).to(torch.float8_e4m3fn), "scale": scale}
            return NativeLinear.of(team, tensors, kept, bias, gated)
    return NativeLinear.of(team, kept.quantize(weight), kept, bias, gated)


def in_groups(weight: Tensor, format: Integers) -> dict[str, Tensor]:
    groups = torch.unflatten(weight, 1, (-1, format.group_size))
    scale = groups.abs().amax(-1) / (-format.lowest - 1)
    return {"weight": (groups / scale[..., None]).round().to(torch.int8).flatten(1), "scale": scale}


class Pair:
    """The two linear maps of each expert, as native kernels run them; and apart, for plain torch."""

    def __init__(
        self,
        team: Team,
        kept: Kept,
        activation: Activation,
        *,
        hidden: int = HIDDEN,
        inner: int = INNER,
        biased: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.run_natively, self.activation = NativeRunExperts(team), activation

        def listed(rows: int, columns: int, gated: bool) -> tuple[ListedExperts, ListedExperts]:
            weights = torch.randn(EXPERTS, rows, columns, generator=generator) / columns**0.5
            biases = [torch.randn(rows, generator=generator) / 4 if biased else None for _ in range(EXPERTS)]
            both = (
                [packed(team, kept, *each, gated=some) for each in zip(weights, biases, strict=True)]
                for some in (gated, False)
            )
            native, apart = (ListedExperts(own, rows) for own in both)
            return native, apart

        self.gate_up = listed(2 * inner if activation.is_gated else inner, hidden, activation.is_gated)
        self.down = listed(hidden, inner, False)

    def native(self, x: Tensor, ids: Tensor, weights: Tensor, *, weighs_inputs: bool = False) -> Tensor:
        both = self.gate_up[0], self.down[0], self.activation
        return self.run_natively(x, ids, weights, *both, weighs_inputs=weighs_inputs)

    def plain(self, x: Tensor, ids: Tensor, weights: Tensor, *, weighs_inputs: bool = False) -> Tensor:
        both = self.gate_up[1], self.down[1], self.activation
        return run_experts(x, ids, weights, *both, weighs_inputs=weighs_inputs)


def random_step(rows: int, hidden: int = HIDDEN, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator)
    logits = torch.randn(rows, EXPERTS, generator=generator)
    return x, *route(logits, Router(num_experts=EXPERTS, top_k=CHOSEN))


def check(found: Tensor, expected: Tensor, kept: Kept) -> None:
    """Between the maps, activations differ in their last bits, and what is rounded then may go the other way."""
    error = float((found - expected).norm() / expected.norm())
    assert error < (1e-6 if kept in (torch.float32, torch.float16) else 5e-3)


@pytest.mark.parametrize("kept", FORMATS, ids=NAMES)
def test_experts_of_every_format(team: Team, kept: Kept) -> None:
    pair, step = Pair(team, kept, Activation()), random_step(ROWS)
    check(pair.native(*step), pair.plain(*step), kept)


@pytest.mark.parametrize(
    "activation",
    [
        Activation(kind="gelu_tanh"),
        Activation(kind="gelu"),
        SWIGLU,
        RELU2,
        Activation(is_gated=False, limit=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("kept", [torch.float32, Integers(8, 0)], ids=str)
def test_activations(team: Team, kept: Kept, activation: Activation) -> None:
    pair, step = Pair(team, kept, activation), random_step(ROWS)
    for weighs_inputs in (False, True):
        found, expected = (run(*step, weighs_inputs=weighs_inputs) for run in (pair.native, pair.plain))
        check(found, expected, kept)


@settings(max_examples=examples(15))
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.booleans())
def test_odd_sizes(team: Team, hidden: int, inner: int, rows: int, biased: bool) -> None:
    pair = Pair(team, torch.float32, Activation(), hidden=hidden, inner=inner, biased=biased)
    step = random_step(rows, hidden)
    torch.testing.assert_close(pair.native(*step), pair.plain(*step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", FORMATS, ids=NAMES)
def test_a_row_has_the_same_bits_in_any_company(team: Team, kept: Kept) -> None:
    pair = Pair(team, kept, SWIGLU)
    x, ids, weights = random_step(ROWS)
    ids[20:] = ids[20]  # experts with many rows, and those with few
    whole = pair.native(x, ids, weights)
    for start, end in pairwise((0, 1, 2, 3, 9, 40, ROWS)):
        assert torch.equal(pair.native(x[start:end], ids[start:end], weights[start:end]), whole[start:end])
    backwards = torch.arange(ROWS - 1, -1, -1)
    assert torch.equal(pair.native(x[backwards], ids[backwards], weights[backwards]), whole[backwards])


def test_a_permutation_is_that_of_each_expert(team: Team) -> None:
    format = Integers(4, 16, has_offset=True, is_permuted=True)
    generator = torch.Generator().manual_seed(6)

    def listed(rows: int, columns: int, gated: bool) -> tuple[ListedExperts, ListedExperts]:
        both: tuple[list[NativeLinear], list[NativeLinear]] = ([], [])
        for _ in range(EXPERTS):
            weight = torch.randn(rows, columns, generator=generator) / columns**0.5
            order = torch.randperm(columns, generator=generator).int()
            tensors = {**Integers(4, 16, has_offset=True).quantize(weight), "permutation": order}
            for own, some in zip(both, (gated, False), strict=True):
                own.append(NativeLinear.of(team, tensors, format, None, some))
        return ListedExperts(both[0], rows), ListedExperts(both[1], rows)

    gate_up, down = listed(2 * INNER, HIDDEN, True), listed(HIDDEN, INNER, False)
    for rows in (1, ROWS):
        step = random_step(rows)
        found = NativeRunExperts(team)(*step, gate_up[0], down[0], Activation())
        check(found, run_experts(*step, gate_up[1], down[1], Activation()), format)


def test_what_is_no_expert_here_adds_nothing(team: Team) -> None:
    pair = Pair(team, torch.float32, Activation())
    x, ids, weights = random_step(20)
    ids[3], ids[5, 1] = -1, EXPERTS
    torch.testing.assert_close(
        pair.native(x, ids, weights), pair.plain(x, ids, weights), rtol=1e-4, atol=1e-5
    )
    assert not pair.native(x, torch.full_like(ids, -1), weights).any()


@settings(max_examples=examples(60))
@given(routers(), st.booleans(), st.booleans(), st.integers(0, 1 << 20))
def test_routes_are_those_of_plain_torch(
    team: Team, router: Router, biased: bool, scaled: bool, seed: int
) -> None:
    """Steps of an eighth leave no doubt which of two is larger; sums of groups are told apart by rounding."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(router.num_experts, generator=generator) / 8 - 1 for _ in range(5)])
    bias = torch.rand(router.num_experts, generator=generator) if biased else None
    factors = torch.rand(router.num_experts, generator=generator) if scaled else None
    ids, weights = NativeRoute(team.library)(logits, router, bias, factors)
    expected_ids, expected = route(logits, router, bias, factors)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_among_equals_the_lower_number_comes_first(team: Team) -> None:
    routed = NativeRoute(team.library)
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0, -1.0, -0.0]])
    plain = Router(num_experts=6, top_k=5)
    assert routed(logits, plain)[0].tolist() == [[1, 2, 4, 0, 3], [0, 1, 2, 3, 5]]
    grouped = Router(num_experts=6, top_k=2, num_groups=3, top_groups=1, group_best=2, scoring="sigmoid")
    assert routed(torch.zeros(1, 6), grouped)[0].tolist() == [[0, 1]]
    for scoring in SCORINGS:
        some = torch.tensor([[1.0, -torch.nan, 3.0, torch.nan, 2.0, torch.inf]])
        router = replace(plain, scoring=scoring)
        assert routed(some, router)[0].tolist() == route(some, router)[0].tolist() == [[1, 3, 5, 2, 4]]
