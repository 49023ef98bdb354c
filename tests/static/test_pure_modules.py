"""The page's pure modules, in node: what they do needs no browser."""

import shutil
import subprocess
from pathlib import Path

import pytest

MODULES = Path(__file__).with_name("modules")
MOST_S = 300


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("file", sorted(MODULES.glob("*.test.js")), ids=lambda file: file.name)
def test_modules(file: Path) -> None:
    run = subprocess.run(
        ["node", "--test", str(file)], capture_output=True, text=True, check=False, timeout=MOST_S
    )
    assert run.returncode == 0, run.stdout + run.stderr
