/** The list of conversations: find, open, rename, export, delete. On a narrow screen it is a drawer. */

import { el, iconButton } from "./dom.js";
import { ageOf, find } from "./search.js";

const UNTITLED = "Untitled";

export class Sidebar {
  #nav;
  #list;
  #search;
  #found;
  #toggle;
  #behind;
  #actions;
  #shown = []; // what show() was last called with

  /**
   * @param {{nav: Element, list: Element, search: Element, found: Element, toggle: Element, behind: Element,
   *   shade: Element}} nodes  found: says how many conversations a search finds; behind: what an open drawer covers
   * @param {object} actions  open(conversation), rename(conversation, title), save(conversation), to a file, and
   *   remove(conversation)
   */
  constructor({ nav, list, search, found, toggle, behind, shade }, actions) {
    this.#nav = nav;
    this.#list = list;
    this.#search = search;
    this.#found = found;
    this.#toggle = toggle;
    this.#behind = behind;
    this.#actions = actions;
    search.addEventListener("input", () => this.#draw());
    search.addEventListener("keydown", (event) => this.#searchKey(event));
    toggle.addEventListener("click", () => this.#openDrawer());
    shade.addEventListener("click", () => this.closeDrawer());
    nav.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.isOpen) return;
      event.stopPropagation(); // an Escape that closes the drawer stops no answer
      this.closeDrawer();
    });
  }

  get isOpen() {
    return this.#nav.classList.contains("open");
  }

  /**
   * @param {import("./conversation.js").Conversation[]} conversations
   * @param {string} currentId
   * @param {Set<string>} running  ids of conversations in which an answer is being made
   */
  show(conversations, currentId, running) {
    this.#shown = [conversations, currentId, running];
    this.#draw();
  }

  /** Puts the cursor where one searches, on a narrow screen too. */
  search() {
    if (getComputedStyle(this.#toggle).display !== "none") this.#setDrawer(true);
    this.#search.select();
    this.#search.focus();
  }

  #draw() {
    const [conversations, currentId, running] = this.#shown;
    const query = this.#search.value.trim();
    const found = query === "" ? conversations.map((conversation) => ({ conversation })) : find(conversations, query);
    const now = Date.now();
    const groups = Map.groupBy(found, ({ conversation }) => (query === "" ? ageOf(conversation.updated, now) : ""));
    const nodes = [...groups].flatMap(([age, members]) => [
      ...(age === "" ? [] : [el("li", { class: "age" }, age)]),
      ...members.map(({ conversation, excerpt }) => {
        const { id } = conversation;
        return this.#row(conversation, { current: id === currentId, running: running.has(id), excerpt });
      }),
    ]);
    this.#list.replaceChildren(...nodes);
    this.#found.textContent = query === "" ? "" : foundText(found.length);
  }

  /** Enter opens the first that was found; Escape ends the search. */
  #searchKey(event) {
    if (event.isComposing) return;
    if (event.key === "Enter") {
      event.preventDefault();
      this.#list.querySelector(".conversation")?.click();
    } else if (event.key === "Escape" && this.#search.value !== "") {
      event.stopPropagation();
      this.#search.value = "";
      this.#draw();
    }
  }

  closeDrawer() {
    if (!this.isOpen) return;
    this.#setDrawer(false);
    this.#toggle.focus();
  }

  #openDrawer() {
    this.#setDrawer(true);
    this.#nav.querySelector("button").focus();
  }

  #setDrawer(open) {
    this.#nav.classList.toggle("open", open);
    this.#behind.inert = open;
    this.#toggle.setAttribute("aria-expanded", String(open));
  }

  #row(conversation, { current, running, excerpt }) {
    const title = conversation.title || UNTITLED;
    const open = el(
      "button",
      {
        type: "button",
        class: "conversation",
        title,
        "aria-current": current ? "true" : null,
        onclick: () => this.#actions.open(conversation),
      },
      el("span", {}, title),
      ...(excerpt ? [el("small", {}, excerpt)] : []),
    );
    const row = el("li", { "data-running": running }, open);
    const actions = el(
      "div",
      { class: "row-actions" },
      iconButton("edit", `Rename ${title}`, () => this.#rename(row, conversation)),
      iconButton("export", `Export ${title}`, () => this.#actions.save(conversation)),
      iconButton("delete", `Delete ${title}`, () => this.#actions.remove(conversation)),
    );
    row.append(actions);
    return row;
  }

  /** Enter and leaving the field keep the new title, Escape the old one. */
  #rename(row, conversation) {
    const field = el("input", { "aria-label": "Title", maxlength: "120", class: "rename" });
    field.value = conversation.title;
    let open = true;
    const end = (title) => {
      if (!open) return;
      open = false;
      this.#actions.rename(conversation, title.trim() || conversation.title);
    };
    field.addEventListener("blur", () => end(field.value));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      if (event.isComposing) return;
      event.stopPropagation();
      end(event.key === "Enter" ? field.value : conversation.title);
    });
    row.replaceChildren(field);
    field.select();
    field.focus();
  }
}

function foundText(number) {
  if (number === 0) return "Nothing found";
  return `${number} conversation${number === 1 ? "" : "s"}`;
}
