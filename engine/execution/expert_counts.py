"""Counts which experts tokens choose, where that is known on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.experts import Route
from penstock.engine.kernels.ops import Kernels
from penstock.engine.planning.step import ExpertLoad, ExpertUse
from penstock.engine.program.native import NativeDecoder
from penstock.engine.spec import Experts, Router

_EVERY = 8
"""Of passes over plain torch, one in so many is counted."""
_READ_EVERY = 64
"""A native decoder's counts become a load in one step of so many."""
_FADING = 0.98


class ExpertCounts(Protocol):
    """Counts the experts that the steps of a model chose."""

    def take(self) -> ExpertUse | None:
        """The experts of the steps since they were taken last; None if nothing was counted."""


class Spread:
    """The tokens that chose each expert of each layer, of which the older ones fade.

    Args:
        own: the experts that each rank has, whole; all of them if ranks share the rows of each.
    """

    def __init__(self, num_layers: int, num_experts: int, own: int) -> None:
        self._counts, self._own = torch.zeros(num_layers, num_experts), own

    def add(self, counts: Tensor) -> ExpertLoad:
        """Takes the tokens of newer steps by expert, [layers, experts], and returns the load of late."""
        self._counts.mul_(_FADING).add_(counts)
        by_rank = torch.unflatten(self._counts, 1, (-1, self._own)).sum(-1)
        return ExpertLoad(experts=_imbalance(self._counts), ranks=_imbalance(by_rank))


class RoutedExperts:
    """Counts the choices of a `route` that runs on the host, in one of _EVERY passes: a count takes time.

    Args:
        route: chooses experts, called for one layer of a pass after another.
    """

    def __init__(self, route: Route, spread: Spread, num_layers: int, num_experts: int) -> None:
        self._route, self._spread = route, spread
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self._num_calls = 0
        self._is_new = False

    def route(
        self, logits: Tensor, router: Router, choice_bias: Tensor | None, expert_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.experts.route`."""
        ids, weights = self._route(logits, router, choice_bias, expert_scale)
        number, layer = divmod(self._num_calls, len(self._counts))
        self._num_calls += 1
        if number % _EVERY == 0:
            self._counts[layer] = torch.bincount(ids.flatten(), minlength=self._counts.shape[1])
            self._is_new = True
        return ids, weights

    def take(self) -> ExpertUse | None:
        """See `ExpertCounts`."""
        if not self._is_new:
            return None
        self._is_new = False
        num_touched = int(self._counts.count_nonzero())
        return ExpertUse(num_touched, len(self._counts), self._spread.add(self._counts))


class DecodedExperts:
    """The choices of a native decoder, which counts all of them.

    Args:
        spread: None if layers have different numbers of experts.
    """

    def __init__(self, decoder: NativeDecoder, spread: Spread | None) -> None:
        self._decoder, self._spread = decoder, spread
        self._num_steps = 0

    def take(self) -> ExpertUse | None:
        """See `ExpertCounts`."""
        num_touched, num_layers = self._decoder.take_experts_touched()
        if num_layers == 0:
            return None
        self._num_steps += 1
        load = None
        if self._spread is not None and self._num_steps % _READ_EVERY == 0:
            load = self._spread.add(self._decoder.take_rows_of_experts())
        return ExpertUse(num_touched, num_layers, load)


def counted(kernels: Kernels, config: ModelConfig) -> tuple[Kernels, ExpertCounts | None]:
    """Returns the kernels with a count of the experts that tokens choose.

    There is none where a device other than the host or a native decoder chooses, nor in models without experts, or with
    several numbers of them.
    """
    parts, spread = _parts(config), _spread(config)
    if kernels.device.type != "cpu" or kernels.team is not None or spread is None:
        return kernels, None
    counts = RoutedExperts(kernels.route, spread, len(parts), parts[0].router.num_experts)
    return replace(kernels, route=counts.route), counts


def counted_natively(decoder: NativeDecoder, config: ModelConfig) -> ExpertCounts | None:
    """The counts of a decoder; None if the model has no experts."""
    return DecodedExperts(decoder, _spread(config)) if _parts(config) else None


def _parts(config: ModelConfig) -> list[Experts]:
    return [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)]


def _spread(config: ModelConfig) -> Spread | None:
    """None if layers have different numbers of experts, or no layer has any."""
    parts = _parts(config)
    sizes = {(part.router.num_experts, len(part.own)) for part in parts}
    return Spread(len(parts), *sizes.pop()) if len(sizes) == 1 else None


def _imbalance(counts: Tensor) -> float:
    """The largest count of a layer in units of the mean, [layers, n], on average of the layers."""
    return float((counts.amax(1) / counts.mean(1).clamp(min=1e-9)).mean())
