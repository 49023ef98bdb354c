"""The emulated processor that NEON's kernels are tested on: its memory is this process's, and a crash of it is said."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import torch

from penstock.engine.kernels.cpu.levels import this_machine
from penstock.engine.kernels.cpu.native import NativeLinear, Team
from tests.engine.kernels.emulated_arm import EmulatedLibrary, missing
from tests.engine.kernels.levels import build_levels, level_of, library_of

pytestmark = [
    pytest.mark.long("other instruction sets"),
    pytest.mark.skipif(this_machine().architecture == "aarch64", reason="this processor has NEON"),
    pytest.mark.skipif(bool(missing()), reason=f"NEON is not tested: there is no {missing()}"),
]


@pytest.fixture
def level() -> str:
    return "neon"


@pytest.fixture
def emulated(built: None) -> Iterator[EmulatedLibrary]:  # noqa: ARG001
    """With a process of its own, which may come to harm."""
    library = EmulatedLibrary(library_of("neon").path, level_of("neon"))
    yield library
    library.close()


def apply(team: Team, linear: NativeLinear, x: int, out: int) -> int:
    """Multiplies one row at an address and writes the outputs to another; returns the status."""
    arguments = (team.handle, linear.handle, x, linear.in_features, 1, out)
    return int(team.library.call("penstock_linear_apply", *arguments))


@pytest.mark.parametrize("at", [0, 1, 2047, 5000, 1 << 16])
def test_only_what_is_written_comes_back(emulated: EmulatedLibrary, at: int) -> None:
    """Of the pages that outputs lie on, too, and of those that the caller changes between two calls."""
    team = emulated.start_team(3)
    linear = NativeLinear(team, torch.eye(3000), None, torch.float32)
    everything = torch.arange(200_000, dtype=torch.float32)
    for _ in range(2):
        expected = everything.clone()
        x = expected[100_000:103_000]
        expected[at : at + 3000] = x
        assert apply(team, linear, x.data_ptr(), everything[at:].data_ptr()) == 0
        assert torch.equal(everything, expected)
        everything *= -1


def test_an_address_of_nothing_ends_the_emulator_and_is_said(emulated: EmulatedLibrary) -> None:
    team = emulated.start_team(2)
    linear = NativeLinear(team, torch.ones(16, 8), None, torch.float32)
    with pytest.raises(RuntimeError, match="ended in penstock_linear_apply with status -11"):
        apply(team, linear, 64, torch.empty(16).data_ptr())


@pytest.mark.parametrize(("name", "instruction"), [("neon", "sadalp"), ("dotprod", "sdot")])
def test_products_of_bytes_are_those_of_the_level(name: str, instruction: str) -> None:
    """Without them the bits are the same, and take many times as long."""
    build_levels([name])
    listing = subprocess.run(
        ["aarch64-linux-gnu-objdump", "--disassemble", library_of(name).path],
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"\t{instruction}\t" in listing.stdout
