"""The page's pure modules, in the browser that they are written for."""

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
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
    for (const math of div.querySelectorAll(".math")) math.replaceChildren();
    return div.innerHTML;
"""
LINK = ' target="_blank" rel="noopener noreferrer"'
PRE = '<pre tabindex="0" role="region" aria-label="Code"><code>'


def tex(text: str) -> str:
    return f'<span class="math" data-tex="{text}"></span>'


def tex_block(text: str) -> str:
    attributes = 'tabindex="0" role="region" aria-label="Formula"'
    return f'<div class="math block" {attributes} data-tex="{text}"></div>'


MARKDOWN = [
    ("", ""),
    ("plain", "<p>plain</p>"),
    ("two\nlines", "<p>two<br>lines</p>"),
    ("one\n\ntwo", "<p>one</p><p>two</p>"),
    (
        "*a* **b** ***c*** _d_ __e__ ~~f~~",
        "<p><em>a</em> <strong>b</strong> <em><strong>c</strong></em> "
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
    (r"\(a_1 * b*\) and $x^2$.", f"<p>{tex('a_1 * b*')} and {tex('x^2')}.</p>"),
    ("$5 and $6, $ x$, $x $, $a$b", f"<p>$5 and $6, $ x$, $x $, {tex('a')}b</p>"),
    (r"\(open and $open^2", "<p>(open and $open^2</p>"),
    (r"a \[ x \] $$y$$", f"<p>a {tex('x')} {tex('y')}</p>"),
    ("$$\nx_1\n+ y\n$$\nafter", tex_block("x_1\n+ y") + "<p>after</p>"),
    ("text\n\\[ x \\]", "<p>text</p>" + tex_block("x")),
    ("$$ x $$ is more", f"<p>{tex('x')} is more</p>"),
    ("$$\nopen\n\nend", "<p>$$<br>open</p><p>end</p>"),
    ("title\n=====\nsub\n---\ntext\n-", "<h3>title</h3><h4>sub</h4><p>text<br>-</p>"),
    (
        "- [x] a\n- [ ] b\n- [y] c",
        '<ul><li class="task"><input type="checkbox" disabled="" checked="" aria-label="Done"> a</li>'
        '<li class="task"><input type="checkbox" disabled="" aria-label="To do"> b</li><li>[y] c</li></ul>',
    ),
    ("a<br>b<BR />c &amp; &copy; &bogus;", "<p>a<br>b<br>c &amp; © &amp;bogus;</p>"),
    ("H<sub>2</sub>O <sup>*a*</sup> <sub>x", "<p>H<sub>2</sub>O <sup><em>a</em></sup> &lt;sub&gt;x</p>"),
    (
        "a[^1] [^x]\n\n[^1]: *why*\n  more",
        '<p>a<sup>1</sup> [^x]</p><p class="footnote"><sup>1</sup> <em>why</em><br>more</p>',
    ),
    (
        "    code\n\n    more\nend",
        f'<figure class="code"><figcaption><span>code</span></figcaption>{PRE}code\n\nmore</code></pre></figure>'
        "<p>end</p>",
    ),
    ("a\r\n\r\nb", "<p>a</p><p>b</p>"),
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


@pytest.mark.parametrize(("kind", "most_parts"), [("all", 8), ("many parts", 2), ("long", 8)])
def test_a_growing_text_looks_at_each_moment_as_if_rendered_at_once(
    call: Call, kind: str, most_parts: int
) -> None:
    text = {"all": GROWING, "many parts": MANY_PARTS, "long": LONG_PARAGRAPHS}[kind]
    differing = call(
        "markdown.js",
        """
        const [text, mostParts] = args;
        const grown = new m.MarkdownView(document.createElement("div"), mostParts);
        const differing = [];
        for (let end = 1; end <= text.length; end += text.length < 9000 ? 1 : 19) {
            const whole = document.createElement("div");
            whole.append(m.renderMarkdown(text.slice(0, end)));
            grown.update(text.slice(0, end));
            if (whole.innerHTML !== grown.element.innerHTML) differing.push(text.slice(0, end));
        }
        return differing.slice(0, 1);
    """,
        text,
        most_parts,
    )
    assert differing == []


# With ends of sentences, with words alone, with neither, with characters of two code units, and of many lines.
LONG_PARAGRAPHS = "\n\n".join(
    piece * (2250 // len(piece)) + "*end* 1. x"
    for piece in ("A *short* sentence. ", "word ", "x", "\N{GRINNING FACE}", "line\n")
)


# Of every kind that is settled in part: with what may follow an item, a row, or a line of code.
MANY_PARTS = (
    "intro\n- a\n- b\n  more\n- c\nlazy\n- d\n\n  own\n- e\n  - f\n  - g\n- h\n-5 degrees\n- i\n***\n"
    " 3. x\n4. y\n5. z\n  6. w\n7. v\n1.5 litres\n8. u\n- other\n\n"
    "|a|b|\n|-|-|\n" + "|1|*2*|\n" * 6 + "3|4\nno row\n\n"
    "```py\n" + 'x = """\n' + "line\n" * 90 + '"""\ny = 1\n' * 30 + "```\nend\n~~~\n" + "open\n" * 85
)


@pytest.mark.parametrize(
    "line",
    [
        "- an *item* of a list\n",
        "|a|`row`|\n",
        "const x = 'code';\n",
        "a paragraph\n\n",
        "a *long* `paragraph` without end, of 1 + 1 sentences. ",
        "*verses*\n",
        "没有空格的长段落，",
        "1. one\n   - two\n",
    ],
    ids=["list", "table", "code", "paragraphs", "a paragraph", "verses", "no spaces", "nested"],
)
def test_the_work_for_a_frame_does_not_grow_with_the_text(call: Call, line: str) -> None:
    """20,000 tokens come in pieces as a stream brings them: what is built for one of them is what counts."""
    opening = {"|": "|a|b|\n|-|-|\n", "c": "```js\n"}.get(line[0], "")
    most, longest, length = call(
        "markdown.js",
        """
        const [opening, line, lines] = args;
        const element = document.createElement("div");
        const view = new m.MarkdownView(element);
        let made = 0;
        let most = 0;
        const counted = (make) => function (...given) { made += 1; return make.apply(this, given); };
        const own = { createElement: document.createElement, createTextNode: document.createTextNode };
        for (const [name, make] of Object.entries(own)) document[name] = counted(make);
        let text = opening;
        let longest = 0; // text whose layout a change to it begins again
        for (let at = 0; at < lines; at += 5) {
            text += line.repeat(5);
            made = 0;
            view.update(text);
            most = Math.max(most, made);
            longest = Math.max(longest, element.lastChild.localName === "p" ? element.lastChild.textContent.length : 0);
        }
        Object.assign(document, own);
        return [most, longest, element.textContent.length];
        """,
        opening,
        line,
        2000,
    )
    assert most < 1000
    assert longest <= 4000
    assert length > 2000 * 3


def test_a_long_text_that_comes_at_once_is_shown_over_some_frames(call: Call) -> None:
    lengths = call(
        "markdown.js",
        """
        const element = document.createElement("div");
        const view = new m.MarkdownView(element);
        const text = "some words\\n\\n".repeat(10_000);
        view.update(text);
        const lengths = [element.textContent.length];
        for (let frame = 0; frame < 20; frame += 1) {
            await new Promise(requestAnimationFrame);
            lengths.push(element.textContent.length);
        }
        return lengths;
        """,
    )
    assert lengths[0] < 16_000
    assert max(later - earlier for earlier, later in pairwise(lengths)) < 16_000
    assert lengths[-1] == 100_000


PAINTED = """
    const html = (nodes) => nodes.map((node) =>
        typeof node === "string" ? node : `[${node.className.slice(3)}:${node.textContent}]`).join("");
    const [language, first, second] = args;
    const {nodes, inside} = m.highlight(first, language);
    return html(nodes) + (second ? html(m.highlight(second, language, inside).nodes) : "");
"""


@pytest.mark.parametrize(
    ("language", "parts", "painted"),
    [
        ("", ["def f"], "def f"),
        ("brainfuck", ["+[-]"], "+[-]"),
        ("Python", ["def f(x: Int): # no"], "[keyword:def] [call:f](x: [type:Int]): [comment:# no]"),
        ("py", ['"a\\"b" + 1.5e3'], '[string:"a\\"b"] + [number:1.5e3]'),
        ("py", ['x = """a\n', 'b""" if'], 'x = [string:"""a\n][string:b"""] [keyword:if]'),
        ("js", ["/* a\n", "b */ `x`"], "[comment:/* a\n][comment:b */] [string:`x`]"),
        ("js", ["/* a\n", "b"], "[comment:/* a\n][comment:b]"),
        ("ts", ["const a = null // x"], "[keyword:const] a = [number:null] [comment:// x]"),
        ("json", ['{"a": ["b", 1]}'], '{[keyword:"a"]: [[string:"b"], [number:1]]}'),
        ("rust", ["<'a> 'x'"], "<'a> [string:'x']"),
        ("sql", ["SELECT a -- b"], "[keyword:SELECT] a [comment:-- b]"),
        ("bash", ["echo $A --x"], "[keyword:echo] [type:$A] [number:--x]"),
        ("yaml", ["a: 1\n[b]"], "[keyword:a]: [number:1]\n[type:[b]]"),
        ("css", [".a { b: 1px }"], "[type:.a] { [keyword:b]: [number:1px] }"),
        ("html", ['<p id="a">'], '[keyword:<p] [call:id]=[string:"a"][keyword:>]'),
        ("diff", ["-a\n+b"], "[removed:-a]\n[string:+b]"),
    ],
)
def test_code_is_painted(call: Call, language: str, parts: list[str], painted: str) -> None:
    assert call("highlight.js", PAINTED, language, *parts) == painted


# Of a few runs the one that other work on the machine slowed down least, in ms.
FASTEST = """
    const fastest = (act, enough) => {
        let best = Infinity;
        for (let run = 0; run < 5 && best >= enough; run += 1) {
            const start = performance.now();
            act();
            best = Math.min(best, performance.now() - start);
        }
        return best;
    };
"""


@pytest.mark.parametrize(
    "piece", ['"', "'", "`", "/*", '"""', "\\", "$", "<", "a", "-", " ", '" ', "0", "#", "\n"]
)
def test_hostile_code_is_painted_in_no_time(call: Call, piece: str) -> None:
    """As much as is painted at once, in every language."""
    slowest = call(
        "highlight.js",
        FASTEST
        + """
        const languages = "js py c java rust go sh rb sql json yaml css html diff".split(" ");
        return Math.max(...languages.map((language) => fastest(() => m.highlight(args[0], language), 250)));
        """,
        piece * (8000 // len(piece)),
    )
    assert slowest < 250  # 40 on a quiet machine


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
    _expect_linear_time(call, *(piece * (size // len(piece)) for size in (5_000, 40_000)))


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
    _expect_linear_time(call, shape(12_500), shape(100_000))


def test_an_open_block_grows_under_a_selection(call: Call) -> None:
    """Nodes that are there stay the same: a selection in them holds, and code stays where it was scrolled to."""
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


def _expect_linear_time(call: Call, short: str, long: str) -> None:
    """The long text is eight times the short one. Of three measurements on a busy machine, one at least is right."""
    measured = []
    for _ in range(3):
        measured.append((_render_ms(call, long, enough=150), _render_ms(call, short)))
        long_ms, short_ms = measured[-1]
        if long_ms < max(150, 40 * short_ms):  # squares would take 64 times as long
            return
    pytest.fail(f"milliseconds of the long text and of the short one: {measured}")


def _render_ms(call: Call, text: str, enough: float = 0) -> float:
    body = FASTEST + "return fastest(() => m.renderMarkdown(args[0]), args[1]);"
    ms: float = call("markdown.js", body, text, enough)
    return ms


def test_what_the_server_is_told_of_a_conversation(call: Call) -> None:
    said = call(
        "conversation.js",
        """
        const c = m.newConversation();
        const first = m.ask(c, "hi");
        Object.assign(first, { text: "<think>They greet.</think>hello", responseId: args[0] });
        const failed = m.ask(c, "and?");
        const last = m.ask(c, "well?");
        const other = m.ask(c, "how?", first.id);
        return [[last, true], [last, false], [other, true], [other, false]].map(([answer, isWhole]) => {
            const { previous, messages } = m.saidBefore(c, answer, isWhole);
            return [previous, ...messages.map(({ role, content }) => `${role}: ${content}`)];
        });
    """,
        "resp_1",
    )
    common = [None, "user: hi", "assistant: hello"]
    assert said == [
        [*common, "user: and?", "user: well?"],
        ["resp_1", "user: and?", "user: well?"],
        [*common, "user: how?"],
        ["resp_1", "user: how?"],
    ]


def test_what_another_tab_did_is_taken_over(call: Call) -> None:
    """Both went on from "b": here with "d", which is being made, there with "e" and "f"."""
    found = call(
        "conversation.js",
        """
        const message = (id, parent, text, state = "done") => ({ id, parent, text, state, thinking: "", retryAt: 7 });
        const before = [message("a", null, "?"), message("b", "a", "!", "streaming"), message("c", "b", "??")];
        const here = { tip: args[0], title: "old", messages: [...before, message("d", "c", "own", "streaming")] };
        const there = { tip: "f", title: "new", messages: [message("a", null, "?"), message("b", "a", "!!"),
            message("c", "b", "??"), message("d", "c", "", "waiting"), message("e", "b", "x"),
            message("f", "e", "y")] };
        const changed = m.takeOver(here, there, ({ id }) => id === "d");
        return [changed.map(({ id }) => id), here.messages.map(({ id, text }) => id + text), here.tip, here.title,
            here.messages.at(-1).retryAt];
    """,
        "d",
    )
    assert found == [["b"], ["a?", "b!!", "c??", "down", "ex", "fy"], "d", "new", None]


ASK_AGAIN = """
    const [error, followed] = args;
    const c = m.newConversation();
    const first = m.ask(c, "hi");
    Object.assign(first, {text: "x", state: error ? "failed" : "done", error, retryAt: 1});
    if (followed) m.ask(c, "more");
    const again = m.askAgain(c, first);
    return [c.messages.map((each) => [each.role, each.text, each.state]), m.shownIn(c).length, again.id === first.id,
            again.error, again.retryAt, again.parent === first.parent];
"""


@pytest.mark.parametrize(
    ("error", "followed", "in_its_place"),
    [
        ({"kind": "lost"}, False, True),
        ({"kind": "lost"}, True, False),
        (None, False, False),
        (None, True, False),
    ],
)
def test_asking_again_makes_another_version_and_only_a_failure_gives_up_its_place(
    call: Call, error: Any, followed: bool, in_its_place: bool
) -> None:
    messages, shown, same, *cleared = call("conversation.js", ASK_AGAIN, error, followed)
    assert (shown, same, cleared) == (2, in_its_place, [None, None, True])
    assert messages[-1] == ["assistant", "", "waiting"]
    kept = [["user", "hi", "done"]] + (
        [] if in_its_place else [["assistant", "x", "failed" if error else "done"]]
    )
    assert messages[: len(kept)] == kept


# A tree by its edges; each message was made after those to its left.
TREE = [["a", None], ["b", "a"], ["c", "b"], ["d", "a"], ["e", "c"], ["f", "d"], ["g", "b"], ["h", None]]


@pytest.mark.parametrize(
    ("expression", "ids"),
    [
        ('m.pathTo(tree, "e")', "abce"),
        ('m.pathTo(tree, "h")', "h"),
        ("m.pathTo(tree, null)", ""),
        ('m.pathTo(tree, "unknown")', ""),
        ('m.pathTo([{id: "x", parent: "y"}, {id: "y", parent: "x"}], "x")', "yx"),
        ("m.siblingsOf(tree, tree[3])", "bd"),
        ("m.siblingsOf(tree, tree[0])", "ah"),
        ("[m.newestEnd(tree, tree[0])]", "f"),
        ("[m.newestEnd(tree, tree[1])]", "g"),
        ("[m.newestEnd(tree, tree[2])]", "e"),
        ("[m.newestEnd(tree, tree[7])]", "h"),
        ("tree.filter((each) => m.hasFollowers(tree, each))", "abcd"),
    ],
)
def test_a_tree_of_messages(call: Call, expression: str, ids: str) -> None:
    body = f"const tree = args[0].map(([id, parent]) => ({{id, parent}})); return {expression}.map((each) => each.id);"
    assert "".join(call("tree.js", body, TREE)) == ids


@pytest.mark.parametrize(
    ("text", "thinking", "answer", "is_thinking"),
    [
        ("plain", "", "plain", False),
        ("<think>", "", "", True),
        ("<think>so", "so", "", True),
        ("<think>\nso\n</think>\n\nyes", "so", "yes", False),
        ("\n<think></think>yes", "", "yes", False),
        ("the template opened it</think>yes", "the template opened it", "yes", False),
        ("it says <think> in the middle", "", "it says <think> in the middle", False),
    ],
)
def test_what_a_model_thinks_is_apart(
    call: Call, text: str, thinking: str, answer: str, is_thinking: bool
) -> None:
    found = call("thinking.js", "return m.splitThinking(args[0]);", text)
    assert found == {"thinking": thinking, "answer": answer, "isThinking": is_thinking}


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
    message = {"id": "a", "state": "streaming", "retryAt": 1, "stream": stream}
    if stream == "missing":
        del message["stream"]
    conversation = {"updated": 1000, "messages": [message]}
    settled = call("conversation.js", "return m.settle(...args);", conversation, 1000 + age_ms)["messages"][0]
    assert (settled["state"], settled["retryAt"]) == (state, None)
    assert settled["stream"] == (None if stream == "missing" else stream)


TALK = """
    const c = (id, title, ...texts) => ({id, title, updated: 0, messages: texts.map((text) => ({text}))});
    const all = [c("1", "Dinner plans", "Soup?", "Yes, with leeks and a potato or two, and perhaps some cream"),
        c("2", "Rivers", "the Leek flows"), c("3", "Nothing")];
    return m.find(all, args[0]).map(({conversation, excerpt}) => [conversation.id, excerpt]);
"""


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("dinner", [["1", None]]),
        (
            "LEEK",
            [["1", "Yes, with leeks and a potato or two, and perhaps some cream"], ["2", "the Leek flows"]],
        ),
        ("potato leeks", [["1", "…leeks and a potato or two, and perhaps some cream"]]),
        ("leek soup", []),
        ("n", [["1", None], ["3", None]]),
    ],
)
def test_conversations_are_found_by_their_words(call: Call, query: str, found: list[Any]) -> None:
    assert call("search.js", TALK, query) == found


def test_conversations_are_grouped_by_their_age(call: Call) -> None:
    ages = call(
        "search.js",
        """
        const at = (...time) => new Date(2026, 2, ...time).getTime();
        return [[30, 0, 1], [29, 23, 59], [29, 0, 0], [28, 12], [23, 1], [22, 1], [1]]
            .map((time) => m.ageOf(at(...time), at(30, 15)));
    """,
    )
    assert ages == ["Today", *["Yesterday"] * 2, *["The last seven days"] * 2, *["Earlier"] * 2]


# Files.

A_FILE: dict[str, Any] = {
    "format": "penstock.conversations",
    "version": 1,
    "conversations": [
        {
            "id": "c1",
            "title": "Lanes",
            "updated": 5,
            "tip": "b",
            "messages": [
                {"id": "a", "parent": None, "role": "user", "text": "hi", "state": "done", "stats": None},
                {
                    "id": "b",
                    "parent": "a",
                    "role": "assistant",
                    "text": "hello",
                    "state": "streaming",
                    "stats": {
                        "tokens": 2,
                        "ttftMs": "1",
                        "finish": "stop",
                        "timings": {"lane": "batch", "x": {}},
                    },
                },
            ],
        }
    ],
}


def test_a_file_brings_back_what_was_exported(call: Call) -> None:
    body = "const read = m.readExport(args[0]); return [read, m.readExport(m.exportText(read))];"
    read, again = call("transfer.js", body, json.dumps(A_FILE))
    assert read == again
    answer = read[0]["messages"][1]
    assert (answer["text"], answer["state"], read[0]["tip"]) == ("hello", "stopped", "b")
    assert (answer["stats"]["tokens"], answer["stats"]["ttftMs"]) == (2, None)
    assert answer["stats"]["timings"] == {"lane": "batch"}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["format"], "other", "no conversations of Penstock"),
        (["conversations"], {}, "no conversations of Penstock"),
        (["version"], 2, "a later version"),
        (["conversations", 0], None, "Conversation 1 in this file is damaged"),
        (["conversations", 0, "id"], "<b>", "damaged"),
        (["conversations", 0, "id"], 7, "damaged"),
        (["conversations", 0, "updated"], "now", "damaged"),
        (["conversations", 0, "messages"], [], "damaged"),
        (["conversations", 0, "messages", 0, "parent"], "b", "damaged"),
        (["conversations", 0, "messages", 1, "id"], "a", "damaged"),
        (["conversations", 0, "messages", 1, "role"], "system", "damaged"),
        (["conversations", 0, "messages", 1, "text"], 7, "damaged"),
    ],
)
def test_a_damaged_file_is_refused(call: Call, path: list[Any], value: Any, said: str) -> None:
    file = json.loads(json.dumps(A_FILE))
    place = file
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    body = "try { m.readExport(args[0]); return null; } catch (fault) { return fault.message; }"
    assert said in call("transfer.js", body, json.dumps(file))
    assert "not JSON" in call("transfer.js", body, "{")


def test_of_a_file_only_what_is_newer_is_taken(call: Call) -> None:
    new = call(
        "transfer.js",
        """
        const c = (id, updated, state = "done") => ({id, updated, messages: [{state}]});
        const here = [c("same", 1), c("older", 1), c("newer", 9), c("running", 1, "streaming")];
        return m.newIn([c("same", 1), c("older", 2), c("newer", 2), c("running", 2), c("new", 1)], here)
            .map((each) => each.id);
    """,
    )
    assert new == ["older", "new"]


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
    event = {"text": "", "thinking": "", "finish": None, "timings": None, "tokens": None}
    events = [
        (150, {**event, "text": "a"}),
        (160, {**event, "text": "b"}),
        (350, {**event, "text": "c"}),
        (355, {**event, "finish": "length", "timings": {"tpot_ms": 50}}),
        (360, {**event, "tokens": 5}),
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
    assert call("format.js", "return m.duration(args[0]);", ms) == text


def test_empty_settings_leave_the_choice_to_the_server(call: Call) -> None:
    fields = "return m.requestFields({...m.DEFAULTS, ...args[0]});"
    assert call("settings.js", fields, {}) == {"service_tier": "default"}
    chosen = {
        "temperature": 0,
        "topP": 0.9,
        "maxTokens": 7,
        "minP": 0.1,
        "seed": 1,
        "stop": "a\n\nb",
        "lane": "batch",
    }
    assert call("settings.js", fields, chosen) == {
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 7,
        "min_p": 0.1,
        "seed": 1,
        "stop": ["a", "b"],
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
    files = [file for file in STATIC.rglob("*") if file.is_file() and "vendor" not in file.parts]
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) < 100_000  # as it is sent
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
