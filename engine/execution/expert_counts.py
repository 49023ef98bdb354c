"""Counts which experts tokens choose, where their ids are on the host: in some of the steps, and of late."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels.experts import Route
from engine.kernels.ops import Kernels
from engine.planning.step import ExpertLoad
from engine.spec import Experts, Router

_EVERY = 8
"""One of so many passes is counted."""
_FADING = 0.98


class ExpertCounts:
    """The tokens that chose each expert of each layer, of which each pass that is counted makes the older ones fade.

    Args:
        route: chooses experts, called for one layer of a pass after another.
        own: the experts that each rank has, whole; all of them if ranks share the rows of each.
    """

    def __init__(self, route: Route, num_layers: int, num_experts: int, own: int) -> None:
        self._route, self._num_layers, self._own = route, num_layers, own
        self._counts = torch.zeros(num_layers, num_experts)
        self._num_calls = 0
        self._is_new = False

    def route(
        self, logits: Tensor, router: Router, choice_bias: Tensor | None, expert_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.experts.route`."""
        ids, weights = self._route(logits, router, choice_bias, expert_scale)
        number, layer = divmod(self._num_calls, self._num_layers)
        self._num_calls += 1
        if number % _EVERY == 0:
            counts = self._counts[layer]
            counts.mul_(_FADING).add_(torch.bincount(ids.flatten(), minlength=len(counts)))
            self._is_new = True
        return ids, weights

    def take(self) -> ExpertLoad | None:
        """The load of experts and of ranks; None if nothing was counted since it was taken last."""
        if not self._is_new:
            return None
        self._is_new = False
        by_rank = torch.unflatten(self._counts, 1, (-1, self._own)).sum(-1)
        return ExpertLoad(experts=_imbalance(self._counts), ranks=_imbalance(by_rank))


def counted(kernels: Kernels, config: ModelConfig) -> tuple[Kernels, ExpertCounts | None]:
    """The kernels with a count of what tokens choose.

    There is none where a graph or a native decoder chooses, nor in models without experts, or with several numbers of
    them.
    """
    parts = [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)]
    sizes = {(part.router.num_experts, len(part.own)) for part in parts}
    if kernels.device.type != "cpu" or kernels.team is not None or len(sizes) != 1:
        return kernels, None
    counts = ExpertCounts(kernels.route, len(parts), *sizes.pop())
    return replace(kernels, route=counts.route), counts


def _imbalance(counts: Tensor) -> float:
    """The largest count of a layer in units of the mean, [layers, n], on average of the layers."""
    return float((counts.amax(1) / counts.mean(1).clamp(min=1e-9)).mean())
