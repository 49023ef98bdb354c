"""The kernels of a rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from penstock.engine.execution.share import own_kernels
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.kernels.ranks import World
from tests.engine.sampling.cases import VOCAB, holding, make_sequence, sample


def fail(*_: Any) -> Tensor:
    raise AssertionError("another rank has no such kernel")


def test_a_kernel_that_another_rank_does_not_have_chooses_no_token() -> None:
    """Its candidates would not fit those of plain torch."""
    given = list[Tensor]()

    def gather(candidates: Tensor) -> Tensor:
        given.append(candidates)
        return candidates

    alone = SimpleNamespace(rank=1, size=2, gather=gather, least=lambda _: 0)
    kernels = replace(reference_kernels(torch.device("cpu"), torch.float32), choose=fail)
    choose = own_kernels(kernels, cast("World", SimpleNamespace(ranks=alone))).choose
    sequences = [make_sequence({"seed": seed}) for seed in range(4)]
    sampler, logits = holding(sequences, choose=choose), torch.zeros(4, VOCAB // 2)
    tokens = sample(sampler, logits, dict(enumerate(sequences)))
    assert [own.shape for own in given] == [(4, 3)]
    assert min(tokens) >= VOCAB // 2, "rank 1 has the second half of the tokens"
