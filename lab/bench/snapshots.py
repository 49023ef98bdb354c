"""Measures a snapshot of a sequence's states on a CPU, next to computing its tokens again.

python -m lab.bench.snapshots    # layers of Qwen 3.5, Granite 4 H, LFM2 and Nemotron 3 in int8

Of each model there are the layers with a state, and nothing else: the whole model takes longer to compute again.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from lab.bench.states import PROMPT, Model, ints
from penstock.app.tables import number, table
from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.kernels.cpu.native import Team, load_library
from penstock.engine.spec import GatedDelta, Layer, Mamba2, ModelSpec, Norm, ShortConv, StateMixer

SHAPES: dict[str, tuple[StateMixer, int]] = {
    "Qwen 3.5 0.8B": (
        GatedDelta(hidden_size=1024, num_key_heads=16, num_value_heads=16, key_dim=128, value_dim=128),
        18,
    ),
    "Granite 4 H Tiny": (
        Mamba2(hidden_size=1536, num_heads=48, head_dim=64, num_groups=1, state_size=128),
        36,
    ),
    "LFM2 1.2B": (ShortConv(hidden_size=2048, channels=2048), 10),
    "Nemotron 3 Nano": (
        Mamba2(hidden_size=2688, num_heads=64, head_dim=64, num_groups=8, state_size=128),
        23,
    ),
}
"""The mixer of each layer with a state, and how many of them the model has."""
_NUM_OWN = 4
"""More weights than the caches hold, and quickly made."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The best steps of one model's layers with a state."""

    name: str
    slot_bytes: int
    step_ms: float
    """Of one token."""
    saved_ms: float
    """The time that a step takes in addition if it leaves a snapshot."""
    found_ms: float
    """The time that it takes in addition if it begins with a snapshot, and the most pending rows are applied to it."""
    prompt_ms: float
    """Of PROMPT tokens."""

    @property
    def pays_after(self) -> float:
        """The tokens that take as long to compute as the snapshot to leave and to find."""
        return PROMPT * max(0.0, self.saved_ms + self.found_ms) / self.prompt_ms


def config_of(mixer: StateMixer, num_layers: int) -> ModelConfig:
    """A model of such layers, without feed-forward parts."""
    norm = Norm(name="input_layernorm", size=mixer.hidden_size)
    layers = (Layer(mixer=mixer, feed_forward=None, input_norm=norm),) * num_layers
    spec = ModelSpec(hidden_size=mixer.hidden_size, layers=layers, norm_eps=1e-6, final_norm=norm)
    return ModelConfig(architecture="", vocab_size=1024, max_position=2 * PROMPT, spec=spec)


def measure(team: Team, name: str, repeats: int) -> Cost:
    """The best of steps with a snapshot and without, in turns: other processes slow all of them."""
    mixer, num_layers = SHAPES[name]
    num_pending = LoadOptions().num_pending
    model = Model(team, "int8", config_of(mixer, num_layers), _NUM_OWN, num_pending)
    end = PROMPT + 1
    steps = (
        model.batch(1, end),
        model.batch(1, end, saves=ints([0, 1, 2, 0])),
        model.batch(1, end, slots=ints([2, 1, num_pending, 1])),
    )
    best, prompt = [math.inf] * len(steps), model.batch(PROMPT, PROMPT)
    for _ in range(repeats):
        best = [min(least, model.seconds(step)) for least, step in zip(best, steps, strict=True)]
    plain, saving, finding = (1e3 * seconds for seconds in best)
    prompt_ms = 1e3 * min(model.seconds(prompt) for _ in range(3))
    return Cost(name, model.states.layout.slot_bytes, plain, saving - plain, finding - plain, prompt_ms)


def print_costs(costs: list[Cost]) -> None:
    head = ["MB", "a token, ms", "to leave it, ms", "to find it, ms", f"{PROMPT} tokens, ms", "pays after"]
    lines = [
        [
            own.name,
            number(own.slot_bytes / 1e6),
            *map(number, (own.step_ms, own.saved_ms, own.found_ms, own.prompt_ms)),
            f"{own.pays_after:.0f} tokens",
        ]
        for own in costs
    ]
    print(table(["a snapshot, of", *head], lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    team = load_library(print).start_team(options.threads)
    print_costs([measure(team, name, options.repeats) for name in SHAPES])


if __name__ == "__main__":
    main()
