"""Pictures of the page: `python -m tests.static.screenshots` makes docs/pictures/, with a FOLDER one of every state."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tests.static.conftest import FLAGS, PHONE
from tests.static.scripted import TIMINGS, Gate, Pause, Refusal, ScriptedServer, stream
from tests.tools import BROWSERS, located

DOCS = Path(__file__).parents[2] / "docs" / "pictures"
DESKTOP: dict[str, Any] = {"viewport": {"width": 1180, "height": 760}, "device_scale_factor": 1}

LANES = """Every request waits in a **lane**, and every lane has a promise:

| lane | first token | then one every |
|:--|--:|--:|
| interactive | 1 s | 100 ms |
| standard | 30 s | 200 ms |
| batch | when there is room | |

A request is let in when the forecast keeps the promise:

```python
def admit(request: Request, lane: Lane) -> Decision:
    # The queue, the prefill and the free blocks are exact.
    forecast = predict_ttft(request, lane)
    if forecast <= lane.promise:
        return Decision.ACCEPT
    return Decision.refuse(retry_after=forecast - lane.promise)
```

So a refusal comes *at once*, with an honest `Retry-After`."""
FORMULA = r"""The share of a lane follows from its weight $w_i$ and from the work in the queue:

$$ v_i(t) = \int_0^t \frac{w_i}{\sum_{j \in A(s)} w_j} \, ds $$

where $A(s)$ are the lanes that wait at $s$. Two things follow:

1. A lane alone gets everything, whatever its weight.
2. No lane waits longer than
   $\max_j \frac{L_j}{w_j}$ for its turn.

> Weighted fair queueing, Demers, Keshav and Shenker, 1989."""
STORY = (
    "Once upon a time there was a brave knight called Rosa. She lived in a tower above the river, where the water "
    "ran through a great pipe and turned the mill.\n\nOne morning the mill stood still. "
)


TTFT_MS, PACE_S = TIMINGS["ttft_ms"], 0.008


def say(page: Page, text: str) -> None:
    page.locator("#field").fill(text)
    page.locator("#send").click()


def wait_for(page: Page, state: str) -> None:
    page.locator(f".answer[data-state={state}]").last.wait_for()


def talk(page: Page, server: ScriptedServer, *turns: tuple[str, str]) -> None:
    """One conversation to its end."""
    for question, answer in turns:
        words = re.findall(r"\S+\s*", answer)
        pieces = [piece for word in words for piece in (Pause(PACE_S), word)]
        ended_ms = TTFT_MS + 1000 * PACE_S * len(words)
        timeline = TIMINGS["timeline"] | {"ended_ms": ended_ms}
        timings = TIMINGS | {"tpot_ms": 1000 * PACE_S, "timeline": timeline}
        server.script(stream(Pause(TTFT_MS / 1000), *pieces, timings=timings))
        say(page, question)
        wait_for(page, "done")


def start_anew(page: Page) -> None:
    page.evaluate("document.getElementById('new').click()")


def empty(page: Page, _: ScriptedServer) -> None:
    page.locator("#status[data-state=ready]").wait_for()


def chat(page: Page, server: ScriptedServer) -> None:
    for title in ("Plan a week of dinners", "Why is the sky blue?", "A haiku about rain"):
        talk(page, server, (title, "Gladly."))
        start_anew(page)
    talk(page, server, ("How do lanes work?", LANES))
    page.mouse.move(0, 0)


def formulas(page: Page, server: ScriptedServer) -> None:
    talk(page, server, ("How is the time shared between lanes?", FORMULA))
    page.locator(".math math").first.wait_for()


def streaming(page: Page, server: ScriptedServer) -> None:
    server.script(stream(STORY, Gate()))
    say(page, "Tell me a story about a brave knight")
    wait_for(page, "streaming")


def versions(page: Page, server: ScriptedServer) -> None:
    talk(page, server, ("Name a colour", "Teal, like deep water in the evening."))
    server.script(stream("Amber."), stream("Vermilion, the colour of old boats."))
    for _ in range(2):
        page.get_by_role("button", name="Answer again").click()
        wait_for(page, "done")
    page.get_by_role("button", name="Previous version").click()


def refused(page: Page, server: ScriptedServer) -> None:
    server.script(Refusal(503, "The interactive lane is full.", headers={"retry-after": "8"}))
    say(page, "Are you there?")
    wait_for(page, "failed")


def settings(page: Page, _: ScriptedServer) -> None:
    page.locator("#status[data-state=ready]").wait_for()
    page.evaluate("document.getElementById('settings').click()")
    page.locator("details summary").first.click()


def conversations(page: Page, server: ScriptedServer) -> None:
    chat(page, server)
    if page.locator("#menu").is_visible():
        page.locator("#menu").click()
    page.locator("#search").fill("forecast")


STATES: list[Callable[[Page, ScriptedServer], None]] = [
    empty,
    chat,
    formulas,
    streaming,
    versions,
    refused,
    settings,
    conversations,
]
Picture = tuple[str, Callable[[Page, ScriptedServer], None], dict[str, Any]]
LIGHT: dict[str, Any] = {**DESKTOP, "color_scheme": "light"}
DARK: dict[str, Any] = {**DESKTOP, "color_scheme": "dark"}
IN_DOCS: list[Picture] = [
    ("page", chat, {**LIGHT, "viewport": {"width": 1180, "height": 880}}),
    ("page-dark", formulas, DARK),
    ("page-phone", conversations, PHONE),
]
ALL: list[Picture] = [
    (f"{state.__name__}-{look}", state, options)
    for look, options in (("light", LIGHT), ("dark", DARK), ("phone", PHONE))
    for state in STATES
]


def picture(browser: Browser, server: ScriptedServer, state: Callable[..., None], **options: Any) -> bytes:
    server.reset()
    context = browser.new_context(reduced_motion="reduce", **options)
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#app:not(.starting)")
    state(page, server)
    page.evaluate("document.activeElement?.matches('#field') && document.activeElement.blur()")
    bytes_ = page.screenshot(animations="disabled")
    context.close()
    return bytes_


def main(folder: Path, pictures: list[Picture]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    server = ScriptedServer()
    server.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=located(*BROWSERS), args=FLAGS)
            for name, state, options in pictures:
                taken = picture(browser, server, state, **options)
                (folder / f"{name}.png").write_bytes(taken)
            browser.close()
    finally:
        server.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), ALL)
    else:
        main(DOCS, IN_DOCS)
