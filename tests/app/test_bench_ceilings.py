"""What no server can exceed follows from what the machine can do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.arithmetic import Arithmetic
from app.bench.ceilings import LABELS, Ceilings, Sizes, measure, most_tokens_per_s
from app.bench.measures import INSTRUCTIONS
from app.bench.workloads import Workload

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


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (("auto",), Sizes(2, 2, 2)),
        (("bfloat16", None, "auto"), Sizes(2, 2, 2)),
        (("float32",), Sizes(4, 4, 4)),
        (("float32", None, "bfloat16"), Sizes(4, 2, 4)),
        (("auto", "int8"), Sizes(1, 2, 1)),
        (("auto", "int4", "int8"), Sizes(0.5, 1, 1)),
    ],
)
def test_sizes_are_those_of_the_options(options: tuple[str, ...], sizes: Sizes) -> None:
    assert Sizes.of(*options) == sizes


def test_every_instruction_has_a_label() -> None:
    assert tuple(LABELS) == INSTRUCTIONS
