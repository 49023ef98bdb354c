"""Figures, the goals beside them, and how a part tells them to the command: one JSON object a line."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass

# The parts count from the start of the command; the clock is one for all processes.
_STARTED_S = float(os.environ.setdefault("GPU_RUN_STARTED_S", str(time.monotonic())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    how: str = ""
    """The way it was measured."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that a figure is to keep."""

    limit: float
    unit: str
    at_most: bool = True

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.limit:,g} {self.unit}"


GOALS: dict[str, Goal] = {
    "llama-8b: TPOT, batch 1": Goal(6.2, "ms"),
    "llama-8b-fp8: TPOT, batch 1": Goal(3.8, "ms"),
    "llama-8b-int4: TPOT, batch 1": Goal(3.0, "ms"),
    "llama-8b: KV slope of a step": Goal(4.9e-5, "ms per token"),
    "llama-8b: attention, KV slope of all layers": Goal(4.9e-5, "ms per token"),
    "llama-8b: prefill of 8,192 tokens": Goal(600, "TFLOP/s", at_most=False),
    "llama-8b: host's share of a step, 64 streams": Goal(5, "%"),
    "qwen3-0.6b: TPOT, batch 1": Goal(1.2, "ms"),
    "qwen3-0.6b: 500 requests of 512 in, 128 out": Goal(12_000, "output tokens/s", at_most=False),
    "qwen3-0.6b: host's share of a step, 64 streams": Goal(5, "%"),
    "qwen3-0.6b: TPOT with 256 clients, above none": Goal(10, "%"),
}
"""By name of the figure. For an H100; other cards are measured against the same."""


def emit(name: str, value: float, unit: str, how: str = "") -> None:
    """From within a part: a figure for the report; one that is no number was not measured."""
    if not math.isfinite(value):
        emit_skip(name, "nothing came of which it could be taken")
        return
    _tell({"figure": asdict(Figure(name=name, value=value, unit=unit, how=how))})


def emit_fact(name: str, value: str) -> None:
    """Tells a fact about the machine, in words."""
    _tell({"fact": [name, value]})


def emit_skip(what: str, why: str) -> None:
    _tell({"skip": [what, " ".join(why.split())]})


def say(text: str) -> None:
    """Progress, for whoever watches."""
    print(f"gpu: {time.monotonic() - _STARTED_S:5.1f} s  {text}", file=sys.stderr, flush=True)


def _tell(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)
