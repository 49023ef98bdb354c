/**
 * How fast an answer came: measured here while it streams, completed by the server at its end.
 *
 * @typedef {object} Stats
 * @property {number} sentAt  epoch, ms
 * @property {?number} firstAt  of the first text; epoch, ms
 * @property {number} tokens  counted here: one per piece of text, until the server gives its count
 * @property {?number} ttftMs  from sending to the first text, as the reader saw it
 * @property {?number} tokensPerS  after the first token; at the end the server's own measure
 * @property {?string} finish  OpenAI's finish_reason
 * @property {?Partial<Timings>} timings  the server's; of an imported answer, what the file had
 *
 * @import { Piece, Timings } from "./wires.js"
 */

import { count, duration, number } from "./format.js";

const SHORTEST_MS = 100; // a shorter stretch says nothing about speed

/**
 * @param {number} now  epoch, ms
 * @returns {Stats} of an answer that is asked for now
 */
export function newStats(now) {
  const unknown = { firstAt: null, ttftMs: null, tokensPerS: null, finish: null, timings: null };
  return { sentAt: now, tokens: 0, ...unknown };
}

/** Measures one answer, which another page may have begun: times are epoch, in ms. */
export class Meter {
  /** @param {Stats} stats  is kept up to date */
  constructor(stats) {
    this.stats = stats;
  }

  /** @param {Piece} piece  @param {number} now */
  take({ text, thinking, finish, timings, tokens }, now) {
    if (text !== "" || thinking !== "") this.#countToken(now);
    if (finish !== null) this.stats.finish = finish;
    if (timings !== null) this.#believe(timings);
    // Speculation and slow readers put several tokens into one piece: the server knows the count.
    if (tokens !== null) this.stats.tokens = tokens;
  }

  /** @param {number} now */
  #countToken(now) {
    const { stats } = this;
    stats.tokens += 1;
    stats.firstAt ??= now;
    stats.ttftMs ??= now - stats.sentAt;
    const elapsed = now - stats.firstAt;
    if (elapsed >= SHORTEST_MS) stats.tokensPerS = ((stats.tokens - 1) * 1000) / elapsed;
  }

  /** The server measures its pace without the network in between. @param {Timings} timings */
  #believe(timings) {
    this.stats.timings = timings;
    if (timings.tpot_ms) this.stats.tokensPerS = 1000 / timings.tpot_ms;
  }
}

/**
 * The line below an answer.
 * @param {Stats} stats
 * @returns {{label: string, hint: string}[]}
 */
export function statsLine(stats) {
  return [...measured(stats), ...(stats.timings ? reported(stats.timings) : [])];
}

/** @param {Stats} stats */
function measured({ tokens, ttftMs, tokensPerS }) {
  const parts = [{ label: count(tokens, "token"), hint: "Length of this answer" }];
  if (tokensPerS) {
    parts.push({ label: `${number(tokensPerS)} tokens/s`, hint: "Speed after the first token" });
  }
  if (ttftMs !== null) {
    parts.push({
      label: `first after ${duration(ttftMs)}`,
      hint: "Time to first token, measured in this browser",
    });
  }
  return parts;
}

/** @param {Partial<Timings>} timings */
function reported(timings) {
  const { lane, queue_ms, predicted_ttft_ms, cached_tokens = 0, prompt_tokens = 0 } = timings;
  const { draft_tokens = 0, accepted_tokens, preemptions = 0 } = timings;
  /** @type {{label: string, hint: string}[]} */
  const parts = [];
  /** @param {string} label  @param {string} hint */
  const add = (label, hint) => parts.push({ label, hint });
  if (predicted_ttft_ms) add(`predicted ${duration(predicted_ttft_ms)}`, "Time to first token the server expected");
  if (typeof queue_ms === "number") add(`queued ${duration(queue_ms)}`, "Wait before the first step");
  if (lane) add(`${lane} lane`, "Lane that this request was served in");
  if (prompt_tokens > 0) add(`${cached_tokens} of ${prompt_tokens} cached`, "Prompt tokens found in the KV cache");
  if (draft_tokens > 0) {
    add(`${accepted_tokens} of ${draft_tokens} drafts`, "Draft tokens accepted by the model");
  }
  if (preemptions > 0) add(count(preemptions, "preemption"), "Times this request made room for others");
  return parts;
}
