"""The window into the engine and the answers' timelines, against a server that tells what the test tells it to."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.static.conftest import PHONE, OpenPage, act_until, reload
from tests.static.scripted import TIMINGS, Gate, ScriptedServer, stream
from tests.static.test_access import faults

NUM_BLOCKS = 64


def encoded(number: int, *, up_to: int) -> str:
    return b64encode(bytes([number] * up_to + [0] * (NUM_BLOCKS - up_to))).decode()


KV = {
    "num_blocks": NUM_BLOCKS,
    "blocks_per_cell": 1,
    "held": encoded(255, up_to=12),
    "shared": encoded(255, up_to=5),
    "cached": encoded(0, up_to=0),
    "holders": encoded(4, up_to=5),
    "num_held": 12,
    "num_shared": 5,
    "num_cached": 20,
    "num_saved": 15,
}


def server_event(
    *,
    waiting: int = 0,
    states: dict[str, int] | None = None,
    tiers: dict[str, dict[str, int]] | None = None,
) -> tuple[str, Any]:
    lane = {"waiting": waiting, "forecast_ttft_ms": 1200, "promised_ttft_ms": 1000, "attainment": 0.98}
    engine = {
        "running": 3,
        "waiting": 1,
        "steps": 1234,
        "preemptions": 0,
        "output_tokens": 99,
        "kv_blocks": NUM_BLOCKS,
        "kv_free_blocks": 52,
        "kv_cached_blocks": 20,
        "states": states,
        "tiers": tiers,
    }
    return "server", {"state": "ready", "streams": 3, "lanes": {"interactive": lane}, "engine": engine}


def steps_event(at_ms: float, *, output_tokens: int = 0, **fields: Any) -> tuple[str, Any]:
    told = {
        "at_ms": at_ms,
        "num_steps": 2,
        "busy_ms": 9.0,
        "draft_spent_ms": 4.0,
        "draft_saved_ms": 6.0,
        "loop_lag_ms": 1.5,
        "output_tokens": output_tokens,
        "prefill_tokens": 30,
        "decode_tokens": 6,
        "draft_tokens": 8,
        "accepted_tokens": 6,
        "prefix_query_tokens": 40,
        "prefix_hit_tokens": 10,
        "experts_touched": 0,
        "expert_layers": 0,
        "preemptions": 0,
        "steps": {
            "started_ms": [at_ms - 10, at_ms - 5],
            "duration_ms": [5.0, 4.0],
            "prefill": [30, 0],
            "decode": [3, 3],
            "drafts": [0, 8],
            "accepted": [0, 6],
        },
    }
    return "steps", told | fields


def open_window(page: Page, server: ScriptedServer) -> Locator:
    server.told += [server_event(), steps_event(0.0), ("kv", KV), server_event(waiting=2)]
    server.told += [steps_event(500.0, output_tokens=210)]
    page.get_by_role("button", name="Engine").click()
    window = page.locator("#window")
    expect(window.get_by_role("heading", name="The engine, live")).to_be_focused()
    expect(chart(window, "Tokens per second")).to_contain_text("420")
    return window


def expect_unwatched(page: Page, server: ScriptedServer) -> None:
    act_until(lambda: not server.watchers, lambda: page.wait_for_timeout(1))


def chart(window: Locator, title: str) -> Locator:
    caption = window.page.locator("figcaption", has_text=re.compile(f"^{title}"))
    return window.locator("figure.chart").filter(has=caption)


def test_the_window_shows_what_the_engine_does(page: Page, server: ScriptedServer) -> None:
    window = open_window(page, server)
    expect(window.locator(".window-head")).to_contain_text(
        "ready: 3 answers in the making, 1,234 steps so far"
    )
    lane = window.get_by_role("region", name="interactive lane")
    expect(lane).to_have_attribute("data-standing", "over")
    expect(lane.locator("dd")).to_have_text(["1.2 s", "1.0 s", "98 %", "2"])
    for title, values in {
        "Sequences": "3 running3 waiting",
        "Tokens in a step": "15 prompt3 decode4 drafts",
        "Time of a step": "4.5 ms",
        "KV blocks in use": "19 %",
        "Prefix cache hits": "25 %",
        "Drafts accepted": "75 %",
        "Event-loop lag": "1.5 ms",
    }.items():
        expect(chart(window, title).locator(".values")).to_have_text(values)
    expect(window.locator(".steps .note")).to_contain_text("12 of 16 drafts were right")
    cells = [row.inner_text().split("\t") for row in window.locator(".blocks tbody tr").all()]
    assert cells == [
        ["held by several sequences", "5", "8 %"],
        ["held by one", "7", "11 %"],
        ["free, content cached", "20", "31 %"],
        ["free", "32", "50 %"],
    ]
    expect(window.locator(".blocks .note")).to_have_text("Each cell is a block. Sharing saves 15 blocks now.")
    expect(page.get_by_role("img", name="64 KV blocks: 5 held by several")).to_be_visible()
    colors = """canvas => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    }"""
    assert window.locator(".blocks canvas").evaluate(colors) >= 3


def test_tenants_are_shown_where_there_are_several(page: Page, server: ScriptedServer) -> None:
    window = open_window(page, server)
    part = window.get_by_role("region", name="Who takes the machine")
    named = {"tenant": "noisy", "share": 0.62, "waiting": 12, "running": 5, "refused": 1040}
    others = {"tenants": 0, "share": 0.0, "waiting": 0, "running": 0, "refused": 0}
    server.told += [("tenants", {"tenants": [named], "others": dict(others)}), server_event(waiting=7)]
    server.told += [steps_event(1000.0)]
    expect(window.get_by_role("region", name="interactive lane").locator("dd").last).to_have_text("7")
    expect(part).to_be_hidden()
    others |= {"tenants": 3, "share": 0.38, "running": 4}
    server.told += [("tenants", {"tenants": [named], "others": others})]
    expect(part.locator("tbody tr")).to_have_count(2)
    rows = [row.inner_text().split("\t") for row in part.locator("tbody tr").all()]
    assert rows == [["noisy", "62 %", "12", "5", "1,040"], ["3 others", "38 %", "0", "4", "0"]]


def test_experts_are_shown_of_a_model_that_has_some(page: Page, server: ScriptedServer) -> None:
    window = open_window(page, server)
    expect(chart(window, "Experts read by a layer")).to_be_hidden()
    server.told += [steps_event(1000.0, experts_touched=84, expert_layers=2)]
    expect(chart(window, "Experts read by a layer").locator(".values")).to_have_text("42")


def test_states_are_shown_of_a_model_that_has_some(page: Page, server: ScriptedServer) -> None:
    window = open_window(page, server)
    expect(chart(window, "States kept")).to_be_hidden()
    server.told += [server_event(states={"slots": 40, "held": 3, "snapshots": 12}), steps_event(1000.0)]
    expect(chart(window, "States kept").locator(".values")).to_have_text("3 of sequences12 snapshots")


def test_tiers_are_shown_where_there_are_some(page: Page, server: ScriptedServer) -> None:
    window, title = open_window(page, server), "KV blocks kept outside of the cache"
    expect(chart(window, title)).to_be_hidden()
    server.told += [server_event(tiers={"disk": {"blocks": 40}}), steps_event(1000.0)]
    expect(chart(window, title).locator(".values")).to_contain_text("40 on disk")


def test_every_chart_can_be_read_without_seeing_it(page: Page, server: ScriptedServer) -> None:
    window = open_window(page, server)
    picture = chart(window, "Tokens per second").get_by_role("img")
    expect(picture).to_have_attribute("aria-label", re.compile("^Tokens per second, now: .* 420, mean 420"))
    picture.focus()
    page.keyboard.press("ArrowLeft")
    expect(picture).to_have_attribute("aria-label", re.compile("^Tokens per second, 0.5 s ago"))
    window.get_by_role("button", name="As tables").click()
    expect(window.locator("table:visible")).to_have_count(10)
    assert chart(window, "Sequences").locator("tbody tr").all_inner_texts() == ["now\t3\t2"]
    for named in window.get_by_role("img").all():
        expect(named).to_have_attribute("aria-label", re.compile("."))
    assert faults(page) == []


def test_nothing_is_asked_while_nobody_looks(page: Page, server: ScriptedServer) -> None:
    assert not server.watchers
    open_window(page, server)
    assert len(server.watchers) == 1
    page.keyboard.press("Escape")
    expect(page.locator("#window")).to_be_hidden()
    expect(page.get_by_role("button", name="Engine")).to_be_focused()
    expect(page.locator("#composer")).to_be_visible()
    expect_unwatched(page, server)


def test_a_button_that_is_pressed_twice_opens_one_window(page: Page) -> None:
    page.get_by_role("button", name="Engine").evaluate("button => { button.click(); button.click(); }")
    expect(page.locator("#window-title")).to_be_focused()
    expect(page.locator("#window")).to_have_count(1)


def test_the_window_fits_a_phone(open_page: OpenPage, server: ScriptedServer) -> None:
    page = open_page(**PHONE, color_scheme="dark")
    window = open_window(page, server)
    assert faults(page) == []
    assert window.evaluate("node => node.scrollWidth <= node.clientWidth")
    for card in window.locator("figure, .lane").all():
        assert card.evaluate("node => node.scrollWidth <= node.clientWidth"), card.inner_text()


def test_an_answer_has_its_place_while_it_waits_and_its_timeline_at_the_end(
    page: Page, server: ScriptedServer
) -> None:
    gate = Gate()
    timeline = {
        "prefills": [[40, 16], [85, 8]],
        "preempted_ms": [],
        "resumed_ms": [],
        "drafts": [[100, 4, 3], [110, 2, 0]],
        "ended_ms": 125,
    }
    server.script(
        stream(
            gate,
            "Once ",
            "upon ",
            "a time.",
            timings=TIMINGS | {"timeline": timeline, "draft_tokens": 6, "accepted_tokens": 3},
        )
    )
    place = {"request_id": "x", "position": 2, "waited_ms": 10, "first_token_in_ms": 1200}
    server.told.append(("request", place))
    page.locator("#field").fill("Tell me a story")
    page.locator("#field").press("Enter")
    shown = page.locator(".answer .timeline")
    expect(shown).to_contain_text("3rd in the queue, first token in about 1.2 s")
    gate.open()
    expect(page.locator(".answer")).to_have_attribute("data-state", "done")
    expect(shown.locator("summary")).to_contain_text("24 of 40 prompt tokens computed in 2 steps")
    expect_unwatched(page, server)
    strip = shown.locator("svg")
    expect(strip.locator(".tick")).to_have_count(3)
    expect(strip.locator("rect.prefill")).to_have_count(2)
    expect(strip.locator("rect.accepted")).to_have_count(2)
    shown.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(shown.locator("table")).to_be_visible()
    assert faults(page) == []
    rows = shown.locator("tbody td:nth-child(2)").all_inner_texts()
    assert rows == [
        "queued",
        "16 prompt tokens computed",
        "8 prompt tokens computed",
        "first token",
        "tokens",
        "4 drafts, 3 accepted",
        "2 drafts, 0 accepted",
    ]
    reload(page)
    expect(shown.locator("rect.prefill")).to_have_count(
        2
    )  # its instants are kept, those of its tokens are not
    expect(shown.locator(".tick")).to_have_count(0)
