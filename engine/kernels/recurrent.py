"""Layers with a state in plain torch, on any device: the specification that faster kernels agree with.

Each takes the rows of a step one by one, in float32, and the shapes that it computes with depend on the layer alone: a
state, and the output of a row, are functions of the tokens up to that row, however they were cut into steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.state_cache import LayerStates
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv, StateMixer

UNIT_EPS = 1e-6
"""Is added to the squared length of queries and keys of a gated delta net."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVectors:
    """The vectors of a layer with a state, besides its linear maps, all in float32; missing ones are None."""

    conv: Tensor
    """[channels, kernel], the tap of the row itself last."""
    conv_bias: Tensor | None = None
    """[channels]"""
    decay: Tensor | None = None
    """[heads], below 0: a state shrinks by e to the product of it and the row's step."""
    step_bias: Tensor | None = None
    """[heads]"""
    skip: Tensor | None = None
    """[heads]"""
    gated_norm: Tensor | None = None
    """[value_dim] of a gated delta net, [heads * head_dim] of Mamba-2."""


class RunGatedDelta(Protocol):
    """See `gated_delta`."""

    def __call__(
        self,
        rows: Tensor,
        gates: Tensor,
        spec: GatedDelta,
        own: StateVectors,
        eps: float,
        states: LayerStates | None,
        batch: Batch,
    ) -> Tensor: ...


class RunMamba2(Protocol):
    """See `mamba2`."""

    def __call__(
        self,
        rows: Tensor,
        spec: Mamba2,
        own: StateVectors,
        eps: float,
        states: LayerStates | None,
        batch: Batch,
    ) -> Tensor: ...


class RunShortConv(Protocol):
    """See `short_conv`."""

    def __call__(
        self, rows: Tensor, spec: ShortConv, own: StateVectors, states: LayerStates | None, batch: Batch
    ) -> Tensor: ...


def gated_delta(
    rows: Tensor,
    gates: Tensor,
    spec: GatedDelta,
    own: StateVectors,
    eps: float,
    states: LayerStates | None,
    batch: Batch,
) -> Tensor:
    """Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.

    Queries, keys and values go through the convolution and SiLU; queries and keys get length 1, and queries are
    multiplied by key_dim^-1/2. Then for each value head, with its state S [keys, values] and its gates b and a:

        S *= exp(decay * softplus(a + step_bias))
        S += outer(k, sigmoid(b) * (v - S^T k))
        made = SiLU(z) * RMSNorm(S^T q)

    Args:
        rows: [T, 2 key_size + 2 value_size] queries, keys, values, z.
        gates: [T, 2 num_value_heads] b, a.
        eps: of the norm.
        states: of the layer; None if all sequences begin, and nothing is kept.

    Returns:
        [T, value_size] in the type of `rows`; zeros for rows of no sequence.
    """
    assert own.decay is not None
    assert own.step_bias is not None
    assert own.gated_norm is not None
    decay, step_bias, norm = own.decay, own.step_bias, own.gated_norm
    sizes = [spec.key_size, spec.key_size, spec.value_size]
    num_heads, group = spec.num_value_heads, spec.num_value_heads // spec.num_key_heads

    def of_heads(x: Tensor) -> Tensor:
        """Queries or keys of all key heads -> of length 1, [value heads, key_dim]."""
        heads = x.view(-1, spec.key_dim)
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + UNIT_EPS)
        return heads.repeat(group, 1) if spec.is_tiled else heads.repeat_interleave(group, 0)

    def advance(state: _State, row: Tensor) -> Tensor:
        channels, b, a = torch.split(row, [sum(sizes), num_heads, num_heads])
        q, k, v = torch.split(F.silu(state.convolved(channels, own)), sizes)
        queries, keys, values = of_heads(q) * spec.key_dim**-0.5, of_heads(k), v.view(num_heads, -1)
        matrix = state.matrix.mul_((decay * F.softplus(a + step_bias)).exp()[:, None, None])
        found = (matrix * keys[:, :, None]).sum(1)
        change = b.sigmoid()[:, None] * (values - found)
        matrix += keys[:, :, None] * change[:, None]
        made: Tensor = (matrix * queries[:, :, None]).sum(1)
        return made

    wide = rows.float()
    channels, z = wide[:, : sum(sizes)], wide[:, sum(sizes) :]

    def gated(made: Tensor, row: int) -> Tensor:
        return (_rms(made, eps) * norm).flatten() * F.silu(z[row])

    inputs = torch.cat((channels, gates.float()), dim=1)
    return _run(spec, inputs, advance, gated, spec.value_size, states, batch).to(rows.dtype)


def mamba2(
    rows: Tensor, spec: Mamba2, own: StateVectors, eps: float, states: LayerStates | None, batch: Batch
) -> Tensor:
    """Dao and Gu, "Transformers are SSMs", 2024.

    Inputs, keys and queries go through the convolution and SiLU. Then for each head, with its state S [keys, values],
    its inputs x and its d:

        step = clamp(softplus(d + step_bias))
        S = S * exp(decay * step) + outer(step * k, x)
        made = S^T q + skip * x

    The outputs of all heads are multiplied by SiLU(z), and then go through RMSNorm of each group.

    Args:
        rows: [T, 2 inner_size + 2 num_groups * state_size + num_heads] z, inputs, keys, queries, d.
        eps: of the norm.
        states: of the layer; None if all sequences begin, and nothing is kept.

    Returns:
        [T, inner_size] in the type of `rows`; zeros for rows of no sequence.
    """
    assert own.decay is not None
    assert own.step_bias is not None
    assert own.skip is not None
    assert own.gated_norm is not None
    decay, step_bias, skip, norm = own.decay, own.step_bias, own.skip, own.gated_norm
    num_heads, inner = spec.num_heads, spec.inner_size

    def of_heads(x: Tensor) -> Tensor:
        """Keys or queries of all groups -> [heads, state_size]."""
        return x.view(-1, spec.state_size).repeat_interleave(num_heads // spec.num_groups, 0)

    def advance(state: _State, row: Tensor) -> Tensor:
        channels, d = torch.split(row, [spec.history_channels, num_heads])
        x, k, q = torch.split(F.silu(state.convolved(channels, own)), list(spec.conv_sizes))
        step = F.softplus(d + step_bias).clamp(*spec.step_limits)
        values = x.view(num_heads, -1)
        matrix = state.matrix.mul_((decay * step).exp()[:, None, None])
        matrix += (step[:, None] * of_heads(k))[:, :, None] * values[:, None]
        return (matrix * of_heads(q)[:, :, None]).sum(1) + skip[:, None] * values

    wide = rows.float()

    def gated(made: Tensor, row: int) -> Tensor:
        groups = (made.flatten() * F.silu(wide[row, :inner])).view(spec.num_groups, -1)
        return _rms(groups, eps).flatten() * norm

    return _run(spec, wide[:, inner:], advance, gated, inner, states, batch).to(rows.dtype)


def short_conv(
    rows: Tensor, spec: ShortConv, own: StateVectors, states: LayerStates | None, batch: Batch
) -> Tensor:
    """C * conv(B * x), by channels.

    Args:
        rows: [T, 3 channels] B, C, x.
        states: of the layer; None if all sequences begin, and nothing is kept.

    Returns:
        [T, channels] in the type of `rows`; zeros for rows of no sequence.
    """
    before, behind, x = rows.float().chunk(3, dim=1)

    def advance(state: _State, row: Tensor) -> Tensor:
        return state.convolved(row, own)

    def gated(made: Tensor, row: int) -> Tensor:
        return behind[row] * made

    return _run(spec, before * x, advance, gated, spec.channels, states, batch).to(rows.dtype)


@dataclass(slots=True)
class _State:
    """A layer's state after the rows of a sequence up to some row."""

    matrix: Tensor
    """[heads, keys, values]"""
    history: Tensor
    """[kernel - 1, channels]"""

    @classmethod
    def read(cls, states: LayerStates | None, slot: int, spec: StateMixer, device: torch.device) -> _State:
        if states is None or not slot:
            shape = spec.kernel - 1, spec.history_channels
            return cls(torch.zeros(spec.state_shape, device=device), torch.zeros(shape, device=device))
        return cls(states.state[slot].clone(), states.history[slot].clone())

    def write(self, states: LayerStates | None, slot: int, pending: Tensor) -> None:
        if states is not None and slot:
            states.state[slot], states.history[slot] = self.matrix, self.history
            states.pending[slot, : len(pending)] = pending

    def convolved(self, channels: Tensor, own: StateVectors) -> Tensor:
        """Convolves the next row [channels], which joins the history; taps are added in their order."""
        rows = torch.cat((self.history, channels[None]))
        self.history = rows[1:]
        made = torch.zeros_like(channels) if own.conv_bias is None else own.conv_bias
        for row, tap in zip(rows, own.conv.T, strict=True):
            made = made + row * tap
        return made


_Advance = Callable[[_State, Tensor], Tensor]
"""Takes a state by a row of inputs, and returns the row's output."""


def _run(
    spec: StateMixer,
    inputs: Tensor,
    advance: _Advance,
    gated: Callable[[Tensor, int], Tensor],
    width: int,
    states: LayerStates | None,
    batch: Batch,
) -> Tensor:
    """Returns the outputs of all rows of a step, [T, width] float32; see `Batch.state_slots` for the slots.

    Args:
        inputs: [T, row_floats] float32
        gated: returns the output of the row of that number, given the result of `advance`.
    """
    made = inputs.new_zeros(len(inputs), width)
    starts = batch.query_starts.tolist()
    for sequence, own in enumerate(_states_of(batch)):
        state = _State.read(states, own.source, spec, inputs.device)
        if states is not None and own.replayed:
            for row in states.pending[own.source, : own.replayed]:
                advance(state, row)
        rows = range(starts[sequence], starts[sequence + 1])
        for done in range(len(rows) + 1):
            if done:
                row = rows[done - 1]
                made[row] = gated(advance(state, inputs[row]), row)
            for slot, kept in own.written.get(done, ()):
                state.write(states, slot, inputs[rows.start + done : rows.start + done + kept])
    return made


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots that a step reads and writes for a sequence's state."""

    source: int
    replayed: int
    written: dict[int, list[tuple[int, int]]]
    """By rows of this step, the slots that get the state after them, and how many of the next rows are pending then."""


def _states_of(batch: Batch) -> Iterator[_Slots]:
    if batch.state_slots is None:
        yield from [_Slots(0, 0, {})] * batch.context_lens.numel()
        return
    lengths = batch.query_starts.diff().tolist()
    saves = [] if batch.state_saves is None else batch.state_saves.tolist()
    for sequence, (source, target, replayed, certain) in enumerate(batch.state_slots.tolist()):
        written = {certain: [(target, lengths[sequence] - certain)]}
        for _, rows, slot, kept in (save for save in saves if save[0] == sequence):
            written.setdefault(rows, []).append((slot, kept))
        yield _Slots(source, replayed, written)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
