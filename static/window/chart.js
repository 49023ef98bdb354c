/**
 * A minute of one or more series: their values, a line or area for each, and the same as a table.
 *
 * @typedef {object} ChartLook
 * @property {string} title
 * @property {{label: string, color: string, area?: boolean}[]} series
 * @property {boolean} [stacked]  each series stands on those before it
 * @property {(value: ?number) => string} [format]
 * @property {number} [least]  the least upper edge
 * @property {number} [most]  the only one
 * @property {boolean} [isOptional]  there is no chart while there are no values
 *
 * @import { Points } from "./shapes.js"
 */

import { el, svg, tableOf } from "../dom.js";
import { ago, number } from "../format.js";
import { EVERY_MS, LENGTH, mean, tableRows } from "./history.js";
import { areaPath, linePath, niceTop, stack, stretches } from "./shapes.js";

const SIZE = { width: 240, height: 60 };
const STEPS = new Map([["ArrowLeft", -1], ["ArrowRight", 1], ["PageUp", -10], ["PageDown", 10]]);

export class Chart {
  #of;
  #values;
  #paths;
  #top = el("span", { class: "chart-top" });
  #cursor = svg("line", { class: "chart-cursor", y1: 0, y2: SIZE.height });
  #picture;
  #table = el("table");

  /**
   * @param {ChartLook} of
   * @param {(index: ?number) => void} onCursor  a moment is pointed at
   */
  constructor(of, onCursor) {
    this.#of = { format: number, least: 1, ...of };
    const { title, series } = of;
    const many = series.length > 1;
    this.#values = series.map(() => el("b", {}, "–"));
    this.#paths = series.map(({ color, area }) => ({
      area: area ? svg("path", { class: `area ${color}` }) : null,
      line: svg("path", { class: `line ${color}` }),
    }));
    this.#picture = svg(
      "svg",
      { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, preserveAspectRatio: "none", role: "img", "aria-label": title, tabindex: 0 },
      svg("path", { class: "grid", d: `M0 .5H${SIZE.width}M0 ${SIZE.height / 2}H${SIZE.width}` }),
      ...this.#paths.flatMap(({ area, line }) => (area ? [area, line] : [line])).reverse(),
      this.#cursor,
    );
    const shown = series.map(({ label, color }, i) =>
      el("span", { class: "value" }, many ? el("i", { class: `swatch ${color}` }) : "", this.#values[i], many ? ` ${label}` : ""),
    );
    this.element = el(
      "figure",
      { class: "chart" },
      el("figcaption", {}, title, this.#top),
      el("div", { class: "values" }, ...shown),
      this.#picture,
      this.#table,
    );
    this.#point(onCursor);
  }

  /**
   * @param {(?number)[][]} series  in the order of the look's
   * @param {?number} cursor  index of the moment whose values are shown; null: the newest
   * @param {boolean} withTable
   */
  update(series, cursor, withTable) {
    const { format, stacked, series: named, title, isOptional } = this.#of;
    this.element.hidden = Boolean(isOptional) && series.flat().every((value) => value === null);
    this.#draw(stacked ? stack(series) : series);
    const at = cursor ?? LENGTH - 1;
    for (const [i, values] of series.entries()) this.#values[i].textContent = format(values[at]);
    this.#cursor.toggleAttribute("hidden", cursor === null);
    const x = (at / (LENGTH - 1)) * SIZE.width;
    this.#cursor.setAttribute("x1", String(x));
    this.#cursor.setAttribute("x2", String(x));
    const said = series.map((values, i) => `${named[i].label} ${format(values[at])}, mean ${format(mean(values))}`);
    const when = ago(((LENGTH - 1 - at) * EVERY_MS) / 1000);
    this.#picture.setAttribute("aria-label", `${title}, ${when}: ${said.join("; ")}`);
    if (withTable) this.#fill(tableRows(series));
  }

  /** @param {(?number)[][]} series */
  #draw(series) {
    const { format, least, most } = this.#of;
    const top = most ?? niceTop(Math.max(...series.flat().map((value) => value ?? 0)), least);
    this.#top.textContent = format(top);
    /** @type {?Points[]} */
    let below = null;
    series.forEach((values, i) => {
      const found = stretches(values, { ...SIZE, top });
      const { area, line } = this.#paths[i];
      line.setAttribute("d", linePath(found));
      area?.setAttribute("d", areaPath(found, SIZE.height, this.#of.stacked ? below : null));
      below = found;
    });
  }

  /** @param {ReturnType<typeof tableRows>} rows */
  #fill(rows) {
    const { format, series, title } = this.#of;
    const heads = ["When", ...series.map(({ label }) => label)];
    const cells = rows.map(({ secondsAgo, means }) => [ago(secondsAgo), ...means.map(format)]);
    const table = tableOf(`${title}: means of five seconds`, heads, cells);
    this.#table.replaceWith(table);
    this.#table = table;
  }

  /** @param {(index: ?number) => void} onCursor */
  #point(onCursor) {
    /** @type {?number} */
    let at = null;
    /** @param {?number} index */
    const move = (index) => {
      at = index === null ? null : Math.max(0, Math.min(LENGTH - 1, index));
      onCursor(at);
    };
    this.#picture.addEventListener("pointermove", ({ clientX }) => {
      const { left, width } = this.#picture.getBoundingClientRect();
      move(Math.round(((clientX - left) / width) * (LENGTH - 1)));
    });
    this.#picture.addEventListener("pointerleave", () => move(null));
    this.#picture.addEventListener("blur", () => move(null));
    this.#picture.addEventListener("keydown", (event) => {
      const step = STEPS.get(event.key);
      if (step === undefined) return;
      event.preventDefault();
      move((at ?? LENGTH - 1) + step);
    });
  }
}
