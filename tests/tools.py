"""Programs that tests start. Where one is not installed, its tests are skipped, and the last line counts them."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Any of these shows the page; the shell alone works half as hard as a whole browser."""
_NEEDED = re.compile(r"needs ([\w.+-]+)\W*$")


def located(*names: str, path: str | None = None) -> str | None:
    """The path of a program by the first of its names that there is."""
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def find(*names: str, path: str | None = None) -> str:
    """The path of a program by the first of its names that there is; without one, the test is skipped."""
    found = located(*names, path=path)
    if found is None:
        pytest.skip(f"needs {names[0]}")
    return found


def lacking(reasons: Iterable[str]) -> str:
    """What skipped tests lack, by the reasons that they give, with their number; "" if none lacks anything."""
    counts = Counter(match[1] for reason in reasons if (match := _NEEDED.search(reason)))
    return ", ".join(f"{number} for want of {name}" for name, number in counts.most_common())
