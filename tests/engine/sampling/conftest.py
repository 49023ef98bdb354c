from __future__ import annotations

import pytest

from penstock.engine.kernels.cpu.native import NativeChoose, NativeUnavailable, load_library
from penstock.engine.sampling import reference
from penstock.engine.sampling.tables import Choose


@pytest.fixture(scope="session", params=["torch", "native"])
def choose(request: pytest.FixtureRequest) -> Choose:
    """Each implementation of the rule whose frequencies are to be checked."""
    if request.param == "torch":
        return reference.choose
    try:
        return NativeChoose(load_library(lambda _: None).start_team(2))
    except NativeUnavailable as error:
        pytest.skip(f"needs the native kernels: {error}")
