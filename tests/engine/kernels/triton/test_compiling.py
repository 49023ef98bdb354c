"""Every kernel that is served compiles for every architecture, into what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def trials() -> Iterator[Any]:
    """Every case on every card; `make test` compiles the first case of each kernel, for its first card."""
    kernels = set()
    for case in cases():
        for architecture in case.architectures:
            marks = [pytest.mark.long("compilation for every card")] if case.kernel in kernels else []
            yield pytest.param(case, architecture, id=key(case, architecture), marks=marks)
            kernels.add(case.kernel)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Compiled | str]:
    """Compiles the cases that the tests of this run ask for."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return compile_all(
        [item.callspec.id for item in items if item.originalname == "test_kernel_fits_the_card"]
    )


def test_names_are_unique() -> None:
    assert len({case.name for case in cases()}) == len(cases()) > 0


@pytest.mark.parametrize(("case", "architecture"), list(trials()))
def test_kernel_fits_the_card(case: Case, architecture: int, results: dict[str, Compiled | str]) -> None:
    compiled = results[key(case, architecture)]
    assert isinstance(compiled, Compiled), compiled
    assert compiled.registers <= 255
    assert compiled.spilled_bytes <= case.most_spilled
    assert compiled.shared_bytes <= SHARED_LIMIT[architecture]
    assert case.shared_bound is None or compiled.shared_bytes <= case.shared_bound
    assert bool(compiled.tensor_cores) == case.has_dot
    if case.has_large_dot:
        assert compiled.tensor_cores == [LARGEST_DOT[architecture]]
