"""What an entry of tiles.json is for, and is measured on: the linear maps of an 8 B Llama, or experts of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loadtests.gpu.experts import QWEN3_30B, SMALL, Layer, table
from loadtests.gpu.quantized import Layout, map_sizes, random_weight
from loadtests.gpu.sizes import LLAMA_8B
from penstock.engine.config import ModelConfig
from penstock.engine.fields import Fields
from penstock.engine.kernels.packed import Code, PackedWeight, UnpackedLinear
from penstock.engine.kernels.triton.attention_tiling import Chip
from penstock.engine.kernels.triton.experts import TritonExperts
from penstock.engine.kernels.triton.packed_linear import multiply
from penstock.engine.kernels.triton.tiles import (
    ROW_CLASSES,
    Card,
    ProductTiling,
    by_rule,
    expert_key,
    expert_rule,
    tiling_key,
)
from penstock.engine.model.parse import parse_config

WALKED_BYTES = 256 << 20
"""Weights are read in turn with so many bytes of others: more than any cache holds."""

Work = tuple[Callable[[], object], int]
"""Runs some products, and how many."""


@dataclass(frozen=True, slots=True)
class Task(ABC):
    """The products that one entry of the file is for."""

    code: Code | None
    dtype: torch.dtype
    """The type of x: int8 is multiplied as it is."""
    most_rows: int
    group_size: int | None

    @property
    @abstractmethod
    def key(self) -> str:
        """The class of code in the file."""

    @abstractmethod
    def rule(self, chip: Chip) -> ProductTiling:
        """The tiling of a card that the file lacks."""

    @abstractmethod
    def choices(self, chip: Chip) -> dict[str, tuple[int, ...]]:
        """The values that are tried of some fields of a tiling."""

    @abstractmethod
    def weights(self, device: torch.device, *, is_dry: bool) -> list[tuple[Any, list[Tensor]]]:
        """Weights, and what each is multiplied with: inputs [rows, in] of every number of rows that is measured."""

    @abstractmethod
    def work(self, weights: Any, x: Tensor, card: Card | None) -> Work:
        """The products of some weights and x by the tiling of a card, or by torch."""


@dataclass(frozen=True, slots=True)
class LinearTask(Task):
    """Linear maps of an 8 B Llama with packed weights."""

    code: Code
    zero: bool = False

    @property
    def key(self) -> str:
        return tiling_key(self.code, self.dtype)

    def rule(self, chip: Chip) -> ProductTiling:
        return by_rule(self.code, self.dtype, self.most_rows, chip)

    def choices(self, chip: Chip) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        few = self.most_rows == ROW_CLASSES[0]
        return {"block_k": (64, 128, 256), "programs_per_sm": (1, 2, 3, 4, 6) if few else (1, 2)}

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows that are measured: the fewest rows are nearly all that a server of one user has."""
        return (1, 16) if self.most_rows == 16 else (self.most_rows,)

    def weights(
        self, device: torch.device, *, is_dry: bool
    ) -> list[tuple[Sequence[PackedWeight], list[Tensor]]]:
        """The maps of a layer, the largest first: of each so many copies that none is left in a cache."""
        layout = Layout("", self.code, self.group_size, zero=self.zero)
        maps: list[tuple[Sequence[PackedWeight], list[Tensor]]] = []
        for out_features, in_features in sorted(map_sizes(_llama()), reverse=True):
            size = (out_features // 64, in_features // 32) if is_dry else (out_features, in_features)
            copies = [random_weight(layout, self.code, *size, device)]
            num_copies = 1 if is_dry else max(1, WALKED_BYTES // copies[0].num_bytes)
            copies += [random_weight(layout, self.code, *size, device) for _ in range(num_copies - 1)]
            maps.append((copies, [self._inputs(rows, size[1], device) for rows in self.rows]))
        return maps

    def _inputs(self, rows: int, size: int, device: torch.device) -> Tensor:
        x = torch.randn(rows, size, device=device)
        return ((x * 30).clamp(-127, 127) if self.dtype == torch.int8 else x).to(self.dtype)

    def work(self, weights: Sequence[PackedWeight], x: Tensor, card: Card | None) -> Work:
        if card is None:
            return partial(UnpackedLinear(weights[0], None), x.float()), 1
        scale = torch.ones(len(x), device=x.device) if self.dtype == torch.int8 else None

        def products() -> None:
            for weight in weights:
                multiply(x, weight, scale, None, torch.bfloat16, card)

        return products, len(weights)


@dataclass(frozen=True, slots=True)
class ExpertTask(Task):
    """The experts of a layer of Qwen3-30B-A3B."""

    @property
    def key(self) -> str:
        return expert_key(self.code, self.dtype)

    def rule(self, chip: Chip) -> ProductTiling:
        return expert_rule(self.code, self.dtype, self.most_rows, chip)

    def choices(self, chip: Chip) -> dict[str, tuple[int, ...]]:
        """One number of inputs in a step, and outputs for the large matrix instructions alone.

        By others a row would have other bits, which may not depend on its class.
        """
        rule = self.rule(chip)
        return {
            "block_n": (64, 128),
            "block_k": (rule.block_k,),
            "programs_per_sm": (rule.programs_per_sm,),
        }

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows that are measured, each of which has 8 of 128 experts."""
        return {16: (1, 32), 64: (256,), 255: (2048,)}[self.most_rows]

    def weights(self, device: torch.device, *, is_dry: bool) -> list[tuple[Layer, list[Tensor]]]:
        spec = SMALL if is_dry else QWEN3_30B
        layout = Layout("", self.code, self.group_size, zero=self.code is Code.UINT4)
        layer = Layer.random(spec, layout, table(device), self.dtype, device)
        rows = (1,) if is_dry else self.rows
        inputs = [torch.randn(each, spec.hidden_size, device=device).to(self.dtype) for each in rows]
        return [(layer, inputs)]

    def work(self, weights: Layer, x: Tensor, card: Card | None) -> Work:
        layer = weights if card is None else replace(weights, run_experts=TritonExperts(card))
        return layer.runs(x)


def tasks() -> list[Task]:
    """The fewest rows first, which matter most, of every class of code."""
    found: list[Task] = []
    for rows in ROW_CLASSES:
        found += [
            LinearTask(Code.INT4, torch.bfloat16, rows, 128),
            LinearTask(Code.FLOAT8, torch.bfloat16, rows, None),
            LinearTask(Code.INT8, torch.int8, rows, None),
            LinearTask(Code.UINT4, torch.bfloat16, rows, 128, zero=True),
            LinearTask(Code.INT8, torch.bfloat16, rows, 128),
            ExpertTask(Code.INT4, torch.bfloat16, rows, 128),
            ExpertTask(None, torch.bfloat16, rows, None),
            ExpertTask(Code.FLOAT8, torch.bfloat16, rows, 128),
            ExpertTask(Code.FLOAT4, torch.bfloat16, rows, 32),
            ExpertTask(Code.UINT4, torch.bfloat16, rows, 128),
            ExpertTask(Code.INT8, torch.bfloat16, rows, 128),
        ]
    return found


def _llama() -> ModelConfig:
    return parse_config(Fields("config.json", LLAMA_8B.config))
