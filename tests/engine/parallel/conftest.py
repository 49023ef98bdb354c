"""The processes of a module's tests are started once for each grid that they ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.parallel.comparing import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool()
    yield processes
    processes.close()
