/** Where the user writes. */

/** @import { Message } from "./conversation.js" */

import { byId, find } from "./dom.js";

const coarsePointer = matchMedia("(pointer: coarse)");
const form = find("#composer", HTMLFormElement);
const field = find("#field", HTMLTextAreaElement);
const send = find("#send", HTMLButtonElement);
const stop = byId("stop");
const note = byId("editing");

export class Composer {
  #send;
  #keep;
  #draft = ""; // what was being written before a message is edited
  #busy = false;
  /** @type {?Message} */
  #edited = null; // the message whose new text is being written

  /** @param {{send: (text: string, edited: ?Message) => void, keep: (draft: string) => void, stop: () => void}} actions */
  constructor(actions) {
    this.#send = actions.send;
    this.#keep = actions.keep;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    field.addEventListener("input", () => {
      this.#fit();
      if (!this.isEditing) this.#keep(field.value);
    });
    field.addEventListener("keydown", (event) => this.#key(event));
    stop.addEventListener("click", () => actions.stop());
    byId("cancel-edit").addEventListener("click", () => this.stopEditing());
    field.enterKeyHint = coarsePointer.matches ? "enter" : "send";
    this.#fit();
  }

  /** While an answer is made, Stop stands where Send was; writing goes on. @param {boolean} busy */
  setBusy(busy) {
    this.#busy = busy;
    const focused = document.activeElement;
    const swapped = focused === stop || focused === send;
    stop.hidden = !busy;
    send.hidden = busy;
    this.#fit();
    if (swapped) this.focus();
  }

  /** Writes a message anew. @param {Message} message */
  edit(message) {
    if (!this.isEditing) this.#draft = field.value;
    this.#edited = message;
    note.hidden = false;
    this.#write(message.text);
    field.focus();
  }

  /** What was being written before stands in the field again. */
  stopEditing() {
    this.restore(this.#draft);
  }

  /** Goes on with a draft, perhaps an empty one. @param {string} draft */
  restore(draft) {
    this.#edited = null;
    this.#draft = "";
    note.hidden = true;
    this.#write(draft);
  }

  /** Not on a touch screen, where focus would bring up the keyboard over the answer. */
  focus() {
    if (!coarsePointer.matches) field.focus();
  }

  get isEditing() {
    return this.#edited !== null;
  }

  #submit() {
    const text = field.value.trim();
    if (text === "" || this.#busy) return;
    const edited = this.#edited;
    if (edited === null) this.#keep("");
    this.restore(edited === null ? "" : this.#draft);
    this.#send(text, edited);
  }

  /** An input method's Enter chooses a word (229 is what Safari sends then). @param {KeyboardEvent} event */
  #key(event) {
    const plainEnter = event.key === "Enter" && !event.shiftKey;
    if (!plainEnter || event.isComposing || event.keyCode === 229 || coarsePointer.matches) return;
    event.preventDefault();
    form.requestSubmit();
  }

  /** @param {string} text */
  #write(text) {
    field.value = text;
    this.#fit();
  }

  /** As high as its text; the style sheet sets the limit. */
  #fit() {
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight}px`;
    send.disabled = field.value.trim() === "";
  }
}
