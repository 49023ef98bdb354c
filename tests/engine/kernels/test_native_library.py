"""Building the kernels, the packed products, and the threads that run them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from penstock.engine.kernels.cpu import build
from penstock.engine.kernels.cpu.levels import this_machine
from penstock.engine.kernels.cpu.native import (
    NativeLibrary,
    NativeLinear,
    NativeUnavailable,
    Team,
    load_library,
)
from tests.engine import ranges
from tests.engine.ranges import assert_within, exactly

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BEST = this_machine().usable()[0]


# ---- building ----


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_no_compiler_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(scratch))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
        load_library(print)


def test_a_compiler_that_fails_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    compiler = _script(
        scratch / "failing", 'case "$*" in *--version*) echo 1;; *) echo "error: no" >&2; exit 1;; esac'
    )
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeUnavailable, match="error: no"):
        load_library(print)
    assert list((scratch / "penstock").iterdir()) == []


def test_a_compiler_that_is_none_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    monkeypatch.setenv("CXX", str(_script(scratch / "broken", "exit 3")))
    with pytest.raises(NativeUnavailable, match="broken did not run"):
        load_library(print)


def test_a_library_that_does_not_load_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "native.so").write_bytes(b"no library")
    with pytest.raises(NativeUnavailable, match="cannot load"):
        NativeLibrary(str(tmp_path / "native.so"), BEST)


def test_of_two_processes_one_builds_and_a_third_finds_it(
    monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    copy = _script(
        scratch
        / "fake",  # a compiler, and a linker, that takes a while and leaves what the last argument names
        'case "$*" in *--version*) echo 1;; *) sleep 0.1; for last; do :; done; echo > "$last"; echo >> runs;; esac',
    )
    environment = {**os.environ, "CXX": str(copy), "XDG_CACHE_HOME": str(scratch)}
    program = (
        "from penstock.engine.kernels.cpu import build, levels\n"
        "print(build.build(levels.this_machine().usable()[0], lambda line: None))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment, cwd=scratch, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = {process.communicate(timeout=300)[0].strip() for process in running}
    assert len(answers) == 1
    assert (scratch / "runs").read_text() == "\n" * (len(list(build.SOURCES.glob("*.cpp"))) + 1)
    assert [str(path) for path in (scratch / "penstock").iterdir()] == list(answers)
    monkeypatch.setenv("CXX", str(copy))
    said: list[str] = []
    assert str(build.build(BEST, said.append)) in answers
    assert said == []


def _script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


# ---- products ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 8), (33, 37), (100, 530), (257, 1100)])
def test_products_are_those_of_torch(team: Team, dtype: torch.dtype, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    weight, bias = torch.randn(n, k, generator=generator).to(dtype), torch.randn(n, generator=generator)
    linear = NativeLinear(team, weight, bias, dtype)
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 13, 97, 200):
        x = torch.randn(rows, k, generator=generator)
        read = x.to(linear.activation_dtype).float()
        assert_within(linear(x), ranges.linear(exactly(read), weight, bias))


@pytest.mark.parametrize("inner", [1, 16, 40, 100])
def test_gated_products(team: Team, inner: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    weight, bias = (
        torch.randn(2 * inner, 24, generator=generator),
        torch.randn(2 * inner, generator=generator),
    )
    linear = NativeLinear(team, weight, bias, torch.float32, gated=True)
    for rows in (1, 2, 9, 100):
        x = torch.randn(rows, 24, generator=generator)
        both = ranges.linear(exactly(x), weight, bias)
        assert_within(linear(x), ranges.silu_mul(both[:, :inner], both[:, inner:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_is_the_row_in_any_batch(team: Team, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = NativeLinear(team, torch.randn(150, 1030, generator=generator), None, dtype)
    x = torch.randn(210, 1030, generator=generator)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 3, 4, 5, 6, 7, 16, 95, 96, 97, 210):
        assert torch.equal(linear(x[:rows]), alone[:rows])
        assert torch.equal(linear(x[-rows:]), alone[-rows:])


def test_silu_far_out(team: Team) -> None:
    weight = torch.tensor([[1.0], [1.0]])
    x = torch.tensor([[-1e30], [-200.0], [-80.0], [0.0], [80.0], [200.0]])
    linear = NativeLinear(team, weight, torch.tensor([0.0, 0.0]), torch.float32, gated=True)
    assert_within(linear(x), ranges.silu_mul(exactly(x), exactly(x)))


def test_half_precision_is_rounded_as_torch_does(team: Team) -> None:
    weight = torch.tensor([[1e-8, 6e-8, 65504.0, 1.0009765, 1e-5]]).repeat(3, 1)
    for dtype in (torch.float16, torch.bfloat16):
        linear = NativeLinear(team, weight, None, dtype)
        assert torch.equal(linear(torch.eye(5)), weight.to(dtype).float().T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_is_what_it_is_to_torch(team: Team, dtype: torch.dtype) -> None:
    weight = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).float()[:, None]
    linear = NativeLinear(team, weight, None, dtype)
    product = weight
    if linear.activation_dtype == torch.bfloat16 and team.library.level != "tiles":
        # The instructions take denormal numbers for zeros; the double of AMX's does not.
        product = torch.where(weight.abs() < torch.finfo(torch.float32).tiny, 0, weight)
    for found, wanted in ((linear.dense(), weight), (linear(torch.ones(1, 1)).T, product)):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (16, 8), (34, 37), (96, 5), (100, 53)])
def test_the_weights_come_out_as_they_went_in(
    team: Team, dtype: torch.dtype, gated: bool, n: int, k: int
) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    linear = NativeLinear(team, weight, None, dtype, gated)
    assert torch.equal(linear.dense(), weight.to(dtype).float())
    assert (linear.in_features, linear.out_features) == (k, n // 2 if gated else n)
    assert linear.num_bytes >= n * k * dtype.itemsize
    padded = -(-n // 32) * 32 * (-(-k // 32) * 32)
    assert linear.num_bytes <= padded * dtype.itemsize


def test_shapes_that_do_not_fit_are_refused(team: Team) -> None:
    linear = NativeLinear(team, torch.zeros(4, 8), None, torch.float32)
    for x in (torch.zeros(1, 7), torch.zeros(8), torch.zeros(1, 8).double()):
        with pytest.raises(ValueError, match="expected"):
            linear(x)
    with pytest.raises(ValueError, match="bias"):
        NativeLinear(team, torch.zeros(4, 8), torch.zeros(3), torch.float32)
    with pytest.raises(ValueError, match="equally"):
        NativeLinear(team, torch.zeros(5, 8), None, torch.float32, gated=True)


# ---- threads ----


def test_calls_from_several_threads_take_turns(team: Team) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = NativeLinear(team, torch.randn(64, 64, generator=generator), None, torch.float32)
    x = torch.randn(20, 64, generator=generator)
    wanted = linear(x)
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(i for i in range(200) if not torch.equal(linear(x), wanted))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("level", [BEST.name], scope="module")
def test_the_interpreter_runs_on_during_a_call(team: Team) -> None:
    """Another thread has it again and again, although nobody has to hand it over."""
    num_ticks = before = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not stop.wait(0.001):
            num_ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    linear = NativeLinear(team, torch.zeros(1024, 1024), None, torch.float32)
    x = torch.zeros(2048, 1024)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    for _ in range(100):  # until there is one during which the other thread had a processor
        before = num_ticks
        linear(x)
        if num_ticks > before + 3:
            break
    found = num_ticks - before
    sys.setswitchinterval(interval_s)
    stop.set()
    thread.join()
    assert found > 3


@pytest.mark.parametrize("level", [BEST.name], scope="module")
def test_idle_threads_use_no_processor(library: NativeLibrary) -> None:
    team = library.start_team(4)
    linear = NativeLinear(team, torch.zeros(64, 64), None, torch.float32)
    linear(torch.zeros(8, 64))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    team.close()
    team.close()


def test_the_end_of_the_interpreter_and_a_fork_are_clean() -> None:
    program = """
import os, torch
from penstock.engine.kernels.cpu.native import NativeLinear, load_library
team = load_library(print).start_team(3)
linear = NativeLinear(team, torch.eye(64), None, torch.float32)
x = torch.randn(40, 64)
assert torch.equal(linear(x), x)
child = os.fork()
assert torch.equal(linear(x), x)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_ends_last_has_native_objects_until_then() -> None:
    """An engine is stopped when the program ends, by which time its thread may be at work."""
    program = """
import atexit
atexit.register(lambda: print(torch.equal(linear(x), x)))  # what is registered later is called before
import torch
from penstock.engine.kernels.cpu.native import NativeLinear, load_library
team = load_library(lambda _: None).start_team(3)
linear = NativeLinear(team, torch.eye(512), None, torch.float32)
x = torch.randn(40, 512)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_team_has_members(library: NativeLibrary) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Team(library, 0)
