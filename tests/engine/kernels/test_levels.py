"""Which level of instruction sets a machine gets, from what its processor and its operating system say."""

from __future__ import annotations

import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from penstock.engine.errors import InstructionSetError
from penstock.engine.kernels.cpu import build, levels
from penstock.engine.kernels.cpu.levels import LEVELS, Machine, features, this_machine
from penstock.engine.kernels.cpu.native import NativeLibrary, NativeLinear, NativeUnavailable, load_library
from tests.engine import ranges
from tests.engine.kernels.levels import TILES, level_of
from tests.engine.ranges import assert_within

OTHERS = [level for level in this_machine().levels if level not in this_machine().usable()]
"""The levels of this architecture that this machine cannot use."""
COMMON = "fpu sse sse2 ssse3 sse4_1 sse4_2 movbe popcnt avx f16c abm fma bmi1 bmi2 avx2"
ALDER_LAKE = f"{COMMON} avx_vnni"
ICE_LAKE = f"{COMMON} avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"
ZEN_4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ICE_LAKE} avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8"

X86 = """\
processor\t: 0
vendor_id\t: {vendor}
model name\t: a processor with avx512f in its name
flags\t\t: {}
vmx flags\t: vnmi amx_tile

processor\t: 1
vendor_id\t: {vendor}
flags\t\t: {}
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 50.00
Features\t: {}

"""
CORTEX_A72 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
GRAVITON_2 = f"{CORTEX_A72} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs"


def machine(architecture: str, cpuinfo: str, refusal: str = "") -> Machine:
    return Machine(architecture, features(cpuinfo), lambda: refusal)


def x86(flags: str, refusal: str = "", vendor: str = "GenuineIntel") -> Machine:
    return machine("x86_64", X86.format(flags, flags, vendor=vendor), refusal)


MACHINES = {
    "SSE alone": (x86("fpu sse sse2"), ["portable"]),
    "AVX2": (x86(COMMON), ["avx2", "portable"]),
    "AVX2 without FMA": (x86(COMMON.replace("fma", "")), ["portable"]),
    "AVX2 with VNNI": (x86(ALDER_LAKE), ["avxvnni", "avx2", "portable"]),
    "AVX-512 without VNNI": (x86(ICE_LAKE.replace("avx512_vnni", "")), ["avx2", "portable"]),
    "AVX-512": (x86(ICE_LAKE), ["avx512", "avx2", "portable"]),
    "AVX-512 with BF16": (x86(ZEN_4), ["avx512bf16", "avx512", "avx2", "portable"]),
    "AMX": (x86(SAPPHIRE_RAPIDS), ["amx", "avx512", "avx512bf16", "avx2", "portable"]),
    "AMX that a hypervisor hides": (
        x86(SAPPHIRE_RAPIDS.replace("amx_tile", "")),
        ["avx512", "avx512bf16", "avx2", "portable"],
    ),
    "AMX that Linux refuses": (
        x86(SAPPHIRE_RAPIDS, "Operation not permitted"),
        ["avx512", "avx512bf16", "avx2", "portable"],
    ),
    "BF16 and float16 of another vendor": (
        x86(f"{ZEN_4} avx512_fp16", vendor="AuthenticAMD"),
        ["avx512bf16", "avx512", "avx2", "portable"],
    ),
    "two unlike processors": (
        machine("x86_64", X86.format(SAPPHIRE_RAPIDS, COMMON, vendor="GenuineIntel")),
        ["avx2", "portable"],
    ),
    "x86-64 without /proc/cpuinfo": (machine("x86_64", ""), ["portable"]),
    "ARM": (machine("aarch64", ARM.format(CORTEX_A72)), ["neon", "portable"]),
    "ARM with dot products": (machine("aarch64", ARM.format(GRAVITON_2)), ["dotprod", "neon", "portable"]),
    "ARM without /proc/cpuinfo": (machine("aarch64", ""), ["neon", "portable"]),
    "another architecture": (machine("riscv64", ""), ["portable"]),
}


@pytest.mark.parametrize(("machine", "names"), MACHINES.values(), ids=MACHINES.keys())
def test_a_machine_can_use_the_levels_that_it_has_all_of(machine: Machine, names: list[str]) -> None:
    assert [level.name for level in machine.usable()] == names
    for level in machine.usable():
        assert machine.named(level.name) == level
        assert machine.obstacle(level) == ""


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("arm64", "aarch64"), ("aarch64", "aarch64")],
)
def test_an_architecture_has_one_name(name: str, architecture: str) -> None:
    assert levels.architecture(name) == architecture
    assert architecture in LEVELS


@pytest.mark.parametrize(
    ("flags", "refusal", "level", "reason"),
    [
        (COMMON, "", "avxvnni", "this processor lacks avx_vnni"),
        (ALDER_LAKE, "", "avx512", "lacks avx512f avx512bw avx512vl avx512dq avx512_vnni"),
        (ICE_LAKE, "", "avx512bf16", "this processor lacks avx512_bf16"),
        (ZEN_4, "", "amx", "lacks amx_tile amx_bf16 amx_int8"),
        (SAPPHIRE_RAPIDS.replace("amx_int8", ""), "", "amx", "this processor lacks amx_int8"),
        (SAPPHIRE_RAPIDS, "Operation not permitted", "amx", "Linux refuses .*Operation not permitted"),
    ],
)
def test_what_keeps_a_machine_from_a_level_is_said(flags: str, refusal: str, level: str, reason: str) -> None:
    machine = x86(flags, refusal)
    with pytest.raises(InstructionSetError, match=reason) as caught:
        machine.named(level)
    assert level in str(caught.value)
    better = machine.better()
    assert better is not None
    assert better[0].name == level
    assert better[1] in str(caught.value)


def test_nothing_is_better_than_the_best() -> None:
    assert x86(SAPPHIRE_RAPIDS).better() is None
    assert machine("aarch64", ARM.format(GRAVITON_2)).better() is None


@pytest.mark.parametrize("name", ["neon", "AVX2", "avx3", " "])
def test_a_level_that_does_not_exist_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(
        InstructionSetError, match=r"portable, avx2, avxvnni, avx512, avx512bf16, amx$"
    ) as caught:
        x86(SAPPHIRE_RAPIDS).named(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("machine", "base"),
    [
        (x86(SAPPHIRE_RAPIDS), "avx512"),
        (x86(ZEN_4), "avx512bf16"),
        (x86(COMMON), "avx2"),
        (x86(""), "portable"),
        (machine("aarch64", ARM.format(GRAVITON_2)), "dotprod"),
    ],
)
def test_emulated_tiles_come_on_top_of_the_best_level_without_tiles(machine: Machine, base: str) -> None:
    level = level_of(TILES, machine)
    assert level.flags[: len(machine.named(base).flags)] == machine.named(base).flags
    assert level.needs == machine.named(base).needs
    assert level.name not in [usable.name for usable in machine.usable()]


@pytest.mark.parametrize("names", LEVELS.values())
def test_a_level_needs_what_the_one_below_needs_and_more(names: tuple[levels.Level, ...]) -> None:
    for lower, higher in pairwise(
        level for level in names if level.name != "avxvnni"
    ):  # AVX-512 has its own VNNI
        assert set(lower.needs) <= set(higher.needs)
        assert lower.flags != higher.flags


# ---- the libraries ----


@pytest.mark.long("other instruction sets")
@pytest.mark.skipif(not OTHERS, reason="this machine has every level of its architecture")
def test_levels_of_other_machines_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that this machine has are compiled for other tests. What is not optimized compiles all the same."""
    try:
        build.find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", [flag.replace("-O3", "-O1") for flag in build.FLAGS])
    with ThreadPoolExecutor() as pool, build.side_by_side() as commands:
        made = pool.map(lambda level: build.build(level, print, commands=commands), OTHERS)
        assert [path.name.split("-")[3] for path in made] == [level.name for level in OTHERS]


def test_each_library_knows_its_level_and_computes(library: NativeLibrary, level: str) -> None:
    assert library.level == level
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(70, 129, generator=generator), torch.randn(9, 129, generator=generator)
    linear = NativeLinear(library.start_team(2), weight, None, torch.float32)
    assert_within(linear(x), ranges.linear(ranges.exactly(x), weight))


def test_the_variable_names_the_level(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.level == "tiles":
        pytest.skip("the double of AMX's tiles is no level that a variable may name")
    monkeypatch.setenv(levels.VARIABLE, library.level)
    assert load_library(print) is library


def test_without_it_the_best_level_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levels.VARIABLE, "")
    try:
        build.find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    # With a compiler there are kernels: this fails where other tests would only be skipped for want of them.
    assert load_library(print).level == this_machine().usable()[0].name


REFUSING = """
import ctypes, struct, sys

# A seccomp filter that answers EPERM to arch_prctl(ARCH_REQ_XCOMP_PERM, ...), and allows all else.
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
program = b"".join(struct.pack("HBBI", *line) for line in [
    (LOAD, 0, 0, 0), (EQUAL, 0, 3, 158), (LOAD, 0, 0, 16), (EQUAL, 0, 1, 0x1023),
    (RETURN, 0, 0, 0x00050001), (RETURN, 0, 0, 0x7fff0000),
])
code = ctypes.create_string_buffer(program)

class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(6, ctypes.addressof(code)))) == 0

from penstock.engine.kernels.cpu.library import load_library
print(load_library(print).level)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or this_machine().usable()[0].name != "amx",
    reason="needs a processor with AMX",
)
def test_where_linux_refuses_tiles_the_next_level_serves_and_says_why() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSING], capture_output=True, text=True, timeout=120, check=True
    )
    *said, level = done.stdout.splitlines()
    assert level == "avx512"
    (line,) = [line for line in said if "in place of amx" in line]
    assert "Operation not permitted" in line
