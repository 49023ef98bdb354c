/**
 * One answer in the making: the stream goes in, the message follows it, whatever becomes of connections.
 *
 * @import { Message, Stream } from "./conversation.js"
 * @import { Body, Piece, WirePath } from "./wires.js"
 *
 * @typedef {{isWhole: boolean, fit: number}} Scope  of a request; isWhole: of all that was said, for the server does not
 *   know what was said before; fit: how often it was too long for the model
 *
 * @typedef {(scope: Scope) => Promise<{path: WirePath, body: Body}>} Prepare  makes the request
 *
 * @typedef {(urgent?: boolean) => void} OnChange  urgent: a reload would need to know of this change
 *
 * @typedef {{signal: AbortSignal, key: ?string, onChange: OnChange}} Options
 */

import { discard, followAnswer, openAnswer } from "./api.js";
import { newId } from "./conversation.js";
import { ApiError } from "./fault.js";
import { tellAnswer } from "./hooks.js";
import { mayGoOn, pause, Pauses } from "./resume.js";
import { Meter, newStats } from "./stats.js";
import { partsOf } from "./thinking.js";
import { CHAT, RESPONSES } from "./wires.js";

const DISCARD_WITHIN_MS = 60_000;
const TOO_LONG = "context_length_exceeded";
const UNKNOWN = ["previous_response_not_found", "previous_response_not_ready", "store_unavailable"];

/**
 * Ends when the answer does, whatever its end: the message's state says which. Never throws for
 * what a server or a network can do.
 * @param {Message} message  an answer that waits, or one whose stream was left
 * @param {Prepare} prepare
 * @param {Options} options
 */
export async function runAnswer(message, prepare, options) {
  const { signal, key, onChange } = options;
  message.stats ??= newStats(Date.now());
  const meter = new Meter(message.stats);
  try {
    const stream = await readWithin(message, prepare, meter, options);
    message.state = "done";
    message.responseId = sessionOf(message, stream);
  } catch (fault) {
    const isCancelled = codeOf(fault) === "cancelled"; // in another tab
    if (signal.aborted || isCancelled) message.state = "stopped";
    else if (fault instanceof ApiError) fail(message, fault);
    else throw fault;
    const isOver = isCancelled || (fault instanceof ApiError && fault.kind === "gone"); // on the server
    const { stream } = message;
    const isLeft = stream !== null && (signal.aborted || (stream.id !== null && !isOver));
    if (isLeft) end(stream, key).catch(() => {}); // it is gone, or the server is
  }
  message.stream = null;
  onChange();
  tellAnswer(message, "end");
}

/**
 * Asks again where the server does not know what was said before, or it was too long.
 * @param {Message} message
 * @param {Prepare} prepare
 * @param {Meter} meter
 * @param {Options} options
 */
async function readWithin(message, prepare, meter, options) {
  /** @type {Scope} */
  const scope = { isWhole: false, fit: 0 };
  let stream = message.stream ?? (await open(message, prepare, scope, options.signal));
  for (;;) {
    try {
      await read(message, stream, meter, options);
      return stream;
    } catch (fault) {
      if (stream.body === null || !widen(scope, stream, codeOf(fault))) throw fault;
      message.shortened = scope.fit > 0;
      stream = await open(message, prepare, scope, options.signal);
    }
  }
}

/**
 * A session is shortened by the server; of a chat completion half is left out each time, down to the question.
 * @param {Scope} scope  is changed to that of the next request
 * @param {Stream} stream  the request that failed
 * @param {string} code
 * @returns {boolean} there is something to change
 */
function widen(scope, { path, body }, code) {
  if (UNKNOWN.includes(code) && body?.previous_response_id && !scope.isWhole) scope.isWhole = true;
  else if (code === TOO_LONG && (path === CHAT ? numMessages(body) > 2 : scope.fit === 0)) scope.fit += 1;
  else return false;
  return true;
}

/** Of a chat completion, with the system's. @param {?Body} body */
function numMessages(body) {
  return Array.isArray(body?.messages) ? body.messages.length : 0;
}

/** @param {unknown} fault */
function codeOf(fault) {
  return (fault instanceof ApiError && fault.code) || "";
}

/**
 * @param {Message} message
 * @param {Prepare} prepare
 * @param {Scope} scope
 * @param {AbortSignal} signal
 */
async function open(message, prepare, scope, signal) {
  const request = await prepare(scope);
  signal.throwIfAborted();
  message.requestId = newId();
  message.stream = { name: message.requestId, ...request, id: null, number: -1 };
  return message.stream;
}

/**
 * Until the answer's end, over as many connections as it takes.
 * @param {Message} message
 * @param {Stream} stream  the message's
 * @param {Meter} meter
 * @param {Options} options
 */
async function read(message, stream, meter, { signal, key, onChange }) {
  const pauses = new Pauses();
  onChange(true);
  tellAnswer(message, "asked");
  for (;;) {
    try {
      const connect = stream.id === null ? openAnswer : followAnswer;
      for await (const piece of connect(stream, { signal, key })) {
        pauses.reset();
        take(message, stream, piece, meter, onChange);
      }
      return;
    } catch (fault) {
      if (signal.aborted || !(fault instanceof ApiError) || !canGoOn(message, stream, fault)) throw fault;
      const wait = pauses.next(performance.now(), fault.retryAfterMs);
      if (wait === null) throw fault;
      message.state = "reconnecting";
      onChange(true);
      await pause(wait, signal);
    }
  }
}

/**
 * A request that the server has not begun to answer is refused, not lost.
 * @param {Message} message
 * @param {Stream} stream
 * @param {ApiError} fault
 */
function canGoOn({ state }, stream, fault) {
  const begun = stream.id !== null || state === "reconnecting" || fault.kind === "lost";
  return begun && mayGoOn(fault);
}

/**
 * @param {Message} message
 * @param {Stream} stream
 * @param {Piece} piece
 * @param {Meter} meter
 * @param {OnChange} onChange
 */
function take(message, stream, piece, meter, onChange) {
  if (piece.number !== null && piece.number <= stream.number) return;
  const isFirst = stream.id === null;
  Object.assign(stream, { id: piece.id ?? stream.id, number: piece.number ?? stream.number, body: null });
  meter.take(piece, Date.now());
  message.text += piece.text;
  message.thinking += piece.thinking;
  message.state = message.text === "" && message.thinking === "" ? "waiting" : "streaming";
  onChange(isFirst);
  tellAnswer(message, "piece", piece.text !== "");
}

/**
 * Where the next turn goes on from: not where thoughts stand in the text, which the server would send again.
 * @param {Message} message
 * @param {Stream} stream
 */
function sessionOf(message, { path, id }) {
  return path === RESPONSES && partsOf(message).answer === message.text ? id : null;
}

/**
 * Leaves nothing of it on the server. An answer whose id is not known yet says it first.
 * @param {Stream} stream
 * @param {?string} key
 */
async function end({ id, body, ...stream }, key) {
  if (id !== null) return discard({ id, ...stream }, key);
  const signal = AbortSignal.timeout(DISCARD_WITHIN_MS);
  for await (const piece of openAnswer({ body, ...stream }, { signal, key })) {
    return discard({ ...stream, id: piece.id }, key);
  }
}

/** @param {Message} message  @param {ApiError} fault */
function fail(message, { kind, status, code, message: text, retryAfterMs }) {
  message.state = "failed";
  message.error = { kind, status, code, message: text };
  message.retryAt = retryAfterMs === null ? null : Date.now() + retryAfterMs;
}
