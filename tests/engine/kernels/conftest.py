"""The native kernels at every level of instruction sets that this machine has."""

from __future__ import annotations

import pytest

from penstock.engine.kernels.cpu.native import NativeLibrary, NativeUnavailable, Team
from tests.engine.kernels.levels import LEVELS, MAIN_LEVELS, build_levels, library_of, params


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest) -> None:
    """The libraries of all levels that the session's tests ask for are in the cache."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    functions = [item for item in items if "built" in item.fixturenames]
    params = [function.callspec.params for function in functions if hasattr(function, "callspec")]
    try:
        asked = {str(param["level"]) for param in params if "level" in param}
        build_levels(sorted(asked.intersection(LEVELS)))  # tests of others are skipped
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=params(MAIN_LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Of a module, as levels are: one of the session would stay as it is where a module has levels of its own.
@pytest.fixture(scope="module")
def library(level: str, built: None) -> NativeLibrary:  # noqa: ARG001
    """The library of each level in turn."""
    return library_of(level)


@pytest.fixture(scope="module")
def team(library: NativeLibrary) -> Team:
    return library.start_team(2)
