/** The lanes and their promises: what is promised, what is predicted for who comes now, and what was kept. */

/**
 * @import { LaneStatus } from "../api.js"
 * @import { History } from "./history.js"
 */

import { el, svg } from "../dom.js";
import { duration, number, percent } from "../format.js";
import { LENGTH } from "./history.js";
import { linePath, niceTop, stretches } from "./shapes.js";

const SIZE = { width: 240, height: 36 };
const NONE = "none";

/**
 * How near a forecast is to its promise.
 * @param {Pick<LaneStatus, "forecast_ttft_ms"|"promised_ttft_ms">} lane
 * @returns {"kept"|"close"|"over"|"none"}
 */
export function standing({ forecast_ttft_ms: forecast, promised_ttft_ms: promised }) {
  if (forecast === null || promised === null) return NONE;
  if (forecast > promised) return "over";
  return forecast > 0.7 * promised ? "close" : "kept";
}

/**
 * How sure the share of promises kept is.
 * @param {LaneStatus["coverage"]} coverage
 */
export function interval(coverage) {
  if (!coverage) return "";
  const { promised, kept, low, high } = coverage;
  return `${number(kept)} of ${number(promised)}; 95 % interval ${percent(low)} to ${percent(high)}`;
}

class LaneCard {
  #name;
  #predicted = el("dd", {}, "–");
  #promised = el("dd", {}, "–");
  #attained = el("dd", {}, "–");
  #waiting = el("dd", {}, "–");
  #line = svg("path", { class: "line" });
  #promise = svg("path", { class: "promise" });
  #fill = el("i");

  /** @param {string} name */
  constructor(name) {
    this.#name = name;
    /** @param {string} label  @param {Element} value */
    const pair = (label, value) => el("div", {}, el("dt", {}, label), value);
    const picture = svg(
      "svg",
      { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.#promise,
      this.#line,
    );
    this.element = el(
      "section",
      { class: "lane", "aria-label": `${name} lane` },
      el("h4", {}, name),
      picture,
      el(
        "dl",
        {},
        pair("predicted", this.#predicted),
        pair("promised", this.#promised),
        pair("kept", this.#attained),
        pair("queued", this.#waiting),
      ),
      el("div", { class: "gauge", "aria-hidden": "true" }, this.#fill),
    );
  }

  /** @param {History} history */
  update(history) {
    const lanes = history.series(({ server }) => server.lanes[this.#name] ?? null);
    const lane = lanes[LENGTH - 1];
    if (lane === null) return;
    const { forecast_ttft_ms: forecast, promised_ttft_ms: promised } = lane;
    this.element.dataset.standing = standing(lane);
    this.#predicted.textContent = forecast === null ? "–" : duration(forecast);
    this.#promised.textContent = promised === null ? "–" : duration(promised);
    this.#attained.textContent = percent(lane.attainment);
    this.#attained.title = interval(lane.coverage);
    this.#waiting.textContent = number(lane.waiting);
    this.#fill.style.width = `${Math.min(100, 100 * ((forecast ?? 0) / (promised ?? Infinity)))}%`;
    const forecasts = lanes.map((one) => one?.forecast_ttft_ms ?? null);
    const top = niceTop(Math.max(...forecasts.map((value) => value ?? 0)) * 1.1, 20);
    this.#line.setAttribute("d", linePath(stretches(forecasts, { ...SIZE, top })));
    const y = promised !== null && promised <= top ? SIZE.height * (1 - promised / top) : null;
    this.#promise.setAttribute("d", y === null ? "" : `M0 ${y}H${SIZE.width}`);
  }
}

/** A card for each lane that the server has. */
export class Lanes {
  element = el("div", { class: "lanes" });
  /** @type {Map<string, LaneCard>} */
  #cards = new Map();

  /** @param {History} history */
  update(history) {
    const names = Object.keys(history.samples.at(-1)?.server.lanes ?? {});
    for (const name of names) {
      if (this.#cards.has(name)) continue;
      const card = new LaneCard(name);
      this.#cards.set(name, card);
      this.element.append(card.element);
    }
    for (const card of this.#cards.values()) card.update(history);
  }
}
