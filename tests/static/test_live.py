"""The page and the real server, with the demo model."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect


@pytest.fixture
def page(browser: Browser, live_server: str) -> Iterator[Page]:
    """The page of the real server, in which no fault happens."""
    context = browser.new_context()
    page = context.new_page()
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(live_server)
    yield page
    context.close()
    assert faults == []


def test_a_conversation_with_the_demo_model(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator(".demo-note")).to_be_visible()
    page.get_by_role("button", name="Tell me a story about a brave knight").click()
    answer = page.locator(".answer").last
    expect(answer).to_have_attribute("data-state", "done", timeout=60_000)
    expect(answer.locator(".text")).not_to_be_empty()
    expect(answer.locator(".stats")).to_have_text(re.compile("tokens/s.*first after.*queued.*lane"))
    page.locator("#field").fill("What is 7 times 8?")
    page.locator("#field").press("Enter")
    expect(page.locator(".answer")).to_have_count(2)
    expect(page.locator(".answer").last).to_have_attribute("data-state", "done", timeout=60_000)


def test_the_window_under_a_small_load(page: Page, live_server: str) -> None:
    page.get_by_role("button", name="Engine").click()
    expect(page.get_by_role("region", name="standard lane")).to_be_visible()
    messages = [{"role": "user", "content": "Tell me a story about a brave knight"}]
    body = {"model": "penstock-demo", "messages": messages, "max_tokens": 40, "seed": 1}
    for _ in range(2):
        assert page.request.post(f"{live_server}/v1/chat/completions", data=body).ok
    expect(page.locator(".steps .note")).to_have_text(re.compile(r"The last \d+ steps took"))
    cached = page.locator(".blocks tbody tr", has_text="free, content cached").locator("td").first
    expect(cached).to_have_text(re.compile("[1-9]"))
