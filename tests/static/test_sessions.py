"""Conversations on a server that keeps responses, and on one that keeps none."""

from playwright.sync_api import Page, expect

from tests.static.conftest import reload
from tests.static.scripted import CUT, Gate, ScriptedServer, stream
from tests.static.test_page import expect_state, last_answer, say


def new_in(server: ScriptedServer, count: int) -> list[tuple[str | None, list[str]]]:
    """Returns for so many requests the response that each continues, and its messages."""
    return [
        (body.get("previous_response_id"), [each["content"] for each in body["input"]])
        for body in server.requests(count)
    ]


def ask(page: Page, server: ScriptedServer, question: str, answer: str) -> None:
    server.script(stream(answer))
    say(page, question)
    expect(last_answer(page).locator(".text")).to_have_text(answer)
    expect_state(page, "done")


def test_a_turn_sends_what_is_new_and_each_version_has_its_own_session(
    page: Page, server: ScriptedServer
) -> None:
    ask(page, server, "A colour", "Red.")
    ask(page, server, "Like what?", "Like wine.")
    server.script(stream("Green."))
    page.locator(".answer").first.get_by_role("button", name="Answer again").click()
    expect(page.locator(".answer .text")).to_have_text(["Green."])
    expect_state(page, "done")
    ask(page, server, "And that?", "Like grass.")
    page.locator(".answer").first.get_by_role("button", name="Previous version").click()
    reload(page)
    ask(page, server, "What else?", "Like a rose.")
    assert new_in(server, 5) == [
        (None, ["A colour"]),
        ("resp_0", ["Like what?"]),
        (None, ["A colour"]),
        ("resp_2", ["And that?"]),
        ("resp_1", ["What else?"]),
    ]


def test_a_server_that_was_emptied_is_told_all_that_was_said(page: Page, server: ScriptedServer) -> None:
    ask(page, server, "One", "1")
    server.forget()
    ask(page, server, "Two", "2")
    ask(page, server, "Three", "3")
    assert new_in(server, 3) == [
        (None, ["One"]),
        (None, ["One", "1", "Two"]),
        ("resp_1", ["Three"]),
    ]


def test_what_was_stopped_is_told_after_what_the_server_keeps(page: Page, server: ScriptedServer) -> None:
    ask(page, server, "One", "1")
    server.script(stream("Half", Gate()))
    say(page, "Two")
    expect(last_answer(page).locator(".text")).to_have_text("Half")
    page.locator("#stop").click()
    expect_state(page, "stopped")
    assert server.next_discarded() == "resp_1"
    ask(page, server, "Three", "3")
    assert new_in(server, 3)[2] == ("resp_0", ["Two", "Half", "Three"])


def test_thoughts_between_tags_are_not_gone_on_from(page: Page, server: ScriptedServer) -> None:
    server.script(stream("<think>", "Hm.", "</think>", "One."))
    say(page, "Hello")
    expect_state(page, "done")
    ask(page, server, "Two", "2")
    assert new_in(server, 2)[1] == (None, ["Hello", "One.", "Two"])


def test_a_deleted_conversation_is_deleted_on_the_server(page: Page, server: ScriptedServer) -> None:
    ask(page, server, "One", "1")
    ask(page, server, "Two", "2")
    page.get_by_role("button", name="Delete One").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#welcome")).to_be_visible()
    assert {server.next_discarded() for _ in range(2)} == {"resp_0", "resp_1"}


def test_what_is_kept_in_the_browser_only_is_a_chat_completion(page: Page, server: ScriptedServer) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Conversations are kept").select_option("browser")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Longest answer").fill("20")
    page.get_by_role("button", name="Save").click()
    server.script(stream("One ", CUT, "two."), stream("More.", finish="length"))
    say(page, "Count")
    expect_state(page, "done")
    expect(last_answer(page).locator(".text")).to_have_text("One two.")
    say(page, "On")
    expect_state(page, "done")
    expect(last_answer(page).locator(".stats")).to_contain_text("cut at the token limit1 token")
    assert server.followed == [1]
    assert server.requests(2)[1] == {
        "model": "penstock-demo",
        "service_tier": "auto",
        "max_tokens": 20,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Count"},
            {"role": "assistant", "content": "One two."},
            {"role": "user", "content": "On"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True, "resumable": True},
    }
    page.get_by_role("button", name="Delete Count").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#welcome")).to_be_visible()
    assert server.discarded.empty()
