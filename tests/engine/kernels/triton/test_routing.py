"""The choice of experts by Triton: what plain torch chooses, and the weights that it gives them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels import experts
from penstock.engine.kernels.triton.routing import route
from penstock.engine.spec import Router
from tests.engine.kernels.test_experts import routers
from tests.few import examples

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|All-NaN):RuntimeWarning")


def check(logits: Tensor, router: Router, *vectors: Tensor | None) -> None:
    ids, weights = route(logits, router, *vectors)
    on_host = (None if each is None else each.cpu() for each in vectors)  # torch sorts NaN otherwise on CUDA
    expected_ids, expected = (each.to(ids.device) for each in experts.route(logits.cpu(), router, *on_host))
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-30, equal_nan=True)


@settings(deadline=None, max_examples=examples(25))
@given(
    router=routers(),
    biased=st.booleans(),
    scaled=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 99),
)
def test_rows_are_routed_as_torch_routes_them(
    router: Router, biased: bool, scaled: bool, dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    """Logits that differ by an eighth at least leave no doubt which expert is better."""
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(router.num_experts, generator=generator) for _ in range(3)]
    logits = (torch.stack(order) / 8 - 1).to(device, dtype)
    vectors = [torch.rand(router.num_experts, generator=generator).to(device) for _ in range(2)]
    bias, factors = (each if wanted else None for each, wanted in zip(vectors, (biased, scaled), strict=True))
    check(logits, router, bias, factors)


FAMILIES = {
    "Qwen 3": Router(num_experts=128, top_k=8, renormalizes=True),
    "gpt-oss": Router(num_experts=32, top_k=4, scoring="softmax_of_chosen"),
    "DeepSeek V3": Router(
        num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, group_best=2, renormalizes=True,
        epsilon=1e-20, scale=2.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_routers_of_families(name: str, device: torch.device) -> None:
    logits = torch.randn(4, FAMILIES[name].num_experts, generator=torch.Generator().manual_seed(1)).to(device)
    check(logits, FAMILIES[name])


def test_among_equals_the_lower_number_comes_first(device: torch.device) -> None:
    plain = Router(num_experts=6, top_k=5)
    rows = [[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0, -0.0]]
    check(torch.tensor(rows, device=device), plain)
    grouped = Router(num_experts=6, top_k=3, num_groups=3, top_groups=2, group_best=2, scoring="sigmoid")
    check(torch.zeros(2, 6, device=device), grouped)


def test_odd_numbers_still_choose_experts_that_differ(device: torch.device) -> None:
    """NaN is the largest; infinities are floats like others."""
    nan, inf = torch.nan, torch.inf
    rows = [[nan] * 4, [1.0, nan, 2.0, -nan], [-inf, -inf, -inf, 1.0], [inf, 1.0, inf, -inf], [-inf] * 4]
    logits = torch.tensor(rows, device=device)
    router = Router(num_experts=4, top_k=4)
    check(logits, router)
    check(logits, replace(router, scoring="sigmoid", num_groups=2, top_groups=2))
    assert route(logits[:0], router)[0].shape == (0, 4)
