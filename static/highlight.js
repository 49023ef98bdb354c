/**
 * Colours for code: comments, strings, numbers, keywords, calls and types, by one expression for each family of
 * languages. It does not parse; where it is wrong, a word has another colour.
 */

import { el } from "./dom.js";

/**
 * @typedef {[opening: string, closing: string, kind: string]} SpanRule  kind: its class
 *
 * @typedef {object} Parts  expressions
 * @property {string} [comment]
 * @property {string} [string]
 * @property {SpanRule[]} [spans]  over any number of lines
 * @property {string} [extra]
 * @property {boolean} [ignoreCase]  of keywords
 *
 * @typedef {ReturnType<typeof family>} Family
 */

/** @param {string} text */
const words = (text) => new Set(text.split(" "));
const LITERALS = words("true false null undefined nil None True False NaN NULL nullptr");

const JS = "as async await break case catch class const continue debugger default delete do else enum export extends finally for from function get if implements import in instanceof interface let new of package private protected public return set static super switch this throw try type typeof var void while with yield";
const PYTHON = "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self try while with yield";
const C = "alignas auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern float for friend goto if inline int long namespace new noexcept operator private protected public register return short signed sizeof static struct switch template this throw try typedef typename union unsigned using virtual void volatile while";
const JAVA = "abstract as async await base bool boolean break byte case catch char class companion const continue data default do double else enum extends final finally float for foreach fun get if implements import in instanceof int interface internal is lateinit long namespace native new object open operator out override package private protected public readonly record return sealed set short static string super switch synchronized this throw throws transient try using val var virtual void volatile when while yield";
const GO = "break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var";
const RUST = "as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return self static struct super trait type unsafe use where while";
const SHELL = "alias break case cd continue do done echo elif else esac eval exec exit export fi for function if in local return select set shift source sudo then trap unset until while";
const RUBY = "alias and begin break case class def do else elsif end ensure for if in module next not or redo require rescue retry return self super then undef unless until when while yield";
const SQL = "add all alter and as asc begin between by case check column commit constraint create cross database default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not null offset on or order outer over partition primary references returning right rollback select set table then union unique update using values view when where with";

const DOUBLE = String.raw`"(?:\\.|[^"\\\n])*"?`;
const SINGLE = String.raw`'(?:\\.|[^'\\\n])*'?`;
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\w*`;
const WORD = String.raw`[\p{L}_$][\p{L}\p{N}_$]*`;
const SLASHES = String.raw`\/\/.*`;
const HASH = String.raw`(?<![^\s;])#.*`;
const QUOTES = `${DOUBLE}|${SINGLE}`;

/**
 * @param {Parts} parts
 * @param {string} keywords
 */
function family({ comment, string = QUOTES, spans = [], extra = "", ignoreCase = false }, keywords = "") {
  const opens = spans.map(([open]) => open.replace(/[/*]/g, "\\$&")).join("|");
  const groups = [
    opens && `(?<span>${opens})`,
    comment && `(?<comment>${comment})`,
    string && `(?<string>${string})`,
    extra,
    `(?<number>${NUMBER})`,
    `(?<word>${WORD})`,
  ];
  const pattern = groups.filter(Boolean).join("|");
  return { pattern: new RegExp(pattern, "gmu"), spans, keywords: words(keywords), ignoreCase };
}

/** @type {SpanRule} */
const BLOCK = ["/*", "*/", "comment"];
/** @type {Record<string, () => Family>} */
const FAMILIES = {
  js: () => family({ comment: SLASHES, spans: [BLOCK, ["`", "`", "string"]] }, JS),
  python: () => family({ comment: HASH, spans: [['"""', '"""', "string"], ["'''", "'''", "string"]] }, PYTHON),
  c: () => family({ comment: `${SLASHES}|^#\\w+`, spans: [BLOCK] }, C),
  java: () => family({ comment: SLASHES, spans: [BLOCK, ['"""', '"""', "string"]] }, JAVA),
  go: () => family({ comment: SLASHES, spans: [BLOCK, ["`", "`", "string"]] }, GO),
  rust: () => family({ comment: SLASHES, string: `${DOUBLE}|'(?:\\\\.|[^'\\\\\\n])'`, spans: [BLOCK] }, RUST),
  shell: () => family({ comment: HASH, extra: String.raw`(?<type>\$\{?[\w@#?*!-]+\}?)|(?<number2>(?<!\S)--?[\w-]+)` }, SHELL),
  ruby: () => family({ comment: HASH }, RUBY),
  sql: () => family({ comment: "--.*", spans: [BLOCK], ignoreCase: true }, SQL),
  json: () => family({ extra: `(?<keyword>${DOUBLE}(?=\\s*:))|(?<string>${DOUBLE})`, string: "" }),
  yaml: () => family({ comment: HASH, extra: String.raw`(?<keyword>(?<![\w.\/-])[\w.\/-]+(?=\s*[:=](?:\s|$)))|(?<type>^\s*\[[^\]\n]*\])` }),
  css: () => family({ spans: [BLOCK], extra: String.raw`(?<keyword>(?<![\w-])[\w-]+(?=\s*:))|(?<type>[.#@][\w-]+)` }),
  markup: () => family({ spans: [["<!--", "-->", "comment"]], extra: String.raw`(?<keyword><\/?[\w:-]*|\/?>)|(?<call>(?<![\w:-])[\w:-]+(?==))` }),
  diff: () => family({ string: "", extra: String.raw`(?<comment>^(?:@@|---|\+\+\+|diff |index ).*)|(?<string>^\+.*)|(?<removed>^-.*)` }),
};

const NAMES = {
  js: "js javascript jsx mjs ts tsx typescript",
  python: "py python python3",
  c: "c cc cpp c++ h hpp cuda cu glsl objc",
  java: "java kotlin kt cs csharp c# scala dart swift php",
  go: "go golang",
  rust: "rust rs",
  shell: "sh bash zsh shell console dockerfile make makefile powershell ps1",
  ruby: "rb ruby elixir perl pl lua r julia",
  sql: "sql mysql postgresql postgres sqlite",
  json: "json json5 jsonc",
  yaml: "yaml yml toml ini conf properties env",
  css: "css scss less",
  markup: "html xml svg vue svelte",
  diff: "diff patch",
};
const FAMILY_OF = new Map(Object.entries(NAMES).flatMap(([own, names]) => names.split(" ").map((name) => [name, own])));
/** @type {Map<string, Family>} */
const built = new Map();

/** @param {string} language */
function familyOf(language) {
  const name = FAMILY_OF.get(language.toLowerCase());
  if (name === undefined) return null;
  const known = built.get(name) ?? FAMILIES[name]();
  built.set(name, known);
  return known;
}

/**
 * @param {string} text  whole lines
 * @param {string} language  as a fence names it
 * @param {?number} inside  the span that an earlier text left open
 * @returns {{nodes: (Node|string)[], inside: ?number}}
 */
export function highlight(text, language, inside = null) {
  const known = familyOf(language);
  if (known === null) return { nodes: [text], inside: null };
  /** @type {(Node|string)[]} */
  const nodes = [];
  let plainFrom = 0;
  let at = 0;
  /** @param {string} kind  @param {number} from  @param {number} to */
  const add = (kind, from, to) => {
    if (from > plainFrom) nodes.push(text.slice(plainFrom, from));
    nodes.push(el("span", { class: `hl-${kind}` }, text.slice(from, to)));
    plainFrom = to;
  };
  /** @param {number} span  @param {number} from  @param {number} searchFrom */
  const close = (span, from, searchFrom) => {
    const [, closing, kind] = known.spans[span];
    const found = text.indexOf(closing, searchFrom);
    at = found === -1 ? text.length : found + closing.length;
    if (at > from) add(kind, from, at);
    return found === -1 ? span : null;
  };
  if (inside !== null) inside = close(inside, 0, 0);
  while (at < text.length) {
    known.pattern.lastIndex = at;
    const found = known.pattern.exec(text);
    if (found === null) break;
    at = found.index + found[0].length;
    const { span, word, ...others } = found.groups ?? {};
    if (span !== undefined) inside = close(known.spans.findIndex(([open]) => open === span), found.index, at);
    else {
      const kind = word === undefined ? kindIn(others) : kindOf(word, text[at], known);
      if (kind !== null) add(kind, found.index, at);
    }
  }
  if (plainFrom < text.length) nodes.push(text.slice(plainFrom));
  return { nodes, inside };
}

/** @param {Record<string, string|undefined>} groups */
function kindIn(groups) {
  const name = Object.keys(groups).find((each) => groups[each] !== undefined);
  return name?.replace(/\d$/, "") ?? null;
}

/**
 * @param {string} word
 * @param {string} next  the character behind it
 * @param {Family} family
 */
function kindOf(word, next, { keywords, ignoreCase }) {
  if (keywords.has(ignoreCase ? word.toLowerCase() : word)) return "keyword";
  if (LITERALS.has(word)) return "number";
  if (next === "(") return "call";
  return /^\p{Lu}/u.test(word) ? "type" : null;
}
