/** Follows the answers of the page, each with a timeline in its footer. */

import { serverEvents } from "../api.js";
import { ANSWER } from "../hooks.js";
import { Timeline } from "./timeline.js";

const ASK_AFTER_MS = 250; // most answers have begun by then
const MOST = 400;
const MOST_TICKS = 8_192;

export class Answers {
  #key;
  #timelines = new Map(); // by the message's id, the ones shown last at the end
  #waiting = new Map(); // by the message's id: how to stop asking for its place

  /** @param {() => ?string} key  of the server */
  constructor(key) {
    this.#key = key;
  }

  /** @param {EventTarget} target  where the page tells of its answers (see hooks.js) */
  listen(target) {
    target.addEventListener(ANSWER, ({ detail }) => this.#take(detail));
  }

  #take(detail) {
    const { phase, id, at } = detail;
    const timeline = this.#timelineOf(id);
    if (phase === "asked") {
      timeline.begin(at);
      this.#askForPlace(id, detail.requestId, timeline);
    } else if (phase === "piece" && detail.hasText) {
      this.#stopAsking(id);
      if (timeline.ticks.length < MOST_TICKS) timeline.ticks.push(at);
    } else if (phase === "end") {
      this.#stopAsking(id);
    }
    timeline.update(detail);
    if (detail.element === null || detail.element.contains(timeline.element)) return;
    detail.element.firstElementChild.after(timeline.element); // below the figures
  }

  #timelineOf(id) {
    const timeline = this.#timelines.get(id) ?? new Timeline();
    this.#timelines.delete(id);
    this.#timelines.set(id, timeline);
    if (this.#timelines.size > MOST) this.#timelines.delete(this.#timelines.keys().next().value);
    return timeline;
  }

  async #askForPlace(id, requestId, timeline) {
    this.#stopAsking(id);
    if (!requestId) return;
    const asking = new AbortController();
    this.#waiting.set(id, asking);
    const { signal } = asking;
    await new Promise((resolve) => setTimeout(resolve, ASK_AFTER_MS));
    if (signal.aborted) return;
    try {
      const query = `?request_id=${encodeURIComponent(requestId)}`;
      for await (const { kind, data } of serverEvents(query, { key: this.#key(), signal })) {
        if (kind === "request") timeline.wait(data);
        else if (timeline.hasWaited && kind === "server") timeline.wait(null);
      }
    } catch {
      // It says less, and no more than that: the answer itself tells of faults.
    }
  }

  #stopAsking(id) {
    this.#waiting.get(id)?.abort();
    this.#waiting.delete(id);
  }
}
