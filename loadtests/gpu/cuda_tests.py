"""The tests on a GPU: pytest on a folder, how many passed, and what the others said; told while they run."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadtests.gpu.figures import emit, emit_skip
from loadtests.gpu.packages import ROOT
from loadtests.gpu.sizes import parse_arguments
from penstock.engine.cores import num_cores

_MOST_PROCESSES = 14
"""Most of the time goes into compiling kernels, on the host."""
_MOST_TOLD = 20
"""Failed tests; the others are counted."""


class Tally:
    """A plugin of pytest that tells the report what became of the tests, after each."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._report = os.fdopen(os.dup(1), "w", buffering=1)
        self._counts = {"passed": 0, "failed": 0}
        self._skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._skipped.append(_reason(report))
        elif report.failed or report.when == "call":
            self._counts[report.outcome] += 1
            self._tell()
            if report.failed and self._counts["failed"] <= _MOST_TOLD:
                with redirect_stdout(self._report):
                    emit_skip(report.nodeid, f"failed in {report.when}: {_reason(report)[-300:]}")

    def pytest_sessionfinish(self) -> None:
        self._tell()
        if self._skipped:
            with redirect_stdout(self._report):
                emit_skip(f"{len(self._skipped)} of {self._folder}", "; ".join(sorted(set(self._skipped))))

    def _tell(self) -> None:
        with redirect_stdout(self._report):
            for name, count in self._counts.items():
                emit(f"{self._folder}: {name}", count, "tests")


def _reason(report: pytest.TestReport) -> str:
    """The message of a skip; of a failure, what was raised, and where."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"


def _paths(folder: str, is_dry: bool) -> list[str]:
    """Without a GPU nearly all are left out, and one file shows that as well as all: one that imports little."""
    return [str(path) for path in sorted(Path(folder).glob("test_*.py"))[-1:]] if is_dry else [folder]


def main() -> int:
    """pytest's exit status."""
    arguments = parse_arguments()
    folder = arguments.names[0]
    if not arguments.is_dry:
        os.environ["TRITON_INTERPRET"] = "0"
    os.chdir(ROOT)
    # Warnings are errors for the versions that the tests were written for, not for those of this machine.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", *_paths(folder, arguments.is_dry)]
    options += ["--ignore=tests/engine/kernels/triton/test_compiling.py"]  # needs no GPU, and takes its time
    if find_spec("xdist") is not None and not arguments.is_dry:
        options += ["-n", str(min(_MOST_PROCESSES, num_cores())), "--dist", "worksteal"]
    tally = Tally(folder)
    with redirect_stdout(sys.stderr):
        return int(pytest.main(options, plugins=[tally]))


if __name__ == "__main__":
    sys.exit(main())
