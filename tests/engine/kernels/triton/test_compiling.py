"""Every kernel that is served compiles for every architecture, into what it should be."""

from __future__ import annotations

import pytest

from tests.engine.kernels.triton.compiling import (
    LARGEST_DOT,
    SHARED_LIMIT,
    Case,
    Compiled,
    cases,
    compile_all,
    key,
)

CASES = list(cases())
TRIALS = [(case, architecture) for case in CASES for architecture in case.architectures]


@pytest.fixture(scope="module")
def results() -> dict[str, Compiled | str]:
    return compile_all()


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 0


@pytest.mark.parametrize(("case", "architecture"), TRIALS, ids=[key(*trial) for trial in TRIALS])
def test_kernel_fits_the_card(case: Case, architecture: int, results: dict[str, Compiled | str]) -> None:
    compiled = results[key(case, architecture)]
    assert isinstance(compiled, Compiled), compiled
    assert compiled.registers <= 255
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= SHARED_LIMIT[architecture]
    assert case.shared_bound is None or compiled.shared_bytes <= case.shared_bound
    assert bool(compiled.tensor_cores) == case.has_dot
    if case.has_large_dot:
        assert compiled.tensor_cores == [LARGEST_DOT[architecture]]
