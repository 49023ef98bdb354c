"""Routing and experts in plain torch: what they are, one row and one expert at a time."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from penstock.engine.kernels.experts import ListedExperts, activate, route, run_experts
from penstock.engine.kernels.linear import DenseLinear
from penstock.engine.spec import SCORINGS, Activation, Router

HIDDEN, INNER = 24, 20
SWIGLU = Activation(limit=0.7, alpha=1.702, shift=1.0)


def expected_route(
    logits: list[float], router: Router, bias: list[float] | None, factors: list[float] | None
) -> tuple[list[int], list[float]]:
    """The rule for one row, with Python's numbers."""
    exps = [math.exp(x - max(logits)) for x in logits]
    scores = [e / sum(exps) for e in exps]
    if router.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    by = [s + b for s, b in zip(scores, bias, strict=True)] if bias else scores
    size = len(logits) // router.num_groups
    best = [
        sum(sorted(by[group * size : group * size + size])[-router.group_best :])
        for group in range(router.num_groups)
    ]
    kept = sorted(range(router.num_groups), key=lambda group: (-best[group], group))[: router.top_groups]
    order = sorted(range(len(logits)), key=lambda e: (e // size not in kept, -by[e], e))[: router.top_k]
    weights = [scores[e] for e in order]
    if router.scoring == "softmax_of_chosen":
        weights = [exps[e] / sum(exps[o] for o in order) for e in order]
    if router.renormalizes:
        weights = [w / (sum(weights) + router.epsilon) for w in weights]
    return order, [
        w * router.scale * (factors[e] if factors else 1) for w, e in zip(weights, order, strict=True)
    ]


@st.composite
def routers(draw: st.DrawFn) -> Router:
    num_groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    top_groups = draw(st.integers(1, num_groups))
    return Router(
        num_experts=num_groups * size,
        top_k=draw(st.integers(1, top_groups * size)),
        scoring=draw(st.sampled_from(SCORINGS)),
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=draw(st.integers(1, size)),
        renormalizes=draw(st.booleans()),
        epsilon=draw(st.sampled_from([0.0, 1e-6])),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )


@settings(deadline=None)
@given(routers(), st.booleans(), st.booleans(), st.integers(0, 1 << 20))
def test_rows_are_routed_by_the_rule(router: Router, biased: bool, scaled: bool, seed: int) -> None:
    """Steps of an eighth leave no doubt which of two is larger; groups of equal sums are told apart by rounding."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(router.num_experts, generator=generator) / 8 - 1 for _ in range(5)])
    bias = torch.rand(router.num_experts, generator=generator) if biased else None
    factors = torch.rand(router.num_experts, generator=generator) if scaled else None
    ids, weights = route(logits, router, bias, factors)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for row, own, weight in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        order, values = expected_route(
            row,
            router,
            None if bias is None else bias.tolist(),
            None if factors is None else factors.tolist(),
        )
        assert own == order
        assert weight == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (8, 4), (4, 1), (16, 3)])
def test_routes_of_deepseek_are_those_of_transformers(
    num_groups: int, top_groups: int, renormalizes: bool
) -> None:
    """The rule that chooses from groups, with a bias for the choice alone, at its full size."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=256 if num_groups != 16 else 64,
        num_experts_per_tok=8,
        n_group=num_groups,
        topk_group=top_groups,
        norm_topk_prob=renormalizes,
        routed_scaling_factor=2.5,
    )
    theirs = DeepseekV3TopkRouter(config)
    torch.manual_seed(num_groups)
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.uniform_(-0.3, 0.3)
    with torch.no_grad():
        logits, expected, chosen = theirs(torch.randn(50, HIDDEN))
    router = Router(
        num_experts=theirs.num_experts,
        top_k=8,
        scoring="sigmoid",
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=2,
        renormalizes=renormalizes,
        epsilon=1e-20,
        scale=2.5,
    )
    ids, weights = route(logits, router, theirs.e_score_correction_bias)
    order, their_order = ids.long().argsort(-1), chosen.argsort(-1)
    assert torch.equal(ids.long().gather(1, order), chosen.gather(1, their_order))
    torch.testing.assert_close(weights.gather(1, order), expected.gather(1, their_order))


def test_among_equals_the_lower_number_comes_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]])
    plain = Router(num_experts=6, top_k=5)
    assert route(logits, plain)[0].tolist() == [[1, 2, 4, 0, 3]]
    grouped = Router(num_experts=6, top_k=2, num_groups=3, top_groups=1, group_best=2, scoring="sigmoid")
    assert route(torch.zeros(1, 6), grouped)[0].tolist() == [[0, 1]]
    assert route(torch.full((2, 6), torch.nan), plain)[0].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_scores_that_round_to_the_same_are_told_apart_by_their_logits() -> None:
    logits = torch.tensor([[50.0, 60.0, 70.0]])
    for scoring in SCORINGS:
        assert route(logits, Router(num_experts=3, top_k=2, scoring=scoring))[0].tolist() == [[2, 1]]


@pytest.mark.parametrize(
    "activation",
    [
        Activation(),
        Activation(kind="gelu_tanh"),
        Activation(kind="gelu"),
        SWIGLU,
        Activation(kind="relu2", is_gated=False),
    ],
)
def test_activations(activation: Activation) -> None:
    x = torch.linspace(-3, 3, 2 * INNER).view(2, INNER)

    def by_hand(gate: float, up: float) -> float:
        if activation.limit:
            gate, up = min(gate, activation.limit), max(-activation.limit, min(up, activation.limit))
        match activation.kind:
            case "relu2":
                return max(gate, 0.0) ** 2
            case "gelu_tanh":
                made = gate / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            case "gelu":
                made = gate / 2 * (1 + math.erf(gate / math.sqrt(2)))
            case _:
                made = gate / (1 + math.exp(-activation.alpha * gate))
        return made * (up + activation.shift)

    half = INNER // 2
    for row, found in zip(x.tolist(), activate(x, activation).tolist(), strict=True):
        pairs = zip(row[:half], row[half:], strict=True) if activation.is_gated else ((g, 0.0) for g in row)
        assert found == pytest.approx([by_hand(*pair) for pair in pairs], rel=1e-5, abs=1e-6)


def listed(
    num_experts: int, out: int, inner: int, seed: int, dtype: torch.dtype = torch.float32
) -> ListedExperts:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        made: Tensor = torch.randn(*shape, generator=generator).to(dtype) / shape[-1] ** 0.5
        return made

    return ListedExperts([DenseLinear(random(out, inner), random(out)) for _ in range(num_experts)], out)


def random_step(rows: int, num_experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=generator)
    logits = torch.randn(rows, num_experts, generator=generator)
    return x, *route(logits, Router(num_experts=num_experts, top_k=top_k))


@pytest.mark.parametrize("weighs_inputs", [False, True])
@pytest.mark.parametrize("activation", [Activation(), SWIGLU, Activation(kind="relu2", is_gated=False)])
def test_experts_are_summed_row_by_row(activation: Activation, weighs_inputs: bool) -> None:
    x, ids, weights = random_step(33, 6, 3)
    wide = 2 * INNER if activation.is_gated else INNER
    gate_up, down = listed(6, wide, HIDDEN, 1), listed(6, HIDDEN, INNER, 2)
    found = run_experts(x, ids, weights, gate_up, down, activation, weighs_inputs=weighs_inputs)
    for row, own, weight, made in zip(x, ids.tolist(), weights, found, strict=True):
        expected = torch.zeros(HIDDEN)
        for expert, each in zip(own, weight, strict=True):
            read = row * each if weighs_inputs else row
            out = down.experts[expert](activate(gate_up.experts[expert](read), activation))
            expected = expected + (out if weighs_inputs else each * out)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x, ids, weights = random_step(67, 6, 3)
    x = x.to(dtype)
    gate_up, down = listed(6, 2 * INNER, HIDDEN, 1, dtype), listed(6, HIDDEN, INNER, 2, dtype)

    def run(rows: slice | list[int]) -> Tensor:
        return run_experts(x[rows], ids[rows], weights[rows], gate_up, down, Activation())

    whole = run(slice(None))
    assert whole.dtype == dtype
    for start, end in pairwise((0, 1, 2, 9, 40, 67)):
        assert torch.equal(run(slice(start, end)), whole[start:end])
    backwards = list(reversed(range(67)))
    assert torch.equal(run(backwards), whole[backwards])


def test_what_is_no_expert_here_adds_nothing() -> None:
    """Ranks have some of the experts each, and their sums are the whole."""
    x, ids, weights = random_step(20, 6, 3)
    gate_up, down = listed(6, 2 * INNER, HIDDEN, 1), listed(6, HIDDEN, INNER, 2)

    def run(experts: range) -> Tensor:
        own: list[Any] = [
            ListedExperts([each.experts[number] for number in experts], each.out_features)
            for each in (gate_up, down)
        ]
        return run_experts(x, ids - experts.start, weights, own[0], own[1], Activation())

    parts = run(range(2)) + run(range(2, 6))
    torch.testing.assert_close(parts, run(range(6)), rtol=1e-5, atol=1e-6)
    assert not run_experts(x, torch.full_like(ids, -1), weights, gate_up, down, Activation()).any()
