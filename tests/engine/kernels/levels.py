"""The levels that the native kernels are tested at: all that this machine has, and what can be emulated here."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from penstock.engine.kernels.cpu.build import build, fingerprint, side_by_side
from penstock.engine.kernels.cpu.commands import Commands
from penstock.engine.kernels.cpu.levels import AMX, AVX512BF16, Level, Machine, levels_of, this_machine
from penstock.engine.kernels.cpu.native import NativeLibrary, load_library
from tests.engine.kernels import emulated_arm

TILES = "tiles"
"""The level that computes what AMX tiles do without having any."""
_EMULATED = Path(__file__).with_name("emulated_tiles.h")

_ARM = "aarch64"
ARM_LEVELS = {level.name: level for level in levels_of(_ARM) if level.name != "portable"}
"""The levels of 64-bit ARM, which are emulated on other processors."""
_EMULATED_ARM = () if this_machine().architecture == _ARM or emulated_arm.missing() else tuple(ARM_LEVELS)

_OWN = (*(level.name for level in this_machine().usable()), TILES)
LEVELS = (*_OWN, *_EMULATED_ARM)
DOTPROD = "dotprod"
"""The level that has code of its own for the products of integers alone."""
ARM_VARIABLE = "PENSTOCK_TEST_ARM"
MAIN_LEVELS = LEVELS if os.environ.get(ARM_VARIABLE) else _OWN
"""Without those of ARM, which `test_same_bits.py` holds against these, unless the variable asks for them."""
_QUICK = (LEVELS[0], "portable")
FEW_LEVELS = tuple(dict.fromkeys((*_QUICK, *_EMULATED_ARM[:1])))
"""Those enough for kernels that have no code of their own for the levels between, or for NEON's products of bytes."""

SHAPE_LEVELS = tuple(name for name in MAIN_LEVELS if name != AVX512BF16 or name == LEVELS[0])
"""Without the level that has only its products of linear maps to itself, unless it is what serves here."""


def level_of(name: str, machine: Machine | None = None) -> Level:
    """The level of a name; emulated tiles come on top of the best level without tiles."""
    machine = machine or this_machine()
    if name in _EMULATED_ARM:
        return ARM_LEVELS[name]
    if name != TILES:
        return machine.named(name)
    base = next(level for level in machine.usable() if level.name != AMX)
    digest = sha256(_EMULATED.read_bytes()).hexdigest()[:16]  # a change of it is another library
    flags = (*base.flags, f'-DPENSTOCK_TILES_HEADER="{_EMULATED}"', f"-DPENSTOCK_TILES_DIGEST={digest}")
    return replace(base, name=TILES, flags=flags, text=f"{base.text}, with emulated tiles")


def params(levels: Iterable[str]) -> list[Any]:
    """Parameters of a fixture: `make test` tries the best level and the portable one, `make test-all` all."""
    left = pytest.mark.long("other instruction sets")
    return [pytest.param(level, marks=() if level in _QUICK else left) for level in levels]


def build_levels(names: Iterable[str]) -> None:
    """Builds what is not in the cache yet; of several test processes one does, and the others wait.

    Raises:
        NativeUnavailable: a level cannot be built.
    """
    # One lock for each user and each state of the sources: a checkout does not wait for another one.
    path = Path(gettempdir()) / f"penstock-{os.getuid()}-{fingerprint(this_machine().usable()[0])}.lock"
    with path.open("w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with side_by_side() as commands:
            list(pool.map(lambda name: _built(name, commands), names))


@functools.cache
def library_of(name: str) -> NativeLibrary:
    """The library of a level; that of an emulated processor computes in a process of its own."""
    if name in _EMULATED_ARM:
        return emulated_arm.EmulatedLibrary(str(_built(name)), level_of(name))
    return load_library(print, level_of(name))


def _built(name: str, commands: Commands | None = None) -> Path:
    if name in _EMULATED_ARM:
        return build(level_of(name), print, _ARM, [emulated_arm.COMPILER], commands)
    return build(level_of(name), print, commands=commands)
