/**
 * The server's HTTP interface: which models, is it ready, and an answer's stream.
 *
 * @import { Body, Piece, WirePath } from "./wires.js"
 *
 * @typedef {object} Model
 * @property {string} id
 * @property {number} [max_model_len]
 * @property {Record<string, string|number>} [defaults]  of its requests
 * @property {string[]} [lanes]  that the key may name
 * @property {?("effort"|"switch")} [reasoning]  what a request may say of how the model thinks
 *
 * @typedef {object} Request  for a streamed answer
 * @property {WirePath} path
 * @property {?Body} body
 * @property {string} name  the same name gets the same answer
 *
 * @typedef {{signal: AbortSignal, key: ?string}} Options
 *
 * @typedef {object} LaneStatus
 * @property {number} waiting
 * @property {?number} forecast_ttft_ms
 * @property {?number} promised_ttft_ms
 * @property {?number} attainment
 * @property {?{promised: number, kept: number, low: number, high: number}} coverage  with its 95 % interval
 *
 * @typedef {object} ServerStatus
 * @property {string} state
 * @property {number} streams
 * @property {Record<string, LaneStatus>} lanes
 * @property {{running: number, waiting: number, steps: number, kv_blocks: number, kv_free_blocks: number,
 *   states: ?{slots: number, held: number, snapshots: number},
 *   tiers: ?Record<string, {blocks: number, bytes: number, hits: number}>}} engine
 *
 * @typedef {{duration_ms: number[], prefill: number[], decode: number[], drafts: number[], accepted: number[]}} Steps
 *   one after the other
 *
 * @typedef {object} StepsStatus  what happened since the event before
 * @property {number} at_ms
 * @property {number} num_steps
 * @property {number} busy_ms
 * @property {number} draft_spent_ms
 * @property {number} draft_saved_ms
 * @property {number} loop_lag_ms
 * @property {number} output_tokens
 * @property {number} prefill_tokens
 * @property {number} decode_tokens
 * @property {number} draft_tokens
 * @property {number} accepted_tokens
 * @property {number} prefix_query_tokens
 * @property {number} prefix_hit_tokens
 * @property {number} experts_touched
 * @property {number} expert_layers
 * @property {Steps} steps
 *
 * @typedef {object} BlocksStatus  base64 with one byte for each cell, and counts of blocks
 * @property {string} held
 * @property {string} shared
 * @property {string} cached
 * @property {string} holders
 * @property {number} num_blocks
 * @property {number} blocks_per_cell
 * @property {number} num_held
 * @property {number} num_shared
 * @property {number} num_cached
 * @property {number} num_saved
 *
 * @typedef {{share: number, waiting: number, running: number, refused: number}} TenantLoad  of the last minute
 * @typedef {{tenants: (TenantLoad & {tenant: string})[], others: TenantLoad & {tenants: number}}} TenantsStatus
 *
 * @typedef {{position: number, first_token_in_ms: ?number}} Place  of a request that waits
 *
 * @typedef {{kind: "server", data: ServerStatus}|{kind: "steps", data: StepsStatus}|{kind: "kv", data: BlocksStatus}
 *   |{kind: "tenants", data: TenantsStatus}|{kind: "request", data: Place}} StatusEvent
 */

import { ApiError } from "./fault.js";
import { readEvents } from "./sse.js";
import { RESPONSES, WIRES } from "./wires.js";

/**
 * How long the server asks to be left alone.
 * @param {Headers} headers
 * @param {number} now  epoch, ms
 * @returns {?number} ms, null where it did not ask, or says that an attempt of the page's own is of no use
 */
export function retryDelayMs(headers, now) {
  if (headers.get("x-should-retry") === "false") return null;
  const precise = headers.get("retry-after-ms");
  if (precise !== null && /^\d+(\.\d+)?$/.test(precise.trim())) return Number(precise);
  const value = headers.get("retry-after")?.trim();
  if (!value) return null;
  if (/^\d+$/.test(value)) return Number(value) * 1000;
  const date = Date.parse(value);
  return Number.isNaN(date) ? null : Math.max(0, date - now);
}

/**
 * @param {?string} key
 * @returns {Promise<?Model>} the model that is served
 */
export async function servedModel(key) {
  const response = await request("v1/models", { headers: authorization(key) });
  const { data } = await response.json();
  return data?.[0] ?? null;
}

/**
 * What the server says of itself, for as long as it does.
 * @param {string} query  of v1/events
 * @param {{key?: ?string, signal: AbortSignal}} options
 * @returns {AsyncGenerator<StatusEvent>}
 * @throws {ApiError}
 */
export async function* serverEvents(query, { key = null, signal }) {
  const response = await request(`v1/events${query}`, { cache: "no-store", headers: authorization(key), signal });
  for await (const { event, data } of eventsOf(response)) {
    yield /** @type {StatusEvent} */ ({ kind: event, data: JSON.parse(data) });
  }
}

/**
 * One streamed answer. It goes on without a reader for a while: discard() ends it.
 * @param {Request} stream
 * @param {Options} options
 * @returns {AsyncGenerator<Piece>}
 * @throws {ApiError}
 */
export async function* openAnswer({ path, body, name }, { signal, key }) {
  const named = { "content-type": "application/json", "idempotency-key": name, "x-request-id": name };
  const headers = { ...named, ...authorization(key) };
  const response = await request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  yield* readPieces(response, path, signal);
}

/**
 * What comes after the piece of that number.
 * @param {{path: WirePath, id: ?string, number: number}} stream
 * @param {Options} options
 * @returns {AsyncGenerator<Piece>}
 * @throws {ApiError}
 */
export async function* followAnswer({ path, id, number }, { signal, key }) {
  const query = `stream=true&starting_after=${number}`;
  const response = await request(`${path}/${id}?${query}`, { headers: authorization(key), signal }).catch(orGone);
  yield* readPieces(response, path, signal);
}

/**
 * Ends an answer on the server, and has it forgotten, even while the page closes.
 * @param {{path: WirePath, id: ?string}} answer
 * @param {?string} key
 */
export async function discard({ path, id }, key) {
  await request(`${path}/${id}`, { method: "DELETE", headers: authorization(key), keepalive: true });
}

/**
 * Has the server forget what it keeps of these answers, as far as it can be told.
 * @param {string[]} responseIds
 * @param {?string} key
 */
export function forget(responseIds, key) {
  for (const id of responseIds) discard({ path: RESPONSES, id }, key).catch(() => {}); // it is gone, or the server is
}

/**
 * @param {unknown} fault
 * @returns {never}
 */
function orGone(fault) {
  if (!(fault instanceof ApiError) || (fault.status !== 404 && fault.status !== 410)) throw fault;
  throw new ApiError({ kind: "gone", message: "The server no longer has it. What came so far stays here." });
}

/**
 * @param {Response} response
 * @param {WirePath} path
 * @param {AbortSignal} signal
 */
async function* readPieces(response, path, signal) {
  for await (const { data, id } of untilLost(eventsOf(response), signal)) {
    if (data === "[DONE]") return;
    const piece = readPiece(data, id === null ? null : Number(id), path);
    yield piece;
    if (piece.isLast) return;
  }
  throw new ApiError({ kind: "lost", message: "The connection ended before the answer did." });
}

/** @param {Response} response  that streams */
function eventsOf({ body }) {
  if (body === null) throw new ApiError({ kind: "failed", message: "The server sent nothing." });
  return readEvents(body);
}

/** @param {string} path  @param {RequestInit} options */
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

/**
 * A connection that breaks ends the stream like one that is closed too early.
 * @template T
 * @param {AsyncGenerator<T>} events
 * @param {AbortSignal} signal
 */
async function* untilLost(events, signal) {
  try {
    yield* events;
  } catch (fault) {
    if (signal.aborted) throw fault;
  }
}

/**
 * @param {string} data
 * @param {?number} number
 * @param {WirePath} path
 */
function readPiece(data, number, path) {
  let told;
  try {
    told = JSON.parse(data);
  } catch {
    throw new ApiError({ kind: "failed", message: "The server sent something that is not JSON." });
  }
  return WIRES[path].read(told, number);
}

/** @param {Response} response */
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

/**
 * @param {?string} key
 * @returns {Record<string, string>}
 */
function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}
