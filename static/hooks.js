/**
 * What other modules of the page can follow: every answer, from its request to its end.
 *
 * A `penstock:answer` event on the document has this detail:
 *   phase      "asked" when the request goes out; "piece" for every piece; "end" whatever the end;
 *              "shown" when a finished or running answer appears on the page (again)
 *   element    the answer's footer (.answer-meta), null while its conversation is not the one shown
 *   id         of the message
 *   requestId  the answer's x-request-id
 *   state      of the message: waiting, streaming, reconnecting, done, stopped or failed
 *   at         performance.now()
 *   tokens     counted so far
 *   timings    the server's so far, or null
 *   stats      all that is known of the answer's speed (see stats.js), or null
 *   hasText    a piece has some of the answer's text
 */

export const ANSWER = "penstock:answer";

/**
 * @param {import("./conversation.js").Message} message  an answer
 * @param {"asked"|"piece"|"end"|"shown"} phase
 */
export function tellAnswer(message, phase, hasText = false) {
  const { id, requestId, state, stats } = message;
  const element = document.querySelector(`#answer-${id} > .answer-meta`);
  const detail = { phase, element, id, requestId, state, at: performance.now(), hasText, stats };
  Object.assign(detail, { tokens: stats?.tokens ?? 0, timings: stats?.timings ?? null });
  document.dispatchEvent(new CustomEvent(ANSWER, { detail }));
}
