"""The sampler's kernels on a GPU, on vocabularies of real size: tokens that plain torch allows, without waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling.tables import Choose, Filters
from tests.engine.kernels.triton.allowed_tokens import checked_sample
from tests.engine.sampling.parts import in_parts
from tests.gpu.cuda import DEVICE, needs_cuda

pytestmark = needs_cuda

ROWS = 48


def params_of(row: int, **changes: Any) -> SamplingParams:
    params = SamplingParams(
        temperature=(0.0, 0.7, 1.0, 1.5)[row % 4],
        top_p=(1.0, 0.9, 0.5)[row % 3],
        top_k=(0, 1, 50, 5000)[row // 4 % 4],
        min_p=(0.0, 0.05)[row // 2 % 2],
        presence_penalty=(0.0, 0.4)[row // 3 % 2],
        frequency_penalty=(0.0, 0.0, 0.2)[row // 5 % 3],
        repetition_penalty=(1.0, 1.3)[row // 7 % 2],
        logit_bias={11: 3.0, 12: -100.0} if row % 6 == 0 else {},
        seed=row,
        num_logprobs=0,
    )
    return replace(params, **changes)


SEATS = list(range(ROWS))


def make_sampler(
    vocab: int, wrapped: Callable[[Choose], Choose] = lambda choose: choose, **changes: Any
) -> Sampler:
    """With a sequence in every seat; `changes` are of their parameters."""
    from penstock.engine.kernels.triton.sampling import TritonChoose

    sampler = Sampler(ROWS, vocab, (1,), DEVICE, wrapped(TritonChoose(ROWS, vocab, DEVICE)))
    for seat in SEATS:
        sampling = params_of(seat, **changes)
        request = Request(request_id=str(seat), prompt_token_ids=(5, 6, 7), sampling=sampling)
        sampler.assign(seat, Sequence(request))
    return sampler


def seats_and_numbers(number: int) -> tuple[Tensor, Tensor]:
    seats = torch.tensor(SEATS, dtype=torch.int32, device=DEVICE)
    return seats, torch.full_like(seats, number)


def random_logits(vocab: int, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(vocab)
    rows = (torch.randn(ROWS, vocab, device=DEVICE, generator=generator) for _ in range(count))
    return [(4 * row).to(dtype) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [511, 32_000, 128_256, 151_936])
def test_the_tokens_are_those_of_plain_torch(vocab: int, dtype: torch.dtype) -> None:
    """Half precision brings many ties."""
    sampler = make_sampler(vocab)
    for number, logits in enumerate(random_logits(vocab, 6, dtype)):
        checked_sample(sampler, logits, *seats_and_numbers(number), Filters())


@pytest.mark.parametrize("vocab", [128_257, 151_936])
@pytest.mark.parametrize("size", [2, 8])
def test_the_best_of_the_parts_of_ranks_is_the_best_of_all(vocab: int, size: int) -> None:
    """To the bit, penalties of earlier tokens included."""
    free: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    whole, parts = (
        make_sampler(vocab, **free),
        make_sampler(vocab, lambda choose: in_parts(choose, size), **free),
    )
    filters = whole.filters(SEATS)
    for number, logits in enumerate(random_logits(vocab, 4, torch.bfloat16)):
        expected = whole.sample(logits, *seats_and_numbers(number), filters)
        assert parts.sample(logits, *seats_and_numbers(number), filters).equal(expected)
    assert parts.tables.counts.equal(whole.tables.counts)


def test_it_can_be_captured_and_counts_what_it_chose() -> None:
    """Replayed on other logits it gives what it gives without a graph, penalties of earlier tokens included."""
    vocab, num_steps = 32_000, 5
    logits = random_logits(vocab, num_steps)
    captured, plain = make_sampler(vocab), make_sampler(vocab)
    seats, numbers = seats_and_numbers(0)
    rows = logits[0].clone()
    captured.sample(rows, torch.full_like(seats, -1), numbers, Filters())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = captured.sample(rows, seats, numbers, Filters())
    for number in range(num_steps):
        rows.copy_(logits[number])
        numbers.fill_(number)
        graph.replay()
        expected = plain.sample(logits[number], *seats_and_numbers(number), Filters())
        assert token_ids.equal(expected)
    assert captured.tables.counts.equal(plain.tables.counts)


def test_a_row_that_is_not_finite_is_told_and_no_other() -> None:
    logits = random_logits(32_000, 1)[0]
    expected = make_sampler(32_000).sample(logits, *seats_and_numbers(0), Filters()).tolist()
    logits[3, 17] = torch.nan
    logits[5, 18] = torch.inf
    found = make_sampler(32_000).sample(logits, *seats_and_numbers(0), Filters()).tolist()
    assert found[3] == found[5] == -1
    assert [t for i, t in enumerate(found) if i not in (3, 5)] == [
        t for i, t in enumerate(expected) if i not in (3, 5)
    ]


@pytest.mark.parametrize("params", [{}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.95}], ids=str)
def test_a_row_does_not_depend_on_the_rows_around_it(params: dict[str, float]) -> None:
    """One row alone and as the last of many; the order of atomic additions changes nothing either."""
    from penstock.engine.kernels.triton.sampling import TritonChoose

    vocab = 128_256
    logits = random_logits(vocab, 1)[0]
    alone, among = (Sampler(ROWS, vocab, (1,), DEVICE, TritonChoose(ROWS, vocab, DEVICE)) for _ in range(2))
    sampling = SamplingParams(**params, seed=7)  # type: ignore[arg-type]
    request = Request(request_id="r", prompt_token_ids=(5,), sampling=sampling)
    for seat in SEATS:
        among.assign(seat, Sequence(request))
    alone.assign(0, Sequence(request))
    seats, numbers = seats_and_numbers(0)
    filters = alone.filters([0])
    tokens = among.sample(logits, seats, numbers, filters)
    for row in (0, 20, ROWS - 1):
        found = alone.sample(logits[row : row + 1], seats[:1], numbers[:1], filters)
        assert found.tolist() == [tokens[row].item()]
    assert tokens.equal(among.sample(logits, seats, numbers, filters))
