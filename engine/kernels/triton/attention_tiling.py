"""The sizes of the attention kernels' tiles, and the room that a card has for them.

The query heads that share a key-value head are rows of one tile, BLOCK_M of them: a token of 4 such heads is 4 rows. A
program multiplies these rows with TILE tokens of context at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import triton

TILE_BYTES = 16 << 10
"""A program loads at most so many bytes of one head's keys at a time, and of its values; two of both are in flight."""
PROGRAMS_PER_SM = 2
"""So many decode programs run on a multiprocessor at once: one reads while the other computes."""
RESERVED_SHARED_BYTES = 1 << 10
"""The driver keeps so much shared memory of every block (CUDA C++ programming guide, compute capability 8.x on)."""
MIN_ROWS = 16
"""Tensor cores multiply no fewer rows."""
MIN_TILE = 16
"""Tensor cores multiply no fewer tokens of context."""
MAX_DECODE_ROWS = 128
"""The sums of more rows than these no longer fit the registers of a decode program."""
LATENT_SUMS = 32 * 512
"""A program has so many sums of latents at most, or half of them where latents pass through registers, or in float32.

Compiled with twice as many, 128 for each of its threads, programs spill on most cards.
"""
PREFILL_ROWS = 128
"""Prefill computes more than it reads, so that a key is multiplied with as many rows as the registers hold."""
PREFILL_TOKENS = 512
"""A step of fewer tokens has half the rows in a tile, and so more programs."""
# No figure above comes from a measurement yet: they follow from sizes of registers, shared memory and waves.


class TensorCores(Enum):
    """The largest matrix instruction that Triton uses on a card."""

    MMA_SYNC = "mma.sync"
    """Both operands come from registers (Ampere, Ada, consumer Blackwell)."""
    WGMMA = "wgmma.mma_async"
    """A warp group multiplies from shared memory (Hopper)."""
    TCGEN05 = "tcgen05.mma"
    """Products stay in tensor memory, apart from the registers (data-center Blackwell)."""

    @classmethod
    def of_capability(cls, major: int) -> TensorCores:
        """The instruction of a compute capability: 12.x is Blackwell, too, and has neither of the large ones."""
        return {9: cls.WGMMA, 10: cls.TCGEN05, 11: cls.TCGEN05}.get(major, cls.MMA_SYNC)


@dataclass(frozen=True, slots=True)
class Chip:
    """The properties of a GPU that the sizes of tiles and launches depend on."""

    num_sms: int
    tensor_cores: TensorCores = TensorCores.MMA_SYNC
    shared_bytes: int = 99 << 10
    """A block may have so much shared memory."""

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        """The chip of a CUDA device; a small one for Triton's interpreter on a CPU."""
        if device.type != "cuda":
            return cls(num_sms=4)
        properties = torch.cuda.get_device_properties(device)
        cores = TensorCores.of_capability(properties.major)
        shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch forgot it
        return cls(properties.multi_processor_count, cores, shared_bytes)

    @property
    def decode_bytes(self) -> int:
        """Shared memory of a decode program, if PROGRAMS_PER_SM of them are to fit."""
        return (self.shared_bytes + RESERVED_SHARED_BYTES) // PROGRAMS_PER_SM - RESERVED_SHARED_BYTES


@dataclass(frozen=True, slots=True)
class KVHead:
    """One key-value head, and the query heads that share it."""

    group: int
    """This many query heads share it."""
    block_d: int
    """The head's dimension, padded to a power of two."""
    itemsize: int
    """Bytes of an element of the queries; keys and values of a quantized cache become the same type."""
    is_quantized: bool = False
    """Keys and values pass through registers, which have room for fewer."""
    rotated: int = 0
    """Of latents, the numbers of a key after those that are its value; 0 if values are kept beside keys."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key as it is multiplied."""
        rotated = max(16, triton.next_power_of_2(self.rotated)) if self.rotated else 0
        return (self.block_d + rotated) * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value, which may be a part of the key."""
        return self.row_bytes if self.rotated else 2 * self.row_bytes

    @property
    def min_rows(self) -> int:
        """Rows of a tile that holds at least one token, or of latents some heads of one."""
        if self.rotated:
            return MIN_ROWS
        heads: int = triton.next_power_of_2(self.group)
        return max(MIN_ROWS, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The tiling of a kernel."""

    block_m: int
    """Rows of queries in a program."""
    tile: int
    """Tokens of context that a program attends to at a time."""
    num_warps: int
    num_stages: int = 5
    """Triton counts the loads of block tables, too: two each for tables, for keys and values, and one to compute."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a launch."""
        return {
            "BLOCK_M": self.block_m,
            "TILE": self.tile,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def decode_tiling(head: KVHead, num_queries: int, chip: Chip) -> Tiling:
    """The tiling for sequences of at most `num_queries` queries, all of them in one tile."""
    rows = max(MIN_ROWS, triton.next_power_of_2(head.group * num_queries))
    if head.rotated:
        return _latent_tiling(head, rows, chip)
    tile = min(128, max(MIN_TILE, TILE_BYTES // head.row_bytes))
    for limit in (chip.decode_bytes, chip.shared_bytes):
        if fitted := _fitting_tile(head, rows, tile, chip.tensor_cores, limit):
            return _decode_tiling(rows, fitted)
    return _decode_tiling(_fitting_rows(head, rows, chip), MIN_TILE)


def _latent_tiling(head: KVHead, rows: int, chip: Chip) -> Tiling:
    """The tiling of at most so many rows that are attended to latents; registers are full with one program, or two."""
    sums = LATENT_SUMS // 2 if head.is_quantized or head.itemsize > 2 else LATENT_SUMS
    rows = max(MIN_ROWS, min(rows, sums // head.block_d))
    tile = min(128, max(MIN_TILE, 2 * TILE_BYTES // (head.block_d * head.itemsize)))
    fitted = _fitting_tile(head, rows, tile, chip.tensor_cores, chip.shared_bytes)
    if fitted is None:
        rows, fitted = _fitting_rows(head, rows, chip), MIN_TILE
    return Tiling(block_m=rows, tile=fitted, num_warps=8 if 2 * rows * head.block_d > sums else 4)


def _decode_tiling(rows: int, tile: int) -> Tiling:
    return Tiling(block_m=rows, tile=tile, num_warps=4 if rows <= 32 else 8)


def prefill_tiling(head: KVHead, num_tokens: int, chip: Chip, *, is_windowed: bool = False) -> Tiling:
    """The tiling for sequences of more queries, in a step of `num_tokens`, for layers with or without a window."""
    if head.rotated:
        return _latent_tiling(head, PREFILL_ROWS, chip)
    wide = head.row_bytes > 256  # twice the registers for each row
    rows = PREFILL_ROWS if num_tokens >= PREFILL_TOKENS and not wide else PREFILL_ROWS // 2
    tile = _prefill_tile(head, rows, chip.tensor_cores, is_windowed=is_windowed)
    rows = max(rows, head.min_rows)
    fitted = _fitting_tile(head, rows, tile, chip.tensor_cores, chip.shared_bytes)
    if fitted is None:
        rows, fitted = _fitting_rows(head, rows, chip), MIN_TILE
    return Tiling(block_m=rows, tile=fitted, num_warps=max(4, rows // (8 if wide else 16)))


def _prefill_tile(head: KVHead, rows: int, cores: TensorCores, *, is_windowed: bool) -> int:
    # 64 x 64 products by wgmma read as much shared memory as they can while they multiply; 64 x 128 leave some of it.
    # Compiled for tensor memory, a tile of 128 no longer fits the registers; nor, for wide heads, if a window
    # or a group that is no power of two takes some of them.
    has_room = head.row_bytes < 256 or not (is_windowed or head.group & (head.group - 1))
    if cores is TensorCores.WGMMA and rows == PREFILL_ROWS and not head.is_quantized and has_room:
        return min(128, max(MIN_TILE, 2 * TILE_BYTES // head.row_bytes))
    return min(32 if cores is TensorCores.MMA_SYNC else 64, max(MIN_TILE, TILE_BYTES // head.row_bytes))


def shared_bytes(head: KVHead, rows: int, tile: int, cores: TensorCores) -> int:
    """The most shared memory of an attention program, as Triton compiles it for these tensor cores.

    It holds the queries, the offsets of tiles, and two tiles each of keys and of values, or three where they are
    multiplied in the background. By mma.sync, the weights pass through it between the two products. At the end it
    serves the results, in float32, on their way to memory. A quantized cache needs less: its tiles have 8 bits.
    """
    tile_bytes = tile * head.token_bytes
    loop_bytes = 2 * tile_bytes + rows * tile * head.itemsize
    if cores is not TensorCores.MMA_SYNC and rows >= 64:
        loop_bytes = max(loop_bytes, 3 * tile_bytes)
    return max(loop_bytes + rows * head.row_bytes + 8 * tile + 1536, 4 * rows * head.block_d)


def _fitting_tile(head: KVHead, rows: int, tile: int, cores: TensorCores, limit: int) -> int | None:
    """The largest tile of at most `tile` that fits the limit; None if the smallest does not."""
    while shared_bytes(head, rows, tile, cores) > limit:
        if tile == MIN_TILE:
            return None
        tile //= 2
    return tile


def _fitting_rows(head: KVHead, rows: int, chip: Chip) -> int:
    """Returns the most of these rows that fit next to the smallest tile, down to the rows of one token."""
    while rows > head.min_rows and shared_bytes(head, rows, MIN_TILE, chip.tensor_cores) > chip.shared_bytes:
        rows //= 2
    return rows
