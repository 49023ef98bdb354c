"""Layers with a state, as `engine/kernels/recurrent.py` specifies them: short steps row by row, prompts in tiles.

Programs share a sequence by columns of its state, which do not depend on each other, so that few rows are fast and many
are right. No shape depends on data that only the device knows: graphs can hold a step with any slots and saves.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.recurrent import StateVectors
from penstock.engine.kernels.state_cache import LayerStates
from penstock.engine.kernels.triton.norms import gated_rms_norm
from penstock.engine.kernels.triton.state_arguments import KeptStates, constants
from penstock.engine.kernels.triton.state_kernels import (
    NEVER,
    keep_rows_kernel,
    short_conv_kernel,
    state_kernel,
)
from penstock.engine.kernels.triton.state_tiles import FEWEST, SAVES, has_tiles, most_rows, run_tiles
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv

PART_OF_STATE = 2048
"""Numbers of the state of a head that a program has, which is a warp: some columns, of 128 keys in most models."""
CHANNELS = 128
"""Numbers of a row that a program keeps."""
CONVOLVED = 64
"""Channels that a program of a short convolution has."""
ROWS = 16
"""Rows that are convolved at a time."""
ROUNDS = 32
"""Programs, at most, that take turns at the rows of a sequence."""


def gated_delta(
    rows: Tensor,
    gates: Tensor,
    spec: GatedDelta,
    own: StateVectors,
    eps: float,
    states: LayerStates | None,
    batch: Batch,
) -> Tensor:
    """Equals `recurrent.gated_delta`; it allocates nothing but its result, and as much in float32."""
    assert own.gated_norm is not None
    rows = rows.contiguous()
    made = _made(rows, gates.contiguous(), spec, own, states, batch)
    z, size = rows[:, spec.history_channels :], spec.value_dim
    return gated_rms_norm(made, own.gated_norm, eps, z, size, batch.query_starts, gates_first=False)


def mamba2(
    rows: Tensor, spec: Mamba2, own: StateVectors, eps: float, states: LayerStates | None, batch: Batch
) -> Tensor:
    """Equals `recurrent.mamba2`; it allocates nothing but its result, and as much in float32."""
    assert own.gated_norm is not None
    rows, inner = rows.contiguous(), spec.inner_size
    channels, gates = rows[:, inner:], rows[:, inner + spec.history_channels :]
    made = _made(channels, gates, spec, own, states, batch)
    z, size = rows[:, :inner], inner // spec.num_groups
    return gated_rms_norm(made, own.gated_norm, eps, z, size, batch.query_starts, gates_first=True)


def short_conv(
    rows: Tensor, spec: ShortConv, own: StateVectors, states: LayerStates | None, batch: Batch
) -> Tensor:
    """Equals `recurrent.short_conv`, in one launch; it allocates nothing but its result."""
    num_tokens, num_sequences = len(rows), batch.context_lens.numel()
    made = torch.empty(num_tokens, spec.channels, dtype=rows.dtype, device=rows.device)
    sizes = conv_sizes(spec)
    rounds = min(max(triton.cdiv(most_rows(batch), sizes["ROWS"]), 1), ROUNDS)
    kept = KeptStates.of(states, batch)
    short_conv_kernel[(triton.cdiv(spec.channels, sizes["BLOCK"]), num_sequences + 1, rounds)](
        made,
        rows.contiguous(),
        own.conv,
        own.conv_bias,
        kept.history,
        kept.pending,
        kept.slot_stride,
        batch.query_starts,
        kept.slots,
        kept.saves,
        kept.num_saves,
        num_tokens,
        num_sequences,
        CHANNELS=spec.channels,
        KERNEL=spec.kernel,
        **sizes,
    )
    return made


def conv_sizes(spec: ShortConv) -> dict[str, int]:
    """Returns the tile of a short convolution, of no fewer rows than its kernel reads before a row."""
    taps = triton.next_power_of_2(spec.kernel)
    return {
        "TAPS": taps,
        "ROWS": max(ROWS, taps),
        "BLOCK": min(CONVOLVED, triton.next_power_of_2(spec.channels)),
    }


def _made(
    channels: Tensor,
    gates: Tensor,
    spec: GatedDelta | Mamba2,
    own: StateVectors,
    states: LayerStates | None,
    batch: Batch,
) -> Tensor:
    """Returns the heads' outputs before norms, [T, heads * values] float32; rows of no sequence are not set.

    Args:
        channels: [T, ...], the channels that go through the convolution, and then others.
        gates: [T, ...], the gates of each head, and then others.
    """
    num_heads, key_dim, value_dim = spec.state_shape
    made = torch.empty(len(channels), num_heads * value_dim, dtype=torch.float32, device=channels.device)
    block_keys = triton.next_power_of_2(key_dim)
    block = min(max(PART_OF_STATE // block_keys, 1), triton.next_power_of_2(value_dim))
    kept, num_sequences = KeptStates.of(states, batch), batch.context_lens.numel()
    taps = triton.next_power_of_2(spec.kernel)
    sizes = {
        "CHANNELS": spec.history_channels,
        "ROW_FLOATS": spec.row_floats,
        "KERNEL": spec.kernel,
        "TAPS": taps,
    }
    numbers, constexprs = constants(spec)
    are_tiled = has_tiles(batch, channels.dtype)
    if are_tiled:
        run_tiles(made, channels, gates, spec, own, kept, batch, numbers, constexprs)
    state_kernel[(num_heads * triton.cdiv(value_dim, block), num_sequences)](
        made,
        channels,
        channels.stride(0),
        gates,
        gates.stride(0),
        own.conv,
        own.conv_bias,
        own.decay,
        own.step_bias,
        own.skip,
        kept.state,
        kept.history,
        kept.pending,
        kept.slot_stride,
        batch.query_starts,
        kept.slots,
        kept.saves,
        kept.num_saves,
        FEWEST - 1 if are_tiled else NEVER.value,
        **numbers,
        **constexprs,
        **sizes,
        BLOCK_KEYS=block_keys,
        BLOCK_VALUES=block,
        SAVES=SAVES,
        num_warps=1,
    )
    if kept.slots is not None:
        _keep_rows(channels, gates, kept, batch, sizes)
    return made


def _keep_rows(
    channels: Tensor, gates: Tensor, kept: KeptStates, batch: Batch, sizes: dict[str, int]
) -> None:
    """Keeps the rows of each sequence that steps to come need; see `keep_rows_kernel`."""
    keep_rows_kernel[(triton.cdiv(sizes["ROW_FLOATS"], CHANNELS), batch.context_lens.numel())](
        channels,
        channels.stride(0),
        gates,
        gates.stride(0),
        kept.history,
        kept.pending,
        kept.slot_stride,
        batch.query_starts,
        kept.slots,
        kept.saves,
        kept.num_saves,
        **sizes,
        BLOCK=CHANNELS,
    )
