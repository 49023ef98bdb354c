"""What no server can exceed follows from what the machine can do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.app.bench.arithmetic import Arithmetic
from penstock.app.bench.ceilings import LABELS, Ceilings, Sizes, measure, most_tokens_per_s
from penstock.app.bench.workloads import Workload
from penstock.app.measures import INSTRUCTIONS

ARITHMETIC = Arithmetic(body=200, head=20, vocabulary=16, kv=3)
PEAKS = {"fma8": 100.0, "fma16": 200.0, "vnni": 0.0, "tile_bf16": 2000.0, "tile_int8": 4000.0}
FREE_READING = Ceilings(math.inf, PEAKS)
FREE_PRODUCTS = Ceilings(1e-9, dict.fromkeys(PEAKS, math.inf))
"""It reads one byte a second."""


def workload(**values: int) -> Workload:
    return Workload(**{"name": "", "streams": 1, "prompt_tokens": 10, "output_tokens": 5, **values})  # type: ignore[arg-type]


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


def test_of_two_measurements_the_higher_rate_counts() -> None:
    one, other = Ceilings(20.0, {"fma8": 90.0, "vnni": 7.0}), Ceilings(18.0, {"fma8": 100.0, "vnni": 0.0})
    assert one.or_better(other) == other.or_better(one) == Ceilings(20.0, {"fma8": 100.0, "vnni": 7.0})


def test_nothing_is_known_of_a_machine_that_was_not_measured() -> None:
    assert math.isnan(most_tokens_per_s(workload(), ARITHMETIC, Sizes(2, 2, 2), Ceilings(math.nan, {})))


def test_without_a_compiler_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert measure(1).peaks == {}


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
