/**
 * Markdown inside a line of text: emphasis, code, links, formulas. Builds DOM nodes and never parses HTML, so
 * hostile text stays text. Linear in the length of the text: openers and closers meet on a stack.
 */

import { el } from "./dom.js";
import { formula } from "./math.js";

/**
 * @typedef {{node: Node, depth: number}|{text: string, depth: number}|{parts: Item[], depth: number}} Item
 */

const SPECIAL = /\\|\$\$?|`+|\*+|_+|~+|!?\[|\]|\n|<?https?:\/\//g;
const DESTINATION = /\(\s*([^\s()]{1,2000}(?:\([^\s()]{0,200}\)[^\s()]{0,200})?)(?:\s+"[^"]{0,200}")?\s*\)/y;
const BARE_URL = /https?:\/\/[^\s<>"`]+/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const SPACE = /\s/;
// Money is written with dollars, too: between two of them there must be something that formulas alone have.
const FORMULA = /[\\^_=<>{}+*/|]|^[A-Za-z]'{0,2}$|^[A-Za-z]\(/;
const MOST_TEX = 1000;
const MAX_DEPTH = 12;

/**
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function renderInline(text) {
  return new InlineParser(text).run();
}

/** The address, where it is one that a link may have. @param {string} text */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

class InlineParser {
  #text;
  #at = 0;
  /** @type {Item[]} in order; an opener is its own text until a closer comes */
  #items = [];
  /** @type {{index: number, mark: string, length: number}[]} delimiter runs that may yet begin an element */
  #openers = [];
  /** @type {number[]} indices of "[" that may yet begin a link */
  #brackets = [];
  /** @type {Map<string, number>} how many openers of a kind there are: spares looking for one in vain */
  #open = new Map();
  /** @type {?Map<number, number>} length of a run of backticks -> where the last such run is */
  #lastFence = null;
  /** @type {Map<string, number>} what ends a formula -> where it comes next */
  #marks = new Map();
  #noUrlUntil = 0; // up to here stands what began like an address and is none

  /** @param {string} text */
  constructor(text) {
    this.#text = text;
  }

  run() {
    for (let next = this.#nextSpecial(); next !== null; next = this.#nextSpecial()) {
      this.#literal(this.#text.slice(this.#at, next.index));
      this.#at = next.index + next[0].length;
      this.#special(next[0], next.index);
    }
    this.#literal(this.#text.slice(this.#at));
    return fragmentOf(this.#items);
  }

  #nextSpecial() {
    SPECIAL.lastIndex = this.#at;
    return SPECIAL.exec(this.#text);
  }

  /** @param {string} found  @param {number} start */
  #special(found, start) {
    const first = found[0];
    if (first === "\\") this.#escape();
    else if (first === "$") this.#dollars(found);
    else if (first === "`") this.#code(found, start);
    else if (first === "\n") this.#push(el("br"));
    else if (found.endsWith("[")) this.#openBracket(found);
    else if (first === "]") this.#closeBracket();
    else if (found.endsWith("//")) this.#bareUrl(found, start);
    else this.#delimiter(found, start);
  }

  /** @param {Node} node */
  #push(node, depth = 0) {
    this.#items.push({ node, depth });
  }

  /** @param {string} text */
  #literal(text) {
    if (text !== "") this.#items.push({ text, depth: 0 });
  }

  #escape() {
    const next = this.#text[this.#at] ?? "";
    if (next === "(" || next === "[") {
      const tex = this.#upTo(next === "(" ? "\\)" : "\\]", this.#at + 1);
      if (tex !== null) return this.#formula(tex, this.#at + 1, 2);
    }
    if (!ESCAPABLE.test(next)) return this.#literal("\\");
    this.#at += 1;
    return this.#literal(next);
  }

  /** @param {string} mark */
  #dollars(mark) {
    const tex = this.#upTo(mark, this.#at);
    if (!tex) return this.#literal(mark);
    const after = this.#text[this.#at + tex.length + mark.length] ?? "";
    const isMoney = mark === "$" && (!FORMULA.test(tex) || /^\s|\s$|\n/.test(tex) || /\d/.test(after));
    if (isMoney) return this.#literal(mark);
    return this.#formula(tex, this.#at, mark.length);
  }

  /**
   * @param {string} tex
   * @param {number} start
   * @param {number} closing  the length of the mark that ends it
   */
  #formula(tex, start, closing) {
    this.#push(formula(tex.trim(), false));
    this.#at = start + tex.length + closing;
  }

  /** The text from there to the mark, null if it does not come soon. @param {string} mark  @param {number} start */
  #upTo(mark, start) {
    let end = this.#marks.get(mark) ?? -1;
    if (end !== Infinity && end < start) {
      end = this.#text.indexOf(mark, start);
      if (end === -1) end = Infinity; // looked for once
      this.#marks.set(mark, end);
    }
    return end - start <= MOST_TEX ? this.#text.slice(start, end) : null;
  }

  /** @param {string} fence  @param {number} start */
  #code(fence, start) {
    const end = this.#closingFence(fence.length, start);
    if (end === null) return this.#literal(fence);
    const code = this.#text.slice(this.#at, end).replaceAll("\n", " ");
    const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
    this.#push(el("code", {}, padded ? code.slice(1, -1) : code));
    this.#at = end + fence.length;
    return undefined;
  }

  /** @param {number} length  @param {number} start */
  #closingFence(length, start) {
    this.#lastFence ??= lastFences(this.#text);
    if ((this.#lastFence.get(length) ?? start) <= start) return null;
    const fences = /`+/g;
    fences.lastIndex = this.#at;
    for (const found of this.#text.matchAll(fences)) if (found[0].length === length) return found.index;
    return null;
  }

  /** @param {string} found  @param {number} start */
  #bareUrl(found, start) {
    if (start < this.#noUrlUntil) return this.#literal(found);
    const bracketed = found[0] === "<";
    BARE_URL.lastIndex = bracketed ? start + 1 : start;
    const [whole] = BARE_URL.exec(this.#text) ?? [""];
    const address = bracketed ? whole : whole.replace(/[.,:;!?'*_~\])]{1,50}$/, "");
    const url = safeUrl(address);
    if (url === null) {
      this.#noUrlUntil = start + whole.length;
      return this.#literal(found);
    }
    this.#push(link(url, [document.createTextNode(address)]));
    this.#at = (bracketed ? start + 1 : start) + address.length;
    if (bracketed && this.#text[this.#at] === ">") this.#at += 1;
    return undefined;
  }

  /** @param {string} found */
  #openBracket(found) {
    this.#brackets.push(this.#items.length);
    this.#literal(found);
  }

  #closeBracket() {
    const index = this.#brackets.pop();
    if (index === undefined) return this.#literal("]");
    DESTINATION.lastIndex = this.#at;
    const destination = DESTINATION.exec(this.#text);
    const url = destination && safeUrl(destination[1]);
    if (!url) return this.#literal("]");
    this.#forgetOpenersFrom(index);
    this.#brackets.length = 0; // a link holds no link, and nothing around this one becomes one
    this.#wrap(index, (children) => link(url, children));
    this.#at = DESTINATION.lastIndex;
    return undefined;
  }

  /** @param {string} run  @param {number} start */
  #delimiter(run, start) {
    const mark = run[0];
    const { opens, closes } = flanks(this.#text, start, run.length, mark);
    let left = run.length;
    while (closes && left > 0) {
      const used = this.#close(mark, left);
      if (used === 0) break;
      left -= used;
    }
    if (opens) left -= this.#opener(mark, left);
    this.#literal(mark.repeat(left));
  }

  /**
   * Pushes an opener of two marks, of one, or both, as many as the run holds.
   * @param {string} mark
   * @param {number} left
   */
  #opener(mark, left) {
    if (left > 3) return 0;
    const lengths = mark === "~" ? [2] : [2, 1];
    let used = 0;
    for (const length of lengths.filter((each) => each <= left)) {
      if (used + length > left) break;
      this.#openers.push({ index: this.#items.length, mark, length });
      this.#count(mark, length, 1);
      this.#literal(mark.repeat(length));
      used += length;
    }
    return used;
  }

  /**
   * Ends the innermost element that this mark can end; returns how many marks that took.
   * @param {string} mark
   * @param {number} available
   */
  #close(mark, available) {
    const lengths = [1, 2].filter((each) => each <= available && this.#open.get(mark + each));
    if (lengths.length === 0) return 0;
    const opener = this.#openers.findLast((each) => each.mark === mark && lengths.includes(each.length));
    if (opener === undefined) return 0;
    const { index, length } = opener;
    this.#forgetOpenersFrom(index);
    this.#forgetBracketsFrom(index);
    this.#wrap(index, (children) => el(elementFor(mark, length), {}, ...children));
    return length;
  }

  /**
   * Puts the items after an opener into one element, which takes the opener's place.
   * @param {number} index
   * @param {(children: Node[]) => Node} build
   */
  #wrap(index, build) {
    const inside = this.#items.splice(index);
    const depth = 1 + inside.reduce((most, item) => Math.max(most, item.depth), 0);
    const parts = inside.slice(1);
    if (depth > MAX_DEPTH) this.#items.push({ parts, depth: depth - 1 });
    else this.#push(build(nodesOf(parts)), depth);
  }

  /** @param {number} index */
  #forgetOpenersFrom(index) {
    const first = this.#openers.findLastIndex((each) => each.index < index) + 1;
    for (const { mark, length } of this.#openers.splice(first)) this.#count(mark, length, -1);
  }

  /** @param {number} index */
  #forgetBracketsFrom(index) {
    this.#brackets.length = this.#brackets.findLastIndex((each) => each < index) + 1;
  }

  /** @param {string} mark  @param {number} length  @param {number} change */
  #count(mark, length, change) {
    this.#open.set(mark + length, (this.#open.get(mark + length) ?? 0) + change);
  }
}

/** @param {Item[]} items */
function fragmentOf(items) {
  const fragment = document.createDocumentFragment();
  for (const node of nodesOf(items)) fragment.append(node);
  return fragment;
}

/**
 * One node for all neighbouring texts: a browser that joins them one by one copies them as often.
 * @param {Item[]} items
 */
function nodesOf(items) {
  /** @type {Node[]} */
  const nodes = [];
  /** @type {string[]} */
  let texts = [];
  const flush = () => {
    if (texts.length > 0) nodes.push(document.createTextNode(texts.join("")));
    texts = [];
  };
  const waiting = [...items].reverse();
  for (let item = waiting.pop(); item !== undefined; item = waiting.pop()) {
    if ("parts" in item) for (let at = item.parts.length - 1; at >= 0; at -= 1) waiting.push(item.parts[at]);
    else if ("text" in item) texts.push(item.text);
    else {
      flush();
      nodes.push(item.node);
    }
  }
  flush();
  return nodes;
}

/** @param {string} mark  @param {number} length */
function elementFor(mark, length) {
  if (mark === "~") return "del";
  return length === 2 ? "strong" : "em";
}

/**
 * Opens in a new tab, which learns nothing of this one. A link inside a link gives up its own.
 * @param {string} href
 * @param {Node[]} children
 */
function link(href, children) {
  const anchor = el("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
  for (const inner of anchor.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  return anchor;
}

/**
 * CommonMark's flanking rules: a mark opens before a word and closes behind one.
 * @param {string} text
 * @param {number} start
 * @param {number} length
 * @param {string} mark
 */
function flanks(text, start, length, mark) {
  const before = text[start - 1] ?? " ";
  const after = text[start + length] ?? " ";
  const afterWord = !SPACE.test(before) && (!PUNCTUATION.test(before) || !isWord(after));
  const beforeWord = !SPACE.test(after) && (!PUNCTUATION.test(after) || !isWord(before));
  if (mark !== "_") return { opens: beforeWord, closes: afterWord };
  return { opens: beforeWord && !isWord(before), closes: afterWord && !isWord(after) };
}

/** @param {string} character */
function isWord(character) {
  return !SPACE.test(character) && !PUNCTUATION.test(character);
}

/** @param {string} text */
function lastFences(text) {
  const last = new Map();
  for (const found of text.matchAll(/`+/g)) last.set(found[0].length, found.index);
  return last;
}
