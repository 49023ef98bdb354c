"""What no server can exceed follows from what the machine can do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.app import measures
from penstock.app.bench.arithmetic import Arithmetic
from penstock.app.bench.ceilings import LABELS, Ceilings, Sizes, measure, most_tokens_per_s
from penstock.app.bench.workloads import Workload
from penstock.app.measures import INSTRUCTIONS, measure_linear, measure_memory, measure_peak, measure_reading
from penstock.engine.kernels.cpu import native
from penstock.engine.quant.integers import Integers

ARITHMETIC = Arithmetic(body=200, head=20, vocabulary=16, kv=3)
PEAKS = {"fma8": 100.0, "fma16": 200.0, "vnni": 0.0, "tile_bf16": 2000.0, "tile_int8": 4000.0}
FREE_READING = Ceilings(math.inf, PEAKS)
FREE_PRODUCTS = Ceilings(1e-9, dict.fromkeys(PEAKS, math.inf))
"""It reads one byte a second."""


def workload(**values: int) -> Workload:
    return Workload(**{"name": "", "streams": 1, "prompt_tokens": 10, "output_tokens": 5, **values})  # type: ignore[arg-type]


def test_wide_weights_are_multiplied_by_what_loses_nothing_of_them() -> None:
    rates = [FREE_READING.products_per_s(size) for size in (4, 2, 1)]
    assert rates == [200e9, 2000e9, 4000e9]


def test_a_floor_is_the_slower_of_reading_and_multiplying() -> None:
    ceilings = Ceilings(20.0, PEAKS)
    assert ceilings.floor_s(400e9, 20e9, 4) == pytest.approx(2.0)
    assert ceilings.floor_s(400e9, 60e9, 4) == pytest.approx(3.0)


def test_with_free_products_a_step_takes_as_long_as_its_reading() -> None:
    # 110 weights of 2 bytes, and the keys and values of 12.5 tokens on the way; the first token needs no step.
    most = most_tokens_per_s(workload(), ARITHMETIC, Sizes(2, 2, 2), FREE_PRODUCTS)
    assert most == pytest.approx(5 / (4 * (220 + 12.5 * 3 * 2)))


def test_with_free_reading_every_token_costs_its_arithmetic() -> None:
    # 10 prompt tokens and 4 more through the layers, 5 through the head.
    most = most_tokens_per_s(workload(), ARITHMETIC, Sizes(4, 4, 4), FREE_READING)
    assert most == pytest.approx(5 / ((14 * 200 + 5 * 20) / 200e9))


def test_a_shared_prefix_is_computed_once() -> None:
    shared = most_tokens_per_s(
        workload(streams=4, shared_tokens=100), ARITHMETIC, Sizes(4, 4, 4), FREE_READING
    )
    assert shared == pytest.approx(20 / (((100 + 4 * 14) * 200 + 20 * 20) / 200e9))


@given(st.integers(1, 64), st.integers(1, 9), st.floats(1, 100), st.floats(1, 4000))
def test_a_better_machine_can_never_do_less(streams: int, rounds: int, memory: float, peak: float) -> None:
    ceilings = Ceilings(memory, {"fma8": peak})
    some = workload(streams=streams, rounds=rounds)
    most = most_tokens_per_s(some, ARITHMETIC, Sizes(4, 4, 4), ceilings)
    assert most > 0
    assert most <= most_tokens_per_s(
        some, ARITHMETIC, Sizes(4, 4, 4), replace(ceilings, memory_gb_per_s=memory * 2)
    ) * (1 + 1e-9)
    assert most <= most_tokens_per_s(
        some, ARITHMETIC, Sizes(4, 4, 4), Ceilings(memory, {"fma8": peak * 2})
    ) * (1 + 1e-9)
    assert most <= most_tokens_per_s(some, ARITHMETIC, Sizes(2, 2, 2), ceilings) * (1 + 1e-9)


def test_of_two_measurements_the_higher_rate_counts() -> None:
    one, other = Ceilings(20.0, {"fma8": 90.0, "vnni": 7.0}), Ceilings(18.0, {"fma8": 100.0, "vnni": 0.0})
    assert one.or_better(other) == other.or_better(one) == Ceilings(20.0, {"fma8": 100.0, "vnni": 7.0})


def test_nothing_is_known_of_a_machine_that_was_not_measured() -> None:
    assert math.isnan(most_tokens_per_s(workload(), ARITHMETIC, Sizes(2, 2, 2), Ceilings(math.nan, {})))


def test_without_a_compiler_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert measure(1).peaks == {}


def test_with_free_products_small_weights_leave_the_cache_to_be_read() -> None:
    most = most_tokens_per_s(workload(), ARITHMETIC, Sizes(0.5, 2, 1), FREE_PRODUCTS)
    assert most == pytest.approx(5 / (4 * (110 * 0.5 + 12.5 * 3 * 2)))


def test_every_round_reads_the_weights_and_what_all_streams_keep() -> None:
    some = workload(streams=3, rounds=2, shared_tokens=20)
    most = most_tokens_per_s(some, ARITHMETIC, Sizes(1, 2, 2), FREE_PRODUCTS)
    assert most == pytest.approx(30 / (2 * 4 * (110 * 1 + 3 * 32.5 * 3 * 2)))


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (("auto",), Sizes(2, 2, 2)),
        (("bfloat16", None, "auto"), Sizes(2, 2, 2)),
        (("float32",), Sizes(4, 4, 4)),
        (("float32", None, "bfloat16"), Sizes(4, 2, 4)),
        (("auto", "int8"), Sizes(1, 2, 1)),
        (("auto", "int4", "int8"), Sizes(0.5, 1, 1)),
        (("float32", "nf4", "fp8"), Sizes(0.5, 1, 2)),
        (("auto", "fp8", "float16"), Sizes(1, 2, 2)),
        (("auto", None, "float32"), Sizes(2, 4, 2)),
        (("auto", None, None, 0.6), Sizes(0.6, 2, 1)),
        (("auto", "int8", None, 0.6), Sizes(1, 2, 1)),
        (("float32", None, None, 1.95), Sizes(4, 4, 4)),
    ],
)
def test_sizes_are_those_of_the_options(options: Any, sizes: Sizes) -> None:
    assert Sizes.of(*options) == sizes


def test_every_instruction_has_a_label() -> None:
    assert tuple(LABELS) == INSTRUCTIONS


# The loops


class Loops:
    """In place of the native library: notes each call, and says how many seconds it took."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._seconds = iter(seconds)

    def call(self, *arguments: object) -> float:
        self.calls.append(arguments)
        return next(self._seconds)


def team(loops: Loops) -> Any:
    return SimpleNamespace(library=loops, handle=7)


def test_a_peak_is_that_of_the_instruction() -> None:
    loops = Loops([120.0])
    assert measure_peak(team(loops), "vnni") == 120.0
    assert loops.calls == [("penstock_measure_peak", 7, 3)]


def test_memory_is_as_fast_as_its_fastest_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", torch.empty)  # memory that nobody touches
    loops = Loops([0.5] * 319 + [0.25])
    assert measure_memory(team(loops)) == pytest.approx(2**24 / 0.25 / 1e9)
    assert {(name, *sizes) for name, _, _, *sizes in loops.calls} == {
        ("penstock_measure_reading", 65536, 64, 1),
    }
    rows = torch.zeros(3, 5)
    loops = Loops([0.5])
    assert measure_reading(team(loops), rows) == 0.5
    assert loops.calls == [("penstock_measure_reading", 7, rows.data_ptr(), 5, 3, 50)]


@pytest.mark.parametrize(
    ("kept", "num_bytes", "copies"), [(torch.bfloat16, 20e6, 3), (Integers(8, 32), 1e8, 1)]
)
def test_a_product_walks_over_more_weights_than_caches_hold(
    monkeypatch: pytest.MonkeyPatch, kept: Any, num_bytes: float, copies: int
) -> None:
    packed: list[tuple[object, ...]] = []

    class Packed:
        def __init__(self, _team: object, _weight: object, *rest: object) -> None:
            packed.append(rest)
            self.num_bytes, self.handle = num_bytes, len(packed)

        of = classmethod(lambda cls, *arguments: cls(*arguments))

    monkeypatch.setattr(measures, "PackedLinear", Packed)
    loops = Loops([0.5])
    assert measure_linear(team(loops), 64, 32, 4, kept) == 2 * 4 * 64 * 32 / 0.5 / 1e9
    ((name, handle, handles, *rest),) = loops.calls
    assert (name, handle, *rest) == ("penstock_measure_products", 7, copies, 4, 10)
    assert list(handles) == list(range(1, copies + 1))  # type: ignore[call-overload]
    assert packed == [(None, kept) if kept is torch.bfloat16 else (kept, None)] * copies


def test_a_machine_is_measured_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(start_team=lambda threads: threads)
    monkeypatch.setattr(native, "load_library", lambda _: library)
    monkeypatch.setattr(measures, "measure_memory", lambda threads: 10.0 * threads)
    monkeypatch.setattr(measures, "measure_peak", lambda threads, name: float(threads * len(name)))
    assert measure(3) == Ceilings(30.0, {name: 3.0 * len(name) for name in INSTRUCTIONS})
