"""The page's pure modules, in the browser that they are written for."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.static.conftest import Call
from tests.static.scripted import STATIC

PARSED = [
    ("data: a\n\n", ["a"]),
    ("data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
    ("data: a\ndata: b\n\n", ["a\nb"]),
    ("data:a\n\ndata:  b\n\n", ["a", " b"]),
    ("data\n\n", [""]),
    ("data:\ndata:\n\n", ["\n"]),
    (": ping\ndata: a\n\n", ["a"]),
    (": ping\n\n\n\ndata: a\n\n", ["a"]),
    ("event: x\nid: 1\nretry: 5\ndata: a\nunknown: b\n\n", ["a"]),
    ("id: 1\n\n", []),
    ("data: the last one is not finished\n", []),
    ("data: a: b\n\n", ["a: b"]),
    ("datab: no\n data: no\n\n", []),
    ("\ufeffdata: a\n\n", ["a"]),
    ("data: é€😀\n\n", ["é€😀"]),
]

READ_BYTES = """
    const [bytes, size] = args;
    const body = new ReadableStream({start(controller) {
        for (let at = 0; at < bytes.length; at += size)
            controller.enqueue(new Uint8Array(bytes.slice(at, at + size)));
        controller.close();
    }});
    const events = [];
    for await (const { data } of m.readEvents(body)) events.push(data);
    return events;
"""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(call: Call, size: int) -> None:
    for text, events in PARSED:
        assert call("sse.js", READ_BYTES, list(text.encode()), size) == events, text


def test_an_event_is_given_as_soon_as_its_blank_line_is_there(call: Call) -> None:
    pushed = call(
        "sse.js",
        r"const p = new m.EventStreamParser(); return args[0].map((t) => p.push(t).map((event) => event.data));",
        [
            "data: a\r",
            "\r",
            "\ndata: b",
            "\n\n",
        ],
    )
    assert pushed == [[], ["a"], [], ["b"]]


def test_an_event_has_its_own_id(call: Call) -> None:
    text = "id: 0\ndata: a\n\n: ping\nid: 1\ndata: b\n\ndata: c\n\nid: 2\n\ndata: d\n\n"
    events = call("sse.js", "return new m.EventStreamParser().push(args[0]);", text)
    assert [(event["data"], event["id"]) for event in events] == [
        ("a", "0"),
        ("b", "1"),
        ("c", None),
        ("d", None),
    ]


def test_leaving_early_cancels_the_stream(call: Call) -> None:
    assert call(
        "sse.js",
        r"""
        let cancelled = false;
        const body = new ReadableStream({
            start: (c) => c.enqueue(new TextEncoder().encode("data: a\n\n")),
            cancel: () => { cancelled = true; },
        });
        for await (const data of m.readEvents(body)) break;
        return cancelled;
    """,
    )


@pytest.mark.parametrize(
    ("headers", "delay"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3000),
        ({"retry-after": "0"}, 0),
        ({"retry-after": "3", "retry-after-ms": "250"}, 250),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:09 GMT"}, 8000),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "2", "retry-after-ms": "-1"}, 2000),
    ],
)
def test_retry_after(call: Call, headers: dict[str, str], delay: int | None) -> None:
    assert call("api.js", "return m.retryDelayMs(new Headers(args[0]), 1000);", headers) == delay


PAUSES = """
    const pauses = new m.Pauses();
    return args[0].map((step) => step === "reset" ? pauses.reset() : pauses.next(...step));
"""


def test_pauses_grow_until_something_comes(call: Call) -> None:
    losses: list[Any] = [[at] for at in (1000, 2000, 4000, 8000, 16_000, 32_000)]
    grown = call("resume.js", PAUSES, [*losses, "reset", [33_000]])
    assert grown == [500, 1000, 2000, 4000, 5000, 5000, None, 500]


def test_what_is_lost_for_two_minutes_is_given_up(call: Call) -> None:
    losses = [[1000], [120_000], [120_900, 60_000], [121_000], [121_001], "reset", [121_002]]
    assert call("resume.js", PAUSES, losses) == [500, 1000, 100, None, None, None, 500]


def test_the_servers_wait_makes_pauses_longer_but_not_shorter(call: Call) -> None:
    assert call("resume.js", PAUSES, [[0, 3000], [3000, 0], [4000, None]]) == [3000, 1000, 2000]


@pytest.mark.parametrize(
    ("fault", "passes"),
    [
        ({"kind": "lost"}, True),
        ({"kind": "unreachable"}, True),
        ({"kind": "refused", "status": 503, "code": "store_unavailable"}, True),
        ({"kind": "refused", "status": 502}, True),
        ({"kind": "failed", "code": "server_shutting_down"}, True),
        ({"kind": "failed", "code": "engine_failed"}, False),
        ({"kind": "refused", "status": 401}, False),
        ({"kind": "refused", "status": 400}, False),
        ({"kind": "gone"}, False),
    ],
)
def test_which_faults_pass(call: Call, fault: dict[str, Any], passes: bool) -> None:
    assert call("resume.js", "return m.isPassing(args[0]);", fault) == passes


def test_a_pause_ends_with_its_time_with_the_network_and_by_the_user(call: Call) -> None:
    ends = call(
        "resume.js",
        """
        const outcome = (promise) => promise.then(() => "over", (fault) => fault.name);
        const controller = new AbortController();
        const short = outcome(m.pause(1, controller.signal));
        const online = outcome(m.pause(1e6, controller.signal));
        dispatchEvent(new Event("online"));
        const first = [await short, await online];
        const stopped = outcome(m.pause(1e6, controller.signal));
        controller.abort();
        return [...first, await stopped];
    """,
    )
    assert ends == ["over", "over", "AbortError"]


RENDER = """
    const div = document.createElement("div");
    div.append(m.renderMarkdown(args[0]));
    for (const node of div.querySelectorAll("figcaption button")) node.remove();
    for (const chunk of div.querySelectorAll("pre > code > span")) chunk.replaceWith(...chunk.childNodes);
    return div.innerHTML;
"""
LINK = ' target="_blank" rel="noopener noreferrer"'
PRE = '<pre tabindex="0" role="region" aria-label="Code"><code>'
MARKDOWN = [
    ("", ""),
    ("plain", "<p>plain</p>"),
    ("two\nlines", "<p>two<br>lines</p>"),
    ("one\n\ntwo", "<p>one</p><p>two</p>"),
    (
        "*a* **b** ***c*** _d_ __e__ ~~f~~",
        "<p><em>a</em> <strong>b</strong> <strong><em>c</em></strong> "
        "<em>d</em> <strong>e</strong> <del>f</del></p>",
    ),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("2 * 3 * 4, snake_case_name, **open", "<p>2 * 3 * 4, snake_case_name, **open</p>"),
    ("*a**", "<p><em>a</em>*</p>"),
    (r"\*a\* \x", r"<p>*a* \x</p>"),
    ("`a*b*` ``c`d`` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"),
    ("[t](https://x.org/a_(b))", f'<p><a href="https://x.org/a_(b)"{LINK}>t</a></p>'),
    ('[*t*](http://x.org "title")', f'<p><a href="http://x.org/"{LINK}><em>t</em></a></p>'),
    (
        "https://x.org/a. <https://y.org>",
        f'<p><a href="https://x.org/a"{LINK}>https://x.org/a</a>. '
        f'<a href="https://y.org/"{LINK}>https://y.org</a></p>',
    ),
    ("[https://x.org](https://y.org)", f'<p><a href="https://y.org/"{LINK}>https://x.org</a></p>'),
    ("[t](javascript:alert(1))", "<p>[t](javascript:alert(1))</p>"),
    ("[t](data:text/html,x) [t](/local) [t] [t](", "<p>[t](data:text/html,x) [t](/local) [t] [t](</p>"),
    ("![alt](https://x.org/i.png)", f'<p><a href="https://x.org/i.png"{LINK}>alt</a></p>'),
    ("# a\n### b #\n#c", "<h3>a</h3><h5>b</h5><p>#c</p>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n\n4. b\n   more\n\nend", '<ol start="3"><li>a</li><li>b<br>more</li></ol><p>end</p>'),
    ("1. a\n- b", "<ol><li>a</li></ol><ul><li>b</li></ul>"),
    ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"),
    (
        "```\n<b>*x*\n```\nafter",
        f'<figure class="code"><figcaption><span>code</span></figcaption>{PRE}'
        "&lt;b&gt;*x*</code></pre></figure><p>after</p>",
    ),
    (
        "~~~\nopen\n```",
        f'<figure class="code"><figcaption><span>code</span></figcaption>{PRE}'
        "open\n```</code></pre></figure>",
    ),
    (
        "|a|b|\n|:-:|--:|\n|1|",
        '<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead>'
        '<tr><th class="align-center">a</th><th class="align-right">b</th></tr></thead><tbody><tr>'
        '<td class="align-center">1</td><td class="align-right"></td></tr></tbody></table></div>',
    ),
    ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
]


@pytest.mark.parametrize(("text", "html"), MARKDOWN)
def test_markdown(call: Call, text: str, html: str) -> None:
    assert call("markdown.js", RENDER, text) == html


GROWING = (
    "\n".join(text for text, _ in MARKDOWN)
    + "\n\n".join(text for text, _ in MARKDOWN)
    + (
        "\ntext\n***bold***\n-5 degrees\n1.5 litres"
        "\n---x\nx\na|b\n-|-x\n```x`y\n|a|\n|-|\n|b|\n\n> q\nlazy\n- l\nlazy\n\n  p"
    )
)


def test_a_growing_text_looks_at_each_moment_as_if_rendered_at_once(call: Call) -> None:
    differing = call(
        "markdown.js",
        """
        const [text] = args;
        const grown = new m.MarkdownView(document.createElement("div"));
        const differing = [];
        for (let end = 1; end <= text.length; end += 1) {
            const whole = document.createElement("div");
            whole.append(m.renderMarkdown(text.slice(0, end)));
            grown.update(text.slice(0, end));
            if (whole.innerHTML !== grown.element.innerHTML) differing.push(text.slice(0, end));
        }
        return differing.slice(0, 1);
    """,
        GROWING,
    )
    assert differing == []


def test_finished_blocks_are_not_touched_again(call: Call) -> None:
    assert call(
        "markdown.js",
        r"""
        const view = new m.MarkdownView(document.createElement("div"));
        view.update("one\n\ntwo\n\nthree and more");
        const first = view.element.firstChild;
        view.update("one\n\ntwo\n\nthree and more\n\nfour");
        const kept = view.element.firstChild === first;
        view.update("other");
        return kept && view.element.textContent === "other";
    """,
    )


@pytest.mark.parametrize(
    "piece",
    [
        "*",
        "_",
        "~",
        "`",
        "[",
        "]",
        "](",
        "![",
        "*a ",
        "a* ",
        "**a *b ",
        "[a](",
        "> ",
        "- ",
        "1. ",
        "|",
        "|-",
        "\\",
        "` `` ",
        "http://",
        "<http://",
        "*a _b ",
        "[*a](http://x.y) ",
        "# ",
        "```\n",
        "- a\n",
        "a|b\n-|-\n",
        "\n> ",
        "  ",
        " - ",
        "***",
        "a\n***",
    ],
)
def test_hostile_markdown_takes_linear_time(call: Call, piece: str) -> None:
    small, large = (_best_ms(call, piece * (size // len(piece))) for size in (5_000, 40_000))
    assert large < 150 or large < 20 * small, f"{piece!r}: {small} ms for 5,000, {large} ms for 40,000"


@pytest.mark.parametrize(
    "shape",
    [
        lambda n: "# a" + " " * n + "####b",
        lambda n: "# a" + " #" * (n // 2) + " b",
        lambda n: "[a" * (n // 11) + "](http://a)" * (n // 11),
        lambda n: "[a](http(" * (n // 9),
        lambda n: "|a" * (n // 4) + "\n" + "|-" * (n // 4) + "\n|" * (n // 4),
        lambda n: "*[_a" * (n // 4),
        lambda n: "*[_a" * (n // 10) + "_]*" * (n // 10),
        lambda n: "```" + " " * n + "`",
        lambda n: "~" * n + "`",
        lambda n: "a|b\n-" + " " * n + "x",
        lambda n: "***" + " " * n + "x",
    ],
    ids=[
        "heading",
        "heading marks",
        "links",
        "brackets",
        "columns",
        "openers",
        "nested",
        "fence",
        "tildes",
        "rule",
        "stars",
    ],
)
def test_hostile_shapes_take_linear_time(call: Call, shape: Callable[[int], str]) -> None:
    small, large = (_best_ms(call, shape(size)) for size in (12_500, 100_000))
    assert large < 150 or large < 20 * small, f"{small} ms for 12,500 characters, {large} ms for 100,000"


def test_an_open_block_grows_under_a_selection(call: Call) -> None:
    """What is there stays the same nodes: a selection in it holds, and code stays where it was scrolled to."""
    assert call(
        "markdown.js",
        r"""
        const found = {};
        const sheet = new CSSStyleSheet();
        sheet.replaceSync("pre { height: 50px; overflow: auto }");
        document.adoptedStyleSheets = [sheet];
        const lines = "line\n".repeat(100);
        const texts = { code: "```js\n" + lines, list: "- " + "one\n- ".repeat(20), text: "some words *and* more" };
        for (const [kind, text] of Object.entries(texts)) {
            const element = document.body.appendChild(document.createElement("div"));
            const view = new m.MarkdownView(element);
            view.update(text);
            const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
            while (walker.nextNode() && !/line|one|some/.test(walker.currentNode.data));
            getSelection().setBaseAndExtent(walker.currentNode, 0, walker.currentNode, 3);
            const pre = element.querySelector("pre");
            if (pre) pre.scrollTop = 20;
            view.update(text + "and more\n");
            view.update(text + "and more\n\nanother block");
            found[kind] = [getSelection().toString(), pre?.scrollTop ?? 20, element.textContent.includes("and more")];
            element.remove();
        }
        return found;
    """,
    ) == {"code": ["lin", 20, True], "list": ["one", 20, True], "text": ["som", 20, True]}


def _best_ms(call: Call, text: str) -> float:
    time: float = call(
        "markdown.js",
        """
        let best = Infinity;
        for (let run = 0; run < 2; run += 1) {
            const start = performance.now();
            m.renderMarkdown(args[0]);
            best = Math.min(best, performance.now() - start);
        }
        return best;
    """,
        text,
    )
    return time


def test_what_the_server_is_told_of_a_conversation(call: Call) -> None:
    history = call(
        "conversation.js",
        """
        const c = m.newConversation();
        const first = m.ask(c, "hi");
        first.text = "hello";
        const failed = m.ask(c, "and?");
        const last = m.ask(c, "well?");
        return m.historyBefore(c, last, "be brief");
    """,
    )
    assert [(each["role"], each["content"]) for each in history] == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "and?"),
        ("user", "well?"),
    ]


def test_asking_again_forgets_the_answer_and_what_followed(call: Call) -> None:
    messages = call(
        "conversation.js",
        """
        const c = m.newConversation();
        const first = m.ask(c, "hi");
        Object.assign(first, {text: "x", state: "failed", error: {kind: "lost"}, retryAt: 1});
        m.ask(c, "more");
        m.askAgain(c, first);
        return c.messages;
    """,
    )
    assert [(each["role"], each["text"], each["state"]) for each in messages] == [
        ("user", "hi", "done"),
        ("assistant", "", "waiting"),
    ]
    assert messages[1]["error"] is messages[1]["retryAt"] is None


@pytest.mark.parametrize(
    ("stream", "age_ms", "state"),
    [
        ({"id": "chatcmpl-1", "number": 7}, 86_400_000, "streaming"),
        ({"id": None, "number": -1}, 599_000, "streaming"),
        ({"id": None, "number": -1}, 601_000, "stopped"),
        (None, 0, "stopped"),
        ("missing", 0, "stopped"),
    ],
)
def test_a_stored_answer_goes_on_if_it_is_known_where(
    call: Call, stream: Any, age_ms: int, state: str
) -> None:
    message = {"state": "streaming", "retryAt": 1, "stream": stream}
    if stream == "missing":
        del message["stream"]
    conversation = {"updated": 1000, "messages": [message]}
    settled = call("conversation.js", "return m.settle(...args);", conversation, 1000 + age_ms)["messages"][0]
    assert (settled["state"], settled["retryAt"]) == (state, None)
    assert settled["stream"] == (None if stream == "missing" else stream)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Short", "Short"),
        ("  first\nsecond", "first"),
        ("word " * 30, "word " * 11 + "word…"),
        ("x" * 100, "x" * 60 + "…"),
    ],
)
def test_titles(call: Call, text: str, title: str) -> None:
    assert call("conversation.js", "return m.titleFrom(args[0]);", text) == title


@pytest.mark.parametrize("factory", ["indexedDB", "undefined", "{open() { throw new Error('refused'); }}"])
def test_stores_keep_conversations_newest_first(call: Call, factory: str) -> None:
    titles, durable = call(
        "store.js",
        f"""
        const open = () => m.openStore({factory if factory != "undefined" else "null"});
        const store = await open();
        for (const each of await store.all()) await store.delete(each.id);
        for (const [id, updated] of [["a", 1], ["b", 3], ["c", 2]])
            await store.put({{id, updated, title: id, messages: []}});
        await store.put({{id: "a", updated: 4, title: "again", messages: []}});
        await store.delete("c");
        const later = store.durable ? await open() : store;
        return [(await later.all()).map((each) => each.title), store.durable];
    """,
    )
    assert titles == ["again", "b"]
    assert durable == (factory == "indexedDB")


def test_a_meter_counts_and_the_servers_figures_correct_it(call: Call) -> None:
    event = {"text": "", "finish": None, "timings": None, "usage": None}
    events = [
        (150, {**event, "text": "a"}),
        (160, {**event, "text": "b"}),
        (350, {**event, "text": "c"}),
        (355, {**event, "finish": "length", "timings": {"tpot_ms": 50}}),
        (360, {**event, "usage": {"completion_tokens": 5}}),
    ]
    early, live, _, final = call(
        "stats.js",
        """
        const meter = new m.Meter(m.newStats(100));
        const seen = args[0].map(([now, event]) => { meter.take(event, now); return {...meter.stats}; });
        return seen.slice(1);
    """,
        events,
    )
    assert (early["tokens"], early["ttftMs"], early["tokensPerS"]) == (2, 50, None)
    assert (live["tokens"], live["ttftMs"], live["tokensPerS"]) == (3, 50, 10)
    assert (final["tokens"], final["tokensPerS"], final["finish"]) == (5, 20, "length")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (3.24, "3.2 ms"),
        (85.4, "85 ms"),
        (999.6, "1.0 s"),
        (1240, "1.2 s"),
        (9960, "10 s"),
        (48_000, "48 s"),
    ],
)
def test_durations(call: Call, ms: float, text: str) -> None:
    assert call("stats.js", "return m.duration(args[0]);", ms) == text


def test_empty_settings_leave_the_choice_to_the_server(call: Call) -> None:
    fields = "return m.requestFields({...m.DEFAULTS, ...args[0]});"
    assert call("settings.js", fields, {}) == {"service_tier": "default"}
    chosen = {"temperature": 0, "topP": 0.9, "maxTokens": 7, "lane": "batch"}
    assert call("settings.js", fields, chosen) == {
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 7,
        "service_tier": "flex",
    }


def test_sentences_are_announced_whole_and_at_a_bearable_pace(call: Call) -> None:
    said = call(
        "announcer.js",
        """
        const message = {};
        const log = document.createElement("div");
        const announcer = new m.Announcer(log);
        for (const [text, ended, now] of args[0]) {
            message.text = text;
            announcer.follow(message, ended, now);
        }
        return [...log.children].map((line) => line.textContent);
    """,
        [
            ("One. Tw", False, 0),
            ("One. Two. Th", False, 500),
            ("One. Two. **Three**. Fo", False, 2100),
            ("One. Two. **Three**. Four", True, 2200),
        ],
    )
    assert said == ["One.", "Two. Three.", "Four"]


def test_the_page_is_small_and_has_no_html_parsing() -> None:
    files = list(STATIC.iterdir())
    assert sum(file.stat().st_size for file in files) < 110_000
    scripts = "".join(file.read_text() for file in files if file.suffix == ".js")
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
    ):
        assert forbidden not in scripts
    assert json.loads((STATIC / "manifest.json").read_text())["start_url"] == "/"
