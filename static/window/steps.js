/**
 * The last steps one by one: the prompt tokens of each above the line, its rows below, and how long it took.
 *
 * @import { Steps } from "../api.js"
 *
 * @typedef {Record<keyof Steps, number>} Row  one step
 */

import { el } from "../dom.js";
import { duration, number } from "../format.js";
import { niceTop } from "./shapes.js";
import { context, palette } from "./paint.js";

const HEIGHT = 232;
const BAR = 5; // px a step, the space after it included
const KEPT = 400;

const LEGEND = [
  ["deep", "prompt tokens"],
  ["water", "sequences that go on"],
  ["leaf", "drafts accepted"],
  ["sun", "drafts rejected"],
];

/**
 * The steps of an event, one object each.
 * @param {Steps} steps
 * @returns {Row[]}
 */
export function rowsOf({ duration_ms, prefill, decode, drafts, accepted }) {
  return duration_ms.map((_, i) => ({
    duration_ms: duration_ms[i],
    prefill: prefill[i],
    decode: decode[i],
    drafts: drafts[i],
    accepted: accepted[i],
  }));
}

/** What a set of steps did, as one sentence. @param {Row[]} rows */
export function summary(rows) {
  if (rows.length === 0) return "No step since this view was opened.";
  /** @param {keyof Row} name */
  const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
  /** @param {keyof Row} name */
  const mean = (name) => number(sum(name) / rows.length);
  const drafts = sum("drafts") > 0 ? `; ${number(sum("accepted"))} of ${number(sum("drafts"))} drafts were right` : "";
  return (
    `The last ${rows.length} steps took ${duration(sum("duration_ms") / rows.length)} each, with ` +
    `${mean("decode")} sequences and ${mean("prefill")} prompt tokens${drafts}.`
  );
}

export class StepStrip {
  /** @type {Row[]} */
  #rows = [];
  #canvas = el("canvas", { role: "img", height: HEIGHT });
  #sentence = el("p", { class: "note" });

  constructor() {
    const legend = LEGEND.map(([color, label]) => el("span", {}, el("i", { class: `swatch ${color}` }), label));
    this.element = el(
      "figure",
      { class: "steps" },
      el("figcaption", {}, "Step by step"),
      el("div", { class: "legend" }, ...legend),
      this.#canvas,
      this.#sentence,
    );
  }

  /** @param {Steps} steps */
  add(steps) {
    this.#rows = [...this.#rows, ...rowsOf(steps)].slice(-KEPT);
  }

  draw() {
    const width = this.#canvas.clientWidth;
    const paint = context(this.#canvas, width, HEIGHT);
    const rows = this.#rows.slice(-Math.floor(width / BAR));
    this.#sentence.textContent = summary(rows);
    this.#canvas.setAttribute("aria-label", this.#sentence.textContent);
    const colors = palette();
    /** @param {(row: Row) => number} pick  @param {number} least */
    const most = (pick, least) => niceTop(Math.max(0, ...rows.map(pick)), least);
    const tops = {
      prefill: most((row) => row.prefill, 8),
      rows: most((row) => row.decode + row.drafts, 4),
      ms: most((row) => row.duration_ms, 1),
    };
    const middle = 84;
    const [up, down, last] = [middle - 14, 74, 34];
    paint.fillStyle = colors.line;
    paint.fillRect(0, middle, width, 1);
    paint.fillRect(0, HEIGHT - 1, width, 1);
    const start = width - rows.length * BAR;
    rows.forEach((row, i) => {
      /** @param {string} color  @param {number} y  @param {number} height */
      const bar = (color, y, height) => {
        if (height <= 0) return;
        paint.fillStyle = color;
        paint.fillRect(start + i * BAR, y, BAR - 1, Math.max(1, height));
      };
      /** @param {number} value  @param {number} top  @param {number} room */
      const tall = (value, top, room) => Math.round((value / top) * room);
      const prefill = tall(row.prefill, tops.prefill, up);
      bar(colors.deep, middle - prefill, prefill);
      let y = middle + 1;
      /** @type {[color: string, value: number][]} */
      const parts = [
        [colors.water, row.decode],
        [colors.leaf, row.accepted],
        [colors.sun, row.drafts - row.accepted],
      ];
      for (const [color, value] of parts) {
        const height = value > 0 ? Math.max(1, tall(value, tops.rows, down)) : 0;
        bar(color, y, height);
        y += height;
      }
      const ms = tall(row.duration_ms, tops.ms, last);
      bar(colors.muted, HEIGHT - 1 - ms, ms);
    });
    paint.fillStyle = colors.muted;
    paint.font = `11px ${colors.font}`;
    paint.fillText(`${number(tops.prefill)} prompt tokens`, 0, 10);
    paint.fillText(`${number(tops.rows)} rows`, 0, middle + down + 13);
    paint.fillText(`${duration(tops.ms)} a step`, 0, HEIGHT - last - 5);
  }
}
