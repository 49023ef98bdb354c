/**
 * What markdown-it reads, as nodes of the page. Text becomes text nodes: nothing here parses HTML.
 *
 * @import { Token } from "markdown-it"
 * @import { Block } from "./blocks.js"
 */

import { chunksOf } from "./blocks.js";
import { codeFigure } from "./code.js";
import { el } from "./dom.js";
import { formula } from "./math.js";

const HEADINGS = /** @type {const} */ (["h3", "h4", "h5", "h6"]); // the page's own stand above those of an answer
const INLINE = /** @type {const} */ (["em", "strong", "sub", "sup", "kbd", "mark"]);
const PLAIN = /** @type {const} */ (["ul", "li", "blockquote", "thead", "tbody", "tr", ...INLINE]);
const TASK = /^\[([ xX])\]\s/;

/** @param {Block[]} blocks */
export function renderBlocks(blocks) {
  const fragment = document.createDocumentFragment();
  for (const { tokens, inside } of blocks) append(fragment, tokens, inside);
  return fragment;
}

/**
 * @param {ParentNode & Node} parent
 * @param {Token[]} tokens
 * @param {?number} inside  the span of code that is open where a block of code begins
 */
function append(parent, tokens, inside = null) {
  const open = [parent];
  for (const token of tokens) {
    const top = open[open.length - 1];
    if (token.type === "inline") append(top, withTask(top, token.children ?? []));
    else if (token.nesting === 1) open.push(begin(top, token));
    else if (token.nesting === -1) open.pop();
    else top.appendChild(leaf(token, inside));
  }
}

/**
 * Adds the element that a token opens.
 * @param {ParentNode & Node} parent
 * @param {Token} token
 * @returns {ParentNode & Node} where its content goes
 */
function begin(parent, token) {
  // An item's first paragraph stands without a frame of its own: lists stay tight.
  if (token.type === "paragraph_open" && parent.nodeName === "LI" && !parent.hasChildNodes()) return parent;
  const element = elementOf(token);
  const framed = token.type === "table_open";
  const frame = framed ? el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, element) : element;
  parent.append(frame);
  return element;
}

/** @param {Token} token */
function elementOf(token) {
  const { type, tag } = token;
  if (type === "heading_open") return el(HEADINGS[Math.min(Number(tag[1]), HEADINGS.length) - 1]);
  if (type === "ordered_list_open") return el("ol", { start: token.attrGet("start") });
  if (type === "link_open") return link(token.attrGet("href"));
  if (type === "footnote_open") return el("p", { class: "footnote" }, el("sup", {}, token.info), " ");
  if (tag === "th" || tag === "td") return el(tag, { class: `align-${alignment(token)}` });
  if (tag === "s") return el("del");
  if (tag === "table") return el("table");
  return el(PLAIN.find((name) => name === tag) ?? "p");
}

/** @param {Token} token  whose style is text-align:right */
function alignment(token) {
  return String(token.attrGet("style") ?? "left").split(":").at(-1);
}

/** Opens in a new tab, which learns nothing of this one. @param {string|number|null} href  @param {...Node} children */
function link(href, ...children) {
  return el("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** @param {Token} token  @param {?number} inside */
function leaf(token, inside) {
  const { type, content } = token;
  switch (type) {
    case "fence":
      return codeFigure(token.info.trim().split(/\s/, 1)[0], chunksOf(content), inside);
    case "code_block":
      return codeFigure("", [content.replace(/\n$/, "")], null);
    case "math_block":
    case "math_inline":
      return formula(content, type === "math_block");
    case "hr":
      return el("hr");
    case "softbreak":
    case "hardbreak":
      return el("br");
    case "code_inline":
      return el("code", {}, content);
    case "footnote_ref":
      return el("sup", {}, content);
    case "image":
      return image(token);
    default:
      return document.createTextNode(content);
  }
}

/** A link to the picture: the page shows nothing from another host. @param {Token} token */
function image(token) {
  const anchor = link(token.attrGet("src"));
  append(anchor, (token.children ?? []).filter(({ type }) => type === "text"));
  return anchor;
}

/**
 * The box of a task, which is in place of its mark.
 * @param {ParentNode & Node} parent
 * @param {Token[]} children
 */
function withTask(parent, children) {
  const isFirst = parent instanceof HTMLLIElement && !parent.hasChildNodes();
  const found = isFirst && children[0]?.type === "text" && TASK.exec(children[0].content);
  if (!found) return children;
  const isDone = found[1] !== " ";
  const label = isDone ? "Done" : "To do";
  parent.className = "task";
  parent.append(el("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": label }), " ");
  children[0].content = children[0].content.slice(found[0].length);
  return children;
}
