"""The sampler's kernels on a GPU, on vocabularies of real size: the tokens of plain torch, with nothing to wait for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.planning.request import Request, SamplingParams, Sequence
from engine.sampling.device import DeviceSampler, Needs, SampledOnDevice
from tests.gpu.cuda import DEVICE, needs_cuda

pytestmark = needs_cuda

ROWS = 48


def params_of(row: int) -> SamplingParams:
    return SamplingParams(
        temperature=(0.0, 0.7, 1.0, 1.5)[row % 4],
        top_p=(1.0, 0.9, 0.5)[row % 3],
        top_k=(0, 1, 50, 5000)[row // 4 % 4],
        min_p=(0.0, 0.05)[row // 2 % 2],
        presence_penalty=(0.0, 0.4)[row // 3 % 2],
        frequency_penalty=(0.0, 0.0, 0.2)[row // 5 % 3],
        repetition_penalty=(1.0, 1.3)[row // 7 % 2],
        logit_bias={11: 3.0, 12: -100.0} if row % 6 == 0 else {},
        seed=row,
    )


def samplers(vocab: int) -> tuple[DeviceSampler, DeviceSampler]:
    """That of the kernels, and that of plain torch, told the same."""
    from engine.kernels.triton.sampling import TritonChoose

    kernels = DeviceSampler(ROWS, vocab, (1,), DEVICE, choose=TritonChoose(ROWS, vocab, DEVICE))
    plain = DeviceSampler(ROWS, vocab, (1,), DEVICE)
    for slot in range(ROWS):
        request = Request(request_id=str(slot), prompt_token_ids=(5, 6, 7), sampling=params_of(slot))
        for sampler in (kernels, plain):
            sampler.assign(slot, Sequence(request))
    return kernels, plain


def steps(sampler: DeviceSampler, logits: list[Tensor]) -> list[SampledOnDevice]:
    slots = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    return [sampler.sample(rows, slots, torch.full_like(slots, number)) for number, rows in enumerate(logits)]


def random_logits(vocab: int, count: int) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(vocab)
    return [4 * torch.randn(ROWS, vocab, device=DEVICE, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("vocab", [511, 32_000, 128_256, 151_936])
def test_the_tokens_are_those_of_plain_torch(vocab: int) -> None:
    logits = random_logits(vocab, 6)
    kernels, plain = samplers(vocab)
    for found, expected in zip(steps(kernels, logits), steps(plain, logits), strict=True):
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)


def test_it_can_be_captured_and_counts_what_it_chose() -> None:
    """Replayed on other logits it gives what it gives without a graph, penalties of earlier tokens included."""
    vocab, num_steps = 32_000, 5
    logits = random_logits(vocab, num_steps)
    kernels, plain = samplers(vocab)
    slots = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    numbers, rows = torch.zeros_like(slots), logits[0].clone()
    nobody = torch.full_like(slots, -1)
    kernels.sample(rows, nobody, numbers, Needs())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.sample(rows, slots, numbers, Needs())
    expected = steps(plain, logits)
    for number in range(num_steps):
        rows.copy_(logits[number])
        numbers.fill_(number)
        graph.replay()
        assert found.token_ids.tolist() == expected[number].token_ids.tolist()


def test_a_row_that_is_not_finite_is_told_and_no_other() -> None:
    vocab = 32_000
    logits = random_logits(vocab, 1)
    kernels, plain = samplers(vocab)
    expected = steps(plain, logits)[0].token_ids.tolist()
    logits[0][3, 17] = torch.nan
    logits[0][5, 18] = torch.inf
    found = steps(kernels, logits)[0].token_ids.tolist()
    assert found[3] == found[5] == -1
    assert [t for i, t in enumerate(found) if i not in (3, 5)] == [
        t for i, t in enumerate(expected) if i not in (3, 5)
    ]
