"""What a user chooses and writes: drafts, lanes, thinking, prompts, and conversations that are too long."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.static.conftest import OpenPage, reload
from tests.static.scripted import Refusal, ScriptedServer, stream
from tests.static.test_page import TOO_LONG, expect_state, last_answer, say
from tests.static.test_sessions import ask
from tests.static.test_tabs import open_talk

NOTE = "without the oldest messages"


def open_settings(page: Page) -> None:
    expect(page.locator("#model")).not_to_be_empty()
    page.locator("#settings").click()


def save(page: Page) -> None:
    page.get_by_role("button", name="Save").click()


def test_what_was_not_sent_is_kept_for_each_conversation(page: Page, server: ScriptedServer) -> None:
    field = page.locator("#field")
    ask(page, server, "One", "1")
    field.fill("half a question")
    page.get_by_role("button", name="New conversation").click()
    expect(field).to_have_value("")
    field.fill("another half")
    open_talk(page, "One")
    expect(field).to_have_value("half a question")
    reload(page)
    expect(field).to_have_value("half a question")
    page.get_by_role("button", name="Edit message").click()
    expect(field).to_have_value("One")
    page.keyboard.press("Escape")
    expect(field).to_have_value("half a question")
    ask(page, server, "Two", "2")
    page.get_by_role("button", name="New conversation").click()
    expect(field).to_have_value("another half")
    open_talk(page, "One")
    expect(field).to_have_value("")


def test_only_lanes_that_the_key_may_use_are_offered(open_page: OpenPage, server: ScriptedServer) -> None:
    server.offers["lanes"] = ["standard", "batch"]
    page = open_page()
    page.evaluate("localStorage['penstock.settings'] = JSON.stringify({lane: 'interactive'})")
    reload(page)
    message = "Your API key does not allow the service_tier 'priority'."
    server.script(Refusal(403, message, "service_tier_not_allowed"), stream("Yes."))
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("Your key does not allow this lane")
    page.get_by_role("button", name="Choose a lane").click()
    expect(page.get_by_label("Lane").locator("option:enabled")).to_have_count(3)
    expect(page.get_by_label("Lane")).to_have_value("auto")
    save(page)
    page.get_by_role("button", name="Try again").click()
    expect_state(page, "done")
    assert [body["service_tier"] for body in server.requests(2)] == ["priority", "auto"]


@pytest.mark.parametrize("offered", [None, "switch", "effort"])
def test_thinking_is_set_where_the_model_has_it(
    open_page: OpenPage, server: ScriptedServer, offered: str | None
) -> None:
    server.offers["reasoning"] = offered
    page = open_page()
    open_settings(page)
    thinking = page.get_by_label("Thinking")
    expect(thinking).to_be_visible() if offered else expect(thinking).to_be_hidden()
    if offered:
        assert thinking.locator("option").all_text_contents()[1:] == ["off", "little", "some", "much"]
        thinking.select_option("none")
    save(page)
    ask(page, server, "Hello", "Yes.")
    [body] = server.requests(1)
    assert body.get("reasoning") == ({"effort": "none"} if offered else None)


def test_a_full_context_goes_on_with_a_note(page: Page, server: ScriptedServer) -> None:
    expect(page.locator("#context")).to_be_hidden()
    ask(page, server, "One", "1")
    expect(page.locator("#context")).to_have_text("41 tokens of 512")
    expect(last_answer(page).locator(".stats")).not_to_contain_text(NOTE)
    server.script(TOO_LONG, stream("2"))
    say(page, "Two")
    expect_state(page, "done")
    expect(last_answer(page).locator(".stats")).to_contain_text(NOTE)
    assert [body.get("truncation") for body in server.requests(3)] == [None, None, "auto"]
    reload(page)
    expect(last_answer(page).locator(".stats")).to_contain_text(NOTE)


def test_a_server_that_keeps_nothing_is_sent_the_last_turns(page: Page, server: ScriptedServer) -> None:
    open_settings(page)
    page.get_by_label("Conversations are kept").select_option("browser")
    save(page)
    for number in ("1", "2", "3"):
        ask(page, server, f"Question {number}", number)
    server.script(TOO_LONG, TOO_LONG, TOO_LONG)
    say(page, "Question 4")
    expect(page.get_by_role("alert")).to_contain_text("too long for this model")
    sent = [[each["content"] for each in body["messages"]] for body in server.requests(6)[3:]]
    assert [messages[0] for messages in sent] == ["Question 1", "Question 3", "Question 4"]


def test_a_conversation_may_have_a_system_prompt_of_its_own(page: Page, server: ScriptedServer) -> None:
    open_settings(page)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("In this conversation instead").fill("Rhyme.")
    save(page)
    ask(page, server, "One", "1")
    page.get_by_role("button", name="New conversation").click()
    ask(page, server, "Two", "2")
    reload(page)
    open_talk(page, "One")
    ask(page, server, "Three", "3")
    assert [body["instructions"] for body in server.requests(3)] == ["Rhyme.", "Be brief.", "Rhyme."]


def test_the_address_of_a_deleted_conversation_adds_no_entry_to_the_history(
    page: Page, server: ScriptedServer
) -> None:
    ask(page, server, "One", "1")
    page.get_by_role("button", name="New conversation").click()
    ask(page, server, "Two", "2")
    page.get_by_role("button", name="Delete One").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator(".conversation")).to_have_text(["Two"])
    page.go_back()
    page.go_back()
    expect(page.locator("#welcome")).to_be_visible()
    page.go_forward()
    page.go_forward()
    expect(page.locator(".answer .text")).to_have_text("2")


def test_a_stream_writes_the_message_that_grows_alone(page: Page, server: ScriptedServer) -> None:
    ask(page, server, "One", "1")
    reload(page)
    page.evaluate("""() => {
        window.put = [];
        const { put } = IDBObjectStore.prototype;
        IDBObjectStore.prototype.put = function (row) {
            if (this.name === "messages") window.put.push(row.text);
            return put.call(this, row);
        };
    }""")
    ask(page, server, "Two", "2")
    assert set(page.evaluate("window.put")) <= {"Two", "", "2"}


def test_a_conversation_is_saved_for_people_to_read(
    page: Page, server: ScriptedServer, tmp_path: Path
) -> None:
    expect(page.get_by_role("button", name="Download as Markdown")).to_be_hidden()
    ask(page, server, "A colour", "Red.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as Markdown").click()
    assert download.value.suggested_filename.endswith(".md")
    download.value.save_as(tmp_path / "talk.md")
    assert (tmp_path / "talk.md").read_text() == "# A colour\n\n## You\n\nA colour\n\n## Answer\n\nRed.\n"


def test_keys_are_named_as_on_the_users_keyboard(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator(".search kbd")).to_have_text("Ctrl K")
    page.add_init_script("Object.defineProperty(navigator, 'platform', {get: () => 'MacIntel'})")
    reload(page)
    expect(page.locator(".search kbd")).to_have_text("⌘ K")
