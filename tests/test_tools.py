"""Tests of what is not installed are skipped, and counted on the last line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import tools


def test_a_program_is_found_by_the_first_of_its_names() -> None:
    name, folder = Path(sys.executable).name, str(Path(sys.executable).parent)
    assert tools.find("surely-not-installed", name, path=folder) == sys.executable


def test_a_program_that_is_not_there_skips_its_test() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"^needs surely-not-installed$"):
        tools.find("surely-not-installed", "nor-this")


def test_what_skipped_tests_lack_is_counted() -> None:
    reasons = [
        "('a.py', 3, 'Skipped: needs chromium')",
        "needs redis-server",
        "needs chromium",
        "needs a card of NVIDIA's",
    ]
    assert tools.lacking(reasons) == "2 for want of chromium, 1 for want of redis-server"
    assert tools.lacking(["Skipped: one model is enough"]) == ""
