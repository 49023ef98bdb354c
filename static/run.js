/**
 * One answer in the making: the stream goes in, the message follows it, whatever becomes of connections.
 *
 * @import { Message, Stream } from "./conversation.js"
 * @import { Body, Piece, WirePath } from "./wires.js"
 *
 * @typedef {(isWhole: boolean) => Promise<{path: WirePath, body: Body}>} Prepare  makes the request; isWhole: of all
 *   that was said, for the server does not know what was said before
 *
 * @typedef {(urgent?: boolean) => void} OnChange  urgent: a reload would need to know of this change
 *
 * @typedef {{signal: AbortSignal, key: ?string, onChange: OnChange}} Options
 */

import { discard, followAnswer, openAnswer } from "./api.js";
import { newId } from "./conversation.js";
import { ApiError } from "./fault.js";
import { tellAnswer } from "./hooks.js";
import { Pauses, isPassing, pause } from "./resume.js";
import { Meter, newStats } from "./stats.js";
import { partsOf } from "./thinking.js";
import { RESPONSES } from "./wires.js";

const DISCARD_WITHIN_MS = 60_000;
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
    let stream = message.stream ?? (await open(message, prepare, false, signal));
    try {
      await read(message, stream, meter, options);
    } catch (fault) {
      if (!stream.body?.previous_response_id || !UNKNOWN.includes(codeOf(fault))) throw fault;
      stream = await open(message, prepare, true, signal);
      await read(message, stream, meter, options);
    }
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

/** @param {unknown} fault */
function codeOf(fault) {
  return (fault instanceof ApiError && fault.code) || "";
}

/**
 * @param {Message} message
 * @param {Prepare} prepare
 * @param {boolean} isWhole
 * @param {AbortSignal} signal
 */
async function open(message, prepare, isWhole, signal) {
  const request = await prepare(isWhole);
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
  return begun && isPassing(fault);
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
