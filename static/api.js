/** The server's HTTP interface: which models, is it ready, and an answer's stream. */

import { ApiError } from "./fault.js";
import { readEvents } from "./sse.js";
import { RESPONSES, WIRES } from "./wires.js";

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

/**
 * What the server says of itself, for as long as it does.
 * @param {string} query  of v1/events
 * @param {{key?: ?string, signal: AbortSignal}} options
 * @returns {AsyncGenerator<{kind: ?string, data: object}>}
 * @throws {ApiError}
 */
export async function* serverEvents(query, { key = null, signal }) {
  const response = await request(`v1/events${query}`, { cache: "no-store", headers: authorization(key), signal });
  for await (const { event, data } of readEvents(response.body)) yield { kind: event, data: JSON.parse(data) };
}

/**
 * One streamed answer. It goes on without a reader for a while: discard() ends it.
 * @param {{path: string, body: object, name: string}} stream  the same name gets the same answer
 * @param {{signal: AbortSignal, key: ?string}} options
 * @returns {AsyncGenerator<import("./wires.js").Piece>}
 * @throws {ApiError}
 */
export async function* openAnswer({ path, body, name }, { signal, key }) {
  const named = { "content-type": "application/json", "idempotency-key": name, "x-request-id": name };
  const headers = { ...named, ...authorization(key) };
  const response = await request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  yield* readPieces(response, path, signal);
}

/** What comes after the piece of that number. */
export async function* followAnswer({ path, id, number }, { signal, key }) {
  const query = `stream=true&starting_after=${number}`;
  const response = await request(`${path}/${id}?${query}`, { headers: authorization(key), signal }).catch(orGone);
  yield* readPieces(response, path, signal);
}

/** Ends an answer on the server, and has it forgotten, even while the page closes. */
export async function discard({ path, id }, key) {
  await request(`${path}/${id}`, { method: "DELETE", headers: authorization(key), keepalive: true });
}

/** Has the server forget what it keeps of these answers, as far as it can be told. */
export function forget(responseIds, key) {
  for (const id of responseIds) discard({ path: RESPONSES, id }, key).catch(() => {}); // it is gone, or the server is
}

function orGone(fault) {
  if (fault.status !== 404 && fault.status !== 410) throw fault;
  throw new ApiError({ kind: "gone", message: "The server no longer has it. What came so far stays here." });
}

async function* readPieces(response, path, signal) {
  for await (const { data, id } of untilLost(readEvents(response.body), signal)) {
    if (data === "[DONE]") return;
    const piece = readPiece(data, id === null ? null : Number(id), path);
    yield piece;
    if (piece.isLast) return;
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

function readPiece(data, number, path) {
  let told;
  try {
    told = JSON.parse(data);
  } catch {
    throw new ApiError({ kind: "failed", message: "The server sent something that is not JSON." });
  }
  return WIRES[path].read(told, number);
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
