/** Blocks of code: with their language, a button to copy them, and colours, which are fetched when the first code comes. */

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";

const MOST_CHARS = 8_000; // of a chunk that gets colours

/** @type {?typeof import("./highlight.js").highlight} */
let highlight = null; // once it is here
let isLoading = false;

/** @type {WeakMap<Element, ?number>} */
const insides = new WeakMap(); // of painted chunks

/**
 * @param {string} language  as the fence names it
 * @param {string[]} chunks  the code, cut between lines: so much of it is painted as one
 * @param {?number} inside  what highlight() gave for the chunk before, null for the first one
 * @returns {HTMLElement}
 */
export function codeFigure(language, chunks, inside) {
  const caption = el("figcaption", {}, el("span", {}, language || "code"));
  const shown = el("code", { "data-language": language || null });
  let open = inside;
  for (const text of chunks) {
    const chunk = el("span");
    shown.append(chunk);
    open = paint(chunk, text, language, open);
  }
  caption.append(copyButton("Copy code", () => caption.nextElementSibling?.textContent ?? ""));
  const label = language ? `Code, ${language}` : "Code";
  return el("figure", { class: "code" }, caption, el("pre", { tabindex: "0", role: "region", "aria-label": label }, shown));
}

/**
 * The span that is open where a painted chunk begins: code that goes on after it is painted from there.
 * @param {Element} chunk
 */
export function insideOf(chunk) {
  return insides.get(chunk) ?? null;
}

/**
 * @param {Element} chunk
 * @param {string} text
 * @param {string} language
 * @param {?number} inside
 */
function paint(chunk, text, language, inside) {
  insides.set(chunk, inside);
  if (language && highlight === null) load();
  if (!language || highlight === null || text.length > MOST_CHARS) {
    chunk.replaceChildren(text);
    return null;
  }
  const painted = highlight(text, language, inside);
  chunk.replaceChildren(...painted.nodes);
  return painted.inside;
}

async function load() {
  if (isLoading) return;
  isLoading = true;
  try {
    ({ highlight } = await import("./highlight.js"));
  } catch {
    return; // code stays without colours
  }
  for (const shown of document.querySelectorAll("code[data-language]")) {
    const language = shown.getAttribute("data-language") ?? "";
    let open = null;
    for (const chunk of shown.children) open = paint(chunk, chunk.textContent, language, open);
  }
}
