/** The dot that says whether the server takes requests. */

import { readiness } from "./api.js";

const CALM_MS = 15_000;
const WORRIED_MS = 3_000;

/** Asks the server gently: only while the page is seen, and none that is ready while an answer streams. */
export class Status {
  #node;
  #isIdle;
  #onReady;
  #timer = 0;

  /**
   * @param {Element} node  shows the state as its text and its data-state
   * @param {{isIdle: () => boolean, onReady: () => void}} options  onReady: the server became ready
   */
  constructor(node, { isIdle, onReady }) {
    this.#node = node;
    this.#isIdle = isIdle;
    this.#onReady = onReady;
  }

  watch() {
    document.addEventListener("visibilitychange", () => this.check());
    return this.check();
  }

  /** Asks now, and again in a while. */
  async check() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    if (this.#isIdle() || !this.#isCalm) this.#show(await readiness());
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.check(), this.#isCalm ? CALM_MS : WORRIED_MS);
  }

  get #isCalm() {
    return this.#node.dataset.state === "ready";
  }

  #show(state) {
    const before = this.#node.dataset.state;
    if (state === before) return;
    this.#node.dataset.state = state;
    this.#node.textContent = state;
    if (state === "ready") this.#onReady();
  }
}
