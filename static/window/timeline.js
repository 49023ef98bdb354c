/**
 * The life of one answer as a strip of time, and as a table.
 *
 * @import { Place } from "../api.js"
 * @import { Answer } from "../hooks.js"
 * @import { Timings } from "../wires.js"
 * @import { Draft, Span } from "./spans.js"
 */

import { el, svg, tableOf } from "../dom.js";
import { count, duration, number, ordinal } from "../format.js";
import { aligned, spansOf, thinned } from "./spans.js";

const WIDTH = 1000;
const TALL = 26;
const TRACK = { y: 13, height: 12 }; // the drafts stand above it
const MOST_TICKS = 400;
const DRAW_MS = 250;

const KINDS = {
  queued: { label: "queued", color: "free" },
  prefill: { label: "prompt computed", color: "deep" },
  decode: { label: "tokens", color: "water" },
  away: { label: "preempted", color: "red" },
};

export class Timeline {
  /** @type {number[]} when text came, performance.now() */
  ticks = [];
  hasWaited = false;
  /** @type {?number} */
  #began = null;
  /** @type {?Place} */
  #place = null;
  /** @type {?Answer} */
  #known = null;
  #isDrawnSoon = false;
  #line = el("span", {});
  #strip = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${TALL}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  #more = el("div", {});

  constructor() {
    this.element = el(
      "details",
      { class: "timeline", hidden: true },
      el("summary", {}, this.#strip, this.#line),
      this.#more,
    );
    this.element.addEventListener("toggle", () => this.#draw());
  }

  /** @param {number} at  performance.now() */
  begin(at) {
    this.#began ??= at;
  }

  /** @param {?Place} place  null: it waits there no more */
  wait(place) {
    this.hasWaited ||= place !== null;
    this.#place = place;
    this.#draw();
  }

  /** @param {Answer} detail */
  update(detail) {
    this.#known = detail;
    const running = detail.state === "waiting" || detail.state === "streaming";
    if (running && !this.#isDrawnSoon) {
      this.#isDrawnSoon = true;
      setTimeout(() => {
        this.#isDrawnSoon = false;
        this.#draw();
      }, DRAW_MS);
    } else if (!running) {
      this.#draw();
    }
  }

  #draw() {
    const { timings, state } = this.#known ?? {};
    if (timings && isWhole(timings)) this.#drawWhole(timings);
    else if (this.#began !== null && (state === "waiting" || state === "streaming")) this.#drawSoFar(this.#began);
    else this.element.hidden = this.ticks.length === 0;
  }

  /** @param {number} began */
  #drawSoFar(began) {
    const now = performance.now();
    const first = this.ticks[0] ?? now;
    const waited = first - began;
    /** @type {Span[]} */
    const spans = [{ kind: "queued", from: 0, to: waited }];
    if (this.ticks.length > 0) spans.push({ kind: "decode", from: waited, to: now - began });
    this.#show(spans, aligned(this.ticks, waited), [], now - began);
    // Once tokens come, the answer's own line has their figures.
    const begun = this.ticks.length > 0;
    this.#say(begun ? "Timeline: tokens come." : this.#waitingLine(), !begun);
  }

  #waitingLine() {
    if (this.#place === null) return this.hasWaited ? "its turn has come" : "";
    const { position, first_token_in_ms: left } = this.#place;
    const place = position > 0 ? `${ordinal(position + 1)} in the queue` : "next in the queue";
    return left === null ? place : `${place}, first token in about ${duration(left)}`;
  }

  /** @param {string} text  @param {boolean} isSeen */
  #say(text, isSeen) {
    this.#line.textContent = text;
    this.#line.className = isSeen ? "" : "visually-hidden";
  }

  /** @param {Timings} timings */
  #drawWhole(timings) {
    const { spans, end, drafts } = spansOf(timings);
    this.#show(spans, aligned(this.ticks, timings.ttft_ms), drafts, end);
    this.#say(sentence(timings, spans), false);
    this.#more.replaceChildren();
    if (this.element.open) this.#more.append(legend(spans, drafts), table(timings, spans, drafts));
  }

  /**
   * @param {Span[]} spans
   * @param {number[]} ticks
   * @param {Draft[]} drafts
   * @param {number} end
   */
  #show(spans, ticks, drafts, end) {
    this.element.hidden = false;
    const scale = WIDTH / Math.max(end, 1);
    /**
     * @param {string} kind
     * @param {number} from
     * @param {number} to
     * @param {number} y
     * @param {number} height
     */
    const box = (kind, from, to, y, height) =>
      svg("rect", { class: kind, x: from * scale, width: Math.max((to - from) * scale, 1), y, height });
    /** @param {number} at  @param {string} kind */
    const tick = (at, kind) =>
      svg("line", { class: kind, x1: at * scale, x2: at * scale, y1: TRACK.y, y2: TRACK.y + TRACK.height });
    const marks = thinned(ticks, MOST_TICKS).map((at) => tick(at, "tick"));
    const cuts = spans.filter(({ kind, from }) => kind === "prefill" && from > 0).map(({ from }) => tick(from, "cut"));
    const most = Math.max(1, ...drafts.map(({ drafted }) => drafted));
    const wide = 3 / scale;
    const guesses = drafts.flatMap(({ at, drafted, accepted }) => {
      const unit = (TRACK.y - 1) / most;
      const low = accepted * unit;
      return [
        box("accepted", at - wide / 2, at + wide / 2, TRACK.y - 1 - low, low),
        box("rejected", at - wide / 2, at + wide / 2, TRACK.y - 1 - drafted * unit, drafted * unit - low),
      ];
    });
    const bars = spans.map(({ kind, from, to }) => box(kind, from, to, TRACK.y, TRACK.height));
    this.#strip.replaceChildren(...bars, ...cuts, ...marks, ...guesses);
  }
}

/**
 * An imported answer has no timeline.
 * @param {Partial<Timings>} timings
 * @returns {timings is Timings}
 */
function isWhole(timings) {
  return Boolean(timings.timeline);
}

/** The strip in words. @param {Timings} timings  @param {Span[]} spans */
export function sentence(timings, spans) {
  const { queue_ms, ttft_ms, predicted_ttft_ms, cached_tokens, prompt_tokens, draft_tokens, accepted_tokens } = timings;
  const prefills = spans.filter(({ kind }) => kind === "prefill");
  const predicted = predicted_ttft_ms ? `, predicted ${duration(predicted_ttft_ms)}` : "";
  const parts = [
    `queued ${duration(queue_ms)}`,
    `${prompt_tokens - cached_tokens} of ${prompt_tokens} prompt tokens computed in ${count(prefills.length, "step")}`,
    `first token after ${duration(ttft_ms)}${predicted}`,
  ];
  if (draft_tokens > 0) parts.push(`${accepted_tokens} of ${draft_tokens} drafts accepted`);
  if (timings.preemptions > 0) parts.push(`preempted ${count(timings.preemptions, "time")}`);
  return `Timeline: ${parts.join("; ")}.`;
}

/** @param {Span[]} spans  @param {Draft[]} drafts */
function legend(spans, drafts) {
  const shown = Object.entries(KINDS).filter(([kind]) => spans.some((span) => span.kind === kind));
  const items = shown.map(([, { label, color }]) => [label, color]);
  if (drafts.length > 0) items.push(["drafts accepted", "leaf"], ["drafts rejected", "sun"]);
  return el(
    "div",
    { class: "legend" },
    ...items.map(([label, color]) => el("span", {}, el("i", { class: `swatch ${color}` }), label)),
  );
}

/**
 * When, how long, what: in order.
 * @param {Timings} timings
 * @param {Span[]} spans
 * @param {Draft[]} drafts
 */
export function rows(timings, spans, drafts) {
  /** @type {{at: number, took: ?number, what: string}[]} */
  const found = [{ at: timings.ttft_ms, took: null, what: "first token" }];
  for (const { kind, from, to, tokens = 0 } of spans) {
    const what = kind === "prefill" ? `${count(tokens, "prompt token")} computed` : KINDS[kind].label;
    found.push({ at: from, took: to - from, what });
  }
  for (const { at, drafted, accepted } of drafts) {
    found.push({ at, took: null, what: `${count(drafted, "draft")}, ${number(accepted)} accepted` });
  }
  return found.sort((one, other) => one.at - other.at);
}

/**
 * @param {Timings} timings
 * @param {Span[]} spans
 * @param {Draft[]} drafts
 */
function table(timings, spans, drafts) {
  const cells = rows(timings, spans, drafts).map(({ at, took, what }) => [
    duration(at),
    what,
    took === null ? "" : duration(took),
  ]);
  const scroller = { class: "scroll", tabindex: 0, role: "region", "aria-label": "Timeline as a table" };
  return el("div", scroller, tableOf("", ["After", "What", "For"], cells));
}
