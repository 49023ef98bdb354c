/** The dot that says whether the server takes requests. */

import { serverStates } from "./api.js";

const AGAIN_MS = 3_000;

/** Listens to the server while the page is seen. */
export class Status {
  #node;
  #onReady;
  #listening = new AbortController();

  /**
   * @param {Element} node  shows the state as its text and its data-state
   * @param {{onReady: () => void}} options  onReady: the server became ready
   */
  constructor(node, { onReady }) {
    this.#node = node;
    this.#onReady = onReady;
  }

  watch() {
    document.addEventListener("visibilitychange", () => this.check());
    return this.check();
  }

  /** Listens anew. Browsers give a server few connections: a page that is not seen takes none. */
  async check() {
    this.#listening.abort();
    const { signal } = (this.#listening = new AbortController());
    while (!document.hidden && !signal.aborted) {
      try {
        for await (const state of serverStates(signal)) this.#show(state);
      } catch {
        // the connection is gone: said below
      }
      if (signal.aborted) return;
      this.#show("unreachable");
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  #show(state) {
    const before = this.#node.dataset.state;
    if (state === before) return;
    this.#node.dataset.state = state;
    this.#node.textContent = state;
    if (state === "ready") this.#onReady();
  }
}
