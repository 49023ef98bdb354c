"""What modules of the page build and keep, in the browser that they are written for."""

import gzip
import json
from itertools import pairwise

import pytest

from tests.static.conftest import Call
from tests.static.scripted import STATIC


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


def test_markdown(call: Call) -> None:
    body = f"return args[0].map((text) => {{ const render = (...args) => {{ {RENDER} }}; return render(text); }});"
    rendered = call("markdown.js", body, [text for text, _ in MARKDOWN])
    assert dict(zip((text for text, _ in MARKDOWN), rendered, strict=True)) == dict(MARKDOWN)


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
    "$$\na\n- b\n- c\n1. d\n$$\n"
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


def test_messages_are_kept_one_by_one_and_those_of_an_older_page_are_taken_over(call: Call) -> None:
    """An answer that grows is written alone; the first version kept a conversation whole."""
    before, after = call(
        "store.js",
        """
        const settled = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
        const factory = { open: (_, version) => indexedDB.open("kept", version) };
        const opening = indexedDB.open("kept", 1);
        opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
        const old = await settled(opening);
        const say = (id, text, state = "done") => ({ id, text, state });
        const heads = old.transaction("conversations", "readwrite").objectStore("conversations");
        const messages = [say("9", "hi"), say("2", "yes", "waiting")];
        const talk = { id: "a", title: "Old", updated: 1, tip: "2", messages };
        await settled(heads.put(talk));
        old.close();
        const store = await m.openStore(factory);
        const texts = async (id) => (await store.messages(id)).map(({ text }) => text);
        const before = [await store.heads(), await texts("a"), store.durable];
        const rows = [];
        const { put } = IDBObjectStore.prototype;
        IDBObjectStore.prototype.put = function (row) { rows.push(row.id); return put.call(this, row); };
        talk.messages[1].text = "yes, more";
        await store.put({ ...talk, updated: 7 }, [talk.messages[1]]);
        IDBObjectStore.prototype.put = put;
        await store.put({ ...talk, id: "ab", updated: 5, messages: [say("1", "other")] }, []);
        const after = [rows, await texts("a"), (await store.heads()).map(({ id }) => id)];
        await store.delete("a");
        after.push(await texts("a"), (await store.heads()).map(({ id }) => id));
        return [before, after];
    """,
    )
    head = {"id": "a", "title": "Old", "updated": 1, "tip": "2", "systemPrompt": None, "running": True}
    assert before == [[head], ["hi", "yes"], True]
    assert after == [["2", "a"], ["hi", "yes, more"], ["a", "ab"], [], ["ab"]]


@pytest.mark.parametrize("factory", ["null", "{open() { throw new Error('refused'); }}"])
def test_a_browser_that_refuses_to_keep_anything_has_a_store_in_memory(call: Call, factory: str) -> None:
    assert call("store.js", f"return (await m.openStore({factory})).durable;") is False


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
    files = [
        file
        for file in STATIC.rglob("*")
        if file.is_file() and not {"temml", "penstock-math"} & {*file.parts}
    ]
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) < 150_000  # as it is sent
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
