/** The lanes and their promises: what is promised, what is predicted for who comes now, and what was kept. */

import { el, svg } from "../dom.js";
import { duration, number, percent } from "../format.js";
import { LENGTH } from "./history.js";
import { linePath, niceTop, stretches } from "./shapes.js";

const SIZE = { width: 240, height: 36 };
const NONE = "none";

/**
 * How near a forecast is to its promise.
 * @returns {"kept"|"close"|"over"|"none"}
 */
export function standing({ forecast_ttft_ms: forecast, promised_ttft_ms: promised }) {
  if (forecast === null || promised === null) return NONE;
  if (forecast > promised) return "over";
  return forecast > 0.7 * promised ? "close" : "kept";
}

class LaneCard {
  #name;
  #shown = Object.fromEntries(
    ["promised", "predicted", "attained", "waiting"].map((name) => [name, el("dd", {}, "–")]),
  );
  #line = svg("path", { class: "line" });
  #promise = svg("path", { class: "promise" });
  #fill = el("i");

  constructor(name) {
    this.#name = name;
    const pair = (label, value) => el("div", {}, el("dt", {}, label), value);
    const { promised, predicted, attained, waiting } = this.#shown;
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
        pair("predicted", predicted),
        pair("promised", promised),
        pair("kept", attained),
        pair("queued", waiting),
      ),
      el("div", { class: "gauge", "aria-hidden": "true" }, this.#fill),
    );
  }

  update(history) {
    const lanes = history.series(({ server }) => server.lanes[this.#name] ?? null);
    const lane = lanes[LENGTH - 1];
    if (lane === null) return;
    const { forecast_ttft_ms: forecast, promised_ttft_ms: promised } = lane;
    this.element.dataset.standing = standing(lane);
    this.#show("predicted", forecast === null ? "–" : duration(forecast));
    this.#show("promised", promised === null ? "–" : duration(promised));
    this.#show("attained", lane.attainment === null ? "–" : percent(lane.attainment));
    this.#show("waiting", number(lane.waiting));
    this.#fill.style.width = `${Math.min(100, 100 * ((forecast ?? 0) / (promised ?? Infinity)))}%`;
    const forecasts = lanes.map((one) => one?.forecast_ttft_ms ?? null);
    const top = niceTop(Math.max(...forecasts.map((value) => value ?? 0)) * 1.1, 20);
    this.#line.setAttribute("d", linePath(stretches(forecasts, { ...SIZE, top })));
    const y = SIZE.height * (1 - promised / top);
    this.#promise.setAttribute("d", promised !== null && promised <= top ? `M0 ${y}H${SIZE.width}` : "");
  }

  #show(name, text) {
    this.#shown[name].textContent = text;
  }
}

/** A card for each lane that the server has. */
export class Lanes {
  element = el("div", { class: "lanes" });
  #cards = new Map();

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
