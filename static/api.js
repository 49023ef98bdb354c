/** The server's HTTP interface: which models, is it ready, and an answer's stream. */

import { readEvents } from "./sse.js";

/**
 * Why a request gave no (whole) answer.
 * kind: "refused"     the server answered with an error status
 *       "failed"      the server reported an error inside the stream
 *       "lost"        the stream ended before the server said that it was done
 *       "unreachable" no connection
 *       "gone"        the server no longer has the rest
 */
export class ApiError extends Error {
  /** @param {{kind: string, message: string, status?: number, code?: ?string, retryAfterMs?: ?number}} fault */
  constructor({ kind, message, status = 0, code = null, retryAfterMs = null }) {
    super(message);
    this.kind = kind;
    this.status = status;
    this.code = code;
    this.retryAfterMs = retryAfterMs;
  }
}

/**
 * How long the server asks to be left alone.
 * @param {Headers} headers  @param {number} now  epoch, ms
 * @returns {?number} ms, null where it did not ask
 */
export function retryDelayMs(headers, now) {
  const precise = headers.get("retry-after-ms");
  if (precise !== null && /^\d+(\.\d+)?$/.test(precise.trim())) return Number(precise);
  const value = headers.get("retry-after")?.trim();
  if (!value) return null;
  if (/^\d+$/.test(value)) return Number(value) * 1000;
  const date = Date.parse(value);
  return Number.isNaN(date) ? null : Math.max(0, date - now);
}

/** @returns {Promise<?{id: string, max_model_len?: number}>} the model that is served */
export async function servedModel(key) {
  const response = await request("v1/models", { headers: authorization(key) });
  const { data } = await response.json();
  return data?.[0] ?? null;
}

const STATES = ["ready", "loading", "draining", "stalled", "failed"];

/**
 * What the server says of itself, for as long as it does: "ready", or why it is not.
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<string>}
 * @throws whatever fetch does, or the reader
 */
export async function* serverStates(signal) {
  const response = await fetch("v1/events", { cache: "no-store", signal });
  if (!response.ok) return;
  for await (const { data } of readEvents(response.body)) {
    const { state } = JSON.parse(data);
    yield STATES.includes(state) ? state : "not ready";
  }
}

const CHAT = "v1/chat/completions";
const STREAMED = { stream: true, stream_options: { include_usage: true, resumable: true } };

/**
 * One streamed answer. It goes on without a reader for a while: discardChat ends it.
 * @param {object} body  OpenAI's chat completion request
 * @param {{signal: AbortSignal, key: ?string, name: string}} options  the same name gets the same answer
 * @returns {AsyncGenerator<{id: ?string, number: ?number, text: string, thinking: string, finish: ?string,
 *   timings: ?object, usage: ?object, raw: object}>}  id: the answer's; number: this piece's; raw: as it came
 * @throws {ApiError}
 */
export async function* streamChat(body, { signal, key, name }) {
  const headers = { "content-type": "application/json", "idempotency-key": name, "x-request-id": name, ...authorization(key) };
  const content = JSON.stringify({ ...body, ...STREAMED });
  const response = await request(CHAT, { method: "POST", headers, body: content, signal });
  yield* readChunks(response, signal);
}

/** What comes after the piece of that number. */
export async function* followChat(id, number, { signal, key }) {
  const asked = request(`${CHAT}/${id}?starting_after=${number}`, { headers: authorization(key), signal });
  yield* readChunks(await asked.catch(orGone), signal);
}

/** Ends an answer on the server, even while the page closes. */
export async function discardChat(id, key) {
  await request(`${CHAT}/${id}`, { method: "DELETE", headers: authorization(key), keepalive: true });
}

function orGone(fault) {
  if (fault.status !== 404 && fault.status !== 410) throw fault;
  throw new ApiError({ kind: "gone", message: "The server no longer has it. What came so far stays here." });
}

async function* readChunks(response, signal) {
  for await (const { data, id } of untilLost(readEvents(response.body), signal)) {
    if (data === "[DONE]") return;
    yield readChunk(data, id);
  }
  throw new ApiError({ kind: "lost", message: "The connection ended before the answer did." });
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (fault) {
    if (options.signal?.aborted) throw fault;
    throw new ApiError({ kind: "unreachable", message: "The server cannot be reached." });
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** A connection that breaks ends the stream like one that is closed too early. */
async function* untilLost(events, signal) {
  try {
    yield* events;
  } catch (fault) {
    if (signal.aborted) throw fault;
  }
}

function readChunk(data, number) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new ApiError({ kind: "failed", message: "The server sent something that is not JSON." });
  }
  if (chunk.error) throw inStreamError(chunk.error);
  const choice = chunk.choices?.[0];
  return {
    id: chunk.id ?? null,
    number: number === null ? null : Number(number),
    text: choice?.delta?.content ?? "",
    thinking: choice?.delta?.reasoning_content ?? "",
    finish: choice?.finish_reason ?? null,
    timings: chunk.timings ?? null,
    usage: chunk.usage ?? null,
    raw: chunk,
  };
}

function inStreamError({ message, code }) {
  return new ApiError({ kind: "failed", message: String(message), code: code ?? null });
}

async function refusal(response) {
  const { error } = await response.json().catch(() => ({})); // a proxy's page is not JSON
  return new ApiError({
    kind: "refused",
    status: response.status,
    message: String(error?.message ?? `HTTP status ${response.status}.`),
    code: error?.code ?? null,
    retryAfterMs: retryDelayMs(response.headers, Date.now()),
  });
}

function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}
