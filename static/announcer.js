/** Reads an answer to screen readers by whole sentences, at a bearable pace. */

/** @import { Message } from "./conversation.js" */

import { RECONNECTING } from "./conversation.js";
import { partsOf } from "./thinking.js";

const GAP_MS = 2000;
const KEPT = 20;
const SENTENCE_END = /[.!?:](?=\s)|\n/g;

export class Announcer {
  #log;
  /** @type {?Message} */
  #message = null;
  #spoken = 0; // how much of the message's text was announced
  #lastAt = -Infinity;
  #lost = false;

  /** @param {Element} log  an element with role="log" that only assistive technology sees */
  constructor(log) {
    this.#log = log;
  }

  /**
   * Announces what a growing answer gained, that it waits for its connection, and its end.
   * @param {Message} message
   * @param {boolean} ended
   */
  follow(message, ended, now = performance.now()) {
    const text = partsOf(message).answer;
    if (message !== this.#message || text.length < this.#spoken) {
      this.#message = message;
      this.#spoken = 0;
    }
    const lost = message.state === "reconnecting";
    if (lost && !this.#lost) this.say(RECONNECTING);
    this.#lost = lost;
    if (!ended && now - this.#lastAt < GAP_MS) return;
    const end = ended ? text.length : lastSentenceEnd(text, this.#spoken);
    const news = text.slice(this.#spoken, end).replace(/[*_`#|]+/g, "").trim();
    this.#spoken = end;
    if (news === "") return;
    this.#lastAt = now;
    this.say(news);
  }

  /** @param {string} text */
  say(text) {
    const line = document.createElement("p");
    line.textContent = text;
    this.#log.append(line);
    while (this.#log.childElementCount > KEPT) this.#log.firstElementChild?.remove();
  }
}

/** @param {string} text  @param {number} from */
function lastSentenceEnd(text, from) {
  const last = [...text.slice(from).matchAll(SENTENCE_END)].at(-1);
  return from + (last === undefined ? 0 : last.index + 1);
}
