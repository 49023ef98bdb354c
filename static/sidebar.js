/**
 * The list of conversations: find, open, rename, export, delete. On a narrow screen it is a drawer.
 *
 * @import { Conversation } from "./conversation.js"
 *
 * @typedef {object} SidebarActions
 * @property {(conversation: Conversation) => void} open
 * @property {(conversation: Conversation, title: string) => void} rename
 * @property {(conversation: Conversation) => void} save  to a file
 * @property {() => Promise<void>} readAll  what is searched
 * @property {(conversation: Conversation) => void} remove
 */

import { byId, el, find, iconButton } from "./dom.js";
import { count } from "./format.js";
import { ageOf, find as findIn } from "./search.js";

const UNTITLED = "Untitled";

const nav = byId("sidebar");
const list = byId("conversations");
const search = find("#search", HTMLInputElement);
const toggle = byId("menu");

export class Sidebar {
  #actions;
  /** @type {{conversations: Conversation[], currentId: string, running: Set<string>}} */
  #shown = { conversations: [], currentId: "", running: new Set() };
  #drawn = ""; // as much of it as the list shows

  /** @param {SidebarActions} actions */
  constructor(actions) {
    this.#actions = actions;
    search.addEventListener("input", () => this.#find());
    search.addEventListener("keydown", (event) => this.#searchKey(event));
    toggle.addEventListener("click", () => this.#openDrawer());
    byId("shade").addEventListener("click", () => this.closeDrawer());
    nav.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.isOpen) return;
      event.stopPropagation(); // an Escape that closes the drawer stops no answer
      this.closeDrawer();
    });
  }

  get isOpen() {
    return nav.classList.contains("open");
  }

  /**
   * @param {Conversation[]} conversations
   * @param {string} currentId
   * @param {Set<string>} running  ids of conversations in which an answer is being made
   */
  show(conversations, currentId, running) {
    this.#shown = { conversations, currentId, running };
    const drawn = JSON.stringify([conversations.map(({ id, title }) => [id, title]), currentId, [...running]]);
    if (drawn !== this.#drawn) this.#draw(); // a list that is made anew loses its focus
    this.#drawn = drawn;
  }

  /** Puts the cursor where one searches, on a narrow screen too. */
  search() {
    if (getComputedStyle(toggle).display !== "none") this.#setDrawer(true);
    search.select();
    search.focus();
  }

  #draw() {
    if (list.querySelector(".rename")) return; // somebody writes in it
    const { conversations, currentId, running } = this.#shown;
    const query = search.value.trim();
    const found = findIn(conversations, query);
    const now = Date.now();
    const groups = Map.groupBy(found, ({ conversation }) => (query === "" ? ageOf(conversation.updated, now) : ""));
    const nodes = [...groups].flatMap(([age, members]) => [
      ...(age === "" ? [] : [el("li", { class: "age" }, age)]),
      ...members.map(({ conversation, excerpt }) => {
        const { id } = conversation;
        return this.#row(conversation, { current: id === currentId, running: running.has(id), excerpt });
      }),
    ]);
    list.replaceChildren(...nodes);
    const said = found.length === 0 ? "Nothing found" : count(found.length, "conversation");
    byId("found").textContent = query === "" ? "" : said;
  }

  async #find() {
    if (search.value.trim() !== "") await this.#actions.readAll();
    this.#draw();
  }

  /** Enter opens the first that was found; Escape ends the search. @param {KeyboardEvent} event */
  async #searchKey(event) {
    if (event.isComposing) return;
    if (event.key === "Enter") {
      event.preventDefault();
      await this.#find();
      const first = list.querySelector(".conversation");
      if (first instanceof HTMLElement) first.click();
    } else if (event.key === "Escape" && search.value !== "") {
      event.stopPropagation();
      search.value = "";
      this.#draw();
    }
  }

  closeDrawer() {
    if (!this.isOpen) return;
    this.#setDrawer(false);
    toggle.focus();
  }

  #openDrawer() {
    this.#setDrawer(true);
    find("button", HTMLButtonElement, nav).focus();
  }

  /** @param {boolean} open */
  #setDrawer(open) {
    nav.classList.toggle("open", open);
    byId("main").inert = open;
    toggle.setAttribute("aria-expanded", String(open));
  }

  /**
   * @param {Conversation} conversation
   * @param {{current: boolean, running: boolean, excerpt: ?string}} look
   */
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

  /**
   * Enter and leaving the field keep the new title, Escape the old one.
   * @param {HTMLElement} row
   * @param {Conversation} conversation
   */
  #rename(row, conversation) {
    const field = el("input", { "aria-label": "Title", maxlength: "120", class: "rename" });
    field.value = conversation.title;
    let open = true;
    /** @param {string} title */
    const end = (title) => {
      if (!open) return;
      open = false;
      field.remove();
      this.#actions.rename(conversation, title.trim() || conversation.title);
      this.#draw();
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
