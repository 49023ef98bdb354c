/**
 * Formulas, written in TeX and shown as MathML. The library that does it is fetched when the first formula comes; until
 * then, and where it finds a mistake, the TeX itself is shown.
 */

import { el } from "./dom.js";

const VENDOR = new URL("vendor/", import.meta.url);
const SHEETS = ["temml/Temml-Local.css", "penstock-math/font.css"];
const LIBRARY = new URL("temml/temml.min.js", VENDOR).href;
// The one script that the page adds: where a browser wants addresses of scripts by a policy, this one is all there is.
const policy = /** @type {{trustedTypes?: {createPolicy: (name: string, rules: object) => {createScriptURL: (url: string) => string}}}} */ (
  globalThis
).trustedTypes?.createPolicy("penstock-math", { createScriptURL: () => LIBRARY });
const OPTIONS = { throwOnError: true, trust: false, maxSize: [20, 20], maxExpand: 200 };
const KEPT = 500;

/**
 * @typedef {{attributes?: Record<string, string>, children?: Tree[], toNode: () => Node}} Tree  of MathML, before it is
 *   a part of the page
 * @typedef {{__renderToMathMLTree: (tex: string, options: object) => Tree}} Temml
 */

/** @type {?Temml} */
let library = null; // once it is here
let isLoading = false;
/** @type {Map<string, ?Node>} */
const rendered = new Map(); // what formulas became, so that a growing text does not make them again

/**
 * @param {string} tex  without its delimiters
 * @param {boolean} isBlock  it stands on lines of its own
 */
export function formula(tex, isBlock) {
  /** @type {import("./dom.js").Properties} */
  const scroller = isBlock ? { tabindex: "0", role: "region", "aria-label": "Formula" } : {};
  const look = isBlock ? "math block" : "math";
  const element = el(isBlock ? "div" : "span", { class: look, ...scroller, "data-tex": tex }, el("code", {}, tex));
  if (library === null) load();
  else fill(element, library);
  return element;
}

/** @param {Element} element  @param {Temml} temml */
function fill(element, temml) {
  const tex = element.getAttribute("data-tex") ?? "";
  const isBlock = element.localName === "div";
  const name = `${isBlock}${tex}`;
  if (!rendered.has(name)) rendered.set(name, render(temml, tex, isBlock));
  const [oldest] = rendered.keys();
  if (rendered.size > KEPT) rendered.delete(oldest);
  element.replaceChildren(rendered.get(name)?.cloneNode(true) ?? el("code", {}, tex));
}

/**
 * @param {Temml} temml
 * @param {string} tex
 * @param {boolean} displayMode
 */
function render(temml, tex, displayMode) {
  try {
    const tree = temml.__renderToMathMLTree(tex, { ...OPTIONS, displayMode });
    dropStyles(tree);
    return tree.toNode();
  } catch {
    return null;
  }
}

/**
 * A style given as an attribute is refused by the page's policy, loudly; the library sets nearly all in another way.
 * @param {Tree} node
 */
function dropStyles(node) {
  if (node.attributes) delete node.attributes.style;
  for (const child of node.children ?? []) dropStyles(child);
}

async function load() {
  if (isLoading) return;
  isLoading = true;
  const sheets = SHEETS.map((path) => el("link", { rel: "stylesheet", href: new URL(path, VENDOR).href }));
  const script = el("script");
  script.src = policy?.createScriptURL(LIBRARY) ?? LIBRARY;
  const ready = new Promise((resolve, reject) => Object.assign(script, { onload: resolve, onerror: reject }));
  document.head.append(...sheets, script);
  try {
    await ready;
  } catch {
    return; // formulas stay what they are: TeX
  }
  library = /** @type {typeof globalThis & {temml: Temml}} */ (globalThis).temml;
  for (const element of document.querySelectorAll(".math")) fill(element, library);
}
