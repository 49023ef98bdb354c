/** Opens the window into the engine, and puts a timeline below every answer. */

import { byId, el, svg } from "../dom.js";
import { loadKey } from "../settings.js";
import { Answers } from "./answers.js";

const app = byId("app");
/** @type {?import("./view.js").WindowView} */
let view = null;

const icon = svg(
  "svg",
  { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" },
  svg("path", { d: "M3 12h4l3-7 4 14 3-7h4" }),
);
const button = el(
  "button",
  { type: "button", "aria-pressed": "false", title: "A live view of the engine", onclick: () => toggle() },
  icon,
  el("span", {}, "Engine"),
);

async function toggle(open = !app.classList.contains("windowed")) {
  if (open && view === null) {
    button.disabled = true; // until it is there: pressed twice, it would be made twice
    const { WindowView } = await import("./view.js").finally(() => { button.disabled = false; });
    view = new WindowView(loadKey);
    byId("main").append(view.element);
  }
  app.classList.toggle("windowed", open);
  button.setAttribute("aria-pressed", String(open));
  if (open) {
    view?.open();
    byId("window-title").focus();
  } else {
    view?.close();
    button.focus();
  }
}

/** @param {?EventTarget} target  @param {string} selector */
function isWithin(target, selector) {
  return target instanceof Element && target.closest(selector) !== null;
}

byId("views").append(button);
// A conversation that is opened is to be seen.
byId("sidebar").addEventListener("click", ({ target }) => {
  if (app.classList.contains("windowed") && isWithin(target, "button")) toggle(false);
});
document.addEventListener(
  "keydown",
  (event) => {
    if (event.key !== "Escape" || !app.classList.contains("windowed")) return;
    if (document.querySelector("dialog[open]") || isWithin(event.target, "#sidebar")) return;
    event.stopPropagation(); // an Escape that closes the window stops no answer
    toggle(false);
  },
  { capture: true },
);

new Answers(loadKey).listen(document);
