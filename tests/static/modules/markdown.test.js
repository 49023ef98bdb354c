/** Markdown is read in linear time, and the vendored library is the one that is published. */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import test from "node:test";

import { parseBlocks } from "../../../static/blocks.js";

const ENOUGH_MS = 100; // for which no comparison is needed

// Of a few runs the one that other work on the machine slowed down least, in ms.
function fastest(text, enough = 0) {
  let best = Infinity;
  for (let run = 0; run < 5 && best >= enough; run += 1) {
    const start = performance.now();
    parseBlocks(text);
    best = Math.min(best, performance.now() - start);
  }
  return best;
}

/** The long text is eight times the short one: squares would take 64 times as long. */
function assertLinear(short, long, name) {
  const measured = [];
  for (let attempt = 0; attempt < 3; attempt += 1) {
    const longMs = fastest(long, ENOUGH_MS);
    if (longMs < ENOUGH_MS) return;
    const shortMs = fastest(short);
    measured.push([longMs, shortMs]);
    if (longMs < 40 * shortMs) return;
  }
  assert.fail(`${name}: milliseconds of the long text and of the short one: ${JSON.stringify(measured)}`);
}

const PIECES = [
  ..."*_~`[]\\|$<&-",
  ...["](", "![", "*a ", "a* ", "**a *b ", "[a](", "> ", "- ", "1. ", "|-", "` `` ", "http://", "<http://", "*a _b "],
  ...["[*a](http://x.y) ", "# ", "```\n", "- a\n", "a|b\n-|-\n", "\n> ", "  ", " - ", "***", "a\n***", "$$", "$$\n"],
  ...["\\(", "\\[", "<sub>", "<sub>a", "<br>", "&amp;", "[^1]", "\n[^1]: a", "a\n-\n", "a\n---\n", "    a\n", "a\n"],
];

test("hostile pieces", () => {
  for (const piece of PIECES) {
    const [short, long] = [2_500, 20_000].map((size) => piece.repeat(Math.floor(size / piece.length)));
    assertLinear(short, long, JSON.stringify(piece));
  }
});

const times = (text, count) => text.repeat(Math.floor(count));
/** @type {Record<string, (size: number) => string>} */
const SHAPES = {
  heading: (n) => `# a${times(" ", n)}####b`,
  "heading marks": (n) => `# a${times(" #", n / 2)} b`,
  links: (n) => times("[a", n / 11) + times("](http://a)", n / 11),
  brackets: (n) => times("[a](http(", n / 9),
  columns: (n) => `${times("|a", n / 4)}\n${times("|-", n / 4)}${times("\n|", n / 4)}`,
  openers: (n) => times("*[_a", n / 4),
  nested: (n) => times("*[_a", n / 10) + times("_]*", n / 10),
  fence: (n) => `\`\`\`${times(" ", n)}\``,
  tildes: (n) => `${times("~", n)}\``,
  rule: (n) => `a|b\n-${times(" ", n)}x`,
  stars: (n) => `***${times(" ", n)}x`,
};

test("hostile shapes", () => {
  for (const [name, shape] of Object.entries(SHAPES)) assertLinear(shape(6_250), shape(50_000), name);
});

test("the vendored library is the published one", async () => {
  const [published, vendored] = await Promise.all([
    readFile(new URL("../../../node_modules/markdown-it/dist/browser/markdown-it.esm.min.mjs", import.meta.url)),
    readFile(new URL("../../../static/vendor/markdown-it/markdown-it.js", import.meta.url)),
  ]).catch(() => [null, null]);
  assert.ok(published === null || published.equals(vendored)); // null: npm has not installed it here
});
