"""The parts of a run. Each is a process of its own, bounded in time, whose figures count as soon as it says them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from loadtests.forked import ForkedProcess
from loadtests.gpu.figures import Figure
from loadtests.gpu.packages import ROOT


@dataclass(frozen=True, slots=True)
class Part:
    """`python -m loadtests.gpu.<module> <arguments>`"""

    name: str
    module: str
    bound_s: float
    """It is ended after so long."""
    arguments: tuple[str, ...] = ()
    is_for_dry_runs: bool = True


PARTS = (
    Part("environment", "environment", 30),
    Part("tests", "cuda_tests", 180, ("tests/gpu",)),
    Part("kernels", "kernels", 130),
    Part("llama-8b", "serving", 190, ("llama-8b",)),
    Part("qwen3-0.6b", "serving", 150, ("qwen3-0.6b",)),
    Part("quantized", "quantized", 150),
    Part("boundaries", "boundaries", 60),
    Part("experts", "experts", 100),
    Part("states", "states", 100),
    Part("drafts", "drafts", 240),
    Part("llama-8b-int4", "serving", 100, ("llama-8b-int4",)),
    Part("llama-8b-fp8", "serving", 100, ("llama-8b-fp8",), is_for_dry_runs=False),
    Part("llama-8b-ranks", "ranks", 120, ("llama-8b",), is_for_dry_runs=False),
    Part("kernel-tests", "cuda_tests", 150, ("tests/engine/kernels/triton",), is_for_dry_runs=False),
)
"""In order of what is wanted most; the last ones have what time the others leave."""

_LEAST_S = 10.0
"""With less time than this a part is not begun."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a part."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(what, why)"""
    failure: str | None = None
    seconds: float = 0.0

    def take(self, line: str) -> None:
        """One line of the part's output; what is none of ours is let pass. A figure told again is a newer one."""
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if "figure" in message:
            figure = Figure(**message["figure"])
            self.figures = [*(known for known in self.figures if known.name != figure.name), figure]
        elif "fact" in message:
            name, value = message["fact"]
            self.facts[name] = value
        elif "skip" in message:
            what, why = message["skip"]
            self.skipped.append((what, why))


def run_part(part: Part, command: Sequence[str], left_s: float) -> Outcome:
    """Runs it for as long as it may, and at most `left_s`; it and all that it started has ended then."""
    outcome = Outcome(part.name)
    bound_s = min(part.bound_s, left_s)
    if bound_s < _LEAST_S:
        outcome.skipped.append((part.name, "no time was left"))
        return outcome
    started_s = time.monotonic()
    process = ForkedProcess(command, 1, {**os.environ, "HF_HUB_OFFLINE": "1"}, ROOT)
    reader = threading.Thread(target=_read, args=(process.pipe, outcome), daemon=True)
    reader.start()
    try:
        status = process.wait(bound_s)
        if status:
            outcome.failure = f"it ended with status {status}; its last lines are above"
    except subprocess.TimeoutExpired:
        outcome.skipped.append((f"the rest of {part.name}", f"it was not done after {bound_s:.0f} s"))
    finally:
        _end_group(process)
    reader.join()
    outcome.seconds = time.monotonic() - started_s
    return outcome


def _read(lines: IO[str], outcome: Outcome) -> None:
    with lines:
        for line in lines:
            outcome.take(line)


def _end_group(process: ForkedProcess) -> None:
    """Servers and clients that the part left behind as well: they would hold the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
