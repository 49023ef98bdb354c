/**
 * The Markdown that chat models write: CommonMark with tables, strikethrough and bare links, formulas, footnotes and a
 * few tags. Each block reads the same whatever stands before and after it, so that a growing text is read from its last
 * block on: links have no definitions elsewhere, and a footnote is shown where it is defined.
 *
 * @import { StateBlock, StateInline } from "markdown-it"
 *
 * @typedef {(state: StateBlock, start: number, end: number, silent: boolean) => boolean} RuleBlock  start, end: lines
 * @typedef {(state: StateInline, silent: boolean) => boolean} RuleInline
 * @typedef {{cut: ?number}} Env  cut: where the rest begins of a text that was read up to a cut
 */

import MarkdownIt from "./vendor/markdown-it/markdown-it.js";

const MOST_PARAGRAPH = 2_000; // characters of a paragraph: more go on in another one
// Where a line is cut that is too long: best after a sentence, else after a word, else anywhere but inside a character.
const CUTS = [/^.{1000,}[.!?]\s+(?=\p{L})/su, /^.{1000,}(?:[。！？]|\s(?=\p{L}))/su, /^.*[^\uD800-\uDBFF]|^.*/s];
const LEAST_UNDERLINE = 3; // of a heading: a shorter one is the beginning of a list
export const MOST_MATH_LINES = 60;
const MOST_TEX = 1000;
// Money is written with dollars, too: between two of them there must be something that formulas alone have.
const FORMULA = /[\\^_=<>{}+*/|]|^[A-Za-z]'{0,2}$|^[A-Za-z]\(/;
/** @type {Record<string, string>} */
const MATH_END = { "$$": "$$", "$": "$", "\\[": "\\]", "\\(": "\\)" };
const MATH = /\$\$?|\\[([]/y;
const MATH_BLOCK = /^(?:\$\$|\\\[)/;
const FOOTNOTE = /\[\^([A-Za-z]{0,20}\d{1,4})\]/y;
const FOOTNOTE_TEXT = /^\[\^([A-Za-z]{0,20}\d{1,4})\]:\s*/;
const BREAK = /<br\s{0,3}\/?>/iy;
const TAG = /<(sub|sup|kbd|mark)>([^<\n]{1,200})<\/\1>/iy;

export const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
for (const scheme of ["ftp:", "mailto:", "//"]) markdown.linkify.add(scheme, null);
markdown.disable("reference");
markdown.validateLink = (url) => safeUrl(url) !== null;
markdown.normalizeLink = (url) => safeUrl(url) ?? url;

/** The address, where it is one that a link may have. @param {string} text */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

const { ruler } = markdown.block;
const [ownHeading, ownParagraph] = ruler.getRules("").slice(-2);

/**
 * A heading by its underline.
 * @type {RuleBlock}
 */
function underlined(state, start, end, silent) {
  const numTokens = state.tokens.length;
  if (!ownHeading(state, start, limitOf(state, start, end), silent)) return false;
  if (lineOf(state, state.line - 1).trimEnd().length >= LEAST_UNDERLINE) return true;
  state.tokens.length = numTokens;
  state.line = start;
  return false;
}

/**
 * A paragraph ends where it is long enough: what follows is another one, be it in the middle of a line.
 * @type {RuleBlock}
 */
function paragraph(state, start, end, silent) {
  const limit = limitOf(state, start, end);
  ownParagraph(state, start, limit, silent);
  const last = limit - 1;
  const text = lineOf(state, last).trimEnd();
  if (state.level > 0 || state.line < limit || text.length <= MOST_PARAGRAPH) return true;
  const beginning = text.slice(0, MOST_PARAGRAPH);
  const head = CUTS.map((cut) => cut.exec(beginning)?.[0]).find((found) => found !== undefined) ?? beginning;
  const inline = state.tokens[state.tokens.length - 2];
  inline.content = inline.content.slice(0, inline.content.length - (text.length - head.length)).trimEnd();
  state.env.cut = state.bMarks[last] + state.tShift[last] + head.length;
  state.line = end; // nothing more is read
  return true;
}

/**
 * The line at which a paragraph ends at the latest: that after it is long enough.
 * @param {StateBlock} state
 * @param {number} start
 * @param {number} end
 */
function limitOf(state, start, end) {
  if (state.level > 0) return end;
  let length = 0;
  for (let line = start; line < end; line += 1) {
    length += state.eMarks[line] - state.bMarks[line];
    if (length >= MOST_PARAGRAPH) return line + 1;
  }
  return end;
}

/** Without its indentation. @param {StateBlock} state  @param {number} line */
function lineOf(state, line) {
  return state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
}

/**
 * A formula on lines of its own; what has no end yet may still get one, unless a blank line comes first.
 * @type {RuleBlock}
 */
function mathBlock(state, start, end, silent) {
  if (state.sCount[start] - state.blkIndent >= 4) return false;
  const first = lineOf(state, start);
  const mark = MATH_BLOCK.exec(first)?.[0];
  if (mark === undefined) return false;
  const tex = [];
  for (let line = start; line < Math.min(end, start + MOST_MATH_LINES); line += 1) {
    const text = line === start ? first.slice(mark.length) : lineOf(state, line);
    const isOutside = line > start && (text.trim() === "" || state.sCount[line] < state.blkIndent);
    if (isOutside) return false;
    const close = text.indexOf(MATH_END[mark]);
    if (close === -1) {
      tex.push(text);
      continue;
    }
    if (text.slice(close + 2).trim() !== "") return false;
    if (silent) return true;
    const token = state.push("math_block", "", 0);
    token.content = [...tex, text.slice(0, close)].join("\n").trim();
    token.map = [start, line + 1];
    state.line = line + 1;
    return true;
  }
  return false;
}

/**
 * The text of a footnote, with the indented lines that follow.
 * @type {RuleBlock}
 */
function footnote(state, start, end, silent) {
  if (state.sCount[start] - state.blkIndent >= 4) return false;
  const found = FOOTNOTE_TEXT.exec(lineOf(state, start));
  if (found === null) return false;
  if (silent) return true;
  let line = start + 1;
  while (line < end && !state.isEmpty(line) && state.sCount[line] > state.blkIndent) line += 1;
  const token = state.push("footnote_open", "p", 1);
  token.map = [start, line];
  token.info = found[1];
  const inline = state.push("inline", "", 0);
  inline.content = state.getLines(start, line, state.blkIndent, false).trim().slice(found[0].length);
  inline.map = token.map;
  inline.children = [];
  state.push("footnote_close", "p", -1);
  state.line = line;
  return true;
}

ruler.before("fence", "math_block", mathBlock, { alt: ["paragraph", "blockquote", "list"] });
ruler.before("heading", "footnote", footnote, { alt: ["paragraph", "blockquote", "list"] });
ruler.at("lheading", underlined);
ruler.at("paragraph", paragraph);

/** @type {WeakMap<StateInline, Map<string, number>>} what ends a formula -> where it comes next */
const ends = new WeakMap();

/** @type {RuleInline} */
function mathInline(state, silent) {
  MATH.lastIndex = state.pos;
  const mark = MATH.exec(state.src)?.[0];
  if (mark === undefined) return false;
  const start = state.pos + mark.length;
  const closing = MATH_END[mark];
  const end = nextOf(state, closing, start);
  if (end === start || end - start > MOST_TEX || end + closing.length > state.posMax) return false;
  const tex = state.src.slice(start, end);
  const after = state.src[end + 1] ?? "";
  if (mark === "$" && (!FORMULA.test(tex) || /^\s|\s$|\n/.test(tex) || /\d/.test(after))) return false;
  if (!silent) state.push("math_inline", "", 0).content = tex.trim();
  state.pos = end + closing.length;
  return true;
}

/** Looks for a mark that does not come once. @param {StateInline} state  @param {string} mark  @param {number} start */
function nextOf(state, mark, start) {
  const known = ends.get(state) ?? new Map();
  ends.set(state, known);
  let end = known.get(mark) ?? -1;
  if (end < start) {
    end = state.src.indexOf(mark, start);
    if (end === -1) end = Infinity;
    known.set(mark, end);
  }
  return end;
}

/** @type {RuleInline} */
function footnoteMark(state, silent) {
  FOOTNOTE.lastIndex = state.pos;
  const found = FOOTNOTE.exec(state.src);
  if (found === null) return false;
  if (!silent) state.push("footnote_ref", "", 0).content = found[1];
  state.pos += found[0].length;
  return true;
}

/** Of HTML, what models write in Markdown: breaks and a few tags around a few words. @type {RuleInline} */
function tag(state, silent) {
  BREAK.lastIndex = TAG.lastIndex = state.pos;
  const broken = BREAK.exec(state.src);
  if (broken !== null) {
    if (!silent) state.push("hardbreak", "br", 0);
    state.pos += broken[0].length;
    return true;
  }
  const found = TAG.exec(state.src);
  if (found === null || state.pos + found[0].length > state.posMax) return false;
  const [whole, name, inner] = found;
  const { pos, posMax } = state;
  if (!silent) {
    state.push("tag_open", name.toLowerCase(), 1);
    state.pos = pos + name.length + 2;
    state.posMax = state.pos + inner.length;
    state.md.inline.tokenize(state);
    state.push("tag_close", name.toLowerCase(), -1);
  }
  state.pos = pos + whole.length;
  state.posMax = posMax;
  return true;
}

markdown.inline.ruler.before("escape", "math_inline", mathInline);
markdown.inline.ruler.before("link", "footnote_ref", footnoteMark);
markdown.inline.ruler.before("autolink", "tag", tag);
