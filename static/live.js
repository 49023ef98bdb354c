/**
 * What the server tells of itself, heard while the page is seen, over as many connections as it takes.
 *
 * @typedef {object} Listeners
 * @property {(event: import("./api.js").StatusEvent) => void} event
 * @property {() => void} [begin]
 * @property {(message: string) => void} lost
 */

import { serverEvents } from "./api.js";
import { messageOf } from "./fault.js";

const AGAIN_MS = 2_000;

export class Live {
  #query;
  #key;
  #on;
  /** @type {?AbortController} */
  #listening = null;

  /**
   * @param {string} query  of v1/events
   * @param {() => ?string} key
   * @param {Listeners} on
   */
  constructor(query, key, on) {
    this.#query = query;
    this.#key = key;
    this.#on = on;
    document.addEventListener("visibilitychange", () => this.#listening && this.open());
  }

  /** Listens, or listens anew. Browsers give a server few connections: a page that is not seen takes none. */
  async open() {
    this.close();
    this.#listening = new AbortController();
    const { signal } = this.#listening;
    while (!document.hidden && !signal.aborted) {
      let message = "The server ended the connection.";
      try {
        this.#on.begin?.();
        const events = serverEvents(this.#query, { key: this.#key(), signal });
        for await (const event of events) this.#on.event(event);
      } catch (fault) {
        message = messageOf(fault);
      }
      if (signal.aborted) return;
      this.#on.lost(message);
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  close() {
    this.#listening?.abort();
    this.#listening = null;
  }
}
