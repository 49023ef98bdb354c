/** Blocks of code: with their language, a button to copy them, and colours, which are fetched when the first code comes. */

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";

const MOST_CHARS = 8_000; // of a chunk that gets colours

let highlight = null; // highlight.js's, once it is here
let loading = null;

/**
 * @param {string} language  as the fence names it
 * @param {string[]} chunks  the code, cut between lines: so much of it is painted as one
 * @param {?number} inside  what highlight() gave for the chunk before, null for the first one
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
  caption.append(copyButton("Copy code", () => caption.nextElementSibling.textContent));
  const label = language ? `Code, ${language}` : "Code";
  return el("figure", { class: "code" }, caption, el("pre", { tabindex: "0", role: "region", "aria-label": label }, shown));
}

/** The chunk remembers what it began inside of: code that goes on after it is painted from there. */
function paint(chunk, text, language, inside) {
  chunk.inside = inside;
  if (language && highlight === null) loading ??= load();
  if (!language || highlight === null || text.length > MOST_CHARS) {
    chunk.replaceChildren(text);
    return null;
  }
  const painted = highlight(text, language, inside);
  chunk.replaceChildren(...painted.nodes);
  return painted.inside;
}

async function load() {
  try {
    ({ highlight } = await import("./highlight.js"));
  } catch {
    return; // code stays without colours
  }
  for (const shown of document.querySelectorAll("code[data-language]")) {
    let open = null;
    for (const chunk of shown.children) open = paint(chunk, chunk.textContent, shown.dataset.language, open);
  }
}
