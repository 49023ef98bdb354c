"""The weights of experts: the rows of all of them in one matrix, in any layout that linear maps have."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.kernels.experts import ListedExperts
from penstock.engine.kernels.packed import PACKED_FORMATS, UNIT, Code, PackedWeight, narrowest, pack, padded
from penstock.engine.kernels.triton.packed_linear import ONE_GROUP, factor_types, group_size_of, scales_of
from penstock.engine.kernels.triton.tiles import ProductTiling, step_inputs, step_size
from penstock.engine.quant.formats import Format, NamedTensors
from penstock.engine.quant.rotation import rotated, rotated_back

GLU_BLOCK = 8
"""Blocks of so many gates and of so many ups alternate, so that a thread has the sums of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """An `ExpertLinear` whose rows are all experts' rows, one expert after another: `num_rows` of each."""

    num_experts: int
    out_features: int
    in_features: int
    weight: PackedWeight | Tensor
    """[E * num_rows, in]: packed, or in the type of x with padded inputs."""
    bias: Tensor | None
    """[E * num_rows] in the type of x"""
    permutation: Tensor | None
    """[E, in] int32: input i of an expert is multiplied with x[permutation[i]]; None if they have the order of x."""
    is_gated: bool
    """Whether rows are in the order of `glu_rows`."""

    @property
    def codes(self) -> Tensor:
        return self.weight if isinstance(self.weight, Tensor) else self.weight.codes

    @property
    def code(self) -> Code | None:
        """None for weights in the type of x."""
        return None if isinstance(self.weight, Tensor) else self.weight.code

    @property
    def rotation(self) -> int:
        """The inputs of a block of x that is rotated before it is multiplied, or 0."""
        return 0 if isinstance(self.weight, Tensor) else self.weight.rotation

    @property
    def num_rows(self) -> int:
        """The rows of one expert, padding included."""
        return len(self.codes) // self.num_experts

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes if isinstance(self.weight, Tensor) else self.weight.num_bytes

    @property
    def kind(self) -> Hashable:
        """Experts of one kind run the same kernels."""
        weight, missing = self.weight, (self.bias is None, self.permutation is None)
        if isinstance(weight, Tensor):
            return self.is_gated, missing
        factors = weight.zero is None, *factor_types(weight)
        sizes = group_size_of(weight), weight.rotation
        return self.is_gated, missing, weight.code, scales_of(weight), sizes, factors

    def layout(self, tiling: ProductTiling) -> dict[str, Any]:
        """The arguments of `expert_linear_kernel` that say how the weights lie."""
        return self._numbers(tiling) | {
            "codes": self.codes,
            "permutation": self.permutation,
            "bias": self.bias,
            "num_outputs": len(self.codes),
            "num_rows": self.num_rows,
            "in_features": self.in_features,
            "row_bytes": self.codes.stride(0),
            "NUM_EXPERTS": self.num_experts,
            "IS_GATED": self.is_gated,
        }

    def _numbers(self, tiling: ProductTiling) -> dict[str, Any]:
        """Returns the arguments that describe the numbers of a row, and how many of them a step takes."""
        weight = self.weight
        if isinstance(weight, Tensor):
            code, scales, group_size = "float", "none", ONE_GROUP
            num_inputs, step = weight.shape[1], step_size(weight.shape[1], tiling)
        else:
            code, scales, group_size = weight.code.value, scales_of(weight), group_size_of(weight)
            num_inputs, step = (
                weight.padded_features,
                step_inputs(weight, tiling, in_groups=scales == "groups"),
            )
        factors = {name: getattr(weight, name, None) for name in ("scale", "zero", "offset")}
        sizes = {"num_steps": num_inputs // step, "BLOCK_K": step}
        return factors | sizes | {"CODE": code, "SCALES": scales, "GROUP_SIZE": group_size}

    def unpacked(self, dtype: torch.dtype) -> PackedExperts:
        """The same experts with weights in the type of x."""
        if isinstance(self.weight, Tensor):
            return self
        num_inputs = self.in_features + -self.in_features % UNIT
        weight = self.codes.new_zeros((len(self.codes), num_inputs), dtype=dtype)
        for expert in range(self.num_experts):
            own = self._weight(expert, torch.float32 if self.rotation else dtype)
            weight[self._rows(expert), : self.in_features] = (
                rotated_back(own, self.rotation).to(dtype) if self.rotation else own
            )
        return replace(self, weight=weight)

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """By torch, which waits for the device: for experts that Triton does not run."""
        products = [partial(self._product, expert) for expert in range(self.num_experts)]
        return ListedExperts(products, self.out_features)(x, ids)

    def _product(self, expert: int, x: Tensor) -> Tensor:
        if self.permutation is not None:
            x = x.index_select(-1, self.permutation[expert])
        if self.rotation:
            x = rotated(x.float(), self.rotation).to(x.dtype)
        bias = None if self.bias is None else self.bias[self._rows(expert)]
        made = F.linear(x, self._weight(expert, x.dtype), bias)
        if not self.is_gated:
            return made
        blocks = torch.unflatten(made, 1, (-1, 2, GLU_BLOCK)).transpose(1, 2).flatten(2)
        return blocks[..., : self.out_features // 2].flatten(1)

    def _weight(self, expert: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, in]"""
        rows = self._rows(expert)
        if isinstance(self.weight, Tensor):
            return self.weight[rows, : self.in_features]
        return self.weight.outputs(rows.start, rows.stop).unpack(dtype)

    def _rows(self, expert: int) -> slice:
        return slice(expert * self.num_rows, (expert + 1) * self.num_rows)


def pack_experts(
    experts: Iterable[tuple[NamedTensors, Tensor | None]],
    format: Format,
    num_experts: int,
    out_features: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> PackedExperts:
    """Packs experts, see `ExpertPacker`, in the layout of dense maps where they have one, else in floating point."""
    order = glu_rows(out_features // 2).to(device) if gated else None
    num_rows, in_features = out_features if order is None else len(order), 0
    codes, weights, biases = torch.empty(0), [], []
    for number, (tensors, bias) in enumerate(experts):
        weight = _packed(tensors, format, device, dtype)
        own = weight.codes if isinstance(weight, PackedWeight) else padded(weight)
        if not number:
            codes = own.new_empty((num_experts * num_rows, own.shape[1]))
            in_features = weight.in_features if isinstance(weight, PackedWeight) else weight.shape[1]
        rows = codes[number * num_rows : (number + 1) * num_rows]
        rows.copy_(own if order is None else own[order])
        if isinstance(weight, PackedWeight):
            weights.append(replace(weight, codes=rows))
        if bias is not None:
            biases.append(bias.to(device, dtype))
    permutations = [weight.permutation for weight in weights if weight.permutation is not None]
    return PackedExperts(
        num_experts=num_experts,
        out_features=out_features,
        in_features=in_features,
        weight=_joined(weights, codes, order) if weights else codes,
        bias=torch.cat(_in_order(biases, order)) if biases else None,
        permutation=torch.stack(permutations) if permutations else None,
        is_gated=gated,
    )


def glu_rows(inner_size: int) -> Tensor:
    """Orders the rows of gates [inner], then ups [inner], in alternating blocks of GLU_BLOCK; the last are padded."""
    numbers = torch.arange(inner_size + -inner_size % GLU_BLOCK).clamp(max=inner_size - 1)
    blocks = numbers.view(-1, GLU_BLOCK)
    return torch.stack((blocks, blocks + inner_size), 1).flatten()


def _packed(
    tensors: NamedTensors, format: Format, device: torch.device, dtype: torch.dtype
) -> PackedWeight | Tensor:
    if isinstance(format, PACKED_FORMATS):
        return pack(tensors, format, device)
    return format.unpack(tensors).to(device, dtype)


def _joined(weights: Sequence[PackedWeight], codes: Tensor, order: Tensor | None) -> PackedWeight:
    """Returns one weight of all rows; it has zeros if all weights have, and a type of scales that holds all of them."""
    zeros = [weight.zero for weight in weights if weight.zero is not None]
    offsets: list[Tensor] = []
    if len(zeros) < len(weights):
        zeros, offsets = [], [offset for weight in weights if (offset := _offset(weight)) is not None]
    return replace(
        weights[0],
        codes=codes,
        scale=_common([weight.scale for weight in weights], order),
        zero=torch.cat(_in_order(zeros, order, 1), 1) if zeros else None,
        offset=_common(offsets, order) if offsets else None,
        permutation=None,
    )


def _offset(weight: PackedWeight) -> Tensor | None:
    return weight.offset if weight.zero is None else -weight.zero.float() * weight.scale.float()


def _common(factors: Sequence[Tensor], order: Tensor | None) -> Tensor:
    """[groups, rows of all] in a type that holds them without rounding."""
    if len({factor.dtype for factor in factors}) > 1:
        factors = [factor.float() for factor in factors]
    whole = torch.cat(_in_order(factors, order, 1), 1)
    return narrowest(whole) if whole.dtype == torch.float32 else whole


def _in_order(parts: Sequence[Tensor], order: Tensor | None, dim: int = 0) -> list[Tensor]:
    return list(parts) if order is None else [part.index_select(dim, order) for part in parts]
