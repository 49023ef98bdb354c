"""Prompts through layers with a state: launches over tiles of 64 rows, see `state_tile_kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.recurrent import StateVectors
from penstock.engine.kernels.triton.state_arguments import KeptStates
from penstock.engine.kernels.triton.state_tile_kernels import (
    carry_state_kernel,
    finish_states_kernel,
    read_tiles_kernel,
    solve_tiles_kernel,
)
from penstock.engine.kernels.triton.state_tile_rows import ROWS, TILE, convolve_tiles_kernel
from penstock.engine.spec import GatedDelta, Mamba2

FEWEST = 32
"""The fewest rows of a sequence in a step that are taken in tiles; fewer are taken one by one, as drafts are."""
SEQUENCES = 64
"""Sequences that are looked through at a time."""
CARRIED = {GatedDelta: 16, Mamba2: 32}
"""Columns of the state of a head that one program takes through all tiles of a sequence."""
SOLVING_WARPS = 2
"""A triangle of 64 rows has not much for more."""
READ = 64
"""Columns of the state of a head that one program reads."""
SAVES = 32
"""Saves that are looked through at a time."""
TILED: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""The types of rows taken in tiles. float32 is taken row by row: a user who wants it wants the same bits."""


def has_tiles(batch: Batch, dtype: torch.dtype) -> bool:
    """Returns whether a sequence of the step can be taken in tiles."""
    return dtype in TILED and most_rows(batch) >= FEWEST


def most_rows(batch: Batch) -> int:
    """The most rows that a sequence of the step can have."""
    return batch.token_ids.numel() if batch.max_query_len is None else batch.max_query_len


def num_tiles(num_tokens: int, num_sequences: int, num_pending: int) -> int:
    """Returns the most tiles that a step can have, for any sequences: both ends of each may be parts of tiles."""
    tiled = min(num_sequences, num_tokens // FEWEST)
    size = int(TILE.value)
    return (num_tokens + tiled * (num_pending + 2 * size - 2)) // size


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tensors between the launches, by tile. See `convolve_tiles_kernel` for their contents."""

    places: Tensor
    heads: Tensor
    values: Tensor
    decays: Tensor
    weights: Tensor
    befores: Tensor
    found: Tensor | None

    @staticmethod
    def empty(spec: GatedDelta | Mamba2, channels: Tensor, num: int, constexprs: dict[str, Any]) -> _Tiles:
        num_heads, num_key_heads = constexprs["NUM_HEADS"], constexprs["NUM_KEY_HEADS"]
        keys, values = block_sizes(spec).values()

        def empty(*shape: int, dtype: torch.dtype = channels.dtype) -> Tensor:
            return torch.empty(num, *shape, dtype=dtype, device=channels.device)

        return _Tiles(
            empty(2, dtype=torch.int32),
            empty(2 * num_key_heads, TILE.value, keys),
            empty(num_heads, TILE.value, values),
            empty(num_heads, TILE.value, dtype=torch.float32),
            empty(num_heads, TILE.value, dtype=torch.float32),
            empty(num_heads, keys, values),
            empty(num_heads, TILE.value, keys) if isinstance(spec, GatedDelta) else None,
        )


def run_tiles(
    made: Tensor,
    channels: Tensor,
    gates: Tensor,
    spec: GatedDelta | Mamba2,
    own: StateVectors,
    kept: KeptStates,
    batch: Batch,
    numbers: dict[str, float],
    constexprs: dict[str, Any],
) -> None:
    """Takes the sequences with FEWEST rows or more through a layer, but keeps none of their rows.

    Tensors between launches have the type of the rows, and so have the factors of their products, whose sums are
    float32; G, and the state that goes from tile to tile, are float32.

    Args:
        made: is written, see `state_kernel`, but for the rows of other sequences.
    """
    num_heads, num_key_heads = constexprs["NUM_HEADS"], constexprs["NUM_KEY_HEADS"]
    sizes = block_sizes(spec)
    values, num_sequences = sizes["BLOCK_VALUES"], batch.context_lens.numel()
    num = num_tiles(len(channels), num_sequences, 0 if kept.pending is None else kept.pending.shape[1])
    tiles = _Tiles.empty(spec, channels, num, constexprs)
    convolve_tiles_kernel[(2 * num_key_heads + num_heads + 1, num, TILE.value // ROWS.value)](
        tiles.places,
        tiles.heads,
        tiles.values,
        tiles.decays,
        tiles.weights,
        channels,
        channels.stride(0),
        gates,
        gates.stride(0),
        own.conv,
        own.conv_bias,
        own.decay,
        own.step_bias,
        kept.history,
        kept.pending,
        kept.slot_stride,
        batch.query_starts,
        batch.context_lens,
        kept.slots,
        num_sequences,
        **numbers,
        **_of(constexprs, "IS_DELTA", "NUM_HEADS", "NUM_KEY_HEADS", "KEY_DIM", "VALUE_DIM"),
        **_of(constexprs, "QUERIES", "KEYS", "VALUES"),
        **row_sizes(spec),
        **sizes,
        FEWEST=FEWEST,
        SEQUENCES=SEQUENCES,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
    )
    shared = _of(constexprs, "NUM_HEADS", "NUM_KEY_HEADS", "IS_TILED") | sizes
    if tiles.found is not None:
        solve_tiles_kernel[(num_heads, num)](
            *(tiles.places, tiles.heads, tiles.values, tiles.found, tiles.decays, tiles.weights),
            **shared,
            num_warps=SOLVING_WARPS,
        )
    _carry(tiles, kept, batch, min(CARRIED[type(spec)], values), constexprs, shared)
    read = min(READ, values)
    read_tiles_kernel[(num_heads * (values // read), num)](
        made,
        tiles.places,
        tiles.heads,
        tiles.values,
        tiles.decays,
        tiles.weights,
        tiles.befores,
        own.skip,
        batch.query_starts,
        **shared,
        IS_DELTA=constexprs["IS_DELTA"],
        VALUE_DIM=constexprs["VALUE_DIM"],
        COLUMNS=read,
    )


def _carry(
    tiles: _Tiles,
    kept: KeptStates,
    batch: Batch,
    columns: int,
    constexprs: dict[str, Any],
    shared: dict[str, Any],
) -> None:
    """Carries states from tile to tile, and keeps those of the sequences, `columns` of a head in each program."""
    num_sequences = batch.context_lens.numel()
    num_parts = constexprs["NUM_HEADS"] * (shared["BLOCK_VALUES"] // columns)
    carrying = _of(constexprs, "IS_DELTA", "KEY_DIM", "VALUE_DIM") | shared
    carrying |= {"COLUMNS": columns, "FEWEST": FEWEST, "SEQUENCES": SEQUENCES}
    carry_state_kernel[(num_parts, num_sequences)](
        tiles.heads,
        tiles.values,
        tiles.found,
        tiles.decays,
        tiles.weights,
        tiles.befores,
        kept.state,
        kept.slot_stride,
        batch.query_starts,
        batch.context_lens,
        kept.slots,
        kept.saves,
        kept.num_saves,
        num_sequences,
        **carrying,
        SAVES=SAVES,
    )
    if kept.slots is not None:
        finish_states_kernel[(num_parts, num_sequences + kept.num_saves)](
            tiles.heads,
            tiles.values,
            tiles.decays,
            tiles.weights,
            kept.state,
            kept.slot_stride,
            batch.query_starts,
            batch.context_lens,
            kept.slots,
            kept.saves,
            num_sequences,
            **carrying,
        )


def _of(constexprs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: constexprs[name] for name in names}


def block_sizes(spec: GatedDelta | Mamba2) -> dict[str, int]:
    """Keys and values of a head as they lie in tiles: no fewer than tensor cores take."""
    _, keys, values = spec.state_shape
    return {
        "BLOCK_KEYS": max(16, triton.next_power_of_2(keys)),
        "BLOCK_VALUES": max(16, triton.next_power_of_2(values)),
    }


def row_sizes(spec: GatedDelta | Mamba2) -> dict[str, int]:
    return {"CHANNELS": spec.history_channels, "ROW_FLOATS": spec.row_floats, "KERNEL": spec.kernel}
