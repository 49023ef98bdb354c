/**
 * The two ways to ask for an answer, each by the path that it is asked under: as a turn of a session that the server
 * keeps, or as a chat completion, after which the server keeps nothing.
 *
 * @typedef {object} Piece  of an answer
 * @property {?string} id  the server's for the answer, where the piece says it
 * @property {?number} number
 * @property {string} text
 * @property {string} thinking
 * @property {?string} finish  OpenAI's finish_reason
 * @property {?Timings} timings
 * @property {?number} tokens  how many the answer has, once it is known
 * @property {boolean} isLast
 *
 * @typedef {object} Timings  the server's: milliseconds and counts
 * @property {number} queue_ms
 * @property {number} ttft_ms
 * @property {?number} tpot_ms
 * @property {number} cached_tokens
 * @property {number} prompt_tokens
 * @property {?number} predicted_ttft_ms
 * @property {number} preemptions
 * @property {number} draft_tokens
 * @property {number} accepted_tokens
 * @property {string} lane
 * @property {TimelineMarks} timeline
 *
 * @typedef {object} TimelineMarks  milliseconds since the request came
 * @property {[at: number, tokens: number][]} prefills
 * @property {number[]} preempted_ms
 * @property {number[]} resumed_ms
 * @property {[at: number, drafted: number, accepted: number][]} drafts
 * @property {number} ended_ms
 *
 * @typedef {Record<string, unknown>} Body  of a request
 *
 * @typedef {object} Said  what the model is to know
 * @property {?string} previous  the response that the messages follow; null: they are all that was said
 * @property {{role: string, content: string}[]} messages
 * @property {number} fit  how often it was too long for the model: the oldest of it is left out
 *
 * @typedef {{message?: unknown, code?: ?string}} Failure  as the server reports it
 *
 * @typedef {object} ResponseEvent
 * @property {string} type
 * @property {number} sequence_number
 * @property {string} [delta]
 * @property {object} [response]
 * @property {string} [response.id]
 * @property {?string} [response.status]
 * @property {?Failure} [response.error]
 * @property {?object} [response.incomplete_details]
 * @property {?Timings} [response.timings]
 * @property {?{output_tokens: number}} [response.usage]
 *
 * @typedef {object} Chunk
 * @property {string} [id]
 * @property {Failure} [error]
 * @property {{delta?: {content?: ?string, reasoning_content?: ?string}, finish_reason?: ?string}[]} [choices]
 * @property {?Timings} [timings]
 * @property {?{completion_tokens: number}} [usage]
 */

import { ApiError } from "./fault.js";

export const RESPONSES = "v1/responses";
export const CHAT = "v1/chat/completions";

/** @typedef {typeof RESPONSES|typeof CHAT} WirePath */

export const WIRES = { [RESPONSES]: { body: responseBody, read: readEvent }, [CHAT]: { body: chatBody, read: readChunk } };

/**
 * @param {Body} fields  of a chat completion request
 * @param {Said} said
 * @param {string} system  prompt, perhaps empty
 * @returns {Body}
 */
function responseBody({ max_tokens, reasoning_effort: effort, ...fields }, { previous, messages, fit }, system) {
  /** @type {Body} */
  const body = { ...fields, input: messages, stream: true, stream_options: { resumable: true } };
  if (effort !== undefined) body.reasoning = { effort };
  if (fit > 0) body.truncation = "auto";
  if (max_tokens !== undefined) body.max_output_tokens = max_tokens;
  if (system !== "") body.instructions = system;
  if (previous !== null) body.previous_response_id = previous;
  return body;
}

/**
 * @param {Body} fields
 * @param {Said} said
 * @param {string} system
 * @returns {Body}
 */
function chatBody(fields, { messages, fit }, system) {
  const last = lastTurns(messages, fit);
  const all = system === "" ? last : [{ role: "system", content: system }, ...last];
  return { ...fields, messages: all, stream: true, stream_options: { include_usage: true, resumable: true } };
}

/**
 * The last of the messages, half as many for each time that they did not fit, from a question on.
 * @param {Said["messages"]} messages
 * @param {number} times
 */
export function lastTurns(messages, times) {
  const start = messages.length - Math.ceil(messages.length / 2 ** times);
  const question = messages.findIndex(({ role }, at) => at >= start && role === "user");
  return messages.slice(question === -1 ? start : question);
}

/**
 * @param {ResponseEvent & Failure} event
 * @returns {Piece}
 */
function readEvent({ type, sequence_number: number, delta, response, ...event }) {
  if (type === "error") throw failure(event);
  if (response?.error) throw failure(response.error);
  if (response?.status === "cancelled") throw failure({ message: "It was stopped.", code: "cancelled" });
  const isLast = type === "response.completed" || type === "response.incomplete";
  return {
    id: response?.id ?? null,
    number,
    text: (type === "response.output_text.delta" && delta) || "",
    thinking: (type === "response.reasoning_text.delta" && delta) || "",
    finish: isLast ? (response?.incomplete_details ? "length" : "stop") : null,
    timings: response?.timings ?? null,
    tokens: response?.usage?.output_tokens ?? null,
    isLast,
  };
}

/**
 * @param {Chunk} chunk
 * @param {?number} number
 * @returns {Piece}
 */
function readChunk({ id, error, choices, timings, usage }, number) {
  if (error) throw failure(error);
  const choice = choices?.[0];
  return {
    id: id ?? null,
    number,
    text: choice?.delta?.content ?? "",
    thinking: choice?.delta?.reasoning_content ?? "",
    finish: choice?.finish_reason ?? null,
    timings: timings ?? null,
    tokens: usage?.completion_tokens ?? null,
    isLast: false, // [DONE] is
  };
}

/** What a stream reports instead of going on. @param {Failure} reported */
function failure({ message, code }) {
  return new ApiError({ kind: "failed", message: String(message), code: code ?? null });
}
