"""Axe-core finds nothing serious in the page's main states."""

from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.static.conftest import PHONE, OpenPage
from tests.static.scripted import Refusal, ScriptedServer, stream
from tests.static.test_page import expect_state, say

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
RICH = r"""# Title

Text, *more*, `code`, [link](https://x.org), $x^2$.

> quote

1. item

```py
def f(x: int = 1):  # a comment
    return "text"
```

$$ x^2 $$

|a|
|-|
|b|
"""


def faults(page: Page) -> list[str]:
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['html']} {node['failureSummary']}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_talk_and_the_settings(open_page: OpenPage, server: ScriptedServer, scheme: Any) -> None:
    page = open_page(color_scheme=scheme)
    server.script(
        stream("<think>so</think>" + RICH), stream(RICH), Refusal(503, "Full.", headers={"retry-after": "60"})
    )
    say(page, "one")
    expect_state(page, "done")
    page.get_by_role("button", name="Answer again").click()
    expect_state(page, "done")
    say(page, "two")
    expect_state(page, "failed")
    expect(page.locator(".math math")).to_have_count(2)
    page.get_by_label("Search conversations").fill("title")
    assert faults(page) == []
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("More", exact=True).click()
    assert faults(page) == []


def test_the_list_on_a_phone(open_page: OpenPage, server: ScriptedServer) -> None:
    page = open_page(**PHONE)
    assert faults(page) == []
    server.script(stream("Yes."))
    page.get_by_role("button", name="What is 7 times 8?").tap()
    expect_state(page, "done")
    page.locator("#menu").tap()
    expect(page.locator("#sidebar")).to_be_visible()
    assert faults(page) == []
