"""Decisions beside chats, the whole of it, quick."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.decisions import WAYS
from tests.lab.bench.command import measure


@pytest.mark.long("benches")
def test_decisions_are_measured_beside_chats(tmp_path: Path) -> None:
    rows, printed = measure("decisions", tmp_path)
    assert [row["questions"] for row in rows] == [1, 10]
    assert all(row["per_s"][way] > 0 for row in rows for way in WAYS)
    assert "decisions a second" in printed
