"""Routing and experts in plain torch, on any device: the specification that faster kernels agree with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.kernels.linear import Linear
from penstock.engine.quant.formats import Format, NamedTensors
from penstock.engine.spec import Activation, Router

ROWS_AT_A_TIME = 16
"""Products of an expert have so many rows, some of zeros, so that a row's output does not depend on their number."""


class ExpertLinear(Protocol):
    """Linear maps of one shape and format, one for each expert that this process has: E of them."""

    @property
    def num_experts(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """
        Args:
            x: [n, in] rows that all their experts read, or [n, k, in] rows of their own for each.
            ids: [n, k] int32; one that is not from 0 to E - 1 is no expert here.

        Returns:
            [n, k, out] in the type of x; zeros where there is no expert.
        """


class ExpertPacker(Protocol):
    """Packs the linear maps of some experts, given as tensors of one format and a bias each.

    They are made as the iterable is followed, so that no more than one exists twice if each is copied into the whole at
    once. With `gated`, the rows are gates, then ups, see `LinearPacker`; without a gate, ups alone.
    """

    def __call__(
        self,
        experts: Iterable[tuple[NamedTensors, Tensor | None]],
        format: Format,
        num_experts: int,
        out_features: int,
        *,
        gated: bool = False,
    ) -> ExpertLinear: ...


class RunExperts(Protocol):
    """See `run_experts`."""

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: Activation,
        *,
        weighs_inputs: bool = False,
    ) -> Tensor: ...


class Route(Protocol):
    """See `route`."""

    def __call__(
        self, logits: Tensor, router: Router, choice_bias: Tensor | None, expert_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


def route(
    logits: Tensor, router: Router, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each row, in float32 throughout.

    Experts are chosen by score + bias; without a bias and groups, by logit, which is the same but for rounding. Among
    equals the lower number comes first, in groups, too. NaN counts as the largest of all.

    Args:
        logits: [n, experts] of any floating-point type.
        choice_bias, expert_scale: [experts] float32, see `Router`.

    Returns:
        The experts [n, k] int32, the best one first; all of a row differ. Their weights [n, k] float32.
    """
    logits = logits.float()
    scores = _scores(logits, router.scoring)
    by = logits
    if choice_bias is not None or router.num_groups > 1:
        by = scores if choice_bias is None else scores + choice_bias
    ids = _best(_of_best_groups(by, router), router.top_k)
    is_late = router.scoring == "softmax_of_chosen"
    weights = logits.gather(1, ids).softmax(-1) if is_late else scores.gather(1, ids)
    if router.renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + router.epsilon)
    weights = weights * router.scale
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    return ids.int(), weights


def _scores(logits: Tensor, scoring: str) -> Tensor:
    return logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)


def _best(numbers: Tensor, count: int) -> Tensor:
    """Returns [n, count] int64, the places of the largest numbers of each row; equal ones have their order."""
    return numbers.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _of_best_groups(numbers: Tensor, router: Router) -> Tensor:
    """Returns the numbers [n, experts], with -inf for experts outside of the best groups."""
    if router.num_groups == 1:
        return numbers
    groups = torch.unflatten(numbers, -1, (router.num_groups, -1))
    best = groups.sort(dim=-1, descending=True).values[..., : router.group_best].sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, router.top_groups), True)
    kept: Tensor = groups.masked_fill(~chosen[..., None], -torch.inf)
    return kept.flatten(1)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Applies the activation of an expert: gates, then ups [..., 2 n] -> [..., n]; without gates [..., n].

    It is computed in the type of x, except inside torch's own functions.
    """
    gate, up = x.chunk(2, dim=-1) if activation.is_gated else (x, None)
    if activation.limit:
        gate = gate.clamp(max=activation.limit)
        up = None if up is None else up.clamp(-activation.limit, activation.limit)
    made = _function(gate, activation)
    return made if up is None else made * (up + activation.shift if activation.shift else up)


def _function(x: Tensor, activation: Activation) -> Tensor:
    match activation.kind:
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu":
            return F.gelu(x)
        case "relu2":
            return F.relu(x).square()
    return F.silu(x) if activation.alpha == 1.0 else x * (activation.alpha * x).sigmoid()


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    activation: Activation,
    *,
    weighs_inputs: bool = False,
) -> Tensor:
    """Returns the weighted sum of the outputs of each row's experts: down(activate(gate_up(x))).

    The sum is taken in float32, in the order of choice, and rounded to the type of x once. A row's bits depend on
    nothing but the row, its experts and their weights.

    Args:
        x: [n, hidden]
        ids: [n, k] int32, see `ExpertLinear`: ids of no expert here add nothing.
        weights: [n, k] float32
        weighs_inputs: whether weights multiply the rows that experts read (rounded to the type of x), and not their
            outputs.

    Returns:
        [n, hidden]
    """
    if weighs_inputs:
        made = down(activate(gate_up((x[:, None] * weights[..., None]).to(x.dtype), ids), activation), ids)
        weights = torch.ones_like(weights)
    else:
        made = down(activate(gate_up(x, ids), activation), ids)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for choice in range(ids.shape[1]):
        total += weights[:, choice, None] * made[:, choice].float()
    return total.to(x.dtype)


class ListedExperts:
    """An `ExpertLinear` of linear maps, one after another: of any format that has one."""

    def __init__(self, experts: Sequence[Linear], out_features: int) -> None:
        self.experts = experts
        self.num_experts = len(experts)
        self.out_features = out_features

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        num_choices = ids.shape[1]
        made = x.new_zeros(ids.numel(), self.out_features)
        rows = x if x.dim() == 2 else x.flatten(0, 1)
        for expert, places in self.chosen(ids):
            made[places] = self.product(expert, rows[places // num_choices if x.dim() == 2 else places])
        return made.view(*ids.shape, self.out_features)

    def chosen(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields each expert that some rows have, with the places of these rows in ids [n, k], in order."""
        flat, absent = ids.flatten().long(), self.num_experts
        flat = torch.where((flat >= 0) & (flat < absent), flat, absent)
        counts = torch.bincount(flat, minlength=absent + 1).tolist()
        for expert, places in enumerate(torch.split(flat.argsort(stable=True), counts)):
            if len(places) and expert < absent:
                yield expert, places

    def product(self, expert: int, rows: Tensor) -> Tensor:
        """Returns an expert's product with its rows, [rows, in] -> [rows, out], computed so many rows at a time."""
        padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS_AT_A_TIME))
        steps = [self.experts[expert](some) for some in torch.split(padded, ROWS_AT_A_TIME)]
        return torch.cat(steps)[: len(rows)]
