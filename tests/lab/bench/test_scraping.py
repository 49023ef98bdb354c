"""A picker that scrapes a busy server, the whole of it, quick."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.bench.command import measure


@pytest.mark.long("benches")
def test_scraping_is_measured_beside_the_same_streams_without(tmp_path: Path) -> None:
    [row], printed = measure("scraping", tmp_path)
    assert row["without"] > 0
    assert row["scraped"] > 0
    assert row["cpu_ms"] >= 0
    assert "20 scrapes/s" in printed
