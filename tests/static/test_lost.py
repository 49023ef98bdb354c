"""Answers that outlive their connection, their page and their server."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from loadtests.forked import ForkedServer
from tests.redis_server import RedisServer
from tests.static.conftest import OpenPage, act_until, reload, wait_started
from tests.static.scripted import CUT, Cut, Gate, Refusal, ScriptedServer, error_frame, frame, stream
from tests.static.test_page import CONTRASTS, expect_state, last_answer, say

LATER = Refusal(503, "The model is loading.", headers={"retry-after": "60"})
NOTICE = "Connection lost. Reconnecting…"


def text_of(page: Page) -> Locator:
    return last_answer(page).locator(".text")


def end_pauses(page: Page, is_so: Callable[[], bool]) -> None:
    """Ends the page's pauses between its attempts to follow an answer, until that is so."""
    act_until(is_so, lambda: page.evaluate("dispatchEvent(new Event('online'))"))


def follow(page: Page, server: ScriptedServer, attempts: int) -> None:
    """Has the page try so often to follow an answer, or once more: it may be at it when its next pause ends."""
    end_pauses(page, lambda: len(server.followed) >= attempts)


def stored_answer(page: Page) -> dict[str, Any]:
    """The last one, as a reload would find it."""
    answer: dict[str, Any] = page.evaluate(
        """async () => {
            const { openStore } = await import("/static/store.js");
            const store = await openStore();
            const [head] = await store.heads();
            return (await store.messages(head.id)).at(-1);
        }"""
    )
    return answer


def wait_until_stored(page: Page, is_stored: Callable[[dict[str, Any]], object]) -> None:
    """The browser writes in its own time."""
    act_until(lambda: is_stored(stored_answer(page)), lambda: None)


# Connections.


def test_an_answer_goes_on_over_lost_connections(page: Page, server: ScriptedServer) -> None:
    server.script(stream("One ", CUT, "two ", CUT, "three."))
    say(page, "Count")
    expect_state(page, "done")
    expect(text_of(page)).to_have_text("One two three.")
    expect(last_answer(page).locator(".stats")).to_contain_text("3 tokens")
    assert server.followed == [1, 2]
    server.requests(1)


def test_a_piece_that_comes_twice_is_shown_once(page: Page, server: ScriptedServer) -> None:
    twice = frame({"type": "response.output_text.delta", "delta": "One ", "sequence_number": 1})
    server.script(stream("One ", twice, "two."))
    say(page, "Count")
    expect_state(page, "done")
    expect(text_of(page)).to_have_text("One two.")


def test_a_server_that_shuts_down_is_followed_when_it_is_back(page: Page, server: ScriptedServer) -> None:
    last = error_frame("The server is shutting down.", "server_shutting_down")
    server.script(stream("Before ", Cut(last), "and after."))
    server.refusals.append(LATER)
    say(page, "Hello")
    expect_state(page, "reconnecting")
    follow(page, server, 1)
    expect(page.get_by_role("alert")).to_have_count(0)
    follow(page, server, 2)
    expect_state(page, "done")
    expect(text_of(page)).to_have_text("Before and after.")


def test_it_is_said_quietly_and_once_that_the_connection_is_lost(page: Page, server: ScriptedServer) -> None:
    before, after = Gate(), Gate()
    server.script(stream("One ", before, CUT, "two", after, "."))
    server.refusals.extend([LATER] * 100)
    say(page, "Count")
    expect(last_answer(page).locator(".stats")).to_contain_text("1 token")
    expect(last_answer(page).locator(".timeline")).to_be_visible()
    height = "document.querySelector('.answer:last-child').getBoundingClientRect().height"
    streaming = page.evaluate(height)
    before.open()
    expect_state(page, "reconnecting")
    expect(last_answer(page).locator(".stats")).to_have_text(NOTICE)
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    expect(last_answer(page).locator(".pipe")).to_be_visible()
    expect(page.locator("#stop")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    assert page.evaluate(height) == streaming
    follow(page, server, 2)
    expect_state(page, "reconnecting")
    expect(page.locator("#announcer p", has_text=NOTICE)).to_have_count(1)
    server.refusals.clear()
    end_pauses(page, lambda: last_answer(page).get_attribute("data-state") == "streaming")
    expect(page.locator("#announcer p", has_text=NOTICE)).to_have_count(1)
    expect(text_of(page)).to_have_text("One two")
    expect(last_answer(page).locator(".stats")).to_contain_text("2 tokens")
    after.open()
    expect_state(page, "done")


def test_the_status_is_looked_at_while_the_connection_is_lost(page: Page, server: ScriptedServer) -> None:
    before, after = Gate(), Gate()
    server.script(stream("One ", before, CUT, "two", after))
    server.refusals.append(LATER)
    say(page, "Count")
    expect(text_of(page)).to_have_text("One")
    server.state = "loading"
    before.open()
    expect(page.locator("#status")).to_have_text("loading")
    follow(page, server, 2)
    expect_state(page, "streaming")
    server.state = "ready"
    expect(page.locator("#status")).to_have_text("ready")


@pytest.mark.parametrize("status", [404, 410])
def test_what_is_gone_is_said_so_and_can_be_asked_for_again(
    page: Page, server: ScriptedServer, status: int
) -> None:
    server.script(stream("Half an ans", CUT, "wer."), stream("A whole answer."))
    server.refusals.append(Refusal(status, "It is not there."))
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("The rest of this answer is gone")
    expect(text_of(page)).to_have_text("Half an ans")
    page.get_by_role("button", name="Try again").click()
    expect(text_of(page)).to_have_text("A whole answer.")
    assert len(server.requests(2)[1]["messages"]) == 1


def test_after_two_minutes_it_is_given_up(page: Page, server: ScriptedServer) -> None:
    page.clock.install()
    gate = Gate()
    server.script(stream("Half", gate, CUT))
    say(page, "Hello")
    expect(text_of(page)).to_have_text("Half")
    page.context.set_offline(True)
    gate.open()
    expect_state(page, "reconnecting")
    card = page.get_by_role("alert")
    act_until(card.is_visible, lambda: page.clock.run_for(30_000))  # a request fails in real time
    expect(card).to_contain_text("The server cannot be reached")
    expect(text_of(page)).to_have_text("Half")


# The page.


def test_an_answer_goes_on_after_a_reload(page: Page, server: ScriptedServer) -> None:
    gate = Gate()
    server.script(stream("Half ", gate, "and whole."))
    say(page, "Hello")
    expect(text_of(page)).to_have_text("Half")
    wait_until_stored(page, lambda answer: answer["stream"]["id"])
    reload(page)
    expect(page.locator(".question .bubble")).to_have_text("Hello")
    expect_state(page, "streaming")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("li[data-running]")).to_have_count(1)
    gate.open()
    expect_state(page, "done")
    expect(text_of(page)).to_have_text("Half and whole.")
    expect(last_answer(page).locator(".stats")).to_have_text(re.compile("2 tokens.*first after"))
    server.requests(1)


def test_a_reload_before_the_first_word_asks_for_the_same_answer(page: Page, server: ScriptedServer) -> None:
    gate = Gate()
    server.script(stream(gate, "Hello.", opens=False))
    say(page, "Hello")
    server.requests(1)
    wait_until_stored(page, lambda answer: answer["stream"])
    reload(page)
    expect_state(page, "waiting")
    gate.open()
    expect_state(page, "done")
    expect(text_of(page)).to_have_text("Hello.")
    first, again = server.requests(2)
    assert again == first


def test_an_answer_that_is_gone_when_the_page_is_opened_again(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Half", Gate()))
    say(page, "Hello")
    expect(last_answer(page).locator(".stats")).to_contain_text("1 token")
    wait_until_stored(page, lambda answer: answer["stream"]["id"])
    page.goto("about:blank")
    server.refusals.append(Refusal(404, "It is not there."))
    page.goto(server.url)
    page.get_by_role("button", name="Hello", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("The rest of this answer is gone")


# Stop.


def test_stop_ends_an_answer_on_the_server(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Half", Gate()))
    say(page, "Hello")
    expect(text_of(page)).to_have_text("Half")
    page.locator("#stop").click()
    expect_state(page, "stopped")
    assert server.next_discarded() == "resp_0"
    reload(page)
    expect_state(page, "stopped")
    assert server.followed == []


def test_stop_while_the_connection_is_lost(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Half", CUT))
    server.refusals.append(LATER)
    say(page, "Hello")
    expect_state(page, "reconnecting")
    page.keyboard.press("Escape")
    expect_state(page, "stopped")
    expect(text_of(page)).to_have_text("Half")
    assert server.next_discarded() == "resp_0"


def test_stop_before_the_server_has_said_anything(page: Page, server: ScriptedServer) -> None:
    gate = Gate()
    server.script(stream(gate, "Hello.", opens=False))
    say(page, "Hello")
    server.requests(1)
    page.locator("#stop").click()
    expect_state(page, "stopped")
    gate.open()
    assert server.next_discarded() == "resp_0"
    expect(text_of(page)).to_be_empty()


def test_stop_in_another_tab(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Half", Cut(error_frame("The reply was cancelled.", "cancelled"))))
    say(page, "Hello")
    expect_state(page, "stopped")
    expect(text_of(page)).to_have_text("Half")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_deleted_conversation_ends_its_answer(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Half", Gate()))
    say(page, "Hello")
    expect(text_of(page)).to_have_text("Half")
    page.get_by_role("button", name="Delete Hello").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    assert server.next_discarded() == "resp_0"


# Colours.


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(open_page: OpenPage, server: ScriptedServer, scheme: Any) -> None:
    page = open_page(color_scheme=scheme)
    server.script(stream("Half", CUT))
    server.refusals.append(LATER)
    say(page, "Hello")
    expect_state(page, "reconnecting")
    expect(last_answer(page).locator(".stats")).to_have_text(NOTICE)
    assert [each for each in page.evaluate(CONTRASTS) if each[0] < 4.5] == []


# The real server.


@pytest.fixture
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


# Looking every now and then, as `expect` does, would be too slow: the whole story takes a second or two.
FIRST_TEXT = """() => new Promise((resolve) => {
    const look = () => document.querySelector(".answer .text").textContent && resolve();
    new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true});
    look();
})"""


def ask_for_length(route: Route) -> None:
    """A story of its own length could be over before its server is killed."""
    body: Any = route.request.post_data_json
    route.continue_(post_data={**body, "min_tokens": 1500, "max_output_tokens": 1600})


def test_an_answer_outlives_its_server(browser: Browser, redis_url: str) -> None:
    arguments = ["--redis-url", redis_url]
    first = ForkedServer(arguments)
    first.wait_ready()
    page = browser.new_context().new_page()
    page.route("**/v1/responses", ask_for_length)
    page.goto(first.url)
    wait_started(page)
    say(page, "Tell me a long story about a brave knight")
    page.evaluate(FIRST_TEXT)
    first.kill()
    expect_state(page, "reconnecting")
    wait_until_stored(page, lambda answer: answer["state"] == "reconnecting")
    length = len(stored_answer(page)["text"])
    with ForkedServer([*arguments, "--port", str(first.port)]):
        with page.expect_response(
            lambda response: "starting_after" in response.url and response.ok
        ) as followed:
            expect(last_answer(page)).to_have_attribute("data-state", "done", timeout=120_000)
        wait_until_stored(page, lambda answer: answer["state"] == "done")
        kept = page.request.get(followed.value.url.split("?")[0]).json()
        text = stored_answer(page)["text"]
        page.context.close()
    assert text == kept["output"][0]["content"][0]["text"]
    assert len(text) > length > 0
