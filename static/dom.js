/**
 * Finds and builds DOM nodes. Text becomes text nodes, always: nothing here parses HTML.
 *
 * @typedef {Record<string, string|number|boolean|null|(() => void)>} Properties  attributes by name; functions are
 *   listeners, named "on…"; true sets an empty attribute, false and null set none
 */

/**
 * The element with this id, which index.html has.
 * @param {string} id
 */
export const byId = (id) => find(`#${id}`, HTMLElement);

/**
 * The first element that the selector matches.
 * @template {Element} T
 * @param {string} selector
 * @param {new () => T} kind
 * @param {ParentNode} within
 * @returns {T}
 */
export function find(selector, kind, within = document) {
  const found = within.querySelector(selector);
  if (!(found instanceof kind)) throw new Error(`There is no ${kind.name} ${selector}.`);
  return found;
}

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Properties} properties
 * @param {...(Node|string)} children
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/**
 * An element of a picture.
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string|number>} attributes
 * @param {...(Node|string)} children
 */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** One of the symbols at the top of index.html. @param {string} name */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));
}

/**
 * A button that shows only an icon; its label is what a screen reader and a tooltip say.
 * @param {string} name
 * @param {string} label
 * @param {() => void} onclick
 */
export function iconButton(name, label, onclick) {
  return el(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick },
    icon(name),
  );
}

/**
 * A table: the first cell of a row is its head.
 * @param {string} caption  for those who do not see it, perhaps empty
 * @param {string[]} heads
 * @param {(Node|string)[][]} rows
 */
export function tableOf(caption, heads, rows) {
  /** @param {(Node|string)[]} cells */
  const row = ([first, ...others]) => el("tr", {}, el("th", { scope: "row" }, first), ...others.map((cell) => el("td", {}, cell)));
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)));
  return el(
    "table",
    {},
    ...(caption ? [el("caption", { class: "visually-hidden" }, caption)] : []),
    el("thead", {}, head),
    el("tbody", {}, ...rows.map(row)),
  );
}
