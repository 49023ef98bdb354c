"""Random layers with a state, and what kernels have to hold to, whatever runs them."""

from __future__ import annotations

import random
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.kernels import recurrent
from penstock.engine.kernels.batch import Batch, blank_batch
from penstock.engine.kernels.recurrent import StateVectors
from penstock.engine.kernels.state_cache import LayerStates, StateCache, StateLayout
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv, StateMixer
from tests.engine.configs import state_config

CPU = torch.device("cpu")
EPS = 1e-6
DELTA = GatedDelta(hidden_size=8, num_key_heads=2, num_value_heads=6, key_dim=5, value_dim=7)
MIXERS: dict[str, StateMixer] = {
    "delta": DELTA,
    "tiled delta": replace(DELTA, is_tiled=True),
    "mamba": Mamba2(hidden_size=8, num_heads=6, head_dim=5, num_groups=2, state_size=7),
    "conv": ShortConv(hidden_size=9, channels=9, has_bias=True),
}
NUM_PENDING = 3


def vectors_of(spec: StateMixer, generator: torch.Generator, device: torch.device) -> StateVectors:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    found = {field: random(*vector.shape) for field, vector in spec.vectors().items()}
    if "decay" in found:
        found["decay"] = -found["decay"].exp()
    return StateVectors(**found, **{field: random(norm.size) for field, norm in spec.norms().items()})


@dataclass
class Layer:
    """A random layer, and random rows of some sequences."""

    spec: StateMixer
    own: StateVectors
    rows: list[Tensor]
    gates: list[Tensor]
    kernels: Any
    """A module that has the three kernels."""

    @classmethod
    def random(
        cls,
        spec: StateMixer,
        lengths: Sequence[int],
        seed: int = 0,
        kernels: Any = recurrent,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        maps = spec.maps()
        widths = [
            sum(rows.count for rows in maps[name].rows) if name in maps else 0 for name in ("into", "gates")
        ]
        rows, gates = (
            [torch.randn(n, width, generator=generator).to(device, dtype) for n in lengths]
            for width in widths
        )
        return cls(spec, vectors_of(spec, generator, device), rows, gates, kernels)

    @property
    def device(self) -> torch.device:
        return self.own.conv.device

    def cache(self, num_slots: int = 16) -> StateCache:
        return StateCache(StateLayout.of(state_config(self.spec), NUM_PENDING), num_slots, self.device)

    def run(self, batch: Batch, rows: Tensor, gates: Tensor, states: LayerStates | None) -> Tensor:
        spec = self.spec
        if isinstance(spec, GatedDelta):
            made = self.kernels.gated_delta(rows, gates, spec, self.own, EPS, states, batch)
        elif isinstance(spec, Mamba2):
            made = self.kernels.mamba2(rows, spec, self.own, EPS, states, batch)
        else:
            made = self.kernels.short_conv(rows, spec, self.own, states, batch)
        assert isinstance(made, Tensor)
        return made

    def whole(self, sequence: int) -> Tensor:
        """What all rows of a sequence become, at once and alone."""
        rows = self.rows[sequence]
        return self.run(batch([len(rows)]).to(self.device), rows, self.gates[sequence], None)

    def step(
        self,
        cache: StateCache,
        parts: Sequence[tuple[int, int, int]],
        slots: Sequence[Sequence[int]],
        saves: Sequence[Sequence[int]] = (),
    ) -> list[Tensor]:
        """What some rows (sequence, first, end) become in one step."""
        own = replace(
            batch([end - first for _, first, end in parts], [end for _, _, end in parts]),
            state_slots=torch.tensor(slots, dtype=torch.int32),
            state_saves=torch.tensor(saves, dtype=torch.int32).view(-1, 4),
        ).to(self.device)
        rows, gates = (torch.cat([of[s][a:b] for s, a, b in parts]) for of in (self.rows, self.gates))
        made = self.run(own, rows, gates, cache.layer(0))
        return list(torch.split(made, [end - first for _, first, end in parts]))


def batch(counts: list[int], contexts: list[int] | None = None) -> Batch:
    return blank_batch(counts, contexts or counts, torch.zeros(len(counts), 1, dtype=torch.int32))


def check_step(
    layer: Layer,
    slots: Sequence[Sequence[int]],
    saves: Sequence[Sequence[int]],
    starts: Sequence[int] | None = None,
    off: float | None = None,
) -> None:
    """One step of all rows, or of those from some on, over slots that have something in them.

    Rows become what the specification makes of them, and the slots get what it writes.

    Args:
        off: how far they may be off together, as a part of what they are; None stands for rounding.
    """
    lengths, dtype = [len(rows) for rows in layer.rows], layer.rows[0].dtype
    plain = Layer.random(layer.spec, lengths, dtype=dtype)
    cache, plain_cache = layer.cache(), plain.cache()
    plain_cache.data[1:] = torch.randn(plain_cache.data[1:].shape, generator=torch.Generator().manual_seed(1))
    cache.data.copy_(plain_cache.data)
    before = cache.data.clone()
    firsts = starts or [0] * len(lengths)
    parts = [
        (sequence, first, length)
        for sequence, (first, length) in enumerate(zip(firsts, lengths, strict=True))
    ]
    found = torch.cat(layer.step(cache, parts, slots, saves))
    expected = torch.cat(plain.step(plain_cache, parts, slots, saves))
    if off is not None:
        written = [
            place for place in range(1, cache.num_slots) if not torch.equal(cache.data[place], before[place])
        ]
        for ours, theirs in [(found, expected), *((cache.data[i], plain_cache.data[i]) for i in written)]:
            gap = (ours.cpu().double() - theirs.double()).norm() / theirs.double().norm()
            assert gap <= off, f"off by {gap:.1e}"
        plain_cache.data[written] = cache.data[written].cpu()
        assert torch.equal(cache.data.cpu(), plain_cache.data), "only what is told is written"
        return
    error = max(2e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found.cpu(), expected, rtol=error, atol=error)
    torch.testing.assert_close(cache.data.cpu(), plain_cache.data, rtol=2e-5, atol=2e-5)


class Rows(Protocol):
    """The rows of some sequences, or their tokens, and what runs steps of them."""

    @property
    def rows(self) -> Sequence[Sized]: ...

    def cache(self, num_slots: int = 16) -> StateCache: ...

    def step(
        self,
        cache: StateCache,
        parts: Sequence[tuple[int, int, int]],
        slots: Sequence[Sequence[int]],
        saves: Sequence[Sequence[int]] = (),
    ) -> Sequence[Tensor]: ...


def check_cuts(layer: Rows, seed: int) -> None:
    """Sequences take steps of some rows, of which the last may turn out wrong; snapshots go on like them.

    However they do, their rows have the same bits.
    """
    lengths, choose = [len(rows) for rows in layer.rows], random.Random(seed)
    everyone = range(len(lengths))
    cache, free = layer.cache(100), list(range(1, 100))
    expected = [layer.step(cache, [(i, 0, lengths[i])], [[0, 0, 0, lengths[i]]])[0] for i in everyone]
    at, slots, replayed = ([0] * len(lengths) for _ in range(3))
    saved: dict[tuple[int, int], tuple[int, int]] = {}
    while unfinished := [sequence for sequence in everyone if at[sequence] < lengths[sequence]]:
        parts, entries, saves = list[tuple[int, int, int]](), list[list[int]](), list[list[int]]()
        for sequence in choose.sample(unfinished, choose.randint(1, len(unfinished))):
            count = choose.randint(1, lengths[sequence] - at[sequence])
            certain = count - choose.randint(0, min(NUM_PENDING, count - 1))
            target = free.pop() if not slots[sequence] or choose.random() < 0.5 else slots[sequence]
            if choose.random() < 0.5:
                rows = choose.randint(0, certain)
                kept = choose.randint(0, min(NUM_PENDING, certain - rows))
                saves.append([len(parts), rows, free.pop(), kept])
                saves.append([-1, 0, free[0], 0])  # as in a graph for more saves
                for again in range(kept + 1):
                    saved[sequence, at[sequence] + rows + again] = saves[-2][2], again
            parts.append((sequence, at[sequence], at[sequence] + count))
            entries.append([slots[sequence], target, replayed[sequence], certain])
        made = layer.step(cache, parts, entries, saves)
        for rows_made, (sequence, first, end), (_, target, _, certain) in zip(
            made, parts, entries, strict=True
        ):
            assert torch.equal(rows_made, expected[sequence][first:end])
            slots[sequence], replayed[sequence] = target, choose.randint(0, end - first - certain)
            at[sequence] = first + certain + replayed[sequence]
    for (sequence, first), (slot, again) in saved.items():
        (rest,) = layer.step(cache, [(sequence, first, lengths[sequence])], [[slot, 0, again, 0]])
        assert torch.equal(rest, expected[sequence][first:])
    assert not cache.data[0].any(), "slot 0 is never written"
