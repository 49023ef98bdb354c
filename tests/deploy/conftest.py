"""The metrics that a real server has."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")


@pytest.fixture(scope="session")
def known_metrics(live_server: str) -> set[str]:
    """The names of all series, also of those that a server has only beside a Redis."""
    with urllib.request.urlopen(f"{live_server}/metrics") as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {family.name.removesuffix("_total") + suffix for family in families for suffix in SUFFIXES}
