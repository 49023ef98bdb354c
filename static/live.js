/** What the server tells of itself, heard while the page is seen, over as many connections as it takes. */

import { serverEvents } from "./api.js";

const AGAIN_MS = 2_000;

export class Live {
  #query;
  #key;
  #on;
  #listening = null;

  /**
   * @param {string} query  of v1/events
   * @param {() => ?string} key
   * @param {{event: (kind: ?string, data: object) => void, begin?: () => void, lost: (fault: Error) => void}} on
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
    const { signal } = (this.#listening = new AbortController());
    while (!document.hidden && !signal.aborted) {
      let fault = new Error("The server ended the connection.");
      try {
        this.#on.begin?.();
        const events = serverEvents(this.#query, { key: this.#key(), signal });
        for await (const { kind, data } of events) this.#on.event(kind, data);
      } catch (thrown) {
        fault = thrown;
      }
      if (signal.aborted) return;
      this.#on.lost(fault);
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  close() {
    this.#listening?.abort();
    this.#listening = null;
  }
}
