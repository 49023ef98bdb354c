"""Experts as the native kernels run them: routed, grouped, and multiplied as one program of the team."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.library import NativeLibrary, Team, check, expect_shape, fields, float32
from penstock.engine.kernels.cpu.linear import PackedLinear
from penstock.engine.kernels.experts import ExpertLinear, ListedExperts
from penstock.engine.spec import EXPERT_ACTIVATIONS, SCORINGS, Activation, Experts, Router

NORMS = ("router_norm", "experts_norm", "experts_out_norm", "shared_norm", "shared_out_norm")
"""In the order that they have in Experts of program.h."""


class RouterFields(ctypes.Structure):
    """A Router of routing.h."""

    _fields_ = [
        *fields(c_int32, "experts top_k scoring groups top_groups group_best renormalizes"),
        *fields(c_float, "epsilon scale"),
        *fields(c_void_p, "choice_bias expert_scale"),
    ]


class ActivationFields(ctypes.Structure):
    """A Bend of linear.h."""

    _fields_ = [("function", c_int32), *fields(c_float, "limit alpha shift")]


class ExpertsFields(ctypes.Structure):
    """Experts of program.h."""

    _fields_ = [
        ("router", RouterFields),
        *fields(c_int32, "first own weighs_inputs each_reads_its_own"),
        ("activation", ActivationFields),
        ("shared_activation", c_int32),
        *fields(c_void_p, "logits gate_up down shared_gate_up shared_down shared_gate"),
        *fields(c_void_p, " ".join(NORMS)),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeExperts:
    """A router and the experts of a layer, as an operation of a decoder's program; see `Experts`.

    Every tensor is read as float32; norms are [hidden], and the others [experts].
    """

    spec: Experts
    router: PackedLinear
    gate_up: Sequence[PackedLinear]
    """One of each expert of `spec.own`; all are packed from one format."""
    down: Sequence[PackedLinear]
    choice_bias: Tensor | None = None
    expert_scale: Tensor | None = None
    shared_gate_up: PackedLinear | None = None
    shared_down: PackedLinear | None = None
    shared_gate: PackedLinear | None = None
    router_norm: Tensor | None = None
    experts_norm: Tensor | None = None
    experts_out_norm: Tensor | None = None
    shared_norm: Tensor | None = None
    shared_out_norm: Tensor | None = None

    def made(self, kept: list[object]) -> ExpertsFields:
        """Returns the fields that the kernels read; objects that they point to join `kept`.

        Raises:
            ValueError: a part has another shape than the description says.
        """
        spec = self.spec
        self._check()
        made = _fields(self.gate_up, self.down, spec.activation, spec.router.weighs_inputs, kept)
        made.router = _router(spec.router, self.choice_bias, self.expert_scale, kept)
        made.first, made.logits = spec.first, self.router.handle
        if spec.shared is not None and self.shared_gate_up is not None and self.shared_down is not None:
            made.shared_activation = EXPERT_ACTIVATIONS.index(spec.shared.activation)
            made.shared_gate_up, made.shared_down = self.shared_gate_up.handle, self.shared_down.handle
            made.shared_gate = None if self.shared_gate is None else self.shared_gate.handle
        for norm in NORMS:
            setattr(made, norm, _address(getattr(self, norm), spec.hidden_size, kept))
        kept.append(self)
        return made

    def _check(self) -> None:
        spec, hidden = self.spec, self.spec.hidden_size
        inner, is_gated = spec.inner_size, spec.activation.is_gated
        expected: dict[str, tuple[Sequence[PackedLinear | None], tuple[int, int, bool]]] = {
            "router": ([self.router], (hidden, spec.router.num_experts, False)),
            "gate_up": (self.gate_up, (hidden, inner, is_gated)),
            "down": (self.down, (inner, hidden, False)),
        }
        if spec.shared is not None:
            wide = spec.shared.inner_size
            expected |= {
                "shared_gate_up": ([self.shared_gate_up], (hidden, wide, spec.shared.is_gated)),
                "shared_down": ([self.shared_down], (wide, hidden, False)),
            }
        for name, (linears, facts) in expected.items():
            for linear in linears:
                if linear is None or (linear.in_features, linear.out_features, linear.gated) != facts:
                    raise ValueError(f"{name}: {facts} expected (inputs, outputs, gated)")
        if not len(self.gate_up) == len(self.down) == len(spec.own):
            raise ValueError(f"{len(spec.own)} experts expected")


def _fields(
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    activation: Activation,
    weighs_inputs: bool,
    kept: list[object],
) -> ExpertsFields:
    handles = [(c_void_p * len(own))(*[linear.handle for linear in own]) for own in (gate_up, down)]
    kept += handles
    return ExpertsFields(
        own=len(gate_up),
        weighs_inputs=weighs_inputs,
        each_reads_its_own=weighs_inputs or any(linear.is_permuted for linear in gate_up),
        activation=ActivationFields(
            EXPERT_ACTIVATIONS.index(activation.kind),
            activation.limit or math.inf,
            activation.alpha,
            activation.shift,
        ),
        gate_up=ctypes.cast(handles[0], c_void_p),
        down=ctypes.cast(handles[1], c_void_p),
    )


def _router(
    router: Router, choice_bias: Tensor | None, expert_scale: Tensor | None, kept: list[object]
) -> RouterFields:
    return RouterFields(
        experts=router.num_experts,
        top_k=router.top_k,
        scoring=SCORINGS.index(router.scoring),
        groups=router.num_groups,
        top_groups=router.top_groups,
        group_best=router.group_best,
        renormalizes=router.renormalizes,
        epsilon=router.epsilon,
        scale=router.scale,
        choice_bias=_address(choice_bias, router.num_experts, kept),
        expert_scale=_address(expert_scale, router.num_experts, kept),
    )


def _address(tensor: Tensor | None, size: int, kept: list[object]) -> int | None:
    if tensor is None:
        return None
    tensor = float32(tensor)
    expect_shape("experts", tensor, (size,))
    kept.append(tensor)
    return tensor.data_ptr()


def packed_experts(experts: ExpertLinear) -> list[PackedLinear]:
    """The linear maps of experts that native kernels packed."""
    assert isinstance(experts, ListedExperts)
    packed = [linear for linear in experts.experts if isinstance(linear, PackedLinear)]
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
        fields = _router(router, choice_bias, expert_scale, kept)
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
        first, second, kept = packed_experts(gate_up), packed_experts(down), list[object]()
        rows, top_k = ids.shape
        x, weights, ids = float32(x), float32(weights), ids.int().contiguous()
        expect_shape("x", x, (rows, first[0].in_features))
        expect_shape("weights", weights, (rows, top_k))
        fields = _fields(first, second, activation, weighs_inputs, kept)
        fields.router = RouterFields(experts=len(first), top_k=top_k)
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
