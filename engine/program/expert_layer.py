"""Experts over the kernel table."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from functools import partial

import torch
from torch import Tensor

from penstock.engine.kernels.beside import beside
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.ranks import gather_rows
from penstock.engine.program.parameters import ExpertsWeights, MlpWeights


def run_experts(
    own: ExpertsWeights, x: Tensor, kernels: Kernels, eps: float, rows_by_rank: ListLike[int] = ()
) -> Tensor:
    """[T, hidden] -> [T, hidden], with one reduction among ranks.

    Args:
        eps: of norms.
        rows_by_rank: see `Batch`.
    """

    def summed(x: Tensor) -> Tensor:
        return x if kernels.ranks is None else kernels.ranks.sum(x)

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else kernels.rms_norm(x, weight, eps)

    def routed() -> Tensor:
        """The weighted sum of the experts of each row, as far as this rank has them."""
        return run_routed(own, x, kernels, eps, rows_by_rank)

    def of_shared(shared: MlpWeights) -> tuple[Tensor, Tensor | None]:
        """The output of shared experts, and the gate [T, 1] that multiplies it once it is normed."""
        assert own.spec.shared is not None
        made = activate(kernels, shared.gate_up(normed(x, own.shared_norm)), own.spec.shared.activation)
        return shared.down(made), None if own.shared_gate is None else own.shared_gate(x).sigmoid()

    if own.shared is None:
        return normed(summed(routed()), own.experts_out_norm)
    made, (shared, gate) = beside(x.device, routed, partial(of_shared, own.shared))
    if own.experts_out_norm is None and own.shared_out_norm is None:
        return summed(made + _gated(shared, gate))
    made, shared = summed(torch.stack((made, shared)))
    return normed(made, own.experts_out_norm) + _gated(normed(shared, own.shared_out_norm), gate)


def run_routed(
    own: ExpertsWeights, x: Tensor, kernels: Kernels, eps: float, rows_by_rank: ListLike[int] = ()
) -> Tensor:
    """The weighted sum of each row's experts, as far as this rank has them: [T, hidden] -> [T, hidden].

    Ranks that have sequences of their own run their experts on the rows of all, T of them none in some ranks, and the
    sum over the ranks is of all experts.
    """
    ranks = kernels.expert_ranks
    if ranks is None:
        return _of_own_experts(own, x, kernels, eps)
    counts = rows_by_rank or (len(x),) * ranks.size
    made = ranks.sum(_of_own_experts(own, gather_rows(x, counts, ranks), kernels, eps))
    first = sum(counts[: ranks.rank])
    return made[first : first + len(x)]


def _of_own_experts(own: ExpertsWeights, x: Tensor, kernels: Kernels, eps: float) -> Tensor:
    def normed(weight: Tensor | None) -> Tensor:
        return x if weight is None else kernels.rms_norm(x, weight, eps)

    router, first = own.spec.router, own.spec.first
    logits = own.router(normed(own.router_norm))
    ids, weights = kernels.route(logits, router, own.choice_bias, own.expert_scale)
    return kernels.run_experts(
        normed(own.experts_norm),
        ids - first if first else ids,
        weights,
        own.gate_up,
        own.down,
        own.spec.activation,
        weighs_inputs=router.weighs_inputs,
    )


def activate(kernels: Kernels, x: Tensor, activation: str) -> Tensor:
    """The activation of a dense feed-forward part: of gates, then ups; of ups alone where there are no gates."""
    return (kernels.activated if activation == "relu2" else kernels.glu)(x, activation)


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * gate
