"""The instruction set levels that the native kernels are compiled for, and which of them a machine can use.

A level is chosen by the machine that the kernels run on, not by the one that compiles them. So a library depends on
its level, its sources and its compiler alone, and one that was compiled elsewhere serves here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.errors import InstructionSetError

VARIABLE = "PENSTOCK_CPU_ISA"
"""Names the level to use in place of the best one."""

AVX512BF16 = "avx512bf16"
AMX = "amx"

_CPUINFO = Path("/proc/cpuinfo")
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True, slots=True)
class Level:
    """The instruction sets that the compiler may use, and the processor flags that they need."""

    name: str
    flags: tuple[str, ...]
    """Of the compiler."""
    needs: tuple[str, ...]
    """Flags of /proc/cpuinfo."""
    text: str
    """A description in one line."""
    slow_on: tuple[str, ...] = ()
    """The flags of processors that are quicker at the level below."""


_AVX2_FLAGS = ("-march=x86-64", "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX2_NEEDS = ("avx2", "fma", "f16c", "bmi1", "bmi2")
_AVXVNNI_FLAGS = (*_AVX2_FLAGS, "-mavxvnni")
_AVXVNNI_NEEDS = (*_AVX2_NEEDS, "avx_vnni")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_AVX512_NEEDS = (*_AVX2_NEEDS, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")
_AVX512BF16_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16")
_AVX512BF16_NEEDS = (*_AVX512_NEEDS, "avx512_bf16")
_AMX_FLAGS = (*_AVX512BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_AMX_NEEDS = (*_AVX512BF16_NEEDS, "amx_tile", "amx_bf16", "amx_int8")
# Of ARMv8.2, without its optional parts.
_DOTPROD_NEEDS = ("atomics", "asimdrdm", "asimddp")

LEVELS = {
    "x86_64": (
        # GCC warns that vectors of 32 bytes are passed differently with AVX; no function of ours is called from outside
        # with one.
        Level(
            "portable", ("-march=x86-64", "-Wno-psabi"), (), "any x86-64 processor, without its vector units"
        ),
        Level("avx2", _AVX2_FLAGS, _AVX2_NEEDS, "AVX2 with FMA"),
        Level("avxvnni", _AVXVNNI_FLAGS, _AVXVNNI_NEEDS, "AVX2 with FMA and VNNI"),
        Level("avx512", _AVX512_FLAGS, _AVX512_NEEDS, "AVX-512 with VNNI"),
        # Where AMX is meant to multiply bfloat16 (Sapphire Rapids and later), vectors do half as many in a cycle as of
        # float32; on Cooper Lake, and on AMD's processors since Zen 4, they do twice as many.
        Level(
            AVX512BF16,
            _AVX512BF16_FLAGS,
            _AVX512BF16_NEEDS,
            "AVX-512 with VNNI and BF16",
            slow_on=("GenuineIntel", "avx512_fp16"),
        ),
        Level(AMX, _AMX_FLAGS, _AMX_NEEDS, "AVX-512 and the tiles of AMX"),
    ),
    "aarch64": (
        Level("portable", ("-DPENSTOCK_NO_NEON",), (), "any 64-bit ARM processor, without its vector units"),
        Level("neon", (), (), "NEON, which every 64-bit ARM processor has"),
        Level("dotprod", ("-march=armv8.2-a+dotprod",), _DOTPROD_NEEDS, "NEON with dot products of bytes"),
    ),
}
"""The levels of each architecture, the slowest first."""
_PORTABLE = (Level("portable", (), (), "any processor"),)


@dataclass(frozen=True)
class Machine:
    """A processor, and the features that its operating system permits this process."""

    architecture: str
    features: frozenset[str]
    """The flags and the vendor of /proc/cpuinfo; empty where there is no such file."""
    request_tiles: Callable[[], str]
    """Asks for permission to use tiles; returns why it is refused, or ""."""

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of the architecture, the slowest first, whether this machine can use them or not."""
        return levels_of(self.architecture)

    def has(self, level: Level) -> bool:
        """Returns whether the processor has the instructions of a level, permitted or not."""
        return self.features.issuperset(level.needs)

    def obstacle(self, level: Level) -> str:
        """Says why this machine cannot use a level; "" if it can."""
        if not self.has(level):
            return (
                f"this processor lacks {' '.join(flag for flag in level.needs if flag not in self.features)}"
            )
        if "amx_tile" in level.needs and (reason := self.request_tiles()):
            return f"Linux refuses this process the tiles of AMX ({reason})"
        return ""

    def is_slow(self, level: Level) -> bool:
        """Returns whether the level below is quicker on this processor."""
        return bool(level.slow_on) and self.features.issuperset(level.slow_on)

    def usable(self) -> tuple[Level, ...]:
        """The levels that this machine can use, the best first."""
        usable = [level for level in self.levels if not self.obstacle(level)]
        return tuple(sorted(usable, key=self._rank, reverse=True))

    def better(self) -> tuple[Level, str] | None:
        """Returns the next level above the best usable one that cannot be used, and the reason; None if none is."""
        above = self.levels[self.levels.index(self.usable()[0]) + 1 :]
        return next(((level, reason) for level in above if (reason := self.obstacle(level))), None)

    def named(self, name: str) -> Level:
        """The level of a name.

        Raises:
            InstructionSetError: there is no such level, or this machine cannot use it.
        """
        level = next((level for level in self.levels if level.name == name), None)
        if level is None:
            names = ", ".join(level.name for level in self.levels)
            raise InstructionSetError(
                f"{VARIABLE}: {self.architecture} has no level {name!r}; it has {names}"
            )
        if obstacle := self.obstacle(level):
            raise InstructionSetError(f"{VARIABLE}: level {name} cannot be used, {obstacle}")
        return level

    def _rank(self, level: Level) -> float:
        """A slow level comes right after the one below it."""
        return self.levels.index(level) - (1.5 if self.is_slow(level) else 0)


def levels_of(architecture: str) -> tuple[Level, ...]:
    """The levels of an architecture, the slowest first; one that is not known has a portable one alone."""
    return LEVELS.get(architecture, _PORTABLE)


def this_machine() -> Machine:
    try:
        cpuinfo = _CPUINFO.read_text(encoding="utf-8")
    except OSError:  # not on macOS
        cpuinfo = ""
    return Machine(architecture(platform.machine()), features(cpuinfo), request_tiles)


def architecture(machine: str) -> str:
    """Returns the usual name of an architecture, given `platform.machine`'s."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine.lower(), machine)


def features(cpuinfo: str) -> frozenset[str]:
    """The flags that all processors of a /proc/cpuinfo have, and their vendor."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    flags = [set(text.split()) for key, _, text in lines if key.strip() in ("flags", "Features")]
    vendors = {text.strip() for key, _, text in lines if key.strip() == "vendor_id"}
    return frozenset(set.intersection(*flags) | vendors) if flags else frozenset()


def requested() -> str:
    """The level that PENSTOCK_CPU_ISA names; "" if it is not set."""
    return os.environ.get(VARIABLE, "")


def multiplies_bfloat16() -> bool:
    """Returns whether the level in use multiplies bfloat16 by instructions of its own, quicker than other types."""
    machine = this_machine()
    slow = {level.name for level in machine.levels if machine.is_slow(level)}
    return (requested() or machine.usable()[0].name) in {AVX512BF16, AMX} - slow


@functools.cache
def request_tiles() -> str:
    """Asks Linux to let this process use AMX tiles; returns why it refuses, or "".

    A process that uses a tile without this permission is killed. It covers all threads, also later ones and the threads
    of a forked process. (Source: Documentation/arch/x86/xstate.rst of Linux.)
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "there are none"
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    if libc.syscall(*map(ctypes.c_long, arguments)) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
