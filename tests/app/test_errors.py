"""What an operator is told of a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.app.errors import TransientError, describe_failure, load_error, suggestion
from penstock.engine.errors import CheckpointError, InstructionSetError, MemoryHeld, NotEnoughMemory

MEMORY = "m: not enough memory for it and its KV cache; try --kv-memory or a smaller model"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CheckpointError("config.json is broken"), "config.json is broken"),
        (InstructionSetError("no AVX"), "no AVX"),
        (NotEnoughMemory("no room"), "no room"),
        (MemoryError(), MEMORY),
        (RuntimeError("can't allocate memory: 12 bytes"), MEMORY),
        (RuntimeError("CUDA out of memory.\nTried to"), MEMORY),
        (ValueError("a\n  trace"), "m cannot be loaded: ValueError: a trace"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_one_line(error: Exception, line: str) -> None:
    assert describe_failure(error, Path("m")) == line


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (MemoryHeld("no room now"), True),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), True),
        (NotEnoughMemory("no room"), False),
        (CheckpointError("/models/CUDA: config.json is broken"), False),
    ],
    ids=repr,
)
def test_what_another_process_holds_may_be_free_at_the_next_start(error: Exception, may_pass: bool) -> None:
    assert isinstance(load_error(error, Path("m")), TransientError) is may_pass


def test_the_nearest_name_is_suggested() -> None:
    assert suggestion("porrt", ["host", "pot", "port", "proto"]) == "; did you mean port?"
    assert suggestion("prot", ["switch"]) == ""
