"""The sizes of the tiles of linear maps, by card: from a file, or by a rule for cards that it lacks.

A *class* is a range of numbers of rows that share a tiling. Nothing depends on the number within a class, so that a
row's result never depends on the other rows while their number stays in the class.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from penstock.engine.kernels.packed import UNIT, Code, PackedWeight
from penstock.engine.kernels.triton.attention_tiling import Chip, TensorCores
from penstock.engine.quant.float8 import FLOAT8

FILE = Path(__file__).with_suffix(".json")
"""{device name or "sm_<capability>": {class of code: {most rows of a class: fields of ProductTiling}}}; see
`tiling_key` and `expert_key`. Beside the classes is "boundaries": {name: rows}; see `Card.boundary`."""
ROW_CLASSES = (16, 64, 255)
"""The most rows of each class. More than the last are multiplied with unpacked weights, or as the last class is."""
NEVER = 1 << 30
"""The boundary of what no number of rows is served by."""
MIN_STEPS = 4
"""A part of the inputs has at least so many steps, if there is more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiling:
    """The tiling of a product."""

    block_m: int
    """Rows of x in a program."""
    block_n: int
    """Outputs in a program."""
    block_k: int
    """Inputs of a step; fewer where groups are smaller."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """The inputs are cut into parts until there are so many programs for each multiprocessor, if rows fill one tile."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a launch."""
        options = asdict(self)
        del options["programs_per_sm"], options["block_k"]
        return {name.upper() if name.startswith("block") else name: each for name, each in options.items()}


@dataclass(frozen=True, slots=True)
class Card:
    """The properties of a GPU that the choice of tiles depends on."""

    chip: Chip
    name: str = ""
    """As the driver spells it."""
    capability: str = ""
    """"sm_90", say."""

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """The card of a CUDA device; one without a name for Triton's interpreter on a CPU."""
        if device.type != "cuda":
            return cls(Chip.of(device))
        major, minor = torch.cuda.get_device_capability(device)
        return cls(Chip.of(device), torch.cuda.get_device_name(device), f"sm_{major}{minor}")

    def tiling(self, code: Code, dtype: torch.dtype, most_rows: int) -> ProductTiling:
        """The tiling for a class of rows.

        Args:
            dtype: the type of x: int8 is multiplied as it is.
            most_rows: one of ROW_CLASSES.
        """
        known = self.known(tiling_key(code, dtype), most_rows)
        return known or by_rule(code, dtype, most_rows, self.chip)

    def expert_tiling(self, code: Code | None, dtype: torch.dtype, most_rows: int) -> ProductTiling:
        """The tiling of experts for a class of rows, see `expert_rows`; a code of None is weights in the type of x."""
        known = self.known(expert_key(code, dtype), most_rows)
        return known or expert_rule(code, dtype, most_rows, self.chip)

    def known(self, key: str, most_rows: int) -> ProductTiling | None:
        """The tiling that the file has for a class of code and of rows."""
        fields = self._known().get(key, {}).get(str(most_rows))
        return ProductTiling(**fields) if fields else None

    def boundary(self, name: str, usual: int) -> int:
        """The number of rows from which on one kernel takes over from another, as measured on this card.

        Args:
            name: one of those in boundaries.py.
            usual: serves cards on which nobody measured it.
        """
        return int(self._known().get("boundaries", {}).get(name, usual))

    def _known(self) -> dict[str, Any]:
        table = _table()
        return table.get(self.name) or table.get(self.capability) or {}


def tiling_key(code: Code, dtype: torch.dtype) -> str:
    """The class of code in the file: "int4 x bfloat16", say."""
    return f"{code.value} x {str(dtype).removeprefix('torch.')}"


def expert_key(code: Code | None, dtype: torch.dtype) -> str:
    """The class of experts' code in the file: "experts, int4 x bfloat16", or "experts, bfloat16"."""
    return f"experts, {str(dtype).removeprefix('torch.') if code is None else tiling_key(code, dtype)}"


def expert_rows(num_pairs: int, num_experts: int) -> int:
    """The class of a step with so many pairs of a row and one of its experts, by twice the rows of an expert."""
    rows = -(-2 * num_pairs // num_experts)
    return next((most for most in ROW_CLASSES if rows <= most), ROW_CLASSES[-1])


def by_rule(code: Code, dtype: torch.dtype, most_rows: int, chip: Chip) -> ProductTiling:
    """A tiling that fits the registers and the shared memory of any card that Triton serves.

    Few rows are bound by memory: small tiles, several programs on a multiprocessor, many loads in flight. Of float32,
    which no tensor core multiplies without rounding, the registers of a program hold less.
    """
    if dtype == torch.float32:
        block_m, block_n, block_k, num_warps = min(most_rows, 32), 64, 32, 4
    elif most_rows == ROW_CLASSES[0]:
        block_m, block_n, block_k, num_warps = 16, 64, 128, 4
    else:
        block_m, block_n, num_warps = min(most_rows + 1, 128) // 64 * 64, 128, 8
        if dtype == FLOAT8 and chip.tensor_cores is TensorCores.TCGEN05:
            block_m = 64  # registers hold the sums of a block beside those of all
        block_k = 128 if block_m == 64 and (code.bits == 4 or dtype in (torch.int8, FLOAT8)) else 64
    few = most_rows == ROW_CLASSES[0]
    tiling = ProductTiling(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=5 if few else 4,
        programs_per_sm=3 if few else 1,
    )
    return _fitting(tiling, code, dtype, most_rows, chip)


def expert_rule(code: Code | None, dtype: torch.dtype, most_rows: int, chip: Chip) -> ProductTiling:
    """Returns the tiling of `by_rule`, except that a step has as many inputs in every class.

    So the sums of a row are added in one order, however many rows its experts have. Where operands pass through
    registers, the operands of long steps leave room for fewer sums.
    """
    rule = by_rule(code or Code.INT8, dtype, most_rows, chip)
    is_small = chip.tensor_cores is TensorCores.MMA_SYNC
    is_long = code is not None and dtype != torch.float32 and (code.bits == 4 or not is_small)
    if is_long and is_small:
        rule = replace(rule, block_m=min(rule.block_m, 64), block_n=64, num_warps=4)
    tiling = replace(
        rule,
        block_k=32 if dtype == torch.float32 else 128 if is_long else 64,
        num_stages=5 if most_rows == ROW_CLASSES[0] else 4,
    )
    return _fitting(tiling, code, dtype, most_rows, chip)


def _fitting(
    tiling: ProductTiling, code: Code | None, dtype: torch.dtype, most_rows: int, chip: Chip
) -> ProductTiling:
    """The tiling with as many stages as there is room for."""
    room = chip.decode_bytes if most_rows == ROW_CLASSES[0] else chip.shared_bytes
    while shared_bytes(tiling, code, dtype, chip.tensor_cores) > room and tiling.num_stages > 2:
        tiling = replace(tiling, num_stages=tiling.num_stages - 1)
    return tiling


def shared_bytes(tiling: ProductTiling, code: Code | None, dtype: torch.dtype, cores: TensorCores) -> int:
    """The most shared memory of the product, as Triton compiles it for these tensor cores.

    It holds the loads of all stages, of which mma.sync needs one less if there are several, and unpacked weights of one
    step where they change hands on their way to the tensor cores. At the end it serves the sums on their way to memory.
    """
    bits = 8 * dtype.itemsize if code is None else code.bits
    tiles = tiling.block_n * bits // 8 + tiling.block_m * dtype.itemsize
    in_flight = max(1, tiling.num_stages - (cores is TensorCores.MMA_SYNC))
    weights = 0 if code is None else tiling.block_n * dtype.itemsize * bits // 8
    loop_bytes = tiling.block_k * (in_flight * tiles + weights)
    return max(loop_bytes, 4 * tiling.block_m * tiling.block_n) + 1024


def step_inputs(weight: PackedWeight, tiling: ProductTiling, *, in_groups: bool) -> int:
    """The inputs of a step: a power of 2 that divides all inputs with their padding, and a group if that is wanted."""
    group_size = weight.group_size if in_groups and weight.scale.shape[0] > 1 else 0
    return step_size(weight.padded_features, tiling, group_size)


def step_size(padded_features: int, tiling: ProductTiling, group_size: int = 0) -> int:
    """The inputs of a step: a power of 2 that divides both sizes."""
    size = tiling.block_k
    while padded_features % size or group_size % size:
        size //= 2
    assert size >= UNIT
    return size


def num_parts(out_features: int, num_steps: int, tiling: ProductTiling, chip: Chip) -> tuple[int, int]:
    """Into how many parts the inputs are cut, and the steps of a part; a function of the weight's shape alone."""
    tiles = -(-out_features // tiling.block_n)
    wanted = max(1, chip.num_sms * tiling.programs_per_sm // tiles)
    steps = -(-num_steps // max(1, min(wanted, num_steps // MIN_STEPS)))
    return -(-num_steps // steps), steps


@cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return table
