"""A native call that cannot get its memory raises MemoryError, and leaves a process that goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits the address space")

# What a case needs of torch and Python is there before the limit is set.
PROGRAM = """
import resource
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.engine.kernels.cpu.native import NativeChoose, NativeLinear, load_library
from penstock.engine.sampling.tables import Filters, SamplingTables

torch.set_num_threads(1)
MIB = 1 << 20


@contextmanager
def at_most(more):
    "The process gets no more than so many bytes beyond those it has."
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


library = load_library(print)
team = library.start_team(2)
linear = NativeLinear(team, torch.ones(16, 8), None, torch.float32)
weight = torch.ones(4096, 4096)
choose = NativeChoose(team)
logits = torch.zeros(3, 4 * MIB)
tables = SamplingTables(3, 4 * MIB, 1, 1, torch.device("cpu"))
seats, numbers = torch.arange(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)


def start_a_large_team():
    library.start_team(64)


def pack_a_large_layer():
    NativeLinear(team, weight, None, torch.float32)


def choose_from_a_large_vocabulary():
    choose(logits, tables, seats, numbers, Filters())


# What choosing needs is kept for the next time, and the others need memory of their own.
for case in (choose_from_a_large_vocabulary, start_a_large_team, pack_a_large_layer):
    try:
        with at_most(16 * MIB):
            case()
    except MemoryError as error:
        print("MemoryError:", error)
    assert linear(torch.ones(2, 8)).tolist() == [[8.0] * 16] * 2, "the team goes on"
    assert choose(logits, tables, seats, numbers, Filters())[0].min() >= 0
    library.start_team(3).close()
    print("went on after", case.__name__)
"""


@pytest.fixture(autouse=True)
def _built() -> None:
    try:
        load_library(print)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def test_memory_that_cannot_be_had_is_a_memory_error_and_no_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[::2] == ["MemoryError: the native kernels could not get their memory"] * 3
    assert lines[1::2] == [
        f"went on after {case}"
        for case in ("choose_from_a_large_vocabulary", "start_a_large_team", "pack_a_large_layer")
    ]
