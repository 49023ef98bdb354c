"""The page in a real browser, against a server that does what the test tells it to."""

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.static.conftest import PHONE, OpenPage, reload
from tests.static.scripted import DONE, PATIENCE_S, Gate, Refusal, ScriptedServer, error_frame, stream

BUSY = Refusal(503, "The interactive lane is full.", headers={"retry-after": "2", "retry-after-ms": "1200"})

TOO_LONG = Refusal(400, "This model's context is 512 tokens.", "context_length_exceeded")


def say(page: Page, text: str) -> None:
    """Waits for the answer before it to end: until then the page sends nothing."""
    page.locator("#field").fill(text)
    expect(page.locator("#send")).to_be_visible()
    page.locator("#field").press("Enter")


def last_answer(page: Page) -> Locator:
    return page.locator(".answer").last


def expect_state(page: Page, state: str) -> None:
    expect(last_answer(page)).to_have_attribute("data-state", state)


def stop_clock(page: Page) -> None:
    """Stops the page's clock: what it shows for a while only stays until the test moves the clock."""
    page.clock.install()
    page.clock.pause_at(datetime.now() + timedelta(hours=1))


# Streaming.


def test_an_answer_streams_and_ends_with_its_figures(page: Page, server: ScriptedServer) -> None:
    before, between = Gate(), Gate()
    server.script(stream(before, "Fifty", between, "-six.", finish="length"))
    say(page, "What is 7 times 8?")
    expect_state(page, "waiting")
    expect(last_answer(page).locator(".pipe")).to_be_visible()
    expect(last_answer(page).locator(".stats")).to_have_text(re.compile(r"waiting \d s"))
    before.open()
    expect(last_answer(page).locator(".text")).to_have_text("Fifty")
    expect(last_answer(page).locator(".stats")).to_have_text(re.compile("1 token.*first after"))
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    between.open()
    expect_state(page, "done")
    expect(last_answer(page).locator(".text")).to_have_text("Fifty-six.")
    stats = last_answer(page).locator(".stats")
    for part in (
        "cut at the token limit",
        "2 tokens",
        "50 tokens/s",
        "queued 3.2 ms",
        "interactive lane",
        "16 of 40 cached",
    ):
        expect(stats).to_contain_text(part)
    expect(page.locator("#announcer")).to_have_text(re.compile("Fifty"))
    assert server.requests(1) == [
        {
            "model": "penstock-demo",
            "service_tier": "auto",
            "input": [{"role": "user", "content": "What is 7 times 8?"}],
            "messages": [{"role": "user", "content": "What is 7 times 8?"}],
            "stream": True,
            "stream_options": {"resumable": True},
        }
    ]


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_cancels_on_the_server_and_keeps_what_came(page: Page, server: ScriptedServer, way: str) -> None:
    gate = Gate()
    server.script(stream("A long", gate, " story"), stream("Another."))
    say(page, "Tell me")
    expect(last_answer(page).locator(".text")).to_have_text("A long")
    page.locator("#stop").click() if way == "button" else page.keyboard.press("Escape")
    expect_state(page, "stopped")
    assert server.next_discarded() == "resp_0"
    expect(last_answer(page).locator(".stats")).to_contain_text("stopped")
    expect(page.locator("#field")).to_be_focused()
    say(page, "Go on")
    expect(last_answer(page).locator(".text")).to_have_text("Another.")
    assert [each["content"] for each in server.requests(2)[1]["messages"]] == ["Tell me", "A long", "Go on"]


def test_one_answer_at_a_time_while_the_next_question_is_written(page: Page, server: ScriptedServer) -> None:
    gate = Gate()
    server.script(stream("One", gate), stream("Two"))
    say(page, "first")
    expect(last_answer(page).locator(".text")).to_have_text("One")
    page.locator("#field").fill("second")
    page.locator("#field").press("Enter")
    expect(page.locator("#field")).to_have_value("second")
    expect(page.locator(".answer")).to_have_count(1)
    gate.open()
    expect_state(page, "done")
    page.locator("#field").press("Enter")
    expect(last_answer(page).locator(".text")).to_have_text("Two")


def test_a_long_answer_is_built_once(page: Page, server: ScriptedServer) -> None:
    words = [
        f"word{number} " if number % 40 else f"line\n\n- *item* `{number}` " for number in range(1, 5001)
    ]
    gate = Gate()
    server.script(stream("Start ", gate, *words))
    say(page, "Everything")
    text = last_answer(page).locator(".text")
    expect(text).to_have_text("Start")
    text.evaluate("""(node) => {
        window.built = 0;
        new MutationObserver((changes) => {
            for (const { addedNodes } of changes) window.built += addedNodes.length;
        }).observe(node, {subtree: true, childList: true});
    }""")
    gate.open()
    expect(last_answer(page)).to_have_attribute("data-state", "done", timeout=60_000)
    expect(text).to_contain_text("word4999")
    expect(last_answer(page).locator(".stats")).to_contain_text("5,001 tokens")
    # A page that builds all of it for every frame builds a hundred times as much.
    assert page.evaluate("window.built") < 3 * text.locator("*").count()


# Errors.


def test_a_busy_server_is_asked_again_after_its_wait(page: Page, server: ScriptedServer) -> None:
    server.script(BUSY, stream("Here I am."))
    stop_clock(page)
    say(page, "Hello")
    card = page.get_by_role("alert")
    expect(card).to_contain_text("The server is busy")
    expect(card).to_contain_text("The interactive lane is full.")
    expect(card.locator(".countdown")).to_have_text("Trying again in 2 s")
    page.clock.run_for(1_000)
    expect(card.locator(".countdown")).to_have_text("Trying again in 1 s")
    page.clock.run_for(250)
    expect(last_answer(page).locator(".text")).to_have_text("Here I am.")
    expect(card).to_have_count(0)
    server.requests(2)


def test_retry_by_hand_does_not_wait(page: Page, server: ScriptedServer) -> None:
    server.script(Refusal(429, "Too many requests.", headers={"retry-after": "60"}), stream("Now."))
    say(page, "Hello")
    expect(page.locator(".countdown")).to_have_text(re.compile(r"Trying again in [56]\d s"))
    page.get_by_role("button", name="Try again").click()
    expect(last_answer(page).locator(".text")).to_have_text("Now.")
    expect(page.locator("#field")).to_be_focused()


def test_the_automatic_retry_can_be_called_off(page: Page, server: ScriptedServer) -> None:
    server.script(Refusal(503, "Full.", headers={"retry-after": "60"}))
    say(page, "Hello")
    page.get_by_role("button", name="Do not retry").click()
    expect(page.locator(".countdown")).to_be_hidden()
    expect(page.get_by_role("button", name="Try again")).to_be_visible()


def test_automatic_retries_end(page: Page, server: ScriptedServer) -> None:
    again, last = (
        Refusal(503, text, headers={"retry-after-ms": "100"}) for text in ("Full.", "Full to the end.")
    )
    server.script(again, again, again, last)
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("Full to the end.")
    expect(page.get_by_role("button", name="Do not retry")).to_have_count(0)
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    expect(page.locator(".countdown")).to_be_hidden()
    server.requests(4)


def test_an_error_inside_the_stream(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Half", error_frame("The device failed."), DONE, ends=False))
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("The answer broke off")
    expect(page.get_by_role("alert")).to_contain_text("The device failed.")
    expect(last_answer(page).locator(".text")).to_have_text("Half")


@pytest.mark.parametrize("piece", [b"data: not json\n\n", b"data: <html>\n\n"])
def test_a_stream_of_something_else(page: Page, server: ScriptedServer, piece: bytes) -> None:
    server.script(stream(piece))
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("not JSON")


def test_too_long_a_conversation_offers_a_new_one(page: Page, server: ScriptedServer) -> None:
    server.script(TOO_LONG, TOO_LONG)
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("too long for this model")
    page.get_by_role("alert").get_by_role("button", name="New conversation").click()
    expect(page.locator("#welcome")).to_be_visible()


def test_a_key_is_asked_for_sent_and_remembered_as_chosen(
    open_page: OpenPage, server: ScriptedServer
) -> None:
    server.key = "secret"
    server.script(stream("Welcome."), stream("Again."))
    page = open_page()
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("This server asks for a key")
    page.get_by_role("button", name="Enter key").click()
    page.get_by_label("Key for this server").fill("secret")
    page.get_by_label("Key for this server").press("Enter")
    expect(last_answer(page).locator(".text")).to_have_text("Welcome.")
    expect(page.locator("#model")).to_have_text("penstock-demo")
    assert page.evaluate("[sessionStorage['penstock.key'], localStorage['penstock.key']]") == ["secret", None]
    page.locator("#settings").click()
    page.locator("#change-key").click()
    page.get_by_label("Remember it").check()
    page.get_by_role("button", name="Use key").click()
    assert page.evaluate("[sessionStorage['penstock.key'], localStorage['penstock.key']]") == [None, "secret"]
    reload(page)
    say(page, "Once more")
    expect(last_answer(page).locator(".text")).to_have_text("Again.")


def test_an_unreachable_server_and_its_return(page: Page, server: ScriptedServer) -> None:
    expect(page.locator("#status")).to_have_text("ready")
    page.context.set_offline(True)
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    expect(page.locator("#status")).to_have_text("unreachable")
    page.context.set_offline(False)
    server.script(stream("Back."))
    page.get_by_role("button", name="Try again").click()
    expect(last_answer(page).locator(".text")).to_have_text("Back.")
    look_again(page)
    expect(page.locator("#status")).to_have_text("ready")


@pytest.mark.parametrize(
    ("word", "shown"), [("draining", "draining"), ("loading", "loading"), ("<b>odd</b>", "not ready")]
)
def test_the_status_says_why_the_server_is_not_ready(
    open_page: OpenPage, server: ScriptedServer, word: str, shown: str
) -> None:
    server.state = word
    page = open_page()
    expect(page.locator("#status")).to_have_text(shown)
    server.state = "ready"
    look_again(page)
    expect(page.locator("#status")).to_have_text("ready")


def look_again(page: Page) -> None:
    """The page asks at once when it comes into view; else it asks every few seconds."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


# Conversations.


def test_conversations_outlive_a_reload(page: Page, server: ScriptedServer) -> None:
    server.script(stream("First answer."), stream("Second answer."))
    say(page, "first question")
    expect_state(page, "done")
    page.get_by_role("button", name="New conversation").click()
    say(page, "second question")
    expect_state(page, "done")
    expect(page.locator(".conversation")).to_have_text(["second question", "first question"])
    reload(page)
    expect(page.locator(".answer .text")).to_have_text("Second answer.")
    page.get_by_role("button", name="first question", exact=True).click()
    expect(page.locator(".answer .text")).to_have_text("First answer.")
    expect(page).to_have_title("first question · Penstock")
    page.go_back()
    expect(page.locator(".answer .text")).to_have_text("Second answer.")


def test_an_answer_goes_on_while_another_conversation_is_open(page: Page, server: ScriptedServer) -> None:
    gate = Gate()
    server.script(stream("One", gate, " two"), stream("Other."))
    say(page, "long")
    expect(last_answer(page).locator(".text")).to_have_text("One")
    page.get_by_role("button", name="New conversation").click()
    say(page, "short")
    expect_state(page, "done")
    expect(last_answer(page).locator(".text")).to_have_text("Other.")
    expect(page.locator("li[data-running] .conversation")).to_have_text("long")
    gate.open()
    expect(page.locator("li[data-running]")).to_have_count(0)
    page.get_by_role("button", name="long", exact=True).click()
    expect(last_answer(page).locator(".text")).to_have_text("One two")


def test_a_browser_that_keeps_nothing_is_told_of(page: Page, server: ScriptedServer) -> None:
    page.evaluate("() => { IDBObjectStore.prototype.put = () => { throw new Error('full'); }; }")
    server.script(stream("Answer."))
    expect(page.locator("#unkept")).to_be_hidden()
    say(page, "question")
    expect_state(page, "done")
    expect(page.locator("#unkept")).to_be_visible()


def test_rename_and_delete(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Answer."))
    say(page, "question")
    expect_state(page, "done")
    page.get_by_role("button", name="Rename question").click()
    page.get_by_label("Title").fill("A better name")
    page.get_by_label("Title").press("Enter")
    expect(page.locator(".conversation")).to_have_text("A better name")
    reload(page)
    page.get_by_role("button", name="Delete A better name").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator(".conversation")).to_have_count(1)
    page.get_by_role("button", name="Delete A better name").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator(".conversation")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    reload(page)
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator(".conversation")).to_have_count(0)


def test_answer_again_and_edit(page: Page, server: ScriptedServer) -> None:
    server.script(stream("First."), stream("Second."), stream("Third."))
    say(page, "question")
    expect(last_answer(page).locator(".text")).to_have_text("First.")
    page.get_by_role("button", name="Answer again").click()
    expect(last_answer(page).locator(".text")).to_have_text("Second.")
    page.get_by_role("button", name="Edit message").click()
    expect(page.locator("#field")).to_have_value("question")
    say(page, "better question")
    expect(last_answer(page).locator(".text")).to_have_text("Third.")
    expect(page.locator(".question .bubble")).to_have_text(["better question"])
    assert [each["messages"][-1]["content"] for each in server.requests(3)] == [
        "question",
        "question",
        "better question",
    ]
    page.get_by_role("button", name="Edit message").click()
    page.keyboard.press("Escape")
    expect(page.locator("#field")).to_have_value("")


def test_copying(open_page: OpenPage, server: ScriptedServer) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    server.script(stream("*Run*:\n\n```\nmake serve\n```"))
    say(page, "how?")
    expect_state(page, "done")
    stop_clock(page)
    page.get_by_role("button", name="Copy code").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "make serve"
    page.get_by_role("button", name="Copy answer").click()
    expect(page.locator(".answer footer").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "*Run*:\n\n```\nmake serve\n```"


def test_settings_go_with_each_request_and_stay(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Yes."))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Longest answer").fill("20")
    page.get_by_label("Lane").select_option("interactive")
    page.get_by_role("button", name="Save").click()
    reload(page)
    say(page, "Hello")
    expect_state(page, "done")
    [sent] = server.requests(1)
    assert sent["instructions"] == "Be brief."
    assert (sent["temperature"], sent["top_p"], sent["max_output_tokens"]) == (0.5, 0.9, 20)
    assert sent["service_tier"] == "priority"


def test_the_demo_model_is_introduced_and_others_are_not(open_page: OpenPage, server: ScriptedServer) -> None:
    expect(open_page().locator(".demo-note")).to_be_visible()
    server.model = "qwen3-8b"
    page = open_page()
    expect(page.locator("#model")).to_have_text("qwen3-8b")
    expect(page.locator(".demo-note")).to_be_hidden()


# Hostile text.

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)><svg onload=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "[click](javascript:alert(1)) [click](JaVaScRiPt:alert(1)) [c](\x01javascript:alert(1))",
    "[click](data:text/html;base64,PHNjcmlwdD4=) [c](vbscript:x) [c](file:///etc/passwd)",
    "![x](https://evil.example/pixel.png) ![x](//evil.example/x.png)",
    '[a](https://evil.example/"onmouseover="alert(1)) <https://evil.example/"onclick=alert(1)>',
    '```"><script>alert(1)</script>\n</code></pre><script>alert(1)</script>\n```',
    "| <b onclick=alert(1)>a</b> |\n|---|\n| <style>*{display:none}</style> |",
    "# <form action=//evil.example><input></form>\n> <base href=//evil.example>",
    "<link rel=stylesheet href=//evil.example/x.css><meta http-equiv=refresh content=0>",
]


def test_hostile_text_stays_text(page: Page, server: ScriptedServer) -> None:
    text = "\n\n".join(HOSTILE)
    server.script(stream(*text), Refusal(500, HOSTILE[1]), stream("fine"))
    say(page, HOSTILE[0] + HOSTILE[1])
    expect_state(page, "done")
    say(page, "and")
    expect(page.get_by_role("alert")).to_contain_text("onerror=alert(1)")
    for shown in ("onerror=alert(1)", "<script>alert(1)</script>", "javascript:alert(1)", "<iframe srcdoc"):
        expect(page.locator(".answer .text").first).to_contain_text(shown)
    messages = page.locator("#messages")
    for tag in ("script", "img", "iframe", "style", "form", "input", "base", "link", "meta", "svg[onload]"):
        assert messages.locator(tag).count() == 0, tag
    attributes = page.evaluate(
        "[...document.querySelectorAll('*')].flatMap((e) => e.getAttributeNames()).filter((n) => n.startsWith('on'))"
    )
    assert attributes == []
    links: list[str] = page.evaluate(
        "[...document.querySelectorAll('#messages a')].map((a) => a.protocol + a.rel)"
    )
    assert set(links) == {"https:noopener noreferrer"}


# Keyboard, phone, colours.


def test_everything_by_keyboard(page: Page, server: ScriptedServer) -> None:
    gate = Gate()
    server.script(stream("Once upon", gate), stream("Again."))
    expect(page.locator("#field")).to_be_focused()
    page.keyboard.type("A story")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("please")
    page.keyboard.press("Enter")
    expect(page.locator(".bubble")).to_have_text("A story\nplease")
    expect(last_answer(page).locator(".text")).to_have_text("Once upon")
    page.keyboard.press("Escape")
    expect_state(page, "stopped")
    assert server.next_discarded() == "resp_0"
    tab_to(page, "Answer again", "Shift+Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(last_answer(page).locator(".text")).to_have_text("Again.")
    expect_state(page, "done")
    tab_to(page, "Settings", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Settings")).to_be_focused()
    page.keyboard.press("Control+Shift+KeyO")
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator("#field")).to_be_focused()
    tab_to(page, "New conversation", "Shift+Tab")
    tab_to(page, "Delete A story", "Tab")  # the row that has the focus shows what can be done with it
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Delete A story")).to_be_focused()


FOCUSED = "(document.activeElement.ariaLabel ?? document.activeElement.textContent).trim()"


def tab_to(page: Page, name: str, key: str) -> None:
    for _ in range(20):
        page.keyboard.press(key)
        if page.evaluate(FOCUSED).startswith(name):
            return
    raise AssertionError(f"{name} cannot be reached with {key}")


def test_the_tab_order_is_that_of_the_eye(page: Page) -> None:
    page.locator(".skip").focus()
    names = []
    for _ in range(12):
        page.keyboard.press("Tab")
        names.append(page.evaluate(FOCUSED))
    assert names[:5] == ["New conversation", "Search conversations", "Export all", "Import", "Engine"]
    assert names[5].startswith("Colours")
    assert names[6:8] == ["Settings", "Tell me a story about a brave knight"]
    assert names[11] == "Message"
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#field")).to_be_focused()


def test_an_input_methods_enter_does_not_send(page: Page, server: ScriptedServer) -> None:
    page.locator("#field").fill("にほん")
    page.evaluate("""() => document.getElementById("field").dispatchEvent(new KeyboardEvent(
        "keydown", {key: "Enter", isComposing: true, bubbles: true, cancelable: true}))""")
    expect(page.locator("#field")).to_have_value("にほん")
    assert server.requests(0) == []


def test_on_a_phone(open_page: OpenPage, server: ScriptedServer) -> None:
    page = open_page(**PHONE)
    server.script(
        stream("x" * 200 + "\n\n```\n" + "y" * 200 + "\n```\n\n|" + "wide cell|" * 12 + "\n|" + "-|" * 12)
    )
    expect(page.locator("#field")).not_to_be_focused()
    assert_fits(page)
    page.locator("#field").tap()
    expect(page.locator("#field")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    expect(page.locator("#field")).to_have_value("one\n")
    page.locator("#send").tap()
    expect_state(page, "done")
    assert_fits(page)
    page.locator("#menu").tap()
    expect(page.get_by_role("button", name="New conversation")).to_be_focused()
    assert_fits(page)
    page.keyboard.press("Escape")
    expect(page.locator("#menu")).to_be_focused()
    page.locator("#menu").tap()
    page.get_by_role("button", name="New conversation").tap()
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator("#sidebar")).to_be_hidden()


def test_escape_closes_the_drawer_before_it_stops_an_answer(
    open_page: OpenPage, server: ScriptedServer
) -> None:
    page = open_page(viewport={"width": 360, "height": 740})
    gate = Gate()
    server.script(stream("One", gate, " two"))
    say(page, "Hello")
    expect(last_answer(page).locator(".text")).to_have_text("One")
    page.locator("#menu").click()
    expect(page.locator("#sidebar")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).to_be_hidden()
    gate.open()
    expect_state(page, "done")
    expect(last_answer(page).locator(".text")).to_have_text("One two")


def assert_fits(page: Page) -> None:
    """No sideways scrolling, and nothing to touch is smaller than a fingertip."""
    width, small = page.evaluate("""() => {
        const buttons = [...document.querySelectorAll("button, textarea, select, summary")];
        const boxes = buttons.filter((b) => b.checkVisibility({visibilityProperty: true}))
            .map((b) => [b.ariaLabel ?? b.textContent, b.getBoundingClientRect()]);
        const small = boxes.filter(([, r]) => r.width < 44 || r.height < 44).map(([name]) => name);
        return [document.documentElement.scrollWidth, small];
    }""")
    assert width == 360
    assert small == []


# Every text's colour against the first opaque ground below it, by WCAG 2's formula.
CONTRASTS = """() => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = (color) => {
        const [r, g, b] = rgba(color).map((v) => v / 255)
            .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const color = getComputedStyle(at).backgroundColor;
            if (rgba(color)[3] === 255) return color;
        }
        return "white";
    };
    const texts = [...document.querySelectorAll("body *")].filter((node) =>
        node.checkVisibility({visibilityProperty: true, opacityProperty: true}) && !node.closest("dialog:not([open])")
        && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()));
    return texts.map((node) => {
        const [a, b] = [luminance(getComputedStyle(node).color), luminance(ground(node))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), `${node.tagName} ${node.textContent.slice(0, 30)}`];
    });
}"""
RICH = """# Title

Text, *more*, `code`, [link](https://x.org).

> quote

- item

```py
code
```

|a|
|-|
|b|
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(open_page: OpenPage, server: ScriptedServer, scheme: Any) -> None:
    page = open_page(color_scheme=scheme)
    expect(page.locator("#status")).to_have_text("ready")
    contrasts = page.evaluate(CONTRASTS)
    server.script(stream(RICH), Refusal(503, "Full.", headers={"retry-after": "60"}), Refusal(400, "Wrong."))
    for question, state in (("one", "done"), ("two", "failed"), ("three", "failed")):
        say(page, question)
        expect_state(page, state)
    contrasts += page.evaluate(CONTRASTS)
    page.locator("#settings").click()
    contrasts += page.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert [each for each in contrasts if each[0] < 4.5] == []


def test_colours_follow_the_system_until_they_are_chosen(open_page: OpenPage) -> None:
    page = open_page(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    switch = page.get_by_role("button", name="Colours")
    switch.click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    light = page.evaluate(background)
    assert light != dark
    reload(page)
    assert page.evaluate(background) == light
    switch.click()
    assert page.evaluate(background) == dark
    expect(switch).to_have_attribute("title", "Colours: dark. Change")


def test_reduced_motion_stops_the_pipe(open_page: OpenPage, server: ScriptedServer) -> None:
    moving = "getComputedStyle(document.querySelector('.pipe'), '::before').animationName"
    for preference, animation in (("reduce", "none"), ("no-preference", "flow")):
        page = open_page(reduced_motion=preference)
        gate = Gate()
        server.script(stream(gate))
        say(page, "Hello")
        expect(page.locator(".pipe")).to_be_visible()
        assert page.evaluate(moving) == animation
        gate.open()
        expect_state(page, "done")


def wait_for(page: Page, condition: str) -> None:
    """Waits as `Page.wait_for_function` does, where a Content-Security-Policy allows no eval."""
    page.evaluate(
        f"""async () => {{
            const end = performance.now() + {PATIENCE_S * 1000};
            while (!({condition})) {{
                if (performance.now() > end) throw new Error("it was never so");
                await new Promise(requestAnimationFrame);
            }}
        }}"""
    )


def test_the_page_follows_the_answer_only_while_the_reader_is_at_its_end(
    page: Page, server: ScriptedServer
) -> None:
    gates = [Gate(), Gate()]
    paragraphs = [f"paragraph {number}\n\n" for number in range(30)]
    server.script(stream(*paragraphs, gates[0], *paragraphs, "middle\n\n", gates[1], *paragraphs, "end"))
    left = "(() => { const s = document.getElementById('scroller'); "
    left += "return s.scrollHeight - s.scrollTop - s.clientHeight; })()"
    say(page, "Long")
    expect(last_answer(page).locator(".text")).to_contain_text("paragraph 29")
    wait_for(page, f"{left} < 2")
    page.locator("#scroller").hover()
    page.mouse.wheel(0, -300)
    wait_for(page, f"Math.round({left}) >= 300")  # a wheel's scrolling takes several frames
    expect(page.locator("#jump")).to_be_visible()
    gates[0].open()
    expect(last_answer(page).locator(".text")).to_contain_text("middle")
    assert page.evaluate(left) > 300
    page.locator("#jump").click()
    wait_for(page, f"{left} < 2")
    expect(page.locator("#jump")).to_be_hidden()
    gates[1].open()
    expect_state(page, "done")
    wait_for(page, f"{left} < 2")
