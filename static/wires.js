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
 * @property {?object} timings
 * @property {?number} tokens  how many the answer has, once it is known
 * @property {boolean} isLast
 */

import { ApiError } from "./fault.js";

export const RESPONSES = "v1/responses";
export const CHAT = "v1/chat/completions";

export const WIRES = { [RESPONSES]: { body: responseBody, read: readEvent }, [CHAT]: { body: chatBody, read: readChunk } };

/**
 * @param {object} fields  of a chat completion request
 * @param {{previous: ?string, messages: {role: string, content: string}[]}} said  what is new since that response
 * @param {string} system  prompt, perhaps empty
 */
function responseBody({ max_tokens, ...fields }, { previous, messages }, system) {
  const body = { ...fields, input: messages, stream: true, stream_options: { resumable: true } };
  if (max_tokens !== undefined) body.max_output_tokens = max_tokens;
  if (system !== "") body.instructions = system;
  if (previous !== null) body.previous_response_id = previous;
  return body;
}

function chatBody(fields, { messages }, system) {
  const all = system === "" ? messages : [{ role: "system", content: system }, ...messages];
  return { ...fields, messages: all, stream: true, stream_options: { include_usage: true, resumable: true } };
}

/** @returns {Piece} */
function readEvent({ type, sequence_number: number, delta, response, ...event }) {
  if (type === "error") throw failure(event);
  if (response?.error) throw failure(response.error);
  if (response?.status === "cancelled") throw failure({ message: "It was stopped.", code: "cancelled" });
  const isLast = type === "response.completed" || type === "response.incomplete";
  return {
    id: response?.id ?? null,
    number,
    text: type === "response.output_text.delta" ? delta : "",
    thinking: type === "response.reasoning_text.delta" ? delta : "",
    finish: isLast ? (response.incomplete_details ? "length" : "stop") : null,
    timings: response?.timings ?? null,
    tokens: response?.usage?.output_tokens ?? null,
    isLast,
  };
}

/** @returns {Piece} */
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

/** What a stream reports instead of going on. */
function failure({ message, code }) {
  return new ApiError({ kind: "failed", message: String(message), code: code ?? null });
}
