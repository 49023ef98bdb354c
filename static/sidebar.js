/** The list of conversations: open, rename, delete. On a narrow screen it is a drawer. */

import { el, iconButton } from "./dom.js";

const UNTITLED = "Untitled";

export class Sidebar {
  #nav;
  #list;
  #toggle;
  #behind;
  #actions;

  /**
   * @param {{nav: Element, list: Element, toggle: Element, behind: Element, shade: Element}} nodes
   *   behind: what an open drawer covers
   * @param {object} actions  open(conversation), rename(conversation, title), remove(conversation)
   */
  constructor({ nav, list, toggle, behind, shade }, actions) {
    this.#nav = nav;
    this.#list = list;
    this.#toggle = toggle;
    this.#behind = behind;
    this.#actions = actions;
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
    const rows = conversations.map((each) =>
      this.#row(each, { current: each.id === currentId, running: running.has(each.id) }),
    );
    this.#list.replaceChildren(...rows);
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

  #row(conversation, { current, running }) {
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
      title,
    );
    const row = el("li", { "data-running": running }, open);
    row.append(
      iconButton("edit", `Rename ${title}`, () => this.#rename(row, conversation)),
      iconButton("delete", `Delete ${title}`, () => this.#actions.remove(conversation)),
    );
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
