"""Steps that leave a snapshot, or begin with one, do so, and are timed."""

from __future__ import annotations

import pytest
import torch

from lab.bench import snapshots
from lab.bench.snapshots import config_of, print_costs
from lab.bench.states import Model, ints
from penstock.engine.kernels.cpu.native import load_library
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv, StateMixer

MIXERS: dict[str, StateMixer] = {
    "delta": GatedDelta(hidden_size=64, num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32),
    "mamba": Mamba2(hidden_size=64, num_heads=4, head_dim=16, num_groups=2, state_size=32),
    "conv": ShortConv(hidden_size=64, channels=64),
}


@pytest.mark.parametrize("name", MIXERS)
def test_what_a_step_leaves_is_what_another_finds(name: str) -> None:
    team = load_library(print).start_team(1)
    model = Model(team, "int8", config_of(MIXERS[name], 3), num_own=2, num_pending=4)
    model.seconds(model.batch(20, 20))
    model.seconds(model.batch(1, 21, saves=ints([0, 1, 2, 0])))
    own = model.states.layer(2)
    assert own.history[1].any()
    for part in (own.state, own.history):
        assert torch.equal(part[1], part[2])
    left = own.history[1].clone()
    model.seconds(model.batch(1, 22))
    assert not torch.equal(own.history[1], left)
    model.seconds(model.batch(1, 22, slots=ints([2, 1, 0, 0])))
    assert torch.equal(own.history[1], left)


def test_every_model_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(snapshots, "SHAPES", {name: (mixer, 3) for name, mixer in MIXERS.items()})
    team = load_library(print).start_team(2)
    costs = [snapshots.measure(team, name, 2) for name in MIXERS]
    for cost, mixer in zip(costs, MIXERS.values(), strict=True):
        assert cost.slot_bytes >= 3 * 4 * mixer.row_floats * 8
        assert min(cost.step_ms, cost.prompt_ms) > 0
    print_costs(costs)
    assert "pays after" in capsys.readouterr().out
