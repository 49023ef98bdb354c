/** Follows the answers of the page, each with a timeline in its footer. */

/** @import { Answer } from "../hooks.js" */

import { serverEvents } from "../api.js";
import { ANSWER } from "../hooks.js";
import { Timeline } from "./timeline.js";

const ASK_AFTER_MS = 250; // most answers have begun by then
const MOST = 400;
const MOST_TICKS = 8_192;

export class Answers {
  #key;
  /** @type {Map<string, Timeline>} by the message's id, the ones shown last at the end */
  #timelines = new Map();
  /** @type {Map<string, AbortController>} by the message's id: how to stop asking for its place */
  #waiting = new Map();

  /** @param {() => ?string} key  of the server */
  constructor(key) {
    this.#key = key;
  }

  /** @param {EventTarget} target  where the page tells of its answers (see hooks.js) */
  listen(target) {
    target.addEventListener(ANSWER, (event) => event instanceof CustomEvent && this.#take(event.detail));
  }

  /** @param {Answer} detail */
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
    detail.element.firstElementChild?.after(timeline.element); // below the figures
  }

  /** @param {string} id */
  #timelineOf(id) {
    const timeline = this.#timelines.get(id) ?? new Timeline();
    this.#timelines.delete(id);
    this.#timelines.set(id, timeline);
    const [oldest] = this.#timelines.keys();
    if (this.#timelines.size > MOST) this.#timelines.delete(oldest);
    return timeline;
  }

  /**
   * @param {string} id
   * @param {?string} requestId
   * @param {Timeline} timeline
   */
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

  /** @param {string} id */
  #stopAsking(id) {
    this.#waiting.get(id)?.abort();
    this.#waiting.delete(id);
  }
}
