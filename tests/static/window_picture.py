"""Pictures of the window into the engine, under load: `python -m tests.static.window_picture [FOLDER] [--all]`.

Starts a server and a steady load, looks for a minute, and takes window.png, by default into docs/pictures/; with
`--all` also the same in dark, on a phone and as tables, and an answer's timeline.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from penstock.app.bench.server_process import ServerProcess
from tests.static.conftest import FLAGS, PHONE
from tests.tools import BROWSERS, located

DOCS = Path(__file__).parents[2] / "docs" / "pictures"
DESKTOP: dict[str, Any] = {"viewport": {"width": 1200, "height": 1110}}
SERVE = ("--num-blocks", "641", "--max-batch-tokens", "256")
"""So few blocks that the load fills a good part of the map."""
CLIENTS = 28
HEROES = ("knight", "fox", "baker", "robot", "sailor", "wizard")
TELLERS = ("You are a friendly storyteller. ", "You are a patient teacher. ", "You are a merry sailor. ")
"""System prompts, many times over, that most requests have in common: their blocks are shared."""


async def _client(http: httpx.AsyncClient, pace: random.Random) -> None:
    """Asks again and again, now and then without a pause for thought."""
    while True:
        question = f"Tell me a story about a brave {pace.choice(HEROES)} and {pace.randrange(100)} friends"
        system = [{"role": "system", "content": pace.choice(TELLERS) * 20}] if pace.random() < 0.8 else []
        body = {
            "model": "penstock-demo",
            "messages": [*system, {"role": "user", "content": question}],
            "service_tier": pace.choice(["priority", "default", "default", "flex"]),
            "max_tokens": pace.randrange(40, 260),
        }
        await http.post("/v1/chat/completions", json=body)
        await asyncio.sleep(pace.random() * pace.choice([0.2, 2.0]))


async def _load(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await asyncio.gather(*(_client(http, random.Random(number)) for number in range(CLIENTS)))


def _run_load(url: str) -> None:
    asyncio.run(_load(url))


@contextmanager
def loaded() -> Iterator[str]:
    """The address of a server with a mixed load."""
    with ServerProcess(SERVE) as server:
        load = get_context("spawn").Process(target=_run_load, args=(server.url,), daemon=True)
        load.start()
        try:
            yield server.url
        finally:
            load.kill()
            load.join()


def opened(browser: Browser, url: str, **options: Any) -> Page:
    page = browser.new_context(reduced_motion="reduce", **options).new_page()
    page.goto(url)
    page.wait_for_selector("#app:not(.starting)")
    return page


def look(page: Page, look_ms: int) -> None:
    page.get_by_role("button", name="Engine").click()
    page.locator("#window .lane").first.wait_for()
    page.wait_for_timeout(look_ms)


def ask(page: Page) -> None:
    page.locator("#field").fill("Tell me a story about a brave knight")
    page.locator("#field").press("Enter")
    page.locator(".answer[data-state=done]").wait_for()
    page.locator(".timeline summary").click()


def main(folder: Path, look_ms: int, *, with_all: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, loaded() as url:
        browser = playwright.chromium.launch(executable_path=located(*BROWSERS), args=FLAGS)
        page = opened(browser, url, **DESKTOP)
        look(page, look_ms)
        page.screenshot(path=folder / "window.png")
        if with_all:
            page.emulate_media(color_scheme="dark")
            page.wait_for_timeout(1_000)
            page.screenshot(path=folder / "window-dark.png")
            page.emulate_media(color_scheme="light")
            page.get_by_role("button", name="As tables").click()
            page.wait_for_timeout(1_000)
            page.screenshot(path=folder / "window-tables.png")
            page.context.close()
            page = opened(browser, url, **PHONE)
            look(page, look_ms // 4)
            page.screenshot(path=folder / "window-phone.png")
            page.get_by_text("Step by step").evaluate("node => node.scrollIntoView()")
            page.screenshot(path=folder / "window-phone-now.png")
            page.context.close()
            page = opened(browser, url, viewport={"width": 1000, "height": 800})
            ask(page)
            page.screenshot(path=folder / "window-answer.png")
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.static.window_picture", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DOCS)
    parser.add_argument("--seconds", type=int, default=60, help="to look, before the picture")
    parser.add_argument(
        "--all", action="store_true", help="also in dark, on a phone, as tables, and an answer"
    )
    asked = parser.parse_args()
    main(asked.folder, 1000 * asked.seconds, with_all=asked.all)
