/** The window: the engine at work, live, with a minute of what it did. */

import { el } from "../dom.js";
import { Live } from "../live.js";
import { decodeBlocks } from "./blocks.js";
import { Chart } from "./chart.js";
import { count, duration, number, percent } from "../format.js";
import { History, heldPart, perSecond, perStep, queued, trailingRatio } from "./history.js";
import { Lanes } from "./lanes.js";
import { BlockField } from "./map.js";
import { StepStrip } from "./steps.js";
import { Tenants } from "./tenants.js";

/**
 * @import { ServerStatus, StatusEvent, StepsStatus } from "../api.js"
 * @import { ChartLook } from "./chart.js"
 * @import { Figure, Sample } from "./history.js"
 *
 * @typedef {(history: History) => (?number)[][]} Values
 */

/** @param {?number} value */
const ms = (value) => (value === null ? "–" : duration(value));

/**
 * @param {(sample: Sample) => ?number} pick
 * @returns {Values}
 */
const one = (pick) => (history) => [history.series(pick)];

/**
 * @param {Figure} part
 * @param {Figure} whole
 * @returns {Values}
 */
const ratio = (part, whole) => (history) => [trailingRatio(history.samples, part, whole)];

/** @type {Figure[]} */
const STEP_TOKENS = ["prefill_tokens", "decode_tokens", "draft_tokens"];

/**
 * What the small charts show.
 * @type {(ChartLook & {values: Values})[]}
 */
const CHARTS = [
  {
    title: "Tokens per second",
    series: [{ label: "tokens per second", color: "water", area: true }],
    values: one(perSecond("output_tokens")),
    least: 10,
  },
  {
    title: "Sequences",
    series: [
      { label: "running", color: "water", area: true },
      { label: "waiting", color: "sun" },
    ],
    values: (history) => [history.series(({ server }) => server.engine.running), history.series(queued)],
    least: 4,
  },
  {
    title: "Tokens in a step",
    series: [
      { label: "prompt", color: "deep", area: true },
      { label: "decode", color: "water", area: true },
      { label: "drafts", color: "sun", area: true },
    ],
    stacked: true,
    values: (history) => STEP_TOKENS.map((name) => history.series(perStep(name))),
    least: 4,
  },
  {
    title: "Time of a step",
    series: [{ label: "milliseconds", color: "deep" }],
    values: one(perStep("busy_ms")),
    format: ms,
    least: 2,
  },
  {
    title: "KV blocks in use",
    series: [{ label: "in use", color: "water", area: true }],
    values: one(heldPart),
    format: percent,
    most: 1,
  },
  {
    title: "States kept",
    series: [
      { label: "of sequences", color: "water", area: true },
      { label: "snapshots", color: "leaf" },
    ],
    values: (history) => [
      history.series(({ server }) => server.engine.states?.held ?? null),
      history.series(({ server }) => server.engine.states?.snapshots ?? null),
    ],
    least: 4,
    isOptional: true,
  },
  {
    title: "KV blocks kept outside of the cache",
    series: [
      { label: "on disk", color: "water", area: true },
      { label: "in host memory", color: "leaf" },
    ],
    values: (history) => [
      history.series(({ server }) => server.engine.tiers?.disk?.blocks ?? null),
      history.series(({ server }) => server.engine.tiers?.host?.blocks ?? null),
    ],
    least: 4,
    isOptional: true,
  },
  {
    title: "Prefix cache hits",
    series: [{ label: "of ten seconds' prompt tokens", color: "leaf", area: true }],
    values: ratio("prefix_hit_tokens", "prefix_query_tokens"),
    format: percent,
    most: 1,
  },
  {
    title: "Drafts accepted",
    series: [{ label: "of ten seconds' drafts", color: "leaf", area: true }],
    values: ratio("accepted_tokens", "draft_tokens"),
    format: percent,
    most: 1,
  },
  {
    title: "Time that drafts saved in a second",
    series: [
      { label: "saved", color: "leaf", area: true },
      { label: "spent on them", color: "sun" },
    ],
    values: (history) => [history.series(perSecond("draft_saved_ms")), history.series(perSecond("draft_spent_ms"))],
    format: ms,
    least: 100,
  },
  {
    title: "Experts read by a layer",
    series: [{ label: "in a step, of ten seconds", color: "deep" }],
    values: ratio("experts_touched", "expert_layers"),
    least: 8,
    isOptional: true,
  },
  {
    title: "Event-loop lag",
    series: [{ label: "at worst", color: "sun" }],
    values: one(({ steps }) => steps.loop_lag_ms),
    format: ms,
    least: 5,
  },
];

export class WindowView {
  #history = new History();
  /** @type {?ServerStatus} */
  #server = null;
  /** @type {?number} */
  #lastMs = null;
  /** @type {?number} */
  #cursor = null;
  #live;
  #line = el("p", { class: "note" });
  #tables = el("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => this.#toggleTables() }, "As tables");
  #charts;
  #lanes = new Lanes();
  #steps = new StepStrip();
  #blocks = new BlockField();
  #tenants = new Tenants();
  #frame = 0;

  /** @param {() => ?string} key  of the server */
  constructor(key) {
    /** @param {?number} cursor */
    const onCursor = (cursor) => {
      this.#cursor = cursor;
      this.#drawSoon();
    };
    this.#charts = CHARTS.map((of) => ({ chart: new Chart(of, onCursor), values: of.values }));
    /** @param {string} id  @param {string} title  @param {...Element} children */
    const part = (id, title, ...children) =>
      el("section", { "aria-labelledby": id }, el("h3", { id, class: "part" }, title), ...children);
    this.element = el(
      "section",
      { id: "window", "aria-labelledby": "window-title", hidden: true },
      el("div", { class: "window-head" }, el("h2", { id: "window-title", tabindex: -1 }, "The engine, live"), this.#tables, this.#line),
      part("window-lanes", "Promises: the time to the first token, lane by lane", this.#lanes.element),
      this.#tenants.element,
      part("window-now", "At this moment", el("div", { class: "pair" }, this.#steps.element, this.#blocks.element)),
      part("window-minute", "The last minute", el("div", { class: "charts" }, ...this.#charts.map(({ chart }) => chart.element))),
    );
    this.#live = new Live("?detail=steps,kv,tenants", key, {
      begin: () => {
        this.#lastMs = null;
      },
      event: (event) => this.#take(event),
      lost: (message) => this.#say(message, "lost"),
    });
    new ResizeObserver(() => this.#drawSoon()).observe(this.element);
  }

  open() {
    this.element.hidden = false;
    this.#say("Listening …", "opening");
    this.#live.open();
  }

  close() {
    this.element.hidden = true;
    this.#live.close();
  }

  /** @param {StatusEvent} event */
  #take({ kind, data }) {
    if (kind === "server") this.#server = data;
    else if (kind === "kv") this.#blocks.set(decodeBlocks(data));
    else if (kind === "tenants") this.#tenants.set(data);
    else if (kind === "steps" && this.#server) this.#takeSteps(this.#server, data);
    this.#drawSoon();
  }

  /** @param {ServerStatus} server  @param {StepsStatus} steps */
  #takeSteps(server, steps) {
    const seconds = this.#lastMs === null ? 0 : (steps.at_ms - this.#lastMs) / 1000;
    this.#lastMs = steps.at_ms;
    this.#history.push({ seconds, server, steps }, performance.now());
    this.#steps.add(steps.steps);
    const { state, streams, engine } = server;
    this.#say(`${state}: ${count(streams, "answer")} in the making, ${number(engine.steps)} steps so far`, state);
  }

  /** @param {string} text  @param {string} state */
  #say(text, state) {
    this.#line.textContent = text;
    this.element.dataset.state = state;
  }

  #toggleTables() {
    const shown = this.element.classList.toggle("with-tables");
    this.#tables.setAttribute("aria-pressed", String(shown));
    this.#drawSoon();
  }

  #drawSoon() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      if (!this.element.hidden) this.#draw();
    });
  }

  #draw() {
    const withTables = this.element.classList.contains("with-tables");
    for (const { chart, values } of this.#charts) chart.update(values(this.#history), this.#cursor, withTables);
    this.#lanes.update(this.#history);
    this.#steps.draw();
    this.#blocks.draw();
  }
}
