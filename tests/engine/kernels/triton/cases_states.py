"""The kernels of layers with a state, as published models launch them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from penstock.engine.kernels.triton import state_tile_kernels, state_tile_rows, states
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv, StateMixer
from tests.engine.kernels.state_layers import Layer, batch
from tests.engine.kernels.triton.compiling import Case, empty, recorded

DELTA = GatedDelta(hidden_size=5120, num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128)
GRANITE = Mamba2(hidden_size=1536, num_heads=48, head_dim=64, num_groups=1, state_size=128)
NEMOTRON = Mamba2(hidden_size=2688, num_heads=64, head_dim=64, num_groups=8, state_size=128)
LFM2 = ShortConv(hidden_size=2048, channels=2048)
MIXERS: dict[str, StateMixer] = {
    "Qwen 3.5 27B": DELTA,
    "Qwen 3.5 27B, tiled": replace(DELTA, is_tiled=True),
    "Granite 4 H": GRANITE,
    "Nemotron 3": NEMOTRON,
    "odd": replace(
        GRANITE, num_heads=9, head_dim=80, num_groups=3, state_size=96, kernel=3, has_conv_bias=False
    ),
    "LFM2": LFM2,
    "LFM2, odd": replace(LFM2, channels=100, kernel=4, has_bias=True),
}
_TILES = {
    state_tile_kernels.carry_state_kernel: 32,
    state_tile_kernels.read_tiles_kernel: 32,
    state_tile_kernels.finish_states_kernel: 32,
    state_tile_kernels.solve_tiles_kernel: 512,
}
"""The kernels that use tensor cores, and the most that they may spill."""


def prompt(name: str, dtype: torch.dtype, *, has_slots: bool = True) -> Iterator[Case]:
    """The launches of a prompt, those of short steps among them."""
    layer = Layer.random(MIXERS[name], [40], kernels=states, dtype=dtype)
    step = replace(batch([40]), state_slots=empty(1, 4), state_saves=empty(2, 4))
    own = layer.cache().layer(0) if has_slots else None
    name = f"{name}, {dtype}{'' if has_slots else ', without slots'}"
    for case in recorded(name, lambda: layer.run(step, layer.rows[0], layer.gates[0], own)):
        spills = 32 if case.kernel is state_tile_rows.convolve_tiles_kernel else 0
        yield replace(case, has_dot=case.kernel in _TILES, most_spilled=_TILES.get(case.kernel, spills))


CASES = [
    *(case for name in list(MIXERS)[:-1] for case in prompt(name, torch.bfloat16)),
    *prompt("LFM2", torch.float32),
    *(
        case
        for name in ("Qwen 3.5 27B", "Granite 4 H", "LFM2, odd")
        for case in prompt(name, torch.float16, has_slots=False)
    ),
]
