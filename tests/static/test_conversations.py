"""Conversations as a person uses them: versions, search, files, and long ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.static.conftest import PHONE, OpenPage, reload
from tests.static.scripted import Gate, ScriptedServer, Thought, stream
from tests.static.test_page import assert_fits, expect_state, last_answer, say


def versions(article: Locator) -> Locator:
    return article.get_by_role("group", name="Versions")


# Versions.


def test_every_version_of_an_answer_stays_and_the_talk_goes_on_from_the_one_shown(
    page: Page, server: ScriptedServer
) -> None:
    server.script(stream("Red."), stream("Green."), stream("Like grass."), stream("Blue."))
    say(page, "A colour")
    expect_state(page, "done")
    expect(versions(last_answer(page))).to_be_hidden()
    page.get_by_role("button", name="Answer again").click()
    expect(last_answer(page).locator(".text")).to_have_text("Green.")
    expect(versions(last_answer(page))).to_have_text("2 of 2")
    say(page, "Like what?")
    expect(last_answer(page).locator(".text")).to_have_text("Like grass.")
    expect_state(page, "done")
    first = page.locator(".answer").first
    first.get_by_role("button", name="Previous version").click()
    expect(page.locator(".answer .text")).to_have_text(["Red."])
    page.get_by_role("button", name="Next version").click()
    expect(page.locator(".answer .text")).to_have_text(["Green.", "Like grass."])
    page.locator(".answer").first.get_by_role("button", name="Answer again").click()
    expect(versions(page.locator(".answer"))).to_have_text("3 of 3")
    expect(page.locator(".answer .text")).to_have_text(["Blue."])
    expect_state(page, "done")
    assert [[each["content"] for each in sent["messages"]] for sent in server.requests(4)[2:]] == [
        ["A colour", "Green.", "Like what?"],
        ["A colour"],
    ]
    page.get_by_role("button", name="Previous version").click()
    reload(page)
    expect(page.locator(".answer .text")).to_have_text(["Green.", "Like grass."])


def test_an_edited_message_is_a_branch_and_the_keyboard_goes_between_them(
    page: Page, server: ScriptedServer
) -> None:
    server.script(stream("One."), stream("Two."), stream("Three."))
    say(page, "first")
    expect_state(page, "done")
    for text in ("second", "third"):
        page.get_by_role("button", name="Edit message").click()
        say(page, text)
        expect(page.locator(".bubble")).to_have_text([text])
        expect_state(page, "done")
    page.get_by_role("button", name="Previous version").press("Enter")
    expect(page.locator(".bubble")).to_have_text(["second"])
    expect(page.get_by_role("button", name="Previous version")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".bubble")).to_have_text(["first"])
    expect(page.locator(".answer .text")).to_have_text(["One."])
    expect(page.get_by_role("button", name="Next version")).to_be_focused()
    assert [each["messages"] for each in server.requests(3)] == [
        [{"role": "user", "content": text}] for text in ("first", "second", "third")
    ]


def test_an_answer_goes_on_while_another_version_is_read(page: Page, server: ScriptedServer) -> None:
    gate = Gate()
    server.script(stream("Red."), stream("Dark ", gate, "green."))
    say(page, "A colour")
    expect_state(page, "done")
    page.get_by_role("button", name="Answer again").click()
    expect(last_answer(page).locator(".text")).to_have_text("Dark")
    page.get_by_role("button", name="Previous version").click()
    expect(last_answer(page).locator(".text")).to_have_text("Red.")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.get_by_role("button", name="Next version").click()
    expect(last_answer(page).locator(".text")).to_have_text("Dark")
    gate.open()
    expect(last_answer(page).locator(".text")).to_have_text("Dark green.")


# The list.


def test_search_finds_words_in_titles_and_messages(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Leek soup, with a potato."), stream("It scatters light."))
    say(page, "Dinner")
    expect_state(page, "done")
    page.keyboard.press("Control+Shift+KeyO")
    say(page, "The sky")
    expect_state(page, "done")
    expect(page.locator("#conversations .age")).to_have_text("Today")
    page.keyboard.press("Control+KeyK")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    page.keyboard.type("potato LEEK")
    expect(page.locator("#found")).to_have_text("1 conversation")
    expect(page.locator(".conversation")).to_have_text("Dinner…soup, with a potato.")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .text")).to_have_text("Leek soup, with a potato.")
    page.get_by_label("Search conversations").fill("turnip")
    expect(page.locator("#found")).to_have_text("Nothing found")
    expect(page.locator(".conversation")).to_have_count(0)
    page.get_by_label("Search conversations").press("Escape")
    expect(page.locator(".conversation")).to_have_text(["The sky", "Dinner"])


def test_an_export_is_taken_in_by_another_browser(
    page: Page, open_page: OpenPage, server: ScriptedServer, tmp_path: Path
) -> None:
    server.script(stream("Red."), stream("Green."), stream("Yes."))
    say(page, "A colour")
    expect_state(page, "done")
    page.get_by_role("button", name="Answer again").click()
    expect(last_answer(page).locator(".text")).to_have_text("Green.")
    expect_state(page, "done")
    page.keyboard.press("Control+Shift+KeyO")
    say(page, "Other")
    expect_state(page, "done")
    with page.expect_download() as all_of_them:
        page.get_by_role("button", name="Export all").click()
    with page.expect_download() as one:
        page.locator("#conversations li", has_text="A colour").hover()
        page.get_by_role("button", name="Export A colour").click()
    assert re.fullmatch(r"penstock-a-colour-\d{4}-\d\d-\d\d\.json", one.value.suggested_filename)
    files = {name: tmp_path / f"{name}.json" for name in ("all", "one", "bad")}
    all_of_them.value.save_as(files["all"])
    one.value.save_as(files["one"])
    files["bad"].write_text("[1, 2]")
    other = open_page()
    taken = other.locator("#imported")
    for name, said, number in (
        ("bad", "This file holds no conversations of Penstock.", 0),
        ("one", "Imported 1.", 1),
        ("all", "Imported 1.", 2),
        ("all", "Everything in this file is here already.", 2),
    ):
        other.locator("#import-file").set_input_files(files[name])
        expect(other.locator(".conversation")).to_have_count(number)
        expect(taken).to_have_text(said)
    expect(other.locator(".conversation")).to_have_text(["Other", "A colour"])
    reload(other)
    other.get_by_role("button", name="A colour", exact=True).click()
    expect(other.locator(".answer .text")).to_have_text("Green.")
    other.get_by_role("button", name="Previous version").click()
    expect(other.locator(".answer .text")).to_have_text("Red.")
    expect(last_answer(other).locator(".stats")).to_contain_text("interactive lane")


# Settings.


def test_the_servers_own_choices_stand_where_nothing_was_chosen(page: Page, server: ScriptedServer) -> None:
    server.script(stream("Yes."))
    expect(page.locator("#model")).to_have_text("penstock-demo")
    page.get_by_role("button", name="Settings").click()
    for label, shown in (("Temperature", "0.7"), ("Top p", "0.8"), ("Longest answer", "what fits in 512")):
        expect(page.get_by_label(label)).to_have_attribute("placeholder", shown)
    page.get_by_text("More", exact=True).click()
    expect(page.get_by_label("Top k")).to_have_attribute("placeholder", "20")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Stop at").fill("END\n###")
    page.get_by_role("button", name="Save").click()
    say(page, "Hello")
    expect_state(page, "done")
    [sent] = server.requests(1)
    assert (sent["seed"], sent["stop"], "temperature" in sent) == (7, ["END", "###"], False)
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Seed")).to_have_value("7")  # what was chosen is not folded away
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("button", name="Save").click()
    assert json.loads(page.evaluate("localStorage['penstock.settings']"))["seed"] is None


# Answers.

RICH = r"""Area: $\pi r^2$, and

$$ \int_0^1 x^2 \, dx = \frac{1}{3} $$

Bad: $\unknown{x}^2$, $\href{javascript:alert(1)}{x}_1$, $\pmb{x}_1$

```python
def area(r):  # of a circle
    return 3.14 * r ** 2
```
"""


def test_formulas_and_code_are_shown_as_such(page: Page, server: ScriptedServer) -> None:
    gate = Gate()
    server.script(stream(RICH[:20], gate, *RICH[20:].splitlines(keepends=True)))
    say(page, "The area?")
    expect(last_answer(page).locator(".text")).to_contain_text("Area")
    loaded = "performance.getEntriesByType('resource').filter(({name}) => /temml|highlight/.test(name))"
    gate.open()
    expect_state(page, "done")
    expect(page.locator(".math math")).to_have_count(3)
    expect(page.locator(".math.block math mfrac")).to_have_count(1)
    expect(page.locator(".math > code")).to_have_text([r"\unknown{x}^2", r"\href{javascript:alert(1)}{x}_1"])
    expect(page.locator(".hl-keyword")).to_have_text(["def", "return"])
    expect(page.locator(".hl-comment")).to_have_text("# of a circle")
    assert page.locator("#messages a").count() == 0
    reload(page)
    expect(page.locator(".math math")).to_have_count(3)
    expect(page.locator(".hl-comment")).to_have_text("# of a circle")
    page.get_by_role("button", name="New conversation").click()
    reload(page)
    expect(page.locator("#welcome")).to_be_visible()
    assert page.evaluate(loaded) == []  # who sees neither pays for neither


@pytest.mark.parametrize("told_apart", [True, False], ids=["by the server", "by tags"])
def test_thoughts_are_folded_away_and_not_sent_again(
    page: Page, server: ScriptedServer, told_apart: bool
) -> None:
    gate = Gate()
    thoughts = (
        (Thought("Seven eights "), gate, Thought("are 56."))
        if told_apart
        else ("<think>", "Seven eights ", gate, "are 56.\n</think>\n\n")
    )
    server.script(stream(*thoughts, "It is **56**."), stream("Yes."))
    say(page, "7 times 8?")
    expect(page.locator("summary", has_text="Thinking…")).to_be_visible()
    gate.open()
    expect_state(page, "done")
    expect(last_answer(page).locator(".text")).to_have_text("It is 56.")
    folded = last_answer(page).get_by_text("Seven eights are 56.")
    expect(folded).to_be_hidden()
    page.get_by_text("Thoughts").click()
    expect(folded).to_be_visible()
    expect(page.locator("#announcer")).to_have_text("It is 56.")
    say(page, "Sure?")
    expect_state(page, "done")
    assert [each["content"] for each in server.requests(2)[1]["messages"]] == [
        "7 times 8?",
        "It is **56**.",
        "Sure?",
    ]


LONG: dict[str, Any] = {
    "format": "penstock.conversations",
    "version": 1,
    "conversations": [
        {
            "id": "long",
            "title": "Long",
            "updated": 1,
            "tip": "m299",
            "messages": [
                {
                    "id": f"m{at}",
                    "parent": f"m{at - 1}" if at else None,
                    "role": "assistant" if at % 2 else "user",
                    "text": f"Message {at}.\n\n- one\n- two\n\n```js\nconst x = {at};\n```",
                    "state": "done",
                    "stats": None,
                }
                for at in range(300)
            ],
        }
    ],
}


def test_three_hundred_messages(page: Page, server: ScriptedServer, tmp_path: Path) -> None:
    """They come into view from the end, a few for a frame, and the page goes on with them."""
    file = tmp_path / "long.json"
    file.write_text(json.dumps(LONG))
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("#imported")).to_have_text("Imported 1.")
    page.evaluate("""() => {
        window.most = 0;
        new MutationObserver((changes) => {
            const added = changes.flatMap(({addedNodes}) => [...addedNodes]).filter((n) => n.localName === "article");
            window.most = Math.max(window.most, added.length);
        }).observe(document.getElementById("messages"), {childList: true});
    }""")
    page.get_by_role("button", name="Long", exact=True).click()
    expect(page.locator("article").last).to_contain_text("Message 299")
    expect(page.locator("article").last).to_be_in_viewport()
    expect(page.locator("article")).to_have_count(300)
    numbers = [int(re.findall(r"\d+", text)[0]) for text in page.locator("article").all_text_contents()]
    assert numbers == list(range(300))
    assert 0 < page.evaluate("window.most") <= 16
    server.script(stream("The end."))
    say(page, "And?")
    expect(last_answer(page).locator(".text")).to_have_text("The end.")
    expect(last_answer(page)).to_be_in_viewport()
    assert len(server.requests(1)[0]["messages"]) == 301


# Other modules, a phone.


def test_modules_can_follow_an_answer(page: Page, server: ScriptedServer) -> None:
    page.evaluate("""() => {
        window.told = [];
        document.addEventListener("penstock:answer", ({detail}) => window.told.push({...detail,
            element: detail.element?.className ?? null}));
    }""")
    server.script(stream("One ", "two."))
    with page.expect_request("**/v1/responses") as asked:
        say(page, "Count")
    expect_state(page, "done")
    told = page.evaluate("window.told")
    phases = [each["phase"] for each in told]
    assert phases == ["shown", "asked", *["piece"] * 4, "end"]
    assert {each["element"] for each in told} == {"answer-meta"}
    assert {each["requestId"] for each in told[1:]} == {asked.value.headers["x-request-id"]}
    assert [each["tokens"] for each in told[2:]] == [0, 1, 2, 2, 2]
    assert [each["hasText"] for each in told[2:]] == [False, True, True, False, False]
    assert told[-1]["timings"]["lane"] == "interactive"


def test_everything_on_a_phone(open_page: OpenPage, server: ScriptedServer) -> None:
    page = open_page(**PHONE)
    server.script(stream(RICH.replace("x^2", "x^2 + " * 40)), stream("<think>a</think>b"))
    page.locator("#field").fill("word " * 40)
    page.locator("#send").tap()
    expect_state(page, "done")
    page.get_by_role("button", name="Answer again").tap()
    expect(versions(last_answer(page))).to_have_text("2 of 2")
    expect_state(page, "done")
    assert_fits(page)
    page.locator("#menu").tap()
    expect(page.get_by_role("button", name="Export all")).to_be_visible()
    assert_fits(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").tap()
    page.get_by_text("More", exact=True).tap()
    expect(page.get_by_label("Seed")).to_be_visible()
    assert_fits(page)
