/**
 * Markdown as chat models write it: paragraphs, headings, lists, quotes, tables, code, formulas, rules.
 * Raw HTML is text. A growing text is rendered block by block: what is finished stays untouched.
 *
 * @typedef {{kind: "paragraph", text: string, isGlued: boolean}} Paragraph  isGlued: no line end follows, for a long
 *   line was cut
 * @typedef {{kind: "code", language: string, chunks: string[], parts: number[]}} Code
 * @typedef {{kind: "list", ordered: boolean, start: number, items: Block[][], parts: number[]}} List
 * @typedef {{kind: "table", head: string[], align: string[], body: string[][], parts: number[]}} Table
 *
 * @typedef {Paragraph|Code|List|Table|{kind: "heading", level: number, text: string}|{kind: "rule"}
 *   |{kind: "quote", blocks: Block[]}|{kind: "math", tex: string}} Content  parts: the lines of items, rows or chunks
 *
 * @typedef {Content & {line: number, inside?: ?number}} Block  line: its first; inside: of code, the span that is open
 *   where it begins
 *
 * @typedef {{block: Content, next: number}} Parsed  next: the line that follows
 *
 * @typedef {object} Tail  a block whose first parts are settled
 * @property {Element} element
 * @property {string[]} head  lines that stand for those parts
 * @property {?number} inside  the span of code that they leave open
 * @property {number} settled  how many they are
 * @property {number} skipped  how many the head makes
 */

import { codeFigure, insideOf } from "./code.js";
import { el, find } from "./dom.js";
import { renderInline } from "./inline.js";
import { formula } from "./math.js";

// Patterns that fail do so in time linear in the line: none has two parts that could share what they match.
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?=\s)/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s{0,8})([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const TABLE_RULE = /^ {0,3}[|:-][|:\s-]*$/;
const RULE_CELL = /^:?-+:?$/;
const MATH = /^ {0,3}(\$\$|\\\[)/;
/** @type {Record<string, string>} */
const MATH_END = { "$$": "$$", "\\[": "\\]" };
const MAX_MATH_LINES = 60;
const MAX_DEPTH = 6;
const CHUNK_LINES = 40; // of code
const MOST_PARTS = 8; // of a block, before it is settled in part
const MOST_CHARS = 16_000; // that a frame takes of a text
const MOST_PARAGRAPH = 2_000; // characters of a paragraph: more go on in another one
// Where a line is cut that is too long: best after a sentence, else after a word, else anywhere but inside a character.
const CUTS = [/^.{1000,}[.!?]\s+(?=\p{L})/su, /^.{1000,}(?:[。！？]|\s(?=\p{L}))/su, /^.*[^\uD800-\uDBFF]|^.*/s];
const MAX_COLUMNS = 100; // a row has a cell for every column, however short it is

/** @param {string} text */
export function renderMarkdown(text) {
  return renderBlocks(parseBlocks(text.split("\n")));
}

/**
 * Shows a text that grows at its end, and renders again only what may still change: the last block, and of a list, a
 * table or code the last parts. So the work for a frame does not grow with the text.
 */
export class MarkdownView {
  #wanted = "";
  #text = ""; // what is shown of it
  #settled = 0; // offset of the first line that may still change
  /** @type {Element[]} of the blocks from there on */
  #open = [];
  /** @type {?Tail} where the first of these was settled in part: see #splitOff */
  #tail = null;
  #isWaiting = false; // for the next frame
  #mostParts;

  /** @param {Element} element  @param {number} mostParts  of a block, before it is settled in part */
  constructor(element, mostParts = MOST_PARTS) {
    this.element = element;
    this.#mostParts = mostParts;
  }

  /** @param {string} text */
  update(text) {
    if (!text.startsWith(this.#text)) this.#clear();
    this.#wanted = text;
    if (!this.#isWaiting) this.#step();
  }

  /** Of a long text that comes at once a frame takes a part. */
  #step() {
    const end = this.#text.length + MOST_CHARS;
    if (this.#wanted !== this.#text) this.#show(this.#wanted.slice(0, end));
    if (end >= this.#wanted.length) return;
    this.#isWaiting = true;
    requestAnimationFrame(() => {
      this.#isWaiting = false;
      this.#step();
    });
  }

  /** @param {string} text */
  #show(text) {
    this.#text = text;
    const head = this.#tail?.head ?? [];
    const lines = [...head, ...text.slice(this.#settled).split("\n")];
    const blocks = parseBlocks(lines);
    if (blocks.length > 0) blocks[0].inside = this.#tail?.inside ?? null;
    const firstOpen = blocks.length - numOpen(blocks, lines);
    this.#grow(renderBlocks(blocks), firstOpen);
    if (firstOpen > 0) this.#tail = null;
    const line = this.#splitOff(blocks[firstOpen], lines) ?? blocks[firstOpen]?.line ?? 0;
    const settled = lines.slice(head.length, line);
    const numGlued = blocks.slice(0, firstOpen).filter((block) => "isGlued" in block && block.isGlued).length;
    this.#settled += settled.reduce((sum, each) => sum + each.length + 1, -numGlued);
  }

  /**
   * What is there becomes what is wanted, from the first open node on; the last of it stays open.
   * @param {DocumentFragment} wanted
   * @param {number} firstOpen
   */
  #grow(wanted, firstOpen) {
    const nodes = [...wanted.children];
    const kept = Math.min(nodes.length, this.#open.length);
    for (const node of this.#open.slice(kept)) node.remove();
    for (let at = 0; at < kept; at += 1) {
      nodes[at] = at === 0 && this.#tail ? goOn(this.#tail, nodes[0]) : become(this.#open[at], nodes[at]);
    }
    this.element.append(...nodes.slice(kept));
    this.#open = nodes.slice(firstOpen);
  }


  /**
   * Settles a block of many parts up to its last ones. Lines that stand for all before them let the rest be read alone.
   * @param {Block|undefined} block
   * @param {string[]} lines
   * @returns {?number} the line of the first part that stays open, null where the block is not split
   */
  #splitOff(block, lines) {
    if (block === undefined || !("parts" in block)) return null;
    const { settled = 0, skipped = 0 } = this.#tail ?? {};
    const parts = block.parts.slice(skipped);
    if (parts.length <= this.#mostParts) return null;
    const [element] = this.#open;
    const first = parts.length - 2; // the last part may turn out to belong to the one before it
    const now = settled + first;
    const inside = insideOf(partsIn(element).children[now]);
    const head = headOf(block, lines);
    this.#tail = { element, head, inside, settled: now, skipped: block.kind === "list" ? 1 : 0 };
    return parts[first];
  }

  #clear() {
    this.element.replaceChildren();
    this.#text = "";
    this.#settled = 0;
    this.#open = [];
    this.#tail = null;
  }
}

/**
 * Lines after which a block's further parts read as they would after all before them.
 * @param {Block & (Code|List|Table)} block
 * @param {string[]} lines
 */
function headOf({ kind, line }, lines) {
  if (kind === "code") return [lines[line]];
  if (kind === "table") return lines.slice(line, line + 2);
  return [`${openingOf(lines[line]).trimEnd()} x`]; // an item in place of all before
}

/** The indentation and the marker of an item. @param {string} text */
function openingOf(text) {
  return ITEM.exec(text)?.[0] ?? "";
}

/** @param {string} text */
function indentOf(text) {
  return text.length - text.trimStart().length;
}

/** The element whose children are the parts of a rendered list, table or block of code. @param {Element} element */
function partsIn(element) {
  return element.matches("ul, ol") ? element : find("tbody, code", HTMLElement, element);
}

/**
 * The open parts of the block that was settled in part, from one that has these alone.
 * @param {Tail} tail
 * @param {Element} node
 */
function goOn({ element, settled, skipped }, node) {
  becomeChildren(partsIn(element), settled, [...partsIn(node).childNodes].slice(skipped));
  return element;
}

/**
 * Makes a node what another one is, and leaves untouched what they have in common: a selection stays, and so does how
 * far somebody scrolled. Returns the one that stands there afterwards.
 * @template {ChildNode} T
 * @param {T} node
 * @param {T} wanted
 */
function become(node, wanted) {
  if (node.isEqualNode(wanted)) return node;
  if (node instanceof Text && wanted instanceof Text) {
    if (wanted.data.startsWith(node.data)) node.appendData(wanted.data.slice(node.data.length));
    else node.data = wanted.data;
    return node;
  }
  if (node instanceof Element && wanted instanceof Element && areAlike(node, wanted)) {
    becomeChildren(node, 0, [...wanted.childNodes]);
    return node;
  }
  node.replaceWith(wanted);
  return wanted;
}

/**
 * The children from a place on become those that are wanted.
 * @param {Element} node
 * @param {number} from
 * @param {ChildNode[]} wanted
 */
function becomeChildren(node, from, wanted) {
  const there = [...node.childNodes].slice(from);
  const kept = Math.min(there.length, wanted.length);
  for (const child of there.slice(kept)) child.remove();
  for (let at = 0; at < kept; at += 1) become(there[at], wanted[at]);
  node.append(...wanted.slice(kept));
}

/** They differ in their children alone. @param {Element} one  @param {Element} other */
function areAlike(one, other) {
  const names = one.getAttributeNames();
  if (one.nodeName !== other.nodeName || names.length !== other.getAttributeNames().length) return false;
  return names.every((name) => one.getAttribute(name) === other.getAttribute(name));
}

/**
 * The last block grows. Where it began only just now, on a line (or a table's pair of lines) that
 * is not finished, it may yet turn out to belong to the block before it.
 * @param {Block[]} blocks
 * @param {string[]} lines
 */
function numOpen(blocks, lines) {
  const justBegan = blocks.length > 1 && blocks[blocks.length - 1].line >= lines.length - 2;
  return Math.min(blocks.length, justBegan ? 2 : 1);
}

/**
 * @param {string[]} lines
 * @returns {Block[]} in order
 */
function parseBlocks(lines, depth = 0) {
  /** @type {Block[]} */
  const blocks = [];
  let line = 0;
  while (line < lines.length) {
    if (lines[line].trim() === "") {
      line += 1;
      continue;
    }
    const { block, next } = parseBlock(lines, line, depth);
    blocks.push({ ...block, line });
    line = next;
  }
  return blocks;
}

/**
 * @param {string[]} lines
 * @param {number} line
 * @param {number} depth
 * @returns {Parsed}
 */
function parseBlock(lines, line, depth) {
  const text = lines[line];
  const fence = fenceOf(text);
  if (fence) return code(lines, line, fence);
  const opening = MATH.exec(text);
  const formula = opening && math(lines, line, opening);
  if (formula) return formula;
  const found = HEADING.exec(text);
  if (found) {
    const level = found[1].length;
    return { block: { kind: "heading", level, text: title(text.slice(found[0].length)) }, next: line + 1 };
  }
  if (RULE.test(text)) return { block: { kind: "rule" }, next: line + 1 };
  if (depth < MAX_DEPTH && QUOTE.test(text)) return quote(lines, line, depth);
  const item = depth < MAX_DEPTH && ITEM.exec(text);
  if (item) return list(lines, line, depth, item);
  if (isTable(lines, line)) return table(lines, line);
  return paragraph(lines, line, depth);
}

/** What begins a block of code; behind its fence there may be a language, but no backtick. @param {string} text */
function fenceOf(text) {
  const found = FENCE.exec(text);
  return found && !text.includes("`", found[0].length) ? found : null;
}

/** A heading's text, without the marks that may end it. @param {string} text */
function title(text) {
  const whole = text.trim();
  let end = whole.length;
  while (whole[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(whole[end - 1]) ? whole.slice(0, end).trimEnd() : whole;
}

/**
 * @param {string[]} lines
 * @param {number} line
 * @param {RegExpExecArray} found
 * @returns {Parsed}
 */
function code(lines, line, [opening, fence]) {
  const [language] = lines[line].slice(opening.length).trim().split(/\s/, 1);
  const closing = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`);
  const end = endWhere(lines, line + 1, (text) => closing.test(text));
  const parts = [line + 1];
  for (let at = line + 1 + CHUNK_LINES; at < end; at += CHUNK_LINES) parts.push(at);
  const chunks = parts.map((from, at) => {
    const text = lines.slice(from, parts[at + 1] ?? end).join("\n");
    return at + 1 < parts.length ? `${text}\n` : text;
  });
  return { block: { kind: "code", language, chunks, parts }, next: end + 1 };
}

/**
 * A formula on lines of its own; what has no end yet may still get one, unless a blank line comes first.
 * @param {string[]} lines
 * @param {number} line
 * @param {RegExpExecArray} found
 * @returns {?Parsed}
 */
function math(lines, line, [opening, mark]) {
  const closing = MATH_END[mark];
  const tex = [];
  for (let at = line; at < lines.length && at - line < MAX_MATH_LINES; at += 1) {
    const text = at === line ? lines[at].slice(opening.length) : lines[at];
    const end = text.indexOf(closing);
    if (end !== -1) {
      if (text.slice(end + closing.length).trim() !== "") return null;
      tex.push(text.slice(0, end));
      return { block: { kind: "math", tex: tex.join("\n").trim() }, next: at + 1 };
    }
    if (at > line && text.trim() === "") return null;
    tex.push(text);
  }
  return null;
}

/**
 * @param {string[]} lines
 * @param {number} line
 * @param {number} depth
 * @returns {Parsed}
 */
function quote(lines, line, depth) {
  const end = endWhere(lines, line, (text) => !QUOTE.test(text));
  const inner = lines.slice(line, end).map((text) => text.replace(QUOTE, ""));
  return { block: { kind: "quote", blocks: parseBlocks(inner, depth + 1) }, next: end };
}

/**
 * @param {string[]} lines
 * @param {number} line
 * @param {number} depth
 * @param {RegExpExecArray} found
 * @returns {Parsed}
 */
function list(lines, line, depth, [, indent, marker]) {
  const ordered = /\d/.test(marker);
  const items = [];
  const parts = [];
  let next = line;
  while (isItem(lines[next], indent.length, ordered)) {
    const end = itemEnd(lines, next);
    parts.push(next);
    items.push(parseBlocks(itemLines(lines.slice(next, end)), depth + 1));
    next = end;
  }
  return { block: { kind: "list", ordered, start: parseInt(marker, 10), items, parts }, next };
}

/**
 * @param {string|undefined} text
 * @param {number} indent
 * @param {boolean} ordered
 */
function isItem(text, indent, ordered) {
  const found = text === undefined || RULE.test(text) ? null : ITEM.exec(text);
  return found !== null && found[1].length >= indent && /\d/.test(found[2]) === ordered;
}

/**
 * An item goes on with indented lines, blank lines before such, and text that starts nothing else.
 * @param {string[]} lines
 * @param {number} line
 */
function itemEnd(lines, line) {
  const inside = indentOf(lines[line]) + 2;
  let end = line + 1;
  for (let at = line + 1; at < lines.length; at += 1) {
    const blank = lines[at].trim() === "";
    const indented = !blank && indentOf(lines[at]) >= inside;
    const lazy = !blank && at === end && !startsBlock(lines, at);
    if (!blank && !indented && !lazy) return followingItem(lines, at) ? at : end;
    if (!blank) end = at + 1;
  }
  return end;
}

/** @param {string[]} lines  @param {number} at */
function followingItem(lines, at) {
  return ITEM.test(lines[at]) && !RULE.test(lines[at]);
}

/** The lines of an item without its marker and indentation. @param {string[]} lines */
function itemLines([first, ...rest]) {
  const width = openingOf(first).length;
  return [first.slice(width), ...rest.map((text) => text.slice(Math.min(width, indentOf(text))))];
}

/** @param {string[]} lines  @param {number} line */
function isTable(lines, line) {
  const rule = lines[line + 1];
  if (!lines[line].includes("|") || rule === undefined || !TABLE_RULE.test(rule)) return false;
  const columns = cells(rule);
  if (columns.length > MAX_COLUMNS || !columns.every((each) => RULE_CELL.test(each))) return false;
  return cells(lines[line]).length === columns.length;
}

/**
 * @param {string[]} lines
 * @param {number} line
 * @returns {Parsed}
 */
function table(lines, line) {
  const end = endWhere(lines, line + 2, (text) => text.trim() === "" || !text.includes("|"));
  const align = cells(lines[line + 1]).map(alignment);
  const body = lines.slice(line + 2, end).map(cells);
  const parts = body.map((_, at) => line + 2 + at);
  return { block: { kind: "table", head: cells(lines[line]), align, body, parts }, next: end };
}

/** @param {string} text */
function cells(text) {
  const row = text.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** @param {string} rule */
function alignment(rule) {
  if (rule.endsWith(":")) return rule.startsWith(":") ? "center" : "right";
  return "left";
}

/**
 * Ends at a blank line, where another block begins, and where it is long enough: then the rest is the next one.
 * @param {string[]} lines
 * @param {number} line
 * @param {number} depth
 * @returns {Parsed}
 */
function paragraph(lines, line, depth) {
  let length = 0;
  let isGlued = false;
  /** @param {number} at */
  const goesOn = (at) => at < lines.length && lines[at].trim() !== "" && !(depth < MAX_DEPTH && startsBlock(lines, at));
  let end = line;
  do {
    isGlued = cutLong(lines, end);
    length += lines[end].length;
    end += 1;
  } while (!isGlued && length < MOST_PARAGRAPH && goesOn(end));
  const text = lines.slice(line, end).map((each) => each.trim()).join("\n");
  return { block: { kind: "paragraph", text, isGlued }, next: end };
}

/**
 * Makes two lines of one that is too long.
 * @param {string[]} lines
 * @param {number} at
 * @returns {boolean} it was
 */
function cutLong(lines, at) {
  const text = lines[at];
  if (text.length <= MOST_PARAGRAPH) return false;
  const start = text.slice(0, MOST_PARAGRAPH);
  const head = CUTS.map((cut) => cut.exec(start)?.[0]).find((found) => found !== undefined) ?? start;
  lines.splice(at, 1, head, text.slice(head.length));
  return true;
}

/** @param {string[]} lines  @param {number} at */
function startsBlock(lines, at) {
  const starts = [HEADING, RULE, QUOTE, ITEM, MATH];
  if (fenceOf(lines[at]) || isTable(lines, at)) return true;
  return starts.some((pattern) => pattern.test(lines[at]));
}

/**
 * @param {string[]} lines
 * @param {number} from
 * @param {(text: string) => boolean} test
 */
function endWhere(lines, from, test) {
  for (let at = from; at < lines.length; at += 1) if (test(lines[at])) return at;
  return lines.length;
}

const HEADINGS = /** @type {const} */ (["h3", "h4", "h5", "h6"]); // the page's own stand above those of an answer

/** @param {Block} block */
function renderBlock(block) {
  switch (block.kind) {
    case "paragraph":
      return el("p", {}, renderInline(block.text));
    case "heading":
      return el(HEADINGS[Math.min(block.level, HEADINGS.length) - 1], {}, renderInline(block.text));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, renderBlocks(block.blocks));
    case "code":
      return codeFigure(block.language, block.chunks, block.inside ?? null);
    case "math":
      return formula(block.tex, true);
    case "list":
      return renderList(block);
    case "table":
      return renderTable(block);
  }
}

/** @param {Block[]} blocks */
function renderBlocks(blocks) {
  const fragment = document.createDocumentFragment();
  for (const block of blocks) fragment.append(renderBlock(block));
  return fragment;
}

/** @param {List} list */
function renderList({ ordered, start, items }) {
  const list = el(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null });
  for (const blocks of items) list.append(el("li", {}, renderItem(blocks)));
  return list;
}

/** An item's first paragraph stands without a frame of its own: lists stay tight. @param {Block[]} blocks */
function renderItem(blocks) {
  const [first, ...rest] = blocks;
  if (first?.kind !== "paragraph") return renderBlocks(blocks);
  const fragment = renderInline(first.text);
  fragment.append(renderBlocks(rest));
  return fragment;
}

/** @param {Table} table */
function renderTable({ head, align, body }) {
  /** @param {"th"|"td"} tag  @param {string[]} texts */
  const row = (tag, texts) =>
    el("tr", {}, ...head.map((_, at) => cell(tag, texts[at] ?? "", align[at])));
  const rows = body.map((texts) => row("td", texts));
  const grid = el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, ...rows));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, grid);
}

/**
 * @param {"th"|"td"} tag
 * @param {string} text
 * @param {string} align
 */
function cell(tag, text, align) {
  return el(tag, { class: `align-${align}` }, renderInline(text));
}
