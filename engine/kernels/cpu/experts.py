"""Experts as the native kernels run them: routed, grouped, and multiplied as one program of the team."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_void_p

import torch
from torch import Tensor

from penstock.engine.kernels.cpu import structs
from penstock.engine.kernels.cpu.library import NativeLibrary, Team, check, expect_shape, float32
from penstock.engine.kernels.cpu.linear import NativeLinear
from penstock.engine.kernels.experts import ExpertLinear, ListedExperts
from penstock.engine.spec import EXPERT_ACTIVATIONS, SCORINGS, Activation, Router


def experts_struct(
    gate_up: Sequence[NativeLinear],
    down: Sequence[NativeLinear],
    activation: Activation,
    weighs_inputs: bool,
    kept: list[object],
) -> structs.Experts:
    """The fields of experts, without a router and shared ones; objects that they point to join `kept`."""
    handles = [(c_void_p * len(own))(*[linear.handle for linear in own]) for own in (gate_up, down)]
    kept += handles
    return structs.Experts(
        own=len(gate_up),
        weighs_inputs=weighs_inputs,
        each_reads_its_own=weighs_inputs or any(linear.is_permuted for linear in gate_up),
        activation=structs.Bend(
            EXPERT_ACTIVATIONS.index(activation.kind),
            activation.limit or math.inf,
            activation.alpha,
            activation.shift,
        ),
        gate_up=ctypes.cast(handles[0], c_void_p),
        down=ctypes.cast(handles[1], c_void_p),
    )


def router_struct(
    router: Router, choice_bias: Tensor | None, expert_scale: Tensor | None, kept: list[object]
) -> structs.Router:
    """The fields of a router; objects that they point to join `kept`."""
    num = router.num_experts
    return structs.Router(
        experts=num,
        top_k=router.top_k,
        scoring=SCORINGS.index(router.scoring),
        groups=router.num_groups,
        top_groups=router.top_groups,
        group_best=router.group_best,
        renormalizes=router.renormalizes,
        epsilon=router.epsilon,
        scale=router.scale,
        choice_bias=address(choice_bias, (num,), kept),
        expert_scale=address(expert_scale, (num,), kept),
    )


def address(tensor: Tensor | None, shape: tuple[int, ...], kept: list[object]) -> int | None:
    """The address of a tensor in float32, which joins `kept`; None of none.

    Raises:
        ValueError: it has another shape.
    """
    if tensor is None:
        return None
    tensor = float32(tensor)
    expect_shape("norm, vector or table", tensor, shape)
    kept.append(tensor)
    return tensor.data_ptr()


def native_experts(experts: ExpertLinear) -> list[NativeLinear]:
    """The linear maps of experts that native kernels packed."""
    assert isinstance(experts, ListedExperts)
    packed = [linear for linear in experts.experts if isinstance(linear, NativeLinear)]
    assert len(packed) == experts.num_experts
    return packed


class NativeRoute:
    """A `route` of the kernel table."""

    def __init__(self, library: NativeLibrary) -> None:
        self._route = library.function("penstock_route")

    def __call__(
        self,
        logits: Tensor,
        router: Router,
        choice_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits, kept = float32(logits), list[object]()
        rows = logits.shape[0]
        expect_shape("logits", logits, (rows, router.num_experts))
        fields = router_struct(router, choice_bias, expert_scale, kept)
        ids = torch.empty((rows, router.top_k), dtype=torch.int32)
        weights = torch.empty((rows, router.top_k))
        check(self._route(ctypes.byref(fields), logits.data_ptr(), rows, ids.data_ptr(), weights.data_ptr()))
        return ids, weights


class NativeRunExperts:
    """A `run_experts` of the kernel table, of experts that native kernels packed."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._run = team.library.function("penstock_run_experts")

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
    ) -> Tensor:
        first, second, kept = native_experts(gate_up), native_experts(down), list[object]()
        rows, top_k = ids.shape
        x, weights, ids = float32(x), float32(weights), ids.int().contiguous()
        expect_shape("x", x, (rows, first[0].in_features))
        expect_shape("weights", weights, (rows, top_k))
        fields = experts_struct(first, second, activation, weighs_inputs, kept)
        fields.router = structs.Router(experts=len(first), top_k=top_k)
        out = torch.empty_like(x)
        check(
            self._run(
                self._team.handle,
                ctypes.byref(fields),
                x.data_ptr(),
                rows,
                ids.data_ptr(),
                weights.data_ptr(),
                out.data_ptr(),
            )
        )
        return out
