"""`python -m lab.bench` as a user runs it, on a model small enough for it to take seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint


def measure(part: str, folder: Path) -> tuple[Any, str]:
    """The figures of one part, and what was printed of them."""
    model, figures = ensure_checkpoint(LLAMA_TINY, folder), folder / "figures.json"
    options = [part, "--quick", "--model", str(model), "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, "-m", "lab.bench", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(figures.read_text())[part], done.stdout
