/**
 * A minute of the engine, a sample for each of the server's events.
 *
 * @typedef {object} Sample
 * @property {number} seconds  since the sample before; 0 for the first of a connection
 * @property {ServerStatus} server
 * @property {StepsStatus} steps
 *
 * @typedef {Exclude<keyof StepsStatus, "steps">} Figure  of a sample
 *
 * @import { ServerStatus, StepsStatus } from "../api.js"
 */

export const LENGTH = 120;
export const EVERY_MS = 500;
const GAP_MS = 3_000; // a pause, and no delay
const TRAIL = 20; // samples that a ratio is taken over: single ones have few events

export class History {
  /** @type {(?Sample)[]} the last one is the newest; null where nobody looked */
  samples = new Array(LENGTH).fill(null);
  /** @type {?number} */
  #lastAt = null;

  /**
   * @param {Sample} sample
   * @param {number} at  ms
   */
  push(sample, at) {
    const missed = this.#lastAt === null ? 0 : at - this.#lastAt;
    if (missed > GAP_MS) {
      for (let i = Math.min(LENGTH, Math.round(missed / EVERY_MS)); i > 1; i -= 1) this.#add(null);
    }
    this.#add(sample);
    this.#lastAt = at;
  }

  /** @param {?Sample} sample */
  #add(sample) {
    this.samples.shift();
    this.samples.push(sample);
  }

  /**
   * @template T
   * @param {(sample: Sample) => T} pick
   * @returns {(T|null)[]} null where there is nothing
   */
  series(pick) {
    return this.samples.map((sample) => (sample === null ? null : pick(sample)));
  }
}

// What the charts show, each from a sample.

/**
 * @param {Figure} name
 * @returns {(sample: Sample) => ?number}
 */
export const perSecond = (name) => ({ seconds, steps }) => (seconds > 0 ? steps[name] / seconds : null);

/**
 * @param {Figure} name
 * @returns {(sample: Sample) => ?number}
 */
export const perStep = (name) => ({ steps }) => (steps.num_steps > 0 ? steps[name] / steps.num_steps : null);

/** @param {Sample} sample */
export const queued = ({ server }) =>
  server.engine.waiting + Object.values(server.lanes).reduce((sum, lane) => sum + lane.waiting, 0);

/** @param {Sample} sample */
export const heldPart = ({ server: { engine } }) =>
  engine.kv_blocks > 0 ? 1 - engine.kv_free_blocks / engine.kv_blocks : null;

/**
 * A part of a whole over the last ten seconds: null where there was none of it.
 * @param {(?Sample)[]} samples
 * @param {Figure} part
 * @param {Figure} whole
 */
export function trailingRatio(samples, part, whole) {
  const sums = { part: 0, whole: 0 };
  /** @param {?Sample} sample  @param {1|-1} sign */
  const add = (sample, sign) => {
    sums.part += sign * (sample?.steps[part] ?? 0);
    sums.whole += sign * (sample?.steps[whole] ?? 0);
  };
  return samples.map((sample, i) => {
    add(sample, 1);
    if (i >= TRAIL) add(samples[i - TRAIL], -1);
    return sample !== null && sums.whole > 0 ? sums.part / sums.whole : null;
  });
}

/** Rows of a table: the values of every five seconds, the newest first, averaged. @param {(?number)[][]} series */
export function tableRows(series, every = 10) {
  const rows = [];
  for (let end = series[0].length; end > 0; end -= every) {
    const means = series.map((values) => mean(values.slice(Math.max(0, end - every), end)));
    if (means.some((value) => value !== null)) {
      rows.push({ secondsAgo: ((series[0].length - end) * EVERY_MS) / 1000, means });
    }
  }
  return rows;
}

/** @param {(?number)[]} values */
export function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length > 0 ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
