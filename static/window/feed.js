/** What the server tells of itself while somebody looks: /v1/events. */

import { readEvents } from "../sse.js";

const AGAIN_MS = 2_000;

/**
 * One connection's events, parsed.
 * @param {string} query  of v1/events
 * @param {{key: ?string, signal: AbortSignal}} options
 * @returns {AsyncGenerator<{kind: string, data: object}>}
 * @throws {Error} if the server refuses, or whatever fetch does
 */
export async function* serverEvents(query, { key, signal }) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(`v1/events?${query}`, { cache: "no-store", headers, signal });
  if (!response.ok) throw new Error(response.status === 401 ? "This server asks for a key." : "No answer.");
  for await (const { event, data } of readEvents(response.body)) yield { kind: event, data: JSON.parse(data) };
}

/** Listens while it is open and the page is seen, over as many connections as it takes. */
export class Feed {
  #key;
  #on;
  #listening = null;

  /**
   * @param {() => ?string} key
   * @param {{event: (kind: string, data: object) => void, begin: () => void, lost: (message: string) => void}} on
   */
  constructor(key, on) {
    this.#key = key;
    this.#on = on;
    document.addEventListener("visibilitychange", () => this.#listening && this.open());
  }

  async open() {
    this.close();
    const { signal } = (this.#listening = new AbortController());
    while (!document.hidden && !signal.aborted) {
      let message = "The server does not answer.";
      try {
        this.#on.begin();
        for await (const { kind, data } of serverEvents("detail=steps,kv", { key: this.#key(), signal })) {
          this.#on.event(kind, data);
        }
      } catch (fault) {
        if (!(fault instanceof TypeError)) message = fault.message;
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
