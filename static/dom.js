/** Builds DOM nodes. Text becomes text nodes, always: nothing here parses HTML. */

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

/**
 * @param {string} tag
 * @param {object} properties  attributes by name; "on…" listeners; true sets an empty attribute,
 *   false and null set none
 * @param {...(Node|string)} children
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** The same for the elements of a picture; its properties are attributes, as they are. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** One of the symbols at the top of index.html. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));
}

/** A button that shows only an icon; its label is what a screen reader and a tooltip say. */
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
 * @param {string[]} heads  @param {(Node|string)[][]} rows
 */
export function tableOf(caption, heads, rows) {
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
