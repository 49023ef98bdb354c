"""On the site a link that leads out of docs/ is a path to read; every other link stays a link."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from docs.outside import on_page_markdown


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[runner.py](../../engine/execution/runner.py)", "`engine/execution/runner.py`"),
        ("[Security](../../SECURITY.md#reports)", "Security (`SECURITY.md`)"),
        ("[lanes](lanes.md#ageing)", "[lanes](lanes.md#ageing)"),
        ("[settings](../reference/settings.md)", "[settings](../reference/settings.md)"),
        ("![a picture](../pictures/page.png)", "![a picture](../pictures/page.png)"),
    ],
)
def test_links(written: str, shown: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guide/deploy.md"))
    assert on_page_markdown(f"See {written}.", page=page) == f"See {shown}."
