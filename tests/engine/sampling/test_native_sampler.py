"""The native sampler against the reference one, on any mixture of parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import native
from engine.planning.request import Request, SamplingParams, Sequence
from engine.sampling import sampler
from engine.sampling.batch import SamplingState

VOCAB = 300


@pytest.fixture(scope="module")
def team() -> native.Team:
    try:
        return native.load_library(lambda _: None).start_team(2)
    except native.NativeUnavailable as error:
        pytest.skip(f"no native kernels: {error}")


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 299, 300]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 17: -100.0}]),
    min_tokens=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**63),
    max_tokens=st.just(9),
    num_logprobs=st.just(0),
)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(params, min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.5, 4.0]),
)
def test_same_tokens_as_the_reference(
    team: native.Team, rows: list[SamplingParams], seed: int, scale: float
) -> None:
    numbers = np.random.default_rng(seed)
    logits = torch.from_numpy(numbers.standard_normal((len(rows), VOCAB)).astype(np.float32) * scale)
    sequences = []
    for i, row in enumerate(rows):
        sequences.append(Sequence(Request(request_id=str(i), prompt_token_ids=(3, 4, 5), sampling=row)))
        sequences[-1].token_ids += [4, 7, 7]
    batch = SamplingState(VOCAB, (1,)).build(sequences)
    expected = sampler.sample(logits.clone(), batch)
    got = native.sample(team, logits, batch)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)
