"""Where the Triton tests run: by the interpreter on the CPU, or compiled where there is a GPU.

Triton decides when it is imported whether it interprets, so it is told here, before any test of this folder is read.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests.engine import skip_reasons

_ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"

if not _ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise RuntimeError(
            "triton was imported before TRITON_INTERPRET=1 was set: these tests would prove nothing"
        )
    os.environ["TRITON_INTERPRET"] = "1"


class _Skipped(pytest.Module):
    """A test module that cannot be imported here."""

    def collect(self) -> NoReturn:
        pytest.skip(skip_reasons.TRITON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Where there is no Triton, the modules of this folder are told apart from those that fail."""
    return None if find_spec("triton") else _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors for kernels belong."""
    return torch.device("cuda" if _ON_GPU else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _kernels_run_where_they_should() -> None:
    from triton.language import standard

    interpreted = type(standard.cdiv).__name__ == "InterpretedFunction"
    assert interpreted != _ON_GPU, "triton was imported too early, or with another TRITON_INTERPRET"
    if interpreted:
        from tests.engine.kernels.triton.interpreter import quicken

        quicken()
