"""One browser for the package; for each test a fresh page that must stay quiet and keep to its own host."""

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from tests.static.scripted import PATIENCE_S, ScriptedServer

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
    "device_scale_factor": 2,
}
# What Chromium itself logs for every error status: the page cannot keep it from doing so.
FAILED_LOAD = "Failed to load resource"

OpenPage = Callable[..., Page]
Call = Callable[..., Any]


def wait_started(page: Page) -> None:
    """A page that is loaded opens its store before it listens: keys and clicks until then are lost."""
    page.wait_for_selector("#app:not(.starting)")


def wait_written(page: Page) -> None:
    """Waits until the browser has written what the page gave it to keep: a reload before that would lose it."""
    page.evaluate("""async () => {
        const { openStore } = await import("/static/store.js");
        await (await openStore()).heads(); // after every change that was begun before
    }""")


def reload(page: Page) -> None:
    wait_written(page)
    page.reload()
    wait_started(page)


def act_until(is_so: Callable[[], object], act: Callable[[], object]) -> None:
    """For what has to be brought about again and again, or what `expect` cannot see."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it was never so"
        act()


# The package's, not the session's: while playwright's synchronous API is open, the main thread counts as
# running an event loop, and asyncio.run() in a later test of another package would refuse to start.
@pytest.fixture(scope="package")
def browser(chromium_path: str) -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path, args=FLAGS, headless=True)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def scripted_server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    scripted.start()
    yield scripted
    scripted.stop()


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    scripted_server.reset()
    return scripted_server


class Watch:
    """Everything a page must not do."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.faults: list[str] = []

    def over(self, page: Page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        page.on("request", lambda request: self._on_request(request.url))
        page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(FAILED_LOAD):
            self.faults.append(f"console: {message.text}")

    def _on_request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self._host:
            self.faults.append(f"request to another host: {url}")


@pytest.fixture
def open_page(browser: Browser, server: ScriptedServer) -> Iterator[OpenPage]:
    """Opens the page in a fresh profile; keyword arguments are playwright's for a browser context."""
    watch = Watch(urlsplit(server.url).netloc)
    contexts: list[BrowserContext] = []

    def open_page(url: str = server.url, **options: Any) -> Page:
        context = browser.new_context(**{"reduced_motion": "reduce", **options})
        contexts.append(context)
        page = context.new_page()
        watch.over(page)
        page.goto(url)
        wait_started(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert watch.faults == []


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    return open_page()


@pytest.fixture(scope="package")
def module_page(browser: Browser, scripted_server: ScriptedServer) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(scripted_server.url)
    yield page
    page.context.close()


@pytest.fixture
def call(module_page: Page) -> Call:
    """call("file.js", "expression in m and args", *args): m is the imported module."""

    def call(module: str, expression: str, *args: Any) -> Any:
        # A string would be compiled in the page, where the policy forbids it: playwright's own world may.
        body = (
            f"async ({{module, args}}) => {{ const m = await import(`/static/${{module}}`); {expression} }}"
        )
        return module_page.evaluate(body, {"module": module, "args": list(args)})

    return call
