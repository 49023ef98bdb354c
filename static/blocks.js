/**
 * A text as its blocks, in order. What a block consists of are tokens of markdown-it.
 *
 * @import { Token } from "markdown-it"
 *
 * @typedef {object} Block
 * @property {"code"|"list"|"table"|"other"} kind
 * @property {Token[]} tokens
 * @property {number} start  offset of its first line
 * @property {number[]} parts  offsets of the items, rows or chunks of code that it may be split into
 * @property {?number} inside  of code: the span that is open where it begins
 */

import { markdown } from "./grammar.js";

export const CHUNK_LINES = 40; // of code
/** @type {Record<string, Block["kind"]>} */
const KINDS = { fence: "code", bullet_list_open: "list", ordered_list_open: "list", table_open: "table" };

/**
 * @param {string} text
 * @returns {Block[]}
 */
export function parseBlocks(text) {
  /** @type {Block[]} */
  const blocks = [];
  for (let from = 0; ; ) {
    /** @type {import("./grammar.js").Env} */
    const env = { cut: null };
    const rest = text.slice(from);
    blocks.push(...blocksOf(markdown.parse(rest, env), startsOf(rest, from)));
    if (env.cut === null) return blocks;
    from += env.cut;
  }
}

/** Where each line starts. @param {string} text  @param {number} offset */
function startsOf(text, offset) {
  const starts = [offset];
  for (let end = text.indexOf("\n"); end !== -1; end = text.indexOf("\n", end + 1)) starts.push(offset + end + 1);
  return starts;
}

/** @param {Token[]} tokens  @param {number[]} starts  of lines */
function blocksOf(tokens, starts) {
  /** @type {Block[]} */
  const blocks = [];
  let first = 0;
  for (const [at, { level, nesting }] of tokens.entries()) {
    if (level > 0 || nesting === 1) continue;
    const own = tokens.slice(first, at + 1);
    const kind = KINDS[own[0].type] ?? "other";
    const parts = partLines(kind, own).map((line) => starts[line]);
    blocks.push({ kind, tokens: own, start: starts[firstLine(own[0])], parts, inside: null });
    first = at + 1;
  }
  return blocks;
}

/** @param {Token} token */
function firstLine({ map }) {
  return map?.[0] ?? 0;
}

/** @param {Block["kind"]} kind  @param {Token[]} tokens */
function partLines(kind, tokens) {
  const [opening] = tokens;
  if (kind === "list") return tokens.filter(({ type, level }) => type === "list_item_open" && level === 1).map(firstLine);
  if (kind === "table") return tokens.filter(({ type }) => type === "tr_open").slice(1).map(firstLine);
  if (kind !== "code") return [];
  return chunksOf(opening.content).map((_, at) => firstLine(opening) + 1 + at * CHUNK_LINES);
}

/** Code, cut between lines. @param {string} content  of a fence: its last line end is not the code's */
export function chunksOf(content) {
  const lines = content.replace(/\n$/, "").split("\n");
  const chunks = [];
  for (let at = 0; at < lines.length; at += CHUNK_LINES) {
    const end = at + CHUNK_LINES < lines.length ? "\n" : "";
    chunks.push(lines.slice(at, at + CHUNK_LINES).join("\n") + end);
  }
  return chunks;
}
