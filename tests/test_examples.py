"""The examples of property tests: the same in every run, whatever was imported before, and new ones on demand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROPERTY = """
import os
from hypothesis import given, strategies as st

if "WORDS" in os.environ:
    import words

@given(st.lists(st.text() | st.integers() | st.floats()))
def test_any(values):
    print("example:", ascii(values))
"""
WORDS = "\n".join(f"a{i} = 'magic word {i}'; b{i} = {i}0987654321; c{i} = {i}.0987" for i in range(1, 50))


def examples(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """What a run tries, in a process of its own."""
    (folder / "words.py").write_text(WORDS)
    (folder / "test_property.py").write_text(PROPERTY)
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-s",
            f"--config-file={ROOT / 'pyproject.toml'}",
            "-p",
            "tests.conftest",
            *arguments,
            folder / "test_property.py",
        ],
        cwd=ROOT,
        env={**inherited, "HYPOTHESIS_STORAGE_DIRECTORY": str(folder.parent), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [line for line in done.stdout.splitlines() if "example:" in line]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return examples(tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize(
    "environment", [{"WORDS": "1"}, {"CI": "1"}, {"PYTHONHASHSEED": "7"}], ids=lambda named: next(iter(named))
)
def test_a_run_tries_what_every_run_tries(
    usual: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    assert len(usual) == 100
    assert examples(tmp_path, **environment) == usual


def test_an_exploration_tries_others(usual: list[str], tmp_path: Path) -> None:
    found = examples(tmp_path, "--hypothesis-profile", "explore")
    assert len(found) == 300
    assert len(set(found) - set(usual)) > 100
