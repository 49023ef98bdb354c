"""Two similar distributions that draw with the same noise mostly choose the same token.

What a token drawn by Gumbel-max promises, and the inverse of the cumulative distribution does not (Daliri, Musco and
Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.sampling import reference
from tests.engine.sampling.cases import draws, states
from tests.engine.sampling.numpy_reference import F64

VOCAB = 32
NUM = 4_000
NUM_PAIRS = 24


def pair(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a distribution and of one beside it: from all but the same to unlike."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(VOCAB, generator=generator)
    return logits, logits + 0.05 * 2 ** (seed % 6) * torch.randn(VOCAB, generator=generator)


def softmax(logits: Tensor) -> F64:
    found: F64 = logits.double().softmax(-1).numpy()
    return found


def total_variation(p: F64, q: F64) -> float:
    return float(np.abs(p - q).sum() / 2)


def by_gumbel_max(p: F64, q: F64) -> float:
    """The probability that both choose the same token: token i wins both races of exponentials."""
    races = np.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    return float((1 / races.sum(1)).sum())


def by_inverse_cdf(p: F64, q: F64) -> float:
    """Returns the probability that one uniform number finds the same token in both: the overlap of their intervals."""
    p_ends, q_ends = p.cumsum(), q.cumsum()
    overlaps = np.minimum(p_ends, q_ends) - np.maximum(p_ends - p, q_ends - q)
    return float(np.maximum(overlaps, 0).sum())


def share_agreeing(first: Tensor, second: Tensor) -> float:
    one, other = (draws(reference.choose, logits, states(NUM)) for logits in (first, second))
    return float((one == other).mean())


@pytest.mark.parametrize("seed", range(6))
def test_agreement_is_what_gumbel_max_promises(seed: int) -> None:
    logits = pair(seed)
    p, q = map(softmax, logits)
    expected, distance = by_gumbel_max(p, q), total_variation(p, q)
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    assert abs(share_agreeing(*logits) - expected) < 4 * (expected * (1 - expected) / NUM) ** 0.5


def test_similar_distributions_agree_more_than_by_the_inverse_cdf() -> None:
    found, inverse, distances = [], [], []
    for seed in range(NUM_PAIRS):
        logits = pair(seed)
        p, q = map(softmax, logits)
        found.append(share_agreeing(*logits))
        inverse.append(by_inverse_cdf(p, q))
        distances.append(total_variation(p, q))
        error = 4 * (found[-1] * (1 - found[-1]) / NUM) ** 0.5
        assert (1 - distances[-1]) / (1 + distances[-1]) - error <= found[-1] <= 1 - distances[-1] + error
    assert np.mean(found) > np.mean(inverse) + 0.05
    best = 1 - np.mean(distances)
    assert best - np.mean(found) < 0.25 * (best - np.mean(inverse)), "most of what the inverse loses is kept"


def test_a_token_that_a_draft_chose_is_mostly_chosen_again_by_the_model() -> None:
    """A draft of the same mind (total variation below 0.03) is followed in more than 19 of 20 tokens."""
    logits = pair(0)
    assert total_variation(*map(softmax, logits)) < 0.03
    assert share_agreeing(*logits) > 0.95


def test_noise_of_another_token_couples_nothing() -> None:
    """Keys apart, equal distributions agree as often as independent draws: the sum of the squares."""
    logits, _ = pair(1)
    p = softmax(logits)
    one = draws(reference.choose, logits, states(NUM))
    other = draws(reference.choose, logits, states(NUM), 1)
    expected = float((p**2).sum())
    assert abs((one == other).mean() - expected) < 4 * (expected * (1 - expected) / NUM) ** 0.5


def test_filters_leave_what_is_coupled_coupled() -> None:
    """Top-k of one model and none of the other: the noise of a token stays its own."""
    logits, _ = pair(2)
    p = softmax(logits)
    kept = np.where(p >= np.sort(p)[-8], p, 0)
    all_of, some = (draws(reference.choose, logits, states(NUM), top_k=top_k) for top_k in (0, 8))
    assert (all_of == some)[kept[all_of] > 0].all(), "a winner that is kept wins again"
    assert 0 < (all_of != some).mean() < 1 - kept.sum() + 0.03
