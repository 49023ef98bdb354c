/** A stream that was lost: whether it is followed again, and when. */

const PAUSES_MS = [500, 1000, 2000, 4000, 5000];
const PATIENCE_MS = 120_000;
const PASSING = [429, 502, 503, 504]; // 502 and 504 are a proxy's, while the server restarts

/**
 * @param {import("./fault.js").ApiError} fault
 * @returns {boolean} true if the rest may come yet
 */
export function mayGoOn({ kind, status, code }) {
  if (kind === "lost" || kind === "unreachable") return true;
  return PASSING.includes(status) || code === "server_shutting_down";
}

/** Pauses that grow while nothing comes. Times are those of performance.now(), in ms. */
export class Pauses {
  /** @type {?number} */
  #lostAt = null;
  #count = 0;

  /** Something came: the next loss is a new one. */
  reset() {
    this.#lostAt = null;
    this.#count = 0;
  }

  /**
   * @param {number} now
   * @param {?number} askedMs  how long the server asks to be left alone
   * @returns {?number} ms until the next attempt, null once it has been lost for too long
   */
  next(now, askedMs = null) {
    this.#lostAt ??= now;
    const left = this.#lostAt + PATIENCE_MS - now;
    if (left <= 0) return null;
    const pause = PAUSES_MS[Math.min(this.#count, PAUSES_MS.length - 1)];
    this.#count += 1;
    return Math.min(Math.max(pause, askedMs ?? 0), left);
  }
}

/**
 * Throws as soon as the signal is aborted; ends early when the browser is online again.
 * @param {number} ms
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
export function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const end = () => {
      clearTimeout(timer);
      removeEventListener("online", end);
      signal.removeEventListener("abort", end);
      if (signal.aborted) reject(signal.reason);
      else resolve();
    };
    const timer = setTimeout(end, ms);
    addEventListener("online", end);
    signal.addEventListener("abort", end);
  });
}
