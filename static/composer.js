/** Where the user writes. */

const coarsePointer = matchMedia("(pointer: coarse)");

export class Composer {
  #form;
  #field;
  #send;
  #stop;
  #note;
  #actions;
  #busy = false;
  #edited = null; // the message whose new text is being written

  /**
   * @param {{form: Element, field: Element, send: Element, stop: Element, note: Element,
   *   cancel: Element}} nodes
   * @param {{send: (text: string, edited: ?object) => void, stop: () => void}} actions
   */
  constructor({ form, field, send, stop, note, cancel }, actions) {
    this.#form = form;
    this.#field = field;
    this.#send = send;
    this.#stop = stop;
    this.#note = note;
    this.#actions = actions;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    field.addEventListener("input", () => this.#fit());
    field.addEventListener("keydown", (event) => this.#key(event));
    stop.addEventListener("click", () => actions.stop());
    cancel.addEventListener("click", () => this.clear());
    field.enterKeyHint = coarsePointer.matches ? "enter" : "send";
    this.#fit();
  }

  /** While an answer is made, Stop stands where Send was; writing goes on. */
  setBusy(busy) {
    this.#busy = busy;
    const focused = document.activeElement;
    const swapped = focused === this.#stop || focused === this.#send;
    this.#stop.hidden = !busy;
    this.#send.hidden = busy;
    this.#fit();
    if (swapped) this.focus();
  }

  /** Writes a message anew. */
  edit(message) {
    this.#edited = message;
    this.#note.hidden = false;
    this.#write(message.text);
    this.#field.focus();
  }

  clear() {
    this.#edited = null;
    this.#note.hidden = true;
    this.#write("");
  }

  /** Not on a touch screen, where focus would bring up the keyboard over the answer. */
  focus() {
    if (!coarsePointer.matches) this.#field.focus();
  }

  get isEditing() {
    return this.#edited !== null;
  }

  #submit() {
    const text = this.#field.value.trim();
    if (text === "" || this.#busy) return;
    const edited = this.#edited;
    this.clear();
    this.#actions.send(text, edited);
  }

  /** An input method's Enter chooses a word (229 is what Safari sends then). */
  #key(event) {
    const plainEnter = event.key === "Enter" && !event.shiftKey;
    if (!plainEnter || event.isComposing || event.keyCode === 229 || coarsePointer.matches) return;
    event.preventDefault();
    this.#form.requestSubmit();
  }

  #write(text) {
    this.#field.value = text;
    this.#fit();
  }

  /** As high as its text; the style sheet sets the limit. */
  #fit() {
    this.#field.style.height = "auto";
    this.#field.style.height = `${this.#field.scrollHeight}px`;
    this.#send.disabled = this.#field.value.trim() === "";
  }
}
