"""Decisions beside chats, the whole of it, quick."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint
from lab.bench.decisions import WAYS


@pytest.mark.long("benches")
def test_decisions_are_measured_beside_chats(tmp_path: Path) -> None:
    model, figures = ensure_checkpoint(LLAMA_TINY, tmp_path), tmp_path / "figures.json"
    options = ["decisions", "--quick", "--model", str(model), "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, "-m", "lab.bench", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["decisions"]
    assert [row["questions"] for row in rows] == [1, 10]
    assert all(row["per_s"][way] > 0 for row in rows for way in WAYS)
    assert "decisions a second" in done.stdout
