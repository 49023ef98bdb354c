/**
 * What other modules of the page can follow: every answer, from its request to its end.
 *
 * @import { Message } from "./conversation.js"
 * @import { Stats } from "./stats.js"
 *
 * @typedef {object} Answer  the detail of a `penstock:answer` event on the document
 * @property {"asked"|"piece"|"end"|"shown"} phase  asked: the request goes out; end: whatever the end; shown: a
 *   finished or running answer appears on the page (again)
 * @property {?Element} element  the answer's footer (.answer-meta), null while its conversation is not the one shown
 * @property {string} id  of the message
 * @property {?string} requestId  the answer's x-request-id
 * @property {Message["state"]} state
 * @property {number} at  performance.now()
 * @property {number} tokens  counted so far
 * @property {Stats["timings"]} timings  the server's so far
 * @property {?Stats} stats  all that is known of the answer's speed
 * @property {boolean} hasText  a piece has some of the answer's text
 */

export const ANSWER = "penstock:answer";

/**
 * @param {Message} message  an answer
 * @param {Answer["phase"]} phase
 */
export function tellAnswer(message, phase, hasText = false) {
  const { id, requestId, state, stats } = message;
  const element = document.querySelector(`#answer-${id} > .answer-meta`);
  const { tokens = 0, timings = null } = stats ?? {};
  /** @type {Answer} */
  const detail = { phase, element, id, requestId, state, at: performance.now(), hasText, stats, tokens, timings };
  document.dispatchEvent(new CustomEvent(ANSWER, { detail }));
}
