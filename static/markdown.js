/**
 * Markdown as chat models write it. Raw HTML is text. A growing text is rendered block by block: what is finished stays
 * untouched.
 *
 * @import { Block } from "./blocks.js"
 *
 * @typedef {object} Tail  a block whose first parts are settled
 * @property {Element} element
 * @property {string} head  lines that stand for those parts
 * @property {?number} inside  the span of code that they leave open
 * @property {number} settled  how many they are
 * @property {number} skipped  how many the head makes
 */

import { parseBlocks } from "./blocks.js";
import { insideOf } from "./code.js";
import { find } from "./dom.js";
import { MOST_MATH_LINES } from "./grammar.js";
import { renderBlocks } from "./nodes.js";

const ITEM = /^ {0,3}(?:[-*+]|\d{1,9}[.)])/;
const CONTENT = /^ {1,4}(?=\S)/;
const FORMULA = /^\s*(?:\$\$|\\\[)/;
const MOST_PARTS = 8; // of a block, before it is settled in part
const MOST_CHARS = 16_000; // that a frame takes of a text

/** @param {string} text */
export function renderMarkdown(text) {
  return renderBlocks(parseBlocks(withoutReturns(text)));
}

/** Some write lines that end with two characters, which may come apart. @param {string} text */
function withoutReturns(text) {
  return text.replaceAll("\r", "");
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

  /** @param {string} given */
  update(given) {
    const text = withoutReturns(given);
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
    const head = this.#tail?.head ?? "";
    const source = head + text.slice(this.#settled);
    const blocks = parseBlocks(source);
    if (blocks.length > 0) blocks[0].inside = this.#tail?.inside ?? null;
    const firstOpen = blocks.length - numOpen(blocks, source);
    this.#grow(renderBlocks(blocks), firstOpen);
    if (firstOpen > 0) this.#tail = null;
    const open = this.#splitOff(blocks[firstOpen], source) ?? blocks[firstOpen]?.start ?? 0;
    this.#settled += Math.max(0, open - head.length);
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
   * @param {string} source
   * @returns {?number} where the first part begins that stays open, null where the block is not split
   */
  #splitOff(block, source) {
    if (block === undefined) return null;
    const { settled = 0, skipped = 0 } = this.#tail ?? {};
    const parts = block.parts.slice(skipped);
    if (parts.length <= this.#mostParts) return null;
    const [element] = this.#open;
    const first = parts.length - 2; // the last part may turn out to belong to the one before it
    const now = settled + first;
    const inside = insideOf(partsIn(element).children[now]);
    const head = headOf(block, source, parts[first - 1]);
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
 * @param {Block} block
 * @param {string} source
 * @param {number} last  where the last part before them begins
 */
function headOf({ kind, start }, source, last) {
  if (kind === "code") return linesAt(source, start, 1);
  if (kind === "table") return linesAt(source, start, 2);
  const line = linesAt(source, last, 1);
  const marker = ITEM.exec(line)?.[0] ?? "";
  const space = CONTENT.exec(line.slice(marker.length))?.[0] ?? " ";
  return `${marker}${space}x\n`; // an item in place of all before
}

/** @param {string} text  @param {number} start  @param {number} count */
function linesAt(text, start, count) {
  let end = start;
  for (let line = 0; line < count; line += 1) end = text.indexOf("\n", end) + 1;
  return text.slice(start, end);
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
 * is not finished, it may yet turn out to belong to the block before it; all that follows what begins like a formula
 * may be a part of that.
 * @param {Block[]} blocks
 * @param {string} source
 */
function numOpen(blocks, source) {
  const lastTwo = source.lastIndexOf("\n", source.lastIndexOf("\n") - 1) + 1;
  const justBegan = blocks.length > 1 && blocks[blocks.length - 1].start >= lastTwo;
  const formula = openFormula(source);
  const inFormula = blocks.length - blocks.findLastIndex(({ start }) => start <= formula);
  return Math.min(blocks.length, Math.max(justBegan ? 2 : 1, formula === -1 ? 0 : inFormula));
}

/** Where the lines up to the next blank one begin like a formula, -1 where they do not. @param {string} source */
function openFormula(source) {
  const lines = source.split("\n").slice(-MOST_MATH_LINES);
  let at = source.length;
  let found = -1;
  for (const [fromEnd, line] of lines.reverse().entries()) {
    at -= line.length + (fromEnd > 0 ? 1 : 0);
    if (fromEnd > 0 && line.trim() === "") break;
    if (FORMULA.test(line)) found = at;
  }
  return found;
}
