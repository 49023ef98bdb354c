"""Two tabs of one browser: neither loses what the other one did."""

import pytest
from playwright.sync_api import Page, expect

from tests.static.conftest import OpenPage, reload, wait_started, wait_written
from tests.static.scripted import Gate, ScriptedServer, stream
from tests.static.test_page import expect_state, last_answer, say, stop_clock

Tabs = tuple[Page, Page]


@pytest.fixture
def tabs(open_page: OpenPage) -> Tabs:
    first = open_page()
    second = first.context.new_page()
    second.goto(first.url)
    wait_started(second)
    return first, second


def open_talk(page: Page, title: str) -> None:
    page.get_by_role("button", name=title, exact=True).click()


def test_both_go_on_with_one_conversation_and_nothing_is_lost(tabs: Tabs, server: ScriptedServer) -> None:
    first, second = tabs
    server.script(stream("Red."), stream("Green."), stream("Blue."), stream("Else."))
    say(first, "A colour")
    expect_state(first, "done")
    open_talk(second, "A colour")
    expect(second.locator(".answer .text")).to_have_text("Red.")
    say(second, "Another")
    expect(first.locator(".answer .text")).to_have_text(["Red.", "Green."])
    say(first, "One more")
    expect(second.locator(".answer .text")).to_have_text(["Red.", "Green.", "Blue."])
    first.keyboard.press("Control+Shift+KeyO")
    say(first, "Something else")
    expect_state(first, "done")
    expect(second.locator(".conversation")).to_have_text(["Something else", "A colour"])
    expect(second.locator(".answer .text")).to_have_count(3)  # its reader stays
    for page in tabs:
        reload(page)
        open_talk(page, "A colour")
        expect(page.locator(".answer .text")).to_have_text(["Red.", "Green.", "Blue."])


def test_a_version_that_is_made_in_one_can_be_read_in_the_other(tabs: Tabs, server: ScriptedServer) -> None:
    first, second = tabs
    gate = Gate()
    server.script(stream("Red."), stream("Green", gate, "."), stream("Blue."))
    say(first, "A colour")
    expect_state(first, "done")
    open_talk(second, "A colour")
    first.get_by_role("button", name="Answer again").click()
    expect(second.get_by_role("group", name="Versions")).to_have_text("1 of 2")
    expect(second.locator(".answer .text")).to_have_text(["Red."])  # its reader stays
    expect(second.locator("#stop")).to_be_visible()
    second.get_by_role("button", name="Next version").click()
    expect(second.locator(".answer .text")).to_have_text(["Green"])
    stop_clock(first)
    gate.open()
    expect(second.locator(".answer .text")).to_have_text(["Green."])
    second.get_by_role("button", name="Answer again").click()
    expect(first.get_by_role("group", name="Versions")).to_have_text("2 of 3")
    expect_state(second, "done")
    wait_written(second)
    first.clock.run_for(2_000)  # what the first tab has seen end, it does not write again
    reload(first)
    expect(first.locator(".answer .text")).to_have_text(["Blue."])
    server.requests(3)
    assert server.followed == []


def test_an_answer_outlives_the_tab_that_asked(tabs: Tabs, server: ScriptedServer) -> None:
    first, second = tabs
    gate = Gate()
    server.script(stream("Half ", gate, "and whole."))
    say(first, "Hello")
    open_talk(second, "Hello")
    expect(last_answer(second).locator(".text")).to_have_text("Half")
    first.close()
    gate.open()
    expect_state(second, "done")
    expect(last_answer(second).locator(".text")).to_have_text("Half and whole.")
    server.requests(1)


def test_stop_and_delete_in_the_other_tab(tabs: Tabs, server: ScriptedServer) -> None:
    first, second = tabs
    server.script(stream("Half", Gate()), stream("Half again", Gate()))
    say(first, "Hello")
    open_talk(second, "Hello")
    expect(last_answer(second).locator(".text")).to_have_text("Half")
    second.locator("#stop").click()
    expect_state(first, "stopped")
    assert server.next_discarded() == "resp_0"
    say(first, "Again")
    expect(last_answer(second).locator(".text")).to_have_text("Half again")
    second.get_by_role("button", name="Delete Hello").click()
    second.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(first.locator("#welcome")).to_be_visible()
    expect(first.locator(".conversation")).to_have_count(0)
    assert server.next_discarded() == "resp_1"


def test_what_comes_from_another_tab_leaves_the_reader_in_peace(tabs: Tabs, server: ScriptedServer) -> None:
    first, second = tabs
    server.script(stream("One."), stream("Two."))
    say(first, "Hello")
    expect_state(first, "done")
    expect(second.locator("li:not([data-running]) .conversation")).to_have_text("Hello")
    second.get_by_role("button", name="Rename Hello").click()
    second.get_by_label("Title").fill("A better na")
    first.keyboard.press("Control+Shift+KeyO")
    say(first, "Other")
    expect_state(first, "done")
    expect(second.get_by_label("Title")).to_be_focused()
    second.keyboard.type("me")
    second.keyboard.press("Enter")
    expect(second.locator(".conversation")).to_have_text(["Other", "A better name"])
    expect(first.locator(".conversation")).to_have_text(["Other", "A better name"])
