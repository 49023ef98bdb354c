"""The tests on a GPU: pytest on a folder, and how many passed."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from loadtests.gpu.figures import emit, emit_skip
from loadtests.gpu.packages import ROOT
from loadtests.gpu.sizes import parse_arguments


def main() -> int:
    """pytest's exit status."""
    arguments = parse_arguments()
    results = arguments.scratch / "tests.xml"
    # Warnings are errors for the versions that the tests were written for, not for those of this machine.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={results}"]
    folder = arguments.names[0]
    options += ["--ignore=tests/engine/triton/test_compiling.py"]  # needs no GPU, and takes its time
    status = subprocess.run(
        [sys.executable, "-m", "pytest", *options, folder], cwd=ROOT, stdout=sys.stderr, check=False
    ).returncode
    if results.exists():
        _tell(folder, results)
    return status


def _tell(folder: str, results: Path) -> None:
    suite = next(ElementTree.parse(results).iter("testsuite"))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    emit(f"{folder}: passed", count["tests"] - failed - count["skipped"], "tests")
    emit(f"{folder}: failed", failed, "tests")
    if count["skipped"]:
        reasons = {skip.get("message") or "" for skip in suite.iter("skipped")}
        emit_skip(f"{count['skipped']} of {folder}", "; ".join(sorted(reasons)))


if __name__ == "__main__":
    sys.exit(main())
