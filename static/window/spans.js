/**
 * What happened to an answer, in order: from the server's `timings` once it has ended, from what the page saw before.
 *
 * @typedef {object} Span
 * @property {"queued"|"prefill"|"decode"|"away"} kind  away: preempted, until it went on
 * @property {number} from  ms since the request
 * @property {number} to
 * @property {number} [tokens]  of a prefill step
 *
 * @typedef {{at: number, drafted: number, accepted: number}} Draft
 *
 * @import { Timings } from "../wires.js"
 */

/**
 * @param {Pick<Timings, "queue_ms"|"ttft_ms"|"timeline">} timings
 * @returns {{spans: Span[], end: number, drafts: Draft[]}}
 */
export function spansOf(timings) {
  const { queue_ms: queued, ttft_ms: first, timeline } = timings;
  const { prefills, preempted_ms: preempted, resumed_ms: resumed, drafts, ended_ms: end } = timeline;
  /** @type {Span[]} */
  const spans = queued > 0 ? [{ kind: "queued", from: 0, to: queued }] : [];
  const away = preempted.map(/** @returns {Span} */ (from, i) => ({ kind: "away", from, to: resumed[i] ?? end }));
  // A prefill step began when the one before it ended, or when the answer had room again.
  let before = queued;
  for (const [to, tokens] of prefills) {
    const back = away.filter((span) => span.to < to).map((span) => span.to);
    spans.push({ kind: "prefill", from: Math.max(before, ...back), to, tokens });
    before = to;
  }
  spans.push(...away, ...decodes(first, end, spans, away));
  spans.sort((one, other) => one.from - other.from);
  return { spans, end, drafts: drafts.map(([at, drafted, accepted]) => ({ at, drafted, accepted })) };
}

/**
 * The time after the first token in which the answer neither was away nor computed its prompt again.
 * @param {number} first
 * @param {number} end
 * @param {Span[]} prefills
 * @param {Span[]} away
 */
function decodes(first, end, prefills, away) {
  const taken = [...prefills, ...away].filter(({ to }) => to > first).sort((one, other) => one.from - other.from);
  /** @type {Span[]} */
  const found = [];
  let from = first;
  for (const span of taken) {
    if (span.from > from) found.push({ kind: "decode", from, to: span.from });
    from = Math.max(from, span.to);
  }
  if (end > from) found.push({ kind: "decode", from, to: end });
  return found;
}

/**
 * Instants as the page saw them, on the server's clock: the first is that of the first token.
 * @param {number[]} seen  ms
 * @param {number} first  ms since the request
 */
export function aligned(seen, first) {
  return seen.map((at) => at - seen[0] + first);
}

/**
 * At most `most` of these, evenly chosen, the first and the last among them.
 * @param {number[]} values
 * @param {number} most
 */
export function thinned(values, most) {
  if (values.length <= most) return values;
  return Array.from({ length: most }, (_, i) => values[Math.round((i * (values.length - 1)) / (most - 1))]);
}
