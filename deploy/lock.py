"""Writes requirements.lock: `python deploy/lock.py`, in the virtual environment that the tests passed in.

The versions of what `pip install penstock[otel]` brings, found by following requirements from pyproject.toml. What
torch brings is left to torch: its builds for a CPU and for CUDA need different packages.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "requirements.lock"
EXTRAS = ("otel",)
_HEAD = """\
# The versions that Penstock was tested with, for `pip install --constraint`; deploy/lock.py writes this file.
# torch is pinned in pyproject.toml, for any of its builds; the packages that it brings are its own to choose.
"""


def wanted() -> list[Requirement]:
    """What pyproject.toml asks for, of the server and its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in EXTRAS)]
    return [Requirement(line) for each in lists for line in each]


def lock() -> str:
    lines = sorted(f"{name}=={distribution(name).version}" for name in _closure(wanted()))
    return _HEAD + "\n".join(lines) + "\n"


def _closure(requirements: Iterable[Requirement]) -> set[str]:
    """The names of these, and of all that they need here."""
    seen: set[tuple[str, str]] = set()
    left = list(requirements)
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if name != "torch" and (name, extra) not in seen:
                seen.add((name, extra))
                left += _needed_by(name, extra)
    return {name for name, _ in seen}


def _needed_by(name: str, extra: str) -> Iterator[Requirement]:
    for requirement in map(Requirement, distribution(name).requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


if __name__ == "__main__":
    PATH.write_text(lock(), encoding="utf-8")
